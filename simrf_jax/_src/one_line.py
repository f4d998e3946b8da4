"""Representations of records in one line, with the types of arrays instead of their numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


def representation(record: Any) -> str:
    """Returns the class and the fields of a dataclass or of a named tuple.

    An array is shown by its dtype and shape, and fields that are None are left out.

    Args:
      record: Instance of a dataclass or of a named tuple.

    Example:
      >>> from typing import NamedTuple
      >>> class Sums(NamedTuple):
      ...     sums: np.ndarray
      ...     count: int
      ...     mask: np.ndarray | None = None
      >>> representation(Sums(np.zeros((3, 4)), 5))
      'Sums(sums=float64[3, 4], count=5)'
    """
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record)]
    else:
        names = record._fields
    values = [(name, getattr(record, name)) for name in names]
    fields = [f"{name}={shown(value)}" for name, value in values if value is not None]
    return f"{type(record).__name__}({', '.join(fields)})"


def shown(value: Any) -> str:
    """Returns a value as it stands in a representation."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype.name}{list(value.shape)}"
    if type(value) in (tuple, list):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)
