"""Files of a run in its folder: config, metrics as CSV and for TensorBoard, results, curves."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import pathlib
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

from ml_collections import ConfigDict
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from experiments.harness import files, mistakes
from experiments.harness.mistakes import UserError, user_mistakes
from experiments.vit.config import config_differences
from experiments.vit.metrics import curves


class Events:
    """An event file with all the rows of a run, each on disk when ``write`` returns.

    It counts instead of those in the folder from before the run was stopped. They stay: a
    TensorBoard that is reading one would wait for more of it, and not see the new one. There is no
    thread, unlike in TensorBoard's own class: it would print a traceback when the disk is full.

    Args:
      folder: Folder of the event files, made if needed.
      rows: Rows before the step that the run goes on from; see ``write``.
    """

    def __init__(self, folder: pathlib.Path, rows: Iterable[Mapping[str, float]]):
        folder.mkdir(parents=True, exist_ok=True)
        now, number = time.time(), len(list(folder.iterdir()))
        # Readers look for "tfevents", and go on from one file to the next by name.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._write_event(Event(wall_time=now, file_version="brain.Event:2"))
        # Readers forget what they have from step 0 on.
        start = SessionLog(status=SessionLog.START)
        self._write_event(Event(wall_time=now, step=0, session_log=start))
        for row in rows:
            self._add(row)
        self._writer.flush()

    def write(self, row: Mapping[str, float]) -> None:
        """Adds a scalar for each column of a row but ``step``, which all of them have."""
        self._add(row)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, row: Mapping[str, float]) -> None:
        scalars = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step"
        ]
        step = int(row["step"])
        self._write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def _write_event(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())


COLUMNS: tuple[str, ...] = (
    "step",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "gradient_norm",
    "images_per_second",
    "flops_per_second",  # The sum over all devices.
    "mfu",  # The share of their peak; empty where the peak is not known.
    "test_loss",
    "test_accuracy",
)


# Least time between two drawings of the curves while a run trains.
SECONDS_BETWEEN_DRAWINGS = 20.0

HELD_OUT_COLUMNS: tuple[str, ...] = ("held_out_loss", "held_out_accuracy")


def accuracy(row: Mapping[str, float]) -> float:
    """Returns the accuracy that chooses the best checkpoint, or minus infinity if there is none.

    It is that on the images that are held out, or in a run without such images the test accuracy.
    """
    return row.get("held_out_accuracy", row.get("test_accuracy", -math.inf))


class Log:
    """``metrics.csv`` and the same for TensorBoard, each row on disk before the next step runs.

    ``curves.png`` is drawn at an evaluation if the last one is old enough.

    Args:
      workdir: Folder to make, with ``config.json`` and the files in it.
      config: The config of the run.
      columns: Columns of the rows to come.
      rows: Rows before the step that the run goes on from.
      writes: If false, write nothing; one host of a pod writes.

    Attributes:
      rows: Rows of the run so far.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: ConfigDict,
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
        self._drawn = time.monotonic()  # When the curves were last drawn, or could have been.
        if writes:
            with _writing(workdir):
                workdir.mkdir(parents=True, exist_ok=True)
                ours = json.loads(config.to_json_best_effort())
                files.write_json(workdir / "config.json", ours)

    def __enter__(self) -> Self:
        """Opens the files and writes the rows there are."""
        if self._writes:
            with _writing(self._workdir):
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
            for opened in (self._file, self._events):
                with contextlib.suppress(OSError):  # The write that failed has raised already.
                    opened.close()

    def write(self, row: dict[str, float]) -> None:
        """Adds a row; columns it lacks stay empty."""
        self.rows.append(row)
        if self._writes:
            with _writing(self._workdir):
                self._table.writerow(row)
                self._file.flush()
                self._events.write(row)
            age = time.monotonic() - self._drawn
            if accuracy(row) >= 0 and age >= SECONDS_BETWEEN_DRAWINGS:
                # What is wrong here is raised by the drawing at the end, which loses nothing.
                with contextlib.suppress(Exception):
                    _draw(self._workdir)
                self._drawn = time.monotonic()


def refuse_bucket(workdir: pathlib.Path) -> None:
    """Refuses a workdir in a bucket, which would be a folder of its name here.

    Raises:
      UserError: If it is one.
    """
    if re.match(r"\w+:/\w", str(workdir)):  # A path keeps but one of the slashes.
        raise UserError(
            f"--workdir must be a folder of this machine, got {workdir}; config.checkpoint.folder "
            "may be in a bucket."
        )


def refuse_used(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Refuses a folder that holds a run, so that none is written over, unless it can go on.

    Raises:
      UserError: If the run is finished, kept no checkpoints or is to keep none from now on, or is
        of another config or of one that cannot be read; the message names the fields that differ.
    """
    with user_mistakes(OSError, prefix=f"{workdir} cannot be read: "):
        found = [name for name in ("results.json", "metrics.csv") if (workdir / name).exists()]
    if not found:
        return
    if found[0] != "results.json":
        refuse_other(workdir, config)
    if found[0] == "results.json" or not config.checkpoint.interval:
        raise UserError(
            f"{workdir} already holds a run ({found[0]}). Give another --workdir or delete it."
        )


def refuse_other(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Refuses a folder of a stopped run that is another one, or whose checkpoints would be lost.

    Raises:
      UserError: If the config differs or cannot be read, or keeps no checkpoints where the run did.
    """
    try:
        theirs = files.read_json(workdir / "config.json")
        differ = config_differences(theirs, json.loads(config.to_json_best_effort()))
        fault = f"of another config: {'; '.join(differ)}" if differ else ""
    except UserError as error:
        fault = f"whose config is lost ({error})"
    if fault:
        raise UserError(f"{workdir} holds a run {fault}. Give another --workdir or delete it.")
    interval = theirs["checkpoint"].get("interval")
    if interval and not config.checkpoint.interval:
        raise UserError(
            f"{workdir} holds a run with checkpoint.interval={interval}, whose checkpoints are "
            "lost with checkpoint.interval=0. Keep the interval, or give another --workdir."
        )


def is_finished(workdir: pathlib.Path, config: ConfigDict) -> bool:
    """Returns whether a folder holds a finished run of this config."""
    if not (workdir / "results.json").exists():
        return False
    theirs = files.read_json(workdir / "results.json").get("config", {})
    return not config_differences(theirs, json.loads(config.to_json_best_effort()))


def finish(workdir: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes the results, which mark the run as finished, and only then draws its last curves."""
    with _writing(workdir):
        files.write_json(workdir / "results.json", results)
    _draw(workdir)


def draw_missing_curves(workdir: pathlib.Path) -> None:
    """Draws ``curves.png`` of a finished run that has none of its end, as drawing it failed."""
    results, picture = workdir / "results.json", workdir / "curves.png"
    if not (os.path.exists(results) and os.path.exists(workdir / "metrics.csv")):
        return
    if not os.path.exists(picture) or os.path.getmtime(picture) < os.path.getmtime(results):
        _draw(workdir)


def _draw(workdir: pathlib.Path) -> None:
    with files.drawing(workdir):
        figure = curves.draw_curves(read_metrics(workdir))
        files.save_figure(workdir / "curves.png", figure, dpi=150)


@contextlib.contextmanager
def _writing(workdir: pathlib.Path) -> Iterator[None]:
    """Says where nothing can be written, and how to go on when the cause is mended."""
    try:
        with mistakes.writing(workdir):
            yield
    except UserError as error:
        error.add_note(
            "When the cause is mended, the same command goes on from the last checkpoint, if any "
            "are kept."
        )
        raise


def read_metrics(workdir: pathlib.Path) -> curves.Metrics:
    """Reads ``metrics.csv``: for each of its columns, (step, value) where there is a value.

    Raises:
      UserError: If it cannot be read or is damaged; the message says in which line.
    """
    path = workdir / "metrics.csv"
    with user_mistakes(OSError, prefix=f"{path} cannot be read: "):
        content = path.read_bytes()
    with user_mistakes(csv.Error, ValueError, prefix=f"{path} is damaged: "):
        reader = csv.DictReader(io.StringIO(content.decode(), newline=""))
        rows = [_read_row(reader.line_num, row) for row in reader]
        if not content.endswith(b"\n"):
            raise ValueError("its last line is not whole.")
    return {
        name: [(int(row["step"]), row[name]) for row in rows if name in row]
        for name in reader.fieldnames or ()
    }


def _read_row(line: int, row: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the values of a line of ``metrics.csv``, without the columns that are empty."""
    if None in row or None in row.values():
        raise ValueError(f"line {line} has more or fewer columns than the header.")
    try:
        values = {name: float(text) for name, text in row.items() if text}
    except ValueError as error:
        raise ValueError(f"line {line}: {error}.") from error
    if not values.get("step", math.nan).is_integer():
        raise ValueError(f"line {line} has no step.")
    return values
