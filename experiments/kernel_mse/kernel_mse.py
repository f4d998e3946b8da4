"""Config, run and report of the three parts of the experiment."""

from __future__ import annotations

import pathlib
from typing import Any

import tqdm
from ml_collections import ConfigDict

from experiments.harness import config_fields, files, resumable
from experiments.kernel_mse import blog, mse_ratio, trigonometric_gap

FIELDS: dict[str, type] = {
    "seed": int,
    # Fig. 6. There are as many features as dimensions, here and in the gap.
    "ratio.dim": int,
    "ratio.distances": tuple,  # Distances v = |x + y| of the trials.
    "ratio.num_trials": int,
    # Eq. 26.
    "gap.dims": tuple,  # Dimensions of the curves and of the table of sign changes.
    "gap.trial_dims": tuple,
    "gap.trial_distances": tuple,  # Distances z = |x - y| of the trials.
    "gap.num_trials": int,
    # Attention in the blog post.
    "attention.length": int,
    "attention.dim": int,
    "attention.num_features": tuple,
    "attention.num_samples": int,
}
PARTS = {"ratio": mse_ratio, "gap": trigonometric_gap, "attention": blog}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    values = config_fields.check_fields(config, FIELDS)
    config_fields.check_seed(values)
    config_fields.check_least(values, {"ratio.dim": 2, "ratio.num_trials": 2})
    config_fields.check_least(values, {"gap.num_trials": 2, "gap.dims": 2, "gap.trial_dims": 2})
    config_fields.check_least(values, {"attention.length": 1, "attention.dim": 1})
    config_fields.check_least(values, {"attention.num_features": 1, "attention.num_samples": 1})
    config_fields.check_ascending(values, [name for name, kind in FIELDS.items() if kind is tuple])
    config_fields.check_distances(values, ["ratio.distances", "gap.trial_distances"], most=10.0)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Computes what ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: ``{"ratio": ..., "gap": ..., "attention": ...}``, the
      summaries of the three parts.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    kept = resumable.Pieces(workdir, config)
    tasks = {name: task for part in PARTS.values() for name, task in part.tasks(config).items()}
    progress = tqdm.tqdm(tasks.items(), unit="piece")
    pieces = {name: kept.get(name, task) for name, task in progress}
    results = {name: part.summary(config, pieces) for name, part in PARTS.items()}
    parts = PARTS.items()
    return files.finish(
        workdir,
        results,
        lambda: {k: v for name, part in parts for k, v in part.draw_figures(results[name]).items()},
    )


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the three parts."""
    return "\n\n".join(part.table(results[name]) for name, part in PARTS.items())
