"""Results in files, with which a long computation continues where it was stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import uuid
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class KeptResults:
    """Results in a folder, each named by a digest of its inputs.

    Attributes:
      folder: The folder; None to keep nothing.
    """

    folder: pathlib.Path | None

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str] | None) -> KeptResults:
        """Returns the results in a folder, which is made if there is none.

        Raises:
          ValueError: If it is a file.
        """
        if folder is None:
            return cls(None)
        path = pathlib.Path(folder)
        if path.exists() and not path.is_dir():
            raise ValueError(f"folder must be a folder, got the file {path}.")
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def recall(
        self, what: str, inputs: Any, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns the result that was kept for equal inputs, or else computes and keeps it.

        Args:
          what: Name of the result, with the inputs that are not arrays.
          inputs: A pytree of arrays.
          compute: Returns the result, a dictionary of arrays of NumPy's own types.

        Raises:
          ValueError: If a file is damaged.
        """
        if self.folder is None:
            return compute()
        path = self.folder / f"{_digest(what, inputs)}.npz"
        if path.exists():
            try:
                with path.open("rb") as kept, np.load(kept) as arrays:
                    return dict(arrays)
            except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is damaged; delete it to compute it again.") from error
        result = compute()
        # A file gets its name once it is whole, even if the process dies or others write it too.
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}")
        with unfinished.open("wb") as file:
            np.savez(file, **result)
        unfinished.replace(path)
        return result


def _digest(what: str, inputs: Any) -> str:
    leaves, structure = jax.tree.flatten(inputs)
    digest = hashlib.sha256(f"{what} {structure}".encode())
    for leaf in leaves:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
