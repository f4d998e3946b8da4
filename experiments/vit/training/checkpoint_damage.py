"""Damaged checkpoints, told apart from those of other programs, faults of the storage and bugs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from etils import epath

from experiments.harness import storage
from experiments.harness.mistakes import UserError
from experiments.vit.training import hosts


class IncompatibleError(UserError):
    """A checkpoint is that of another run, of another program, or of a version without digests."""


class DamagedError(UserError):
    """A checkpoint is not what was saved."""


@contextlib.contextmanager
def agreeing_on_damage(path: epath.Path) -> Iterator[None]:
    """Raises a DamagedError, on all hosts or none, if reading a checkpoint finds it damaged.

    Raises:
      UserError: If the storage fails. That may be over at the next start, so it is no damage. Not
        even an I/O error is: a network file system that was away for a moment raises the same one
        as a failing disk.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        is_lost = storage.is_absence(error) and path.parent.exists()
        if storage.is_fault(error) and not is_lost:
            raise UserError(
                f"{path} cannot be read: {storage.one_line_message(error)}. The checkpoint may be "
                "intact. Fix the cause and rerun, or move it away to start without it."
            ) from error
        if not is_lost and not _is_damage(error):
            raise
        failure = error
    if not hosts.everywhere(failure is None):
        cause = storage.one_line_message(failure) if failure else "another host cannot read it"
        raise DamagedError(f"{path} is damaged ({cause})") from failure


def _is_damage(error: Exception) -> bool:
    """Returns whether an error in reading tells of altered files, and not of a bug.

    Altered files make Orbax, and the packages it reads by, raise errors of any type: one flipped
    bit may lead to an AttributeError. So what counts is not the type but whether Orbax was reading.
    """
    if isinstance(error, DamagedError):
        return True
    # No content of a file leads to one of these.
    others = (UserError, ImportError, NameError, MemoryError, jax.errors.JaxRuntimeError)
    return storage.is_raised_in("orbax", error) and not isinstance(error, others)
