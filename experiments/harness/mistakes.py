"""Errors of the user, which end a program with one line; every other error keeps its traceback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class UserError(Exception):
    """A mistake of the user, or a fault of the machine that the user can fix.

    The message says what was expected and what was given. Raise it where the mistake is recognized:
    programs catch this type alone, so that a bug of any type keeps its traceback.
    """


@contextlib.contextmanager
def user_mistakes(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Replaces errors that a mistake of the user causes by ``UserError``.

    Use it only around code that checks the user's input, such as a check of a config or the opening
    of a file. Around other code it would hide bugs.

    Args:
      *kinds: The types of errors that this code raises for bad input.
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
    """Raises ``UserError`` if the file or folder cannot be written, for example on a full disk."""
    return user_mistakes(OSError, prefix=f"{path} cannot be written: ")


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the program with only the message if a ``UserError`` is raised inside."""
    try:
        yield
    except UserError as error:
        raise SystemExit(message(error)) from None


def message(error: UserError) -> str:
    """Returns the text that ends the program: the message and the notes added to the error."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])
