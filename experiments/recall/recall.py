"""Config and run of the experiment: associative recall, and training for equal time."""

from __future__ import annotations

import pathlib
from typing import Any

from ml_collections import ConfigDict

from experiments.harness import config_fields, files, resumable
from experiments.harness.mistakes import UserError
from experiments.recall import equal_time, kinds, measure_recall, summary
from experiments.recall.configs import paper

FIELDS = config_fields.types_of(paper.get_config())
SELECTION = ("seeds", "parts", "attentions", "num_features", "exact_keys", "num_pairs", "contexts")
PARTS = ("recall", "equal_time")
LEAST = {f"{part}.{name}": 0 for part in PARTS for name in ("warmup_steps", "bandwidth")}
LEAST |= {"num_features": 4, "exact_keys": 1, "num_pairs": 2, "contexts": 2}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    values = config_fields.check_fields(config, FIELDS, LEAST)
    config_fields.check_names("parts", config.parts, PARTS)
    for field in ("attentions", "equal_time.attentions"):
        config_fields.check_names(field, values[field], kinds.LABELS)
    for part in PARTS:
        config_fields.check_rotary(values, f"{part}.")
        config_fields.check_training(values, f"{part}.")
    seconds = "equal_time.seconds"
    config_fields.check_range(seconds, values[seconds], config_fields.above(0))
    ours = config.recall
    for size in config.num_pairs:
        if size & (size - 1) or size > ours.num_keys:
            raise UserError(
                "Each of config.num_pairs must be a power of two and at most num_keys="
                f"{ours.num_keys}, got {size}."
            )
    if ours.num_steps % ours.eval_interval:
        raise UserError(
            f"config.recall.num_steps must be a multiple of eval_interval={ours.eval_interval}, "
            f"got {ours.num_steps}."
        )
    for case in measure_recall.cases(config).values():
        kinds.check_rows("num_features", case.attention, case.num_features, case.exact_keys)
    ours = config.equal_time
    for attention in ours.attentions:
        kinds.check_rows("equal_time.num_features", attention, ours.num_features, ours.exact_keys)
    if max(config.contexts) > ours.validation_tokens:
        raise UserError(
            "Each of config.contexts must be at most equal_time.validation_tokens="
            f"{ours.validation_tokens}, got {max(config.contexts)}."
        )


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains all models that ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: a section for each of ``config.parts``.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config or text.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config, selection=SELECTION)
    parts = {"recall": measure_recall.run, "equal_time": equal_time.run}
    results = {part: parts[part](config, pieces) for part in config.parts}
    return files.finish(workdir, results, lambda: summary.draw(results))


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the README."""
    return "\n\n".join(summary.describe(results))
