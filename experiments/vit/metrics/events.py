"""Scalars for TensorBoard, by its own writer of records and without TensorFlow."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from collections.abc import Iterable, Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


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
