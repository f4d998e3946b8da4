"""SIGTERM, the notice that a machine will be taken away, on one host or on a pod."""

from __future__ import annotations

import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


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
