"""Results in files, with which a long computation continues where it was stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class KeptResults:
    """Arrays in a folder, each under a digest of all that they were computed from.

    Attributes:
      folder: The folder; None to keep nothing.
    """

    folder: pathlib.Path | None

    @classmethod
    def into(cls, folder: str | os.PathLike[str] | None) -> KeptResults:
        """Returns the results in a folder, which is made if there is none."""
        if folder is None:
            return cls(None)
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def recall(
        self, what: str, inputs: Any, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        """Returns the arrays that were kept for equal inputs, or else computes and keeps them.

        Args:
          what: Name of the result, with the inputs that are no arrays.
          inputs: A pytree of arrays.
          compute: Returns the result, a dictionary of arrays.

        Raises:
          ValueError: If a file is damaged.
        """
        if self.folder is None:
            return compute()
        path = self.folder / f"{_digest(what, inputs)}.npz"
        if path.exists():
            try:
                with np.load(path) as kept:
                    return dict(kept)
            except (ValueError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is damaged; delete it to compute it again.") from error
        result = compute()
        # Under its name a file is always whole, also if the process dies meanwhile.
        unfinished = path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file:
            np.savez(file, **result)
        unfinished.replace(path)
        return result


def _digest(what: str, inputs: Any) -> str:
    leaves, structure = jax.tree.flatten(inputs)
    digest = hashlib.sha256(f"{what} {structure}".encode())
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
