"""Trains the same model with several attentions and seeds; one table, one figure."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import ml_collections
import numpy as np

from experiments import harness, style
from experiments.vit import config as config_lib
from experiments.vit import report, train
from simrf_jax import checks
from simrf_jax.models import ATTENTIONS


def compare(
    config: ml_collections.ConfigDict,
    workdir: str | pathlib.Path,
    attentions: Sequence[str],
    seeds: Sequence[int],
) -> str:
    """Trains every attention with every seed, and sums up.

    For one seed, all attentions start from the same parameters and see the same batches and the
    same dropout. Runs that are finished are not run again, so a comparison that was stopped goes on
    where it was.

    Args:
      config: What to train; its ``seed`` and ``model.attention`` are replaced.
      workdir: Folder for one run a folder, ``results.json``, ``table.md`` and ``compare.png``.
      attentions: Names of ``simrf_jax.models.ATTENTIONS``.
      seeds: Seeds.

    Returns:
      The table, in Markdown.

    Raises:
      ValueError: If an attention is unknown, a name or seed comes twice, or a finished run in
        workdir had another config.
    """
    for attention in attentions:
        checks.one_of("--compare", attention, ATTENTIONS)
    for seed in seeds:
        harness.check_seed({"seed": seed})
    if len({*attentions}) < len(attentions) or len({*seeds}) < len(seeds) or not seeds:
        raise ValueError(
            "--compare and --seeds must each name something, and nothing twice, got "
            f"{list(attentions)} and {list(seeds)}."
        )
    workdir = pathlib.Path(workdir)
    runs = {a: [workdir / f"{a}-{seed}" for seed in seeds] for a in attentions}
    configs = {
        workdir / f"{a}-{seed}": _config_of(config, a, seed) for seed in seeds for a in attentions
    }
    for run, ours in configs.items():
        _check_run(ours, run)
    for run, ours in configs.items():
        _finish_run(ours, run)
    results = {
        attention: [json.loads((run / "results.json").read_text()) for run in folders]
        for attention, folders in runs.items()
    }
    table = make_table(results)
    (workdir / "table.md").write_text(table)
    harness.write_json(workdir / "results.json", results)
    draw_comparison(runs).savefig(workdir / "compare.png", dpi=150)
    return table


def _config_of(
    config: ml_collections.ConfigDict, attention: str, seed: int
) -> ml_collections.ConfigDict:
    """The config of one run."""
    config = copy.deepcopy(config)
    config.seed = seed
    config.model.attention = attention
    if config.checkpoint.folder:
        config.checkpoint.folder = f"{config.checkpoint.folder}/{attention}-{seed}"
    return config


def _check_run(config: ml_collections.ConfigDict, run: pathlib.Path) -> None:
    """Refuses, before any run trains, what one of them could not go on with."""
    config_lib.check(config)
    if (run / "results.json").exists():
        before = json.loads((run / "results.json").read_text())["config"]
        if before != json.loads(config.to_json_best_effort()):
            raise ValueError(f"{run} was run with another config; give another --workdir.")
    elif config.checkpoint.interval:
        report.refuse_used(run, config)


def _finish_run(config: ml_collections.ConfigDict, run: pathlib.Path) -> None:
    """Trains one run unless it is finished; one that was stopped goes on, or starts over."""
    if (run / "results.json").exists():
        print(f"{run} is finished.")
        return
    if not config.checkpoint.interval:
        (run / "metrics.csv").unlink(missing_ok=True)
    print(f"{run}", flush=True)
    train.train(config, run)


def make_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One row an attention: mean and standard deviation over the seeds, median speed."""
    head = "attention | test accuracy | s.d. | test loss | s.d. | seeds | images/s | seconds a run"
    lines = [f"| {head} |", "| --- " * (head.count("|") + 1) + "|"]
    for attention, runs in results.items():

        def column(name: str, runs: list[dict[str, Any]] = runs) -> np.ndarray:
            return np.array([run[name] for run in runs])

        cells = [attention]
        for name in ("test_accuracy", "test_loss"):
            spread = f"{column(name).std(ddof=1):.4f}" if len(runs) > 1 else "-"
            cells += [f"{column(name).mean():.4f}", spread]
        cells += [str(len(runs))]
        cells += [f"{np.median(column(name)):.0f}" for name in ("images_per_second", "seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_comparison(runs: dict[str, list[pathlib.Path]]) -> matplotlib.figure.Figure:
    """Test accuracy against the step, and each run's last one; bands are one standard deviation."""
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=(3, 2))
    for row, (attention, folders) in enumerate(runs.items()):
        tests = [np.array(report.read_metrics(folder)["test_accuracy"]) for folder in folders]
        steps, accuracies = tests[0][:, 0], np.stack([test[:, 1] for test in tests])
        mean = accuracies.mean(axis=0)
        curves.plot(steps, mean, **style.STYLES[attention], label=attention)
        last = accuracies[:, -1]
        color = style.STYLES[attention]["color"]
        if len(folders) > 1:
            spread = accuracies.std(axis=0, ddof=1)
            curves.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, lw=0)
            ends.errorbar(last.mean(), row, xerr=spread[-1], color=color, fmt="D", capsize=4)
        below = 0.2 if len(folders) > 1 else 0.0  # Not on the mean.
        ends.plot(last, np.full(len(last), row + below), "o", color=color, ms=5, alpha=0.6)
    curves.set(xlabel="step", ylabel="test accuracy")
    curves.grid(alpha=0.3)
    curves.legend()
    ends.set(xlabel="test accuracy at the end", yticks=range(len(runs)), yticklabels=list(runs))
    ends.set_ylim(len(runs) - 0.5, -0.5)
    ends.grid(alpha=0.3, axis="x")
    return figure
