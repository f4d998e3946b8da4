"""What all experiments share: fields of configs, flags, and files that are whole or absent."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np
from absl import flags

# Type of each field of a config by its dotted name: {"model.width": int, ...}.
Fields = Mapping[str, type]


def check_fields(config: ml_collections.ConfigDict, fields: Fields) -> dict[str, Any]:
    """Refuses a config that has not these fields and no other, each of its type.

    Returns:
      The values by dotted name.

    Raises:
      TypeError: If a field has the wrong type.
      ValueError: If fields are missing or unknown.
    """
    given = flatten(config)
    if unknown := sorted(given.keys() - fields.keys()):
        raise ValueError(unknown_field_message(unknown, fields))
    if missing := [name for name in fields if name not in given]:
        raise ValueError(f"The config lacks {', '.join(missing)}.")
    for name, value in given.items():
        if type(value) is not fields[name]:
            raise TypeError(f"config.{name} must be {fields[name].__name__}, got {value!r}.")
    return given


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns ``{"model.width": 64, ...}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, (Mapping, ml_collections.ConfigDict)):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def unknown_field_message(names: list[str], fields: Fields) -> str:
    """Says which fields there are."""
    plural = "s" if len(names) > 1 else ""
    return (
        f"Unknown config field{plural} {', '.join(names)}; the known ones are {', '.join(fields)}."
    )


def overridden(argv: list[str], fields: Fields) -> list[str]:
    """The fields that the command line overrides; one that no config has is a usage error."""
    names = [m[1] for a in argv if (m := re.match(r"--?config\.([\w.]+)", a))]
    if unknown := [name for name in names if name not in fields]:
        raise SystemExit(unknown_field_message(unknown, fields))
    return names


def parse_flags(argv: list[str], fields: Fields, default_config: pathlib.Path) -> list[str]:
    """Parses flags; a mistake ends the program with a line that says what it was.

    Define ``--config`` without a default: ml_collections would read it, and fail on the overrides
    of the command line, while the program is still being imported.
    """
    overridden(argv, fields)
    if not any(re.match(r"--?config(=|$)", a) for a in argv):
        argv = [argv[0], f"--config={default_config}", *argv[1:]]
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise SystemExit(f"{error}\nPass --help to see the flags.") from None


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a whole file or none."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    partial.replace(path)


class Pieces:
    """The finished pieces of a run, so that one that was stopped goes on where it was.

    Args:
      workdir: Folder to make; it keeps ``config.json`` and one file for each piece.
      config: What the pieces belong to.

    Raises:
      FileExistsError: If the folder holds the pieces of another config.
    """

    def __init__(self, workdir: pathlib.Path, config: ml_collections.ConfigDict):
        self._folder = workdir / "pieces"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = workdir / "config.json"
        ours = json.loads(config.to_json())
        if path.exists() and json.loads(path.read_text()) != ours:
            raise FileExistsError(
                f"{workdir} holds a run of another config ({path}). Give another --workdir or "
                "delete it."
            )
        write_json(path, ours)

    def load(self, name: str) -> np.ndarray | None:
        """A finished piece, or None."""
        path = self._folder / f"{name}.npy"
        return np.load(path) if path.exists() else None

    def save(self, name: str, values: np.ndarray) -> None:
        """Keeps a piece, whole or not at all."""
        partial = self._folder / f"{name}.partial.npy"
        np.save(partial, values)
        partial.replace(self._folder / f"{name}.npy")
