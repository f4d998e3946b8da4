"""What a run leaves in its folder: ``config.json``, ``metrics.csv``, ``results.json``, figures."""

from __future__ import annotations

import csv
import json
import os
import pathlib
from typing import Any, TextIO

import matplotlib.figure
import ml_collections

from experiments import harness
from experiments.vit import config as config_lib

COLUMNS = (
    "step",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "gradient_norm",
    "images_per_second",
    "test_loss",
    "test_accuracy",
)


class Log:
    """``metrics.csv``, a row at a time, each on disk before the next step runs.

    Args:
      workdir: Folder to make, with ``config.json`` and the file in it.
      config: The config of the run.
      rows: Those before the step it goes on from.
      writes: Whether to write at all; of the hosts of a pod one does.

    Attributes:
      rows: All of them.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: ml_collections.ConfigDict,
        rows: list[dict[str, float]],
        *,
        writes: bool,
    ):
        self.rows = list(rows)
        self._path = workdir / "metrics.csv" if writes else pathlib.Path(os.devnull)
        self._file: TextIO
        if writes:
            workdir.mkdir(parents=True, exist_ok=True)
            harness.write_json(workdir / "config.json", json.loads(config.to_json_best_effort()))

    def __enter__(self) -> Log:
        """Opens the file and writes the head and the rows there are."""
        self._file = self._path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")
        self._writer.writeheader()
        self._writer.writerows(self.rows)
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, row: dict[str, float]) -> None:
        """Adds a row; columns it lacks stay empty."""
        self.rows.append(row)
        self._writer.writerow(row)
        self._file.flush()


def refuse_used(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Refuses a folder that holds a run, so that none is written over, unless it can go on.

    Raises:
      FileExistsError: If the run is finished, kept no checkpoints, or is of another config; the
        message names the fields that differ.
    """
    if not (workdir / "metrics.csv").exists():
        return
    if (workdir / "results.json").exists() or not config.checkpoint.interval:
        raise FileExistsError(
            f"{workdir} already holds a run (metrics.csv). Give another --workdir or delete it."
        )
    theirs = json.loads((workdir / "config.json").read_text())
    if differ := config_lib.differences(theirs, json.loads(config.to_json_best_effort())):
        raise FileExistsError(
            f"{workdir} holds a run of another config: {'; '.join(differ)}. Give another --workdir "
            "or delete it."
        )


def finish(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """Draws the curves and writes the results, which mark the run as finished."""
    draw_curves(read_metrics(workdir)).savefig(workdir / "curves.png", dpi=150)
    harness.write_json(workdir / "results.json", results)


def read_metrics(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Reads ``metrics.csv``: for each column, (step, value) where there is a value."""
    with (workdir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        for name in COLUMNS
    }


def draw_curves(metrics: dict[str, list[tuple[int, float]]]) -> matplotlib.figure.Figure:
    """Loss and accuracy against the step, of training and test."""
    figure = matplotlib.figure.Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, name, unit in zip(axes, ("loss", "accuracy"), (" (nats)", ""), strict=True):
        axis.plot(*zip(*metrics[f"train_{name}"], strict=True), color="C0", lw=1, label="train")
        axis.plot(*zip(*metrics[f"test_{name}"], strict=True), "C1o-", ms=3, label="test")
        axis.set(xlabel="step", ylabel=name + unit)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    final = metrics["test_accuracy"][-1][1]
    axes[1].set_title(f"test accuracy at the end: {final:.4f}")
    return figure
