"""Config and run of the language-model experiment: all kinds of attention, all seeds."""

from __future__ import annotations

import functools
import itertools
import pathlib
import platform
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.char_lm import corpus, summary, train
from experiments.char_lm.configs import paper
from experiments.char_lm.model import ATTENTIONS
from experiments.harness import config_fields, files, resumable
from experiments.harness.mistakes import UserError, user_mistakes
from simrf_jax._src.projections import COUPLINGS

FIELDS = config_fields.types_of(paper.get_config())
LEAST = {"context": 2, "model.width": 2}
LEAST |= {"warmup_steps": 0, "redraw_interval": 0, "model.bandwidth": 0}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    values = config_fields.check_fields(config, FIELDS, LEAST)
    attentions = config.attentions
    for attention in attentions:
        config_fields.check_one_of("Each of config.attentions", attention, ATTENTIONS)
    if not attentions or len(set(attentions)) < len(attentions):
        raise UserError(f"config.attentions must be one or more, none twice, got {attentions}.")
    config_fields.check_one_of("config.model.coupling", config.model.coupling, COUPLINGS)
    config_fields.check_rotary(values)
    config_fields.check_training(values)
    config_fields.check_range("temperature", config.temperature, config_fields.above(0))
    if config.num_steps % config.eval_interval:
        raise UserError(
            f"config.num_steps must be a multiple of eval_interval={config.eval_interval}, "
            f"got {config.num_steps}."
        )
    text = corpus.load()
    if config.context >= len(text.validation):
        raise UserError(
            f"config.context must be below the {len(text.validation)} characters of the "
            f"validation text, got {config.context}."
        )
    if not 1 <= len(config.prompt) <= config.context:
        raise UserError(
            f"config.prompt must have 1 to {config.context} characters, got {config.prompt!r}."
        )
    with user_mistakes(ValueError):
        corpus.encode(config.prompt, text.alphabet)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains all models that ``workdir`` lacks, and writes results and the figure there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: the text, and for each attention the validation losses in
      nats, seconds and a sample.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config or text; or if a validation loss is not finite.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config, selection=["seeds", "attentions"])
    text = corpus.load()
    for attention in config.attentions:
        pieces.check_text(attention, text.sha256)
    steps = list(range(config.eval_interval, config.num_steps + 1, config.eval_interval))
    program = functools.cache(
        functools.partial(train.make_program, config, vocabulary_size=len(text.alphabet))
    )

    def compute(attention: str, seed: int, name: str) -> np.ndarray:
        trained = train.train(program(attention), text, config, seed=seed, name=name)
        return np.concatenate(trained)

    runs: dict[str, dict[str, Any]] = {attention: {} for attention in config.attentions}
    for seed, attention in itertools.product(config.seeds, config.attentions):
        name = f"{attention}-{seed}"
        kept = pieces.get(name, compute, attention, seed, name)
        losses, sample = np.split(kept, [len(steps)])
        runs[attention][str(seed)] = {
            "losses": losses.tolist(),
            "seconds": pieces.seconds(name),
            "sample": corpus.decode(sample.astype(int), text.alphabet),
        }
    results = {
        "python": platform.python_version(),
        "text": {
            "sha256": text.sha256,
            "alphabet": text.alphabet,
            "train": len(text.train),
            "validation": len(text.validation),
        },
        "steps": steps,
        "runs": runs,
    }
    return files.finish(workdir, results, lambda: {"char_lm": summary.draw_figure(results)})


def report(results: dict[str, Any]) -> str:
    """Returns the table, the gain of the far field over the near field, and facts of the text."""
    lines = [summary.table(results), summary.comparison(results), summary.describe_text(results)]
    return "\n\n".join(lines)
