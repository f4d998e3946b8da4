"""Config, run and report of the four parts of the experiment."""

from __future__ import annotations

import pathlib
from typing import Any

from ml_collections import ConfigDict

from experiments.harness import config_fields, files, resumable
from experiments.kernel_mse import blog, mse_ratio, other_kernels, trigonometric_gap
from experiments.kernel_mse.configs import paper

FIELDS = config_fields.types_of(paper.get_config())
PARTS = {
    "ratio": mse_ratio,
    "gap": trigonometric_gap,
    "kernels": other_kernels,
    "attention": blog,
}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    two = ["ratio.dim", "ratio.num_trials", "gap.num_trials", "gap.dims", "gap.trial_dims"]
    two += ["kernels.dims", "kernels.trial_dims", "kernels.num_trials"]
    least = {"attention.num_features": 1, **dict.fromkeys(two, 2)}
    values = config_fields.check_fields(config, FIELDS, least)
    config_fields.check_ascending(values, [name for name, kind in FIELDS.items() if kind is tuple])
    config_fields.check_distances(values, ["ratio.distances", "gap.trial_distances"], most=10.0)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Computes what ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: ``{"ratio": ..., "gap": ..., "kernels": ..., "attention":
      ...}``, the summaries of the four parts.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config)
    results = {name: part.summary(config, pieces) for name, part in PARTS.items()}
    parts = PARTS.items()
    return files.finish(
        workdir,
        results,
        lambda: {k: v for name, part in parts for k, v in part.draw_figures(results[name]).items()},
    )


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the four parts."""
    return "\n\n".join(part.table(results[name]) for name, part in PARTS.items())
