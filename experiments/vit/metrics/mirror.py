"""A copy of a run's small files in a bucket, where TensorBoard and other machines read them."""

from __future__ import annotations

import pathlib
import warnings
from concurrent import futures
from typing import Self

from etils import epath

from experiments.harness import storage
from experiments.harness.mistakes import UserError

# Checkpoints have a folder of their own. The results are last, so that they mark a whole copy.
_PATTERNS = ("config.json", "metrics.csv", "tensorboard/*", "curves.png", "results.json")


class Mirror:
    """Copies what is new in a workdir to a folder, while training goes on.

    Objects of a bucket cannot grow, so each file that has grown is copied whole. A copy that fails
    while the run trains is a warning, and the next one brings what it lacks.

    Args:
      workdir: Folder of the run.
      folder: Folder to copy to, as ``gs://bucket/runs/simplex``; "" copies nothing.
      writes: If false, copy nothing; one host of a pod copies.
    """

    def __init__(self, workdir: pathlib.Path, folder: str, *, writes: bool):
        self._workdir = workdir
        self._folder = epath.Path(folder) if folder and writes else None
        self._copied: dict[pathlib.Path, tuple[int, int]] = {}
        self._pool = futures.ThreadPoolExecutor(1)
        self._pending: futures.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Copies what has been written since; if that fails too, the first error is the one to see.

        It waits for the copy that is under way.
        """
        try:
            if self._folder is not None:
                self.start()
                self._warn_of_failure()
        except Exception:
            if kind is None:
                raise
        finally:
            self._pool.shutdown()

    def start(self) -> None:
        """Starts to copy what is new, after the copy before."""
        if self._folder is None:
            return
        self._warn_of_failure()
        self._pending = self._pool.submit(self._copy)

    def finish(self) -> None:
        """Copies what is new.

        Raises:
          UserError: If that fails, also when it is tried again.
        """
        if self._folder is None:
            return
        self._warn_of_failure()
        with storage.faults(
            lambda cause: UserError(
                f"{self._folder} cannot be written: {cause}. The results are in {self._workdir}."
            )
        ):
            self._copy()

    def _warn_of_failure(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception as error:
            if not storage.is_fault(error):
                raise
            cause = storage.one_line_message(error)
            warnings.warn(f"{self._folder} lacks the last rows: {cause}", stacklevel=3)

    def _copy(self) -> None:
        assert self._folder is not None
        for path in (path for pattern in _PATTERNS for path in sorted(self._workdir.glob(pattern))):
            state = path.stat()
            version = state.st_size, state.st_mtime_ns
            if self._copied.get(path) != version:
                self._write(self._folder / str(path.relative_to(self._workdir)), path.read_bytes())
                self._copied[path] = version

    def _write(self, target: epath.Path, content: bytes) -> None:
        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

        storage.retried(write)
