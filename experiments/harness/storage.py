"""Storage faults, distinguished from damaged files and from bugs.

Python raises an ``OSError`` for them. TensorStore, in which Orbax keeps arrays, raises a
``ValueError`` for every fault; its message begins with a status or ends with the number
of the operating system's error. The clients of buckets have their own error types.
"""

from __future__ import annotations

import contextlib
import errno
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from experiments.harness.mistakes import UserError

# TensorStore's status of a file that is not there, and those that a request may have but a file's
# content cannot lead to. It reads an altered file with DATA_LOSS, OUT_OF_RANGE or no status.
_STATUS = re.compile(
    r"(NOT_FOUND|ABORTED|CANCELLED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    r"|UNAUTHENTICATED|UNAVAILABLE): "
)
_OS_ERROR = re.compile(r"\[os_error_code='\d+'")

_PERMANENT = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
_PERMANENT_STATUS = {"NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED"}

Result = TypeVar("Result")

# Packages that read buckets, and the packages that those use.
_CLIENTS = frozenset({"aiohttp", "fsspec", "gcsfs", "google", "requests"})


def is_fault(error: BaseException) -> bool:
    """Returns whether the storage caused an error: it fails, is full, or lacks a file or folder.

    A damaged file does not count, because a program cannot tell whether the storage caused it.
    """
    return any(_is_fault(one) for one in _causes(error))


def is_absence(error: BaseException) -> bool:
    """Returns whether a fault is only a missing file or folder, or a folder in place of a file."""
    absences = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return any(
        isinstance(one, absences)
        or (isinstance(one, ValueError) and str(one).startswith("NOT_FOUND: "))
        for one in _causes(error)
    )


def is_raised_in(package: str, error: BaseException) -> bool:
    """Returns whether code of a package was running when an error was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].partition(".")[0] == package for frame, _ in frames)


def is_transient(error: BaseException) -> bool:
    """Returns whether a retry may succeed, as after a timeout, unlike a missing file or a refusal.

    A full disk is not transient, because it does not empty itself.
    """
    return is_fault(error) and not any(_is_permanent(one) for one in _causes(error))


def retried(call: Callable[[], Result], *, waits: Sequence[float] = (1.0, 3.0, 9.0)) -> Result:
    """Calls a function that uses the storage, and calls it again after each transient fault.

    Args:
      call: The function; it may be called again after a partial run.
      waits: Seconds to wait before each further call; the fault of the last one is raised.

    Example:
      >>> answers = iter([TimeoutError(), "content"])
      >>> def read():
      ...     answer = next(answers)
      ...     if isinstance(answer, Exception):
      ...         raise answer
      ...     return answer
      >>> retried(read, waits=(0.0,))
      'content'
    """
    for wait in waits:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
        time.sleep(wait)
    return call()


@contextlib.contextmanager
def faults(make_error: Callable[[str], UserError]) -> Iterator[None]:
    """Replaces a storage fault by a ``UserError``; other errors pass.

    Args:
      make_error: Makes the error from one line that says what the fault is.

    Example:
      >>> with faults(lambda cause: UserError(f"No report can be written: {cause}")):
      ...     open("/nowhere/report.txt", "w")
      Traceback (most recent call last):
        ...
      experiments.harness.mistakes.UserError: No report can be written: [Errno 2] No such file ...
    """
    try:
        yield
    except Exception as error:
        if not is_fault(error):
            raise
        raise make_error(one_line_message(error)) from error


def one_line_message(error: BaseException) -> str:
    """Returns the message of an error without the pages that TensorStore adds to it."""
    faults = [one for one in _causes(error) if _is_fault(one)]
    first = faults[-1] if faults else error
    line = re.split(r" \[tensorstore_spec| See full TensorStore|\n", str(first))[0]
    is_clear = line and isinstance(first, (OSError, UserError, ValueError))
    return line if is_clear else f"{type(first).__name__}: {line}"


def _is_fault(error: BaseException) -> bool:
    if isinstance(error, ImportError):
        return error.name in _CLIENTS  # The bucket needs a client that is not installed.
    if isinstance(error, ValueError):
        message = str(error)
        return bool(_STATUS.match(message) or _OS_ERROR.search(message))
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def _is_permanent(error: BaseException) -> bool:
    """Returns whether a fault lasts until a person fixes it."""
    if isinstance(error, OSError) and error.errno in _PERMANENT:
        return True
    status = _STATUS.match(str(error)) if isinstance(error, ValueError) else None
    refused = status is not None and status[1] in _PERMANENT_STATUS
    return refused or isinstance(error, (ImportError, PermissionError)) or is_absence(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised from.

    An error that Orbax raises while it handles one of its own, such as a failed clean-up on a full
    disk, counts as raised from that one. A bug in other code during a fault does not.
    """
    seen: set[int] = set()  # An error that is raised again may be among its own causes.
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        cause, context = error.__cause__, error.__context__
        if cause is None and context is not None and not error.__suppress_context__:
            is_of_orbax = all(is_raised_in("orbax", one) for one in (error, context))
            cause = context if is_of_orbax else None
        error = cause
