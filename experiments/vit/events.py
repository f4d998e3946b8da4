"""Scalars for TensorBoard, by its own writer and without TensorFlow."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterable, Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Events:
    """An event file with all the rows of a run, each on disk when ``write`` returns.

    It counts instead of those in the folder from before the run was stopped. They stay: a
    TensorBoard that is reading one would wait for more of it, and not see the new one.

    Args:
      folder: Made if needed.
      rows: Those before the step it goes on from; see ``write``.
    """

    def __init__(self, folder: pathlib.Path, rows: Iterable[Mapping[str, float]]):
        self._writer = EventFileWriter(str(folder))
        # Readers forget what they have from step 0 on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))
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
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
        )
