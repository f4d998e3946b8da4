"""Agreement between the processes of one run, on one host or on many, also on SIGTERM."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.harness import config_fields
from experiments.harness.mistakes import UserError


def everywhere(here: bool) -> bool:
    """Returns whether ``here`` is true in all processes; each process must call this."""
    return bool(multihost_utils.process_allgather(np.array(here)).all())


def on_first(call: Callable[[], None]) -> None:
    """Calls a function in the first process; if it raises there, all processes end.

    Raises:
      UserError: In the other processes, if the first one raises.
    """
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - It is raised again once all processes know.
            failure = error
    went_well = everywhere(failure is None)
    if failure is not None:
        raise failure
    if not went_well:
        raise UserError("The first process cannot train; its output says why.")


def check_same(what: str, ours: Mapping[str, Any]) -> None:
    """Refuses values that differ between processes, which would train on different things.

    Args:
      what: Names the values in the message.
      ours: The values of this process; they can be written as JSON.

    Raises:
      UserError: In all processes; that of a process whose values are not those of the first one
        names the differences.
    """
    theirs = json.loads(_from_first(json.dumps(ours)))
    differ = config_fields.differences(theirs, json.loads(json.dumps(ours)))
    if everywhere(not differ):
        return
    if differ:
        raise UserError(
            f"All processes must have one {what}, got in the first process (there) and in process "
            f"{jax.process_index()} (here): {'; '.join(differ)}."
        )
    raise UserError(f"All processes must have one {what}; the output of another says what differs.")


def _from_first(text: str) -> str:
    """Returns the text of the first process."""
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    content = content if jax.process_index() == 0 else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(content))).decode()


class Preemption:
    """Listens for SIGTERM while it is entered; before and after, SIGTERM ends the process at once.

    On a pod one host may get the signal alone, and all hosts must save the same step. There the
    service that ``jax.distributed.initialize`` starts catches the signal and agrees on a step. A
    run of a single process has no such service, so this catches the signal itself. A second signal
    changes nothing.
    """

    def __init__(self) -> None:
        self._noticed = False
        self._alone = not jax.distributed.is_initialized()

    def __enter__(self) -> Preemption:
        """Catches the signal, unless the service does."""
        if self._alone:
            self._previous = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous handler of the signal."""
        if self._alone:
            signal.signal(signal.SIGTERM, self._previous)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._noticed = True

    def reached(self, step: int) -> bool:
        """Returns whether to save at this step and stop; every host must ask at every step."""
        return self._noticed if self._alone else multihost_utils.reached_preemption_sync_point(step)
