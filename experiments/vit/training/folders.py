"""The folders of a run, kept from other runs."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import time
from typing import Self

from etils import epath

from experiments.harness import locking, storage
from experiments.vit.training import hosts

_QUIET_SECONDS = 0.5  # Orbax writes its next piece sooner than that after the last one.
_LONGEST_SECONDS = 10.0


class Folders:
    """The workdir of a run and the folder of its checkpoints, locked while it is entered.

    Of several hosts the first one locks them for all. Programs that only read a run do not enter
    this, so they work while it trains.

    Args:
      workdir: A folder of this machine; made if needed.
      checkpoints: A folder that all hosts see, or one in a bucket as in ``gs://bucket/run``; None
        if the run keeps no checkpoints.
    """

    def __init__(self, workdir: pathlib.Path, checkpoints: epath.PathLike | None):
        self.workdir, self.checkpoints = workdir, checkpoints
        self._stack = contextlib.ExitStack()
        self._saving: int | None = None  # The step of the last save.
        self._workdir_lock: locking.Lock | None = None
        self._checkpoint_lock: locking.Lock | locking.Lease | None = None

    def __enter__(self) -> Self:
        """Locks both folders.

        Raises:
          UserError: If another run holds one of them, or one cannot be written.
        """
        with contextlib.ExitStack() as stack:
            self._stack = stack
            hosts.on_first(self._lock)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Unlocks them.

        Raises:
          UserError: If Orbax failed because the folder of the checkpoints was removed, renamed or
            replaced. The type of its error does not say so: it may be of a file that it misses.
        """
        lock = self._checkpoint_lock
        try:
            if isinstance(lock, locking.Lock) and error and storage.is_raised_in("orbax", error):
                lock.check()
        finally:
            self._stack.close()
            if isinstance(lock, locking.Lock) and lock.is_lost:
                self._remove_remains(lock.folder)

    def check_workdir(self) -> None:
        """Refuses to go on if the workdir was removed, renamed or replaced.

        Raises:
          UserError: If it was.
        """
        if self._workdir_lock:
            self._workdir_lock.check()

    def check_checkpoints(self, step: int) -> None:
        """Refuses to save a step if the folder was removed or another run has taken it over.

        Raises:
          UserError: If it was.
        """
        if self._checkpoint_lock:
            self._checkpoint_lock.check()
        self._saving = step

    def _remove_remains(self, folder: pathlib.Path) -> None:
        """Removes what a save went on to write after its folder was removed or renamed.

        Orbax makes the folders anew, and they would be in the way of those that are put back. When
        a write fails Orbax does not wait for the others, so this goes on until they have ended.
        """
        last_seen = time.monotonic()
        deadline = last_seen + _LONGEST_SECONDS
        while (now := time.monotonic()) < min(last_seen + _QUIET_SECONDS, deadline):
            if any((path / locking.FILE).exists() for path in (folder, self.workdir)):
                return  # Those are another run's.
            remains = [folder / f"{self._saving}", *folder.glob(f"{self._saving}.orbax*")]
            if any(path.exists() for path in remains):
                last_seen = now
            for path in remains:
                shutil.rmtree(path, ignore_errors=True)
            for path in (folder, self.workdir):
                with contextlib.suppress(OSError):  # It is not empty, or not there.
                    path.rmdir()
            time.sleep(0.05)

    def _lock(self) -> None:
        holder = locking.Holder.here(self.workdir)
        lock = self._stack.enter_context(locking.locked(self.workdir, holder))
        self._workdir_lock = lock
        if self.checkpoints is None:
            return
        if "://" in str(self.checkpoints):
            lease = locking.leased(epath.Path(self.checkpoints), holder, lock.left_by)
            self._checkpoint_lock = self._stack.enter_context(lease)
        else:
            folder = pathlib.Path(self.checkpoints).expanduser()
            if folder.resolve() == self.workdir.resolve():
                self._checkpoint_lock = lock
            else:
                self._checkpoint_lock = self._stack.enter_context(locking.locked(folder, holder))
