"""Trains the same model with several attentions and seeds; one table, one figure."""

from __future__ import annotations

import copy
import itertools
import json
import pathlib
from collections.abc import Sequence

from ml_collections import ConfigDict

from experiments.harness import config_fields, files, locking
from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.config import check_config, config_differences
from experiments.vit.metrics import log
from experiments.vit.tools import report
from experiments.vit.training.folders import Folders
from simrf_jax._src.models.config import ATTENTIONS


def compare(
    config: ConfigDict, workdir: str | pathlib.Path, attentions: Sequence[str], seeds: Sequence[int]
) -> str:
    """Trains every attention with every seed, and sums up.

    For one seed, all attentions start from the same parameters and see the same batches and the
    same dropout. Runs that are finished are not run again, so a comparison that was stopped goes on
    where it was.

    Args:
      config: Config of the runs; its ``seed`` and ``model.attention`` are replaced.
      workdir: Folder for ``results.json``, ``table.md``, ``compare.png`` and a folder for each run.
      attentions: Names of ``ATTENTIONS``.
      seeds: Seeds of the runs of each attention.

    Returns:
      The table, in Markdown.

    Raises:
      UserError: If an attention is unknown, a name or seed comes twice, another run or comparison
        is in workdir, or a finished run in it had another config or is damaged; and for the
        reasons of ``train``.
    """
    check_config(config)
    for attention in attentions:
        config_fields.check_one_of("--compare", attention, ATTENTIONS)
    for seed in seeds:
        config_fields.check_range("seed", seed, config_fields.SEEDS)
    if len({*attentions}) < len(attentions) or len({*seeds}) < len(seeds) or not seeds:
        raise UserError(
            "--compare and --seeds must each name something, and nothing twice, got "
            f"{list(attentions)} and {list(seeds)}."
        )
    workdir = pathlib.Path(workdir)
    log.refuse_bucket(workdir)
    configs = {
        workdir / f"{attention}-{seed}": _config_of(config, attention, seed)
        for seed, attention in itertools.product(seeds, attentions)
    }
    with locking.locked(workdir):
        return _compare(configs, workdir)


def _compare(configs: dict[pathlib.Path, ConfigDict], workdir: pathlib.Path) -> str:
    """Compares in a folder that is locked; each of its runs locks its own."""
    for run, ours in configs.items():
        _check_run(ours, run)
    for run, ours in configs.items():
        _finish_run(ours, run)
    runs = report.find_runs(configs)
    table = report.make_table(runs)
    with files.whole_file(workdir / "table.md") as partial:
        partial.write_text(table)
    results = {attention: [run.results for run in some] for attention, some in runs.items()}
    files.write_json(workdir / "results.json", results)
    with files.drawing(workdir):
        files.save_figure(workdir / "compare.png", report.draw(runs), dpi=150)
    return table


def _config_of(config: ConfigDict, attention: str, seed: int) -> ConfigDict:
    """Returns the config of one run."""
    config = copy.deepcopy(config)
    config.seed = seed
    config.model.attention = attention
    if config.checkpoint.folder:
        config.checkpoint.folder = f"{config.checkpoint.folder}/{attention}-{seed}"
    if config.mirror:
        config.mirror = f"{config.mirror}/{attention}-{seed}"
    return config


def _check_run(config: ConfigDict, run: pathlib.Path) -> None:
    """Refuses, before any run trains, what one of them could not go on with."""
    check_config(config)
    if (run / "results.json").exists():
        before = report.read_results(run)["config"]
        ours = json.loads(config.to_json_best_effort())
        if differ := config_differences(before, ours):
            raise UserError(
                f"{run} was run with another config: {'; '.join(differ)}. Give another --workdir."
            )
    elif (run / "metrics.csv").exists():
        log.refuse_other(run, config)


def _finish_run(config: ConfigDict, run: pathlib.Path) -> None:
    """Trains one run unless it is finished; one that was stopped goes on, or starts over."""
    if (run / "results.json").exists():
        # One that was killed while it drew its curves has left its locks, which this removes.
        with Folders(run, train.checkpoint_folder(config, run)):
            log.draw_missing_curves(run)
            train.mirror_results(run, config)
        print(f"{run} is finished.")
        return
    if not config.checkpoint.interval:
        with locking.locked(run):
            (run / "metrics.csv").unlink(missing_ok=True)
    print(f"{run}", flush=True)
    train.train(config, run)
