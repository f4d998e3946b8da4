"""A profile of chosen steps."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any, Self

import jax

from experiments.harness.mistakes import UserError, user_mistakes


class Profile:
    """Traces some steps of a run with ``jax.profiler``, into a folder that XProf reads.

    Of several hosts only the first one traces.

    Args:
      folder: Folder of the trace, made when the first of the steps comes.
      start: First step, counted from 0.
      steps: Number of steps; 0 for none.

    Raises:
      UserError: In ``after`` or at the end, if the folder cannot be written.
    """

    def __init__(self, folder: pathlib.Path, *, start: int, steps: int):
        self._folder = folder
        self._steps = range(start, start + steps if jax.process_index() == 0 else start)
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes what it has if a step raised; if that fails too, the first error is shown."""
        with contextlib.suppress(*([] if kind is None else [UserError])):
            self._stop()

    def before(self, step: int) -> None:
        """Starts at the first of the steps, or in the middle of them where a run goes on."""
        if step in self._steps and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, done: Any) -> None:
        """Stops after the last of the steps, when ``done``, what it computes, is there."""
        if self._running and step + 1 not in self._steps:
            jax.block_until_ready(done)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            prefix = f"{self._folder} cannot be written: "
            with user_mistakes(OSError, jax.errors.JaxRuntimeError, prefix=prefix):
                jax.profiler.stop_trace()
