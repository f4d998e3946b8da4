"""Ends a program with one line after Ctrl-C, at any time and for any number of presses.

By default Ctrl-C raises ``KeyboardInterrupt``, which prints a traceback where no code catches it:
during imports, in exit handlers and in destructors. A second Ctrl-C interrupts the cleanup after
the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def end_at_once(line: str) -> None:
    """Makes Ctrl-C end the program at once from now on; use it while there is nothing to clean up.

    Args:
      line: Line to print.
    """
    signal.signal(signal.SIGINT, lambda *_: end(f"\n{line}"))


@contextlib.contextmanager
def exit_on_interrupt(line: str) -> Iterator[None]:
    """Ends the program with a line after Ctrl-C: with cleanup after the first, then at once.

    The first Ctrl-C raises ``KeyboardInterrupt``, so that the context managers inside clean up.

    Args:
      line: Line to print in either case.
    """
    interrupted = False

    def raise_once(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        del number, frame
        interrupted = True
        end_at_once(line)
        raise KeyboardInterrupt

    def end_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            end(f"\n{line}")
        hook(unraisable)

    handler, hook = signal.signal(signal.SIGINT, raise_once), sys.unraisablehook
    sys.unraisablehook = end_if_interrupted  # The interrupt may come during a destructor.
    try:
        yield
    except BaseException as error:
        # A library may have turned the interrupt into another error.
        if interrupted or isinstance(error, KeyboardInterrupt):
            end(line)
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook


def end(line: str) -> None:
    """Prints a line and ends the program as the signal would, without running exit handlers.

    JAX's threads may still compile, and would crash when the interpreter shuts down. A shell loop
    that runs the program ends too, because the shell sees that a signal ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # The interrupt may have come during a print.
        sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
