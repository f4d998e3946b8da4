"""Config and run of the swap experiment: all models, all attentions, all seeds."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

from ml_collections import ConfigDict

from examples.hugging_face import EncoderConfig
from experiments.harness import config_fields, files, resumable
from experiments.harness.mistakes import UserError
from experiments.swap import (
    figures,
    measure_encoder,
    measure_kinds,
    measure_task,
    predicted,
    tables,
    texts,
    training,
)
from experiments.swap.configs import paper
from experiments.swap.methods import METHODS

FIELDS = config_fields.types_of(paper.get_config())
TRAINED = ("digits", "char_lm", "fashion_mnist")  # Sections whose model is trained here.
PARTS = ("predicted", "predicted_heads", "encoder", "kinds", *TRAINED)
LEAST = {
    "predicted.dim": 2,
    "predicted.num_keys": 2,
    "predicted_heads.num_features": 1,
    "encoder.length": 3,
    "encoder.bandwidth": 0,
    "encoder.num_features": 2,
    "kinds.lengths": 3,
    "kinds.num_fit_texts": 3,
    "kinds.num_features": 2,
    "char_lm.context": 2,
    "char_lm.bandwidth": 0,
}
LEAST |= {f"{part}.{name}": 0 for part in TRAINED for name in ("warmup_steps", "tuned_steps")}
LEAST |= {
    f"{part}.{name}": 2
    for part in TRAINED
    for name in ("num_features", "tuned_features", "model.width")
}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    values = config_fields.check_fields(config, FIELDS, LEAST)
    config_fields.check_names("parts", config.parts, PARTS)
    config_fields.check_names("methods", config.methods, METHODS)
    for method in config.tuned_methods:  # Maybe none.
        config_fields.check_one_of("Each of config.tuned_methods", method, METHODS)
    sized = [f"{part}.num_features" for part in ("predicted_heads", "encoder", *TRAINED)]
    tuned = [f"{part}.tuned_steps" for part in TRAINED]
    config_fields.check_ascending(values, ["predicted.lengths", "kinds.lengths", *sized, *tuned])
    above_zero = [f"{part}.learned.learning_rate" for part in ("encoder", "kinds", *TRAINED)]
    above_zero += [f"{part}.tuned_learning_rate" for part in TRAINED]
    for name in above_zero:
        config_fields.check_range(name, values[name], config_fields.above(0))
    # |x + y| is then at most 10, as in kernel_mse.
    config_fields.check_distances(values, ["predicted.lengths"], most=5.0)
    longest = EncoderConfig().max_length  # ``encoder.find`` accepts no other model.
    allowed = config_fields.Range(f"at most {longest}", lambda length: length <= longest)
    config_fields.check_range("encoder.length", config.encoder.length, allowed)
    config_fields.check_range("kinds.lengths", config.kinds.lengths[-1], allowed)
    used = [(f"{part}.num_features", config.methods) for part in ("encoder", "kinds", *TRAINED)]
    used += [(f"{part}.tuned_features", config.tuned_methods) for part in TRAINED]
    for field, methods in used:
        part, sizes = field.partition(".")[0], values[field]
        keys = config["encoder" if part == "kinds" else part].exact_keys
        for m, name in itertools.product(sizes if isinstance(sizes, tuple) else [sizes], methods):
            replaced = keys if METHODS[name].has_keys else 0
            config_fields.check_rows(field, m, replaced, METHODS[name].features_per_row, name)
    if config.predicted_heads.num_queries > config.encoder.length:
        raise UserError(
            "config.predicted_heads.num_queries must be at most encoder.length="
            f"{config.encoder.length}, got {config.predicted_heads.num_queries}."
        )
    for part in TRAINED:
        config_fields.check_training(values, f"{part}.")
        config_fields.check_rotary(values, f"{part}.")


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures all that ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: a section for each of ``config.parts``.

    Raises:
      UserError: If ``check`` refuses the config; if the model or a data set is not there; or if the
        folder cannot be written or holds a run of another config or of other texts.
    """
    check(config)
    selection = ["seeds", "parts", "methods", "tuned_methods", "model_dir", "data_dir"]
    pieces = resumable.Pieces(workdir, config, selection=selection)
    for part in config.parts:
        if part in texts.READ:
            pieces.check_text(part, texts.sha256(part))
    results = {part: _run_part(part, config, pieces) for part in config.parts}
    return files.finish(workdir, results, lambda: figures.draw(results))


def _run_part(part: str, config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    if part == "predicted":
        return predicted.run(config, pieces)
    if part == "predicted_heads":
        return predicted.run_heads(config, pieces)
    if part == "encoder":
        return measure_encoder.run(config, pieces)
    if part == "kinds":
        return measure_kinds.run(config, pieces)
    return measure_task.run(part, training.task(part, config), config, pieces)


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the README."""
    return "\n\n".join(tables.describe(results))
