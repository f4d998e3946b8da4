"""One run in a folder at a time, by a file ``run.lock`` that says who holds the folder.

The kernel drops a lock with its process, however that ends, so a run that was killed can go on at
once. On a network file system the lock is as good as its ``flock``, which Linux's NFS passes on to
the server.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator
from typing import NamedTuple, TextIO

from experiments.harness import mistakes
from experiments.harness.mistakes import UserError

FILE = "run.lock"

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


class Holder(NamedTuple):
    """The process that holds a folder.

    Attributes:
      host: Name of its machine.
      pid: Number of the process.
      since: Time when it began to lock the folders of its run.
      workdir: Workdir of its run, as an absolute path.
    """

    host: str
    pid: int
    since: str
    workdir: str

    @classmethod
    def here(cls, workdir: pathlib.Path) -> Holder:
        """Returns this process, with the current time."""
        now = datetime.datetime.now().astimezone().isoformat(" ", "milliseconds")
        return cls(socket.gethostname(), os.getpid(), now, str(workdir.resolve()))


class Lock(NamedTuple):
    """A folder that this process has locked; ``locked`` makes it.

    Attributes:
      path: The lock file.
      file: The same, open and locked.
    """

    path: pathlib.Path
    file: TextIO

    def is_there(self) -> bool:
        """Returns whether the locked file is still the one in the folder."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.file.fileno()))
        except OSError:
            return False

    def check(self) -> None:
        """Refuses to go on if the folder was removed, renamed or replaced.

        Raises:
          UserError: If the lock file is no longer the one in the folder.
        """
        if not self.is_there():
            raise UserError(
                f"{self.path.parent} was removed, renamed or replaced while the run wrote to it. "
                "When it is back, the same command goes on from the last checkpoint, if any are "
                "kept."
            )


@contextlib.contextmanager
def locked(folder: pathlib.Path, holder: Holder | None = None) -> Iterator[Lock]:
    """Keeps other runs out of a folder of this machine.

    Args:
      folder: Made if needed, and removed again if nothing else is in it at the end.
      holder: Who holds it; this process, with the folder as its workdir, unless given.

    Raises:
      UserError: If another run holds it, or it cannot be written.
    """
    with mistakes.writing(folder):
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder / FILE)
    try:
        with mistakes.writing(folder):
            lock.file.truncate(0)
            lock.file.write(json.dumps((holder or Holder.here(folder))._asdict()))
            lock.file.flush()
        yield lock
    finally:
        with contextlib.suppress(OSError):  # The folder may have become read-only.
            if lock.is_there():
                lock.path.unlink()
        with contextlib.suppress(OSError):  # On a full disk the text was never written.
            lock.file.close()
        with contextlib.suppress(OSError):  # There are files of the run in it.
            if made:
                folder.rmdir()


def _take(path: pathlib.Path) -> Lock:
    """Opens and locks a file, which its last holder may remove at any time before."""
    while True:
        with contextlib.ExitStack() as stack:
            lock = Lock(path, stack.enter_context(path.open("a+")))
            try:
                fcntl.flock(lock.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(_refusal(lock)) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    f"{path} cannot be locked ({error.strerror}): two runs in its folder would not "
                    "notice each other.",
                    stacklevel=2,
                )
            if lock.is_there():
                stack.pop_all()
                return lock


def _refusal(lock: Lock) -> str:
    lock.file.seek(0)
    try:
        holder = Holder(**json.load(lock.file))
        who = (
            f"process {holder.pid} on {holder.host}, since {holder.since}, with "
            f"--workdir={holder.workdir}"
        )
    except (TypeError, ValueError):  # It has just locked the file, or is a program of its own.
        who = f"a process that {FILE} does not name"
    folder = lock.path.parent
    return f"{folder} is in use by another run: {who}. Stop it, or give this one another folder."
