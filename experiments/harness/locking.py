"""One run in a folder at a time: a lock on a disk, a lease in a bucket.

Both are a file ``run.lock`` in the folder, which says who holds it. The kernel drops a lock with
its process, however that ends, so a run that was killed can go on at once. On a network file system
the lock is as good as its ``flock``, which Linux's NFS passes on to the server.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import pathlib
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from etils import epath

from experiments.harness import mistakes, storage
from experiments.harness.mistakes import UserError

FILE = "run.lock"
RENEWAL = 30.0  # Seconds between the renewals of a lease.
EXPIRY = 120.0  # Seconds without a renewal after which a lease is over; it bears delays and skew.

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

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, since {self.since}, with --workdir={self.workdir}"
        )


class Lock:
    """A folder of this machine that this process has locked; ``locked`` makes it.

    Args:
      path: The lock file.
      file: The same, open and locked.

    Attributes:
      folder: The folder.
      left_by: The process that held the folder before and was killed, or None.
      is_lost: True if the folder was no longer at its path when it was released, because it was
        removed, renamed or replaced.
    """

    def __init__(self, path: pathlib.Path, file: TextIO):
        self._path, self._file = path, file
        self.folder = path.parent
        self.left_by = _holder(file.read())
        self.is_lost = False
        # Kept open, so that no new folder gets its inode.
        self._directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)

    def write(self, holder: Holder) -> None:
        """Says who holds the folder."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(holder._asdict()))
        self._file.flush()

    def check(self) -> None:
        """Refuses to go on if the folder was removed, renamed or replaced.

        Raises:
          UserError: If the lock file is no longer the one in the folder.
        """
        if not _is_at(self._path, self._file):
            raise UserError(
                f"{self.folder} was removed, renamed or replaced while the run wrote to it. "
                "When it is back, the same command goes on from the last checkpoint, if any are "
                "kept."
            )

    def release(self) -> None:
        """Removes the lock file and unlocks the folder."""
        try:
            here, locked = self.folder.stat(), os.fstat(self._directory)
            self.is_lost = not os.path.samestat(here, locked)
        except OSError:
            self.is_lost = True
        os.close(self._directory)
        if _is_at(self._path, self._file):
            with contextlib.suppress(OSError):  # A folder may have become read-only.
                self._path.unlink()
        with contextlib.suppress(OSError):  # On a full disk the text was never written.
            self._file.close()


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
        lock = Lock(folder / FILE, _open_locked(folder / FILE))
    try:
        with mistakes.writing(folder):
            lock.write(holder or Holder.here(folder))
        yield lock
    finally:
        lock.release()
        if made:
            with contextlib.suppress(OSError):  # There are files of the run in it.
                folder.rmdir()


def _open_locked(path: pathlib.Path) -> TextIO:
    """Opens and locks a file, which its last holder may remove at any time before."""
    while True:
        file = path.open("a+")
        file.seek(0)
        try:
            _flock(file)
        except BlockingIOError:
            with file:
                raise UserError(_refusal(path.parent, _holder(file.read()))) from None
        except BaseException:
            file.close()
            raise
        if _is_at(path, file):
            return file
        file.close()


def _flock(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{file.name} cannot be locked ({error.strerror}): two runs in its folder would not "
            "notice each other.",
            stacklevel=2,
        )


def _is_at(path: pathlib.Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


class Lease:
    """A folder in a bucket that a process holds as long as it renews this; ``leased`` makes it.

    A bucket has no locks. So the file says when it was last renewed, which a run that starts
    compares with its own clock, and the holder looks before each save whether the file is its own.

    Args:
      folder: Made if needed.
      holder: Who holds it.
    """

    def __init__(self, folder: epath.Path, holder: Holder):
        self._path, self._holder = folder / FILE, holder

    def take(self, left_by: Holder | None) -> None:
        """Takes the folder unless another run holds it; see ``leased``.

        Raises:
          UserError: If another run holds it, or the file does not say who does.
        """
        found = self._read()
        if found:
            self._refuse_held(found, left_by)
        self._write()

    def check(self) -> None:
        """Refuses to save if another run has taken the folder.

        Raises:
          UserError: If the file is no longer that of this process.
        """
        found = _holder(self._read())
        if found != self._holder:
            taken = f"was taken over by {found}" if found else f"has lost its {FILE}"
            raise UserError(
                f"{self._path.parent} {taken}. This run ends, so that it writes over nothing."
            )

    def keep_renewing(self, stop: threading.Event) -> None:
        """Renews the lease until ``stop`` is set or another run has taken the folder."""
        while not stop.wait(RENEWAL):
            with contextlib.suppress(Exception):  # The network may be back at the next time.
                if _holder(self._read()) != self._holder:
                    return
                self._write()

    def release(self) -> None:
        """Gives the folder back, at once if that can be done."""
        with contextlib.suppress(Exception):  # Otherwise it is over in a while.
            if _holder(self._read()) == self._holder:
                self._path.unlink()

    def _refuse_held(self, found: str, left_by: Holder | None) -> None:
        holder, renewed = _holder(found), _content(found).get("renewed")
        if holder is None or not isinstance(renewed, int):
            raise UserError(
                f"{self._path} does not say who holds the folder. Delete it if no run does."
            )
        is_of_workdir = (holder.host, holder.workdir) == (self._holder.host, self._holder.workdir)
        rest = renewed + EXPIRY - time.time()
        if rest > 0 and not (is_of_workdir and holder == left_by):
            raise UserError(
                f"{_refusal(self._path.parent, holder)} If that run was killed, start again in "
                f"{math.ceil(rest)} seconds."
            )

    def _read(self) -> str:
        """Returns the text of the file, or "" if there is none."""
        with _storage(self._path.parent):
            try:
                return storage.retried(self._path.read_text)
            except FileNotFoundError:
                return ""

    def _write(self) -> None:
        with _storage(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # An integer has one length. fsspec may remember the length of a file and read no more.
            lease = self._holder._asdict() | {"renewed": int(time.time())}
            storage.retried(lambda: self._path.write_text(json.dumps(lease)))


@contextlib.contextmanager
def leased(folder: epath.Path, holder: Holder, left_by: Holder | None = None) -> Iterator[Lease]:
    """Keeps other runs out of a folder in a bucket.

    Args:
      folder: Made if needed.
      holder: Who holds it.
      left_by: Who held the lock of the workdir before and was killed, or None. If the lease is
        that one's too, and from this machine, it is over at once.

    Raises:
      UserError: If another run holds it, or it cannot be read and written.
    """
    lease, stop = Lease(folder, holder), threading.Event()
    lease.take(left_by)
    renewing = threading.Thread(target=lease.keep_renewing, args=(stop,), daemon=True)
    renewing.start()
    try:
        yield lease
    finally:
        stop.set()
        renewing.join()  # A renewal after the release would bring the file back.
        lease.release()


def _holder(text: str) -> Holder | None:
    """Returns who a lock file names, or None if it is empty, cut off or of something else."""
    content = _content(text)
    try:
        return Holder(**{name: content[name] for name in Holder._fields})
    except KeyError:
        return None


def _content(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _refusal(folder: os.PathLike[str], holder: Holder | None) -> str:
    who = holder or f"a process that {FILE} does not name"
    return f"{folder} is in use by another run: {who}. Stop it, or give this one another folder."


def _storage(folder: epath.Path) -> contextlib.AbstractContextManager[None]:
    return storage.faults(lambda cause: UserError(f"{folder} cannot be read and written: {cause}"))
