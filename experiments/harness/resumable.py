"""The pieces of a run that is resumable: each is computed once and kept in a file."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import ParamSpec

import numpy as np
from ml_collections import ConfigDict

import simrf_jax
from experiments.harness import files, mistakes
from experiments.harness.mistakes import UserError

Arguments = ParamSpec("Arguments")


class Pieces:
    """The finished pieces of a run, so that one that was stopped goes on where it was.

    Args:
      workdir: Folder to make; it keeps ``config.json`` and one file for each piece.
      config: Config that the pieces belong to.
      selection: Fields that say which pieces to make, or where data are, but change none of them.

    Raises:
      UserError: If the folder cannot be written, or holds the pieces of another config or of
        another version of this package.
    """

    def __init__(self, workdir: pathlib.Path, config: ConfigDict, *, selection: Iterable[str] = ()):
        self._folder = workdir / "pieces"
        with mistakes.writing(workdir):
            self._folder.mkdir(parents=True, exist_ok=True)
        path = workdir / "config.json"
        ours = {"version": simrf_jax.__version__, **json.loads(config.to_json())}
        if path.exists():
            theirs = files.read_json(path)
            names = [n for n in ours | theirs if ours.get(n) != theirs.get(n)]
            if differ := [name for name in names if name not in selection]:
                raise UserError(
                    f"{workdir} holds a run of another config ({path}), which differs in "
                    f"{', '.join(differ)}. Give another --workdir or delete it."
                )
        files.write_json(path, ours)

    def check_text(self, part: str, sha256: str) -> None:
        """Refuses the pieces of another text, as each Python environment has its own.

        Args:
          part: Beginning of the names of the pieces, up to a hyphen.
          sha256: Hash of the text of this environment.

        Raises:
          UserError: If there are pieces of another text, or of one whose hash was not kept.
        """
        kept = self.load(f"{part}.text")
        if kept == sha256:
            return
        if any(self._folder.glob(f"{part}-*")):
            theirs = "an unknown text" if kept is None else f"a text with SHA-256 {kept}"
            raise UserError(
                f"{self._folder} holds {part}-* of {theirs}, but the text of this Python has "
                f"SHA-256 {sha256}. Use the Python of that run, or give another --workdir."
            )
        self.save(f"{part}.text", np.array(sha256))

    def load(self, name: str) -> np.ndarray | None:
        """Returns a finished piece, or None.

        Raises:
          UserError: If its file is damaged.
        """
        path = self._folder / f"{name}.npy"
        if not path.exists():
            return None
        try:
            return np.load(path)
        except (EOFError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is damaged ({error}). Delete it; the same command computes it again."
            ) from error

    def save(self, name: str, values: np.ndarray) -> None:
        """Keeps a piece, whole or not at all."""
        with files.whole_file(self._folder / f"{name}.npy") as partial:
            np.save(partial, values)

    def get(
        self,
        name: str,
        compute: Callable[Arguments, np.ndarray],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> np.ndarray:
        """Returns a piece; unless it is finished, this computes and keeps it."""
        values = self.load(name)
        if values is None:
            start = time.monotonic()
            values = compute(*arguments, **keywords)
            self.save(f"{name}.seconds", np.array(time.monotonic() - start))
            self.save(name, values)
        return values

    def seconds(self, names: str) -> float:
        """Returns the seconds that the pieces took whose names match a glob, in all runs so far."""
        kept = (self.load(path.stem) for path in self._folder.glob(f"{names}.seconds.npy"))
        return sum(float(seconds) for seconds in kept if seconds is not None)
