"""Mistakes of a program's user: told in one line, while every other error keeps its traceback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class UserError(Exception):
    """A mistake of the user, or a fault of the machine that the user can mend.

    The message says what was expected and what was given. Raise it where the mistake is recognized:
    programs catch this type alone, so that bugs, whatever their type, show where they are.
    """


@contextlib.contextmanager
def user_mistakes(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Raises ``UserError`` in place of errors that tell of a mistake of the user.

    Enter it only around the code that judges what the user gave, such as a check or the opening of
    a file. Around more than that, it would hide bugs.

    Args:
      *kinds: The types by which this code refuses what the user gave.
      prefix: Text to put before the message of the error.

    Example:
      >>> with user_mistakes(ValueError, prefix="--seed: "):
      ...     int("two")
      Traceback (most recent call last):
        ...
      experiments.harness.mistakes.UserError: --seed: invalid literal for int() with base 10: 'two'
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{prefix}{error}") from error


def writing(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Raises ``UserError`` where the file or folder cannot be written, as on a full disk."""
    return user_mistakes(OSError, prefix=f"{path} cannot be written: ")


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """Ends the program with the message of a ``UserError`` alone."""
    try:
        yield
    except UserError as error:
        raise SystemExit(message(error)) from None


def message(error: UserError) -> str:
    """Returns the text to end a program with: the message, and the notes added on its way."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
