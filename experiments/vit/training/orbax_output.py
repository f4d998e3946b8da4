"""Keeps what Orbax, TensorStore and asyncio print off a program's standard error."""

from __future__ import annotations

import logging
import re
import sys
import warnings

import absl.logging

# Orbax's files that log the errors they raise.
_RAISING = ("async_checkpointer.py", "checkpoint_manager.py", "future.py", "metadata/checkpoint.py")


def quiet() -> None:
    """Keeps a program's standard error free of what Orbax, TensorStore and asyncio say.

    Of a save or a read that fails each of them prints pages, some of them when the program ends;
    ``Checkpoints`` and ``load`` raise the error. Orbax's other errors stay.
    """
    absl.logging.get_absl_handler().addFilter(_is_news)
    # After a failed write, the writes that have not begun.
    warnings.filterwarnings("ignore", r"coroutine '.*write_fragment' was never awaited")
    hook = sys.unraisablehook

    def pass_on(unraisable: sys.UnraisableHookArgs) -> None:
        # Reads and writes go on after the first failure, which has ended asyncio's loop.
        abandoned = "Event loop is closed|Encountered error while reading array index"
        if not re.match(abandoned, str(unraisable.exc_value)):
            hook(unraisable)

    sys.unraisablehook = pass_on


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether nobody else tells what a record of the log says."""
    if record.name == "asyncio":
        return "exception was never retrieved" not in record.getMessage()
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.ERROR and not record.pathname.endswith(_RAISING)
