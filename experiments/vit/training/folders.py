"""The folders of a run, kept from other runs."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Self

from etils import epath

from experiments.harness import locking, storage
from experiments.vit.training import hosts


class Folders:
    """The workdir of a run and the folder of its checkpoints, locked while it is entered.

    Of several hosts the first one locks them for all. Programs that only read a run do not enter
    this, so they work while it trains. A folder in a bucket cannot be locked; ``Checkpoints``
    notices another run there.

    Args:
      workdir: A folder of this machine; made if needed.
      checkpoints: A folder that all hosts see, or one in a bucket as in ``gs://bucket/run``; None
        if the run keeps no checkpoints.
    """

    def __init__(self, workdir: pathlib.Path, checkpoints: epath.PathLike | None):
        self.workdir, self.checkpoints = workdir, checkpoints
        self._stack = contextlib.ExitStack()
        self._workdir_lock: locking.Lock | None = None
        self._checkpoint_lock: locking.Lock | None = None

    def __enter__(self) -> Self:
        """Locks both folders.

        Raises:
          UserError: If another run holds one of them, or one cannot be written.
        """
        with contextlib.ExitStack() as self._stack:
            hosts.on_first(self._lock)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Unlocks them.

        Raises:
          UserError: If Orbax failed because the folder of the checkpoints was removed, renamed or
            replaced. The type of its error does not say so: it may be of a file that it misses.
        """
        with self._stack:
            if error and storage.is_raised_in("orbax", error):
                self.check_checkpoints()

    def check_workdir(self) -> None:
        """Refuses to go on if the workdir was removed, renamed or replaced.

        Raises:
          UserError: If it was.
        """
        if self._workdir_lock:
            self._workdir_lock.check()

    def check_checkpoints(self) -> None:
        """Refuses to save if the folder of the checkpoints was removed, renamed or replaced.

        Raises:
          UserError: If it was.
        """
        if self._checkpoint_lock:
            self._checkpoint_lock.check()

    def _lock(self) -> None:
        holder = locking.Holder.here(self.workdir)
        lock = self._stack.enter_context(locking.locked(self.workdir, holder))
        self._workdir_lock = lock
        if self.checkpoints is None or "://" in str(self.checkpoints):
            return
        folder = pathlib.Path(self.checkpoints).expanduser()
        if folder.resolve() != self.workdir.resolve():
            lock = self._stack.enter_context(locking.locked(folder, holder))
        self._checkpoint_lock = lock
