"""What a run leaves in its folder: config, metrics as CSV and for TensorBoard, results, curves."""

from __future__ import annotations

import contextlib
import csv
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO

import ml_collections

from experiments import harness
from experiments.vit import config as config_lib
from experiments.vit import curves
from experiments.vit.events import Events

COLUMNS: tuple[str, ...] = (
    "step",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "gradient_norm",
    "images_per_second",
    "flops_per_second",  # Of all devices together.
    "mfu",  # As a share of their peak; empty where that is not known.
    "test_loss",
    "test_accuracy",
)


class Log:
    """``metrics.csv`` and the same for TensorBoard, each row on disk before the next step runs.

    Args:
      workdir: Folder to make, with ``config.json`` and the files in it.
      config: The config of the run.
      columns: Those of the rows to come.
      rows: Those before the step it goes on from.
      writes: Whether to write at all; of the hosts of a pod one does.

    Attributes:
      rows: All of them.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: ml_collections.ConfigDict,
        columns: Sequence[str],
        rows: Sequence[dict[str, float]],
        *,
        writes: bool,
    ):
        self.rows = list(rows)
        self._workdir, self._writes = workdir, writes
        # A run may go on without what it measured before.
        self._columns = tuple(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        self._file: TextIO
        if writes:
            with _naming(workdir):
                workdir.mkdir(parents=True, exist_ok=True)
                ours = json.loads(config.to_json_best_effort())
                harness.write_json(workdir / "config.json", ours)

    def __enter__(self) -> Self:
        """Opens the files and writes the rows there are."""
        if self._writes:
            with _naming(self._workdir):
                self._file = (self._workdir / "metrics.csv").open("w", newline="")
                self._table = csv.DictWriter(self._file, self._columns, restval="")
                self._table.writeheader()
                self._table.writerows(self.rows)
                self._file.flush()
                self._events = Events(self._workdir / "tensorboard", self.rows)
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        if self._writes:
            with contextlib.suppress(OSError):  # Of what could not be flushed, which is known.
                self._file.close()
                self._events.close()

    def write(self, row: dict[str, float]) -> None:
        """Adds a row; columns it lacks stay empty."""
        self.rows.append(row)
        if self._writes:
            with _naming(self._workdir):
                self._table.writerow(row)
                self._file.flush()
                self._events.write(row)


def refuse_used(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Refuses a folder that holds a run, so that none is written over, unless it can go on.

    Raises:
      FileExistsError: If the run is finished, kept no checkpoints, or is of a config that cannot be
        read or is another; the message names the fields that differ.
      ValueError: If it is in a bucket.
    """
    if re.match(r"\w+:/\w", str(workdir)):  # A path keeps but one of the slashes.
        raise ValueError(
            f"--workdir must be a folder of this machine, got {workdir}; config.checkpoint.folder "
            "may be in a bucket."
        )
    if not (workdir / "metrics.csv").exists():
        return
    if (workdir / "results.json").exists() or not config.checkpoint.interval:
        raise FileExistsError(
            f"{workdir} already holds a run (metrics.csv). Give another --workdir or delete it."
        )
    try:
        theirs = json.loads((workdir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise FileExistsError(
            f"{workdir} holds a run whose config.json cannot be read ({error}). Give another "
            "--workdir or delete it."
        ) from error
    if differ := config_lib.differences(theirs, json.loads(config.to_json_best_effort())):
        raise FileExistsError(
            f"{workdir} holds a run of another config: {'; '.join(differ)}. Give another --workdir "
            "or delete it."
        )


def finish(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """Draws the curves and writes the results, which mark the run as finished."""
    with _naming(workdir):
        curves.draw_curves(read_metrics(workdir)).savefig(workdir / "curves.png", dpi=150)
        harness.write_json(workdir / "results.json", results)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Says what cannot be written, which the error of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: {error}\nWhen the cause is mended, the same command goes "
            "on from the last checkpoint, if any are kept."
        ) from error


def read_metrics(workdir: pathlib.Path) -> curves.Metrics:
    """Reads ``metrics.csv``: for each of its columns, (step, value) where there is a value."""
    with (workdir / "metrics.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        for name in reader.fieldnames or ()
    }
