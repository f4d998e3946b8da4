"""Ctrl-C ends a program with one line, whenever it comes and however often.

By default it raises ``KeyboardInterrupt``, which is a traceback wherever nothing catches it: while
modules are imported, in what runs at exit, in a destructor. A second one comes in the midst of the
cleaning up after the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def end_at_once(line: str) -> None:
    """Lets Ctrl-C end the program at once from now on, as long as there is nothing to clean up.

    Args:
      line: Line to print.
    """
    signal.signal(signal.SIGINT, lambda *_: end(f"\n{line}"))


@contextlib.contextmanager
def told_in_one_line(line: str) -> Iterator[None]:
    """Ends the program with a line after Ctrl-C: in order after the first, at once after the next.

    The first one raises ``KeyboardInterrupt``, so that what is entered inside is left in order.

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
    sys.unraisablehook = end_if_interrupted  # The interrupt may come in the midst of a destructor.
    try:
        yield
    except BaseException as error:
        # A library may have turned the interrupt into an error of its own.
        if interrupted or isinstance(error, KeyboardInterrupt):
            end(line)
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook


def end(line: str) -> None:
    """Prints a line and ends the program as the signal would, without what runs at exit.

    JAX's threads may still compile, and crash when the interpreter is taken down. A shell that sees
    that a signal ended the program ends the loop which it was started in.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # The interrupt may have come in the midst of a print.
        sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
