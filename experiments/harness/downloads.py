"""Published files, found in a folder or downloaded once, and checked by their hashes."""

from __future__ import annotations

import os
import pathlib
from typing import NamedTuple

import pooch

from experiments.harness.mistakes import UserError, user_mistakes


class Place(NamedTuple):
    """The place where a user keeps published files.

    Attributes:
      flag: Flag that names a folder with them.
      variable: Variable of the environment that does.
      cache: Name of their folder in the cache, which the user's folder may also hold.
      published: The file in words, as in "is not the published file".
    """

    flag: str
    variable: str
    cache: str
    published: str

    def find(self, name: str, address: str, sha256: str, folder: str, *names: str) -> pathlib.Path:
        """Returns the path of a file, after downloading it if necessary.

        Args:
          name: Name of the file in messages.
          address: Address of the file, which ends in its name.
          sha256: Hash of the file.
          folder: Folder with the file; "" for the one that the variable names or, without it, for
            the cache, to which the file is downloaded.
          *names: Further names that the file may have in the folder.

        Raises:
          UserError: If the folder lacks the file, it cannot be downloaded, or it is another one.
        """
        ways = (
            f"Put the file into a folder and say which by {self.variable} or, in an experiment, by "
            f"{self.flag}=DIR, or give this machine access to {address}, from where it is "
            "downloaded once."
        )
        file, folder = address.rpartition("/")[2], folder or os.environ.get(self.variable, "")
        if not folder:
            try:
                cache = pooch.os_cache("simrf_jax") / self.cache
                return pathlib.Path(pooch.retrieve(address, f"sha256:{sha256}", file, cache))
            except OSError as error:
                raise UserError(f"Cannot download {name}: {error}. {ways}") from error
            except ValueError as error:  # The checksum differs; pooch has deleted the file.
                raise UserError(f"{name} is not what it was: {error}") from error
        for path in (pathlib.Path(folder, x) for x in (file, *names, f"{self.cache}/{file}")):
            path = path.expanduser()
            with user_mistakes(OSError, prefix=f"{path} cannot be read: "):
                found = pooch.file_hash(str(path)) if path.exists() else None
            if found == sha256:
                return path
            if found:
                raise UserError(
                    f"{path} is not {self.published}: its SHA-256 is {found}, expected {sha256}."
                )
        either = " or ".join(dict.fromkeys((file, *names)))
        raise UserError(f"There is no {either} in {folder}. {ways}")
