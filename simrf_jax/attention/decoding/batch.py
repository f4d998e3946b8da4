"""States of any leading batch shape, and whether they fit what comes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def flatten(state: Any, expected: Any, batch: tuple[int, ...]) -> Any:
    """The state with one leading axis, if it fits the keys and values.

    Args:
      state: A named tuple of arrays ``[*batch, ...]``.
      expected: What it should be, in arrays or shapes ``[math.prod(batch), ...]``.
      batch: Leading shape.

    Raises:
      TypeError: If it is another kind of state.
      ValueError: If it has other shapes.
    """
    if type(state) is not type(expected):
        raise TypeError(
            f"state must be of type {type(expected).__name__}, got {type(state).__name__}."
        )
    shapes = [(*batch, *x.shape[1:]) for x in expected]
    given = [jnp.shape(x) for x in state]
    if given != shapes:
        raise ValueError(
            f"state must have {_named(expected, shapes)} for these keys and values, got "
            f"{_named(expected, given)}."
        )
    return jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), state)


def unflatten(state: Any, batch: tuple[int, ...]) -> Any:
    """The state with the leading shape of the inputs."""
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), state)


def check_as_many_keys_as_queries(query: jax.Array, key: jax.Array) -> None:
    """Refuses arrays ``[B, T, ...]`` and ``[B, S, ...]`` of different lengths."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "A step of decoding takes as many keys as queries, got "
            f"{key.shape[1]} and {query.shape[1]}."
        )


def _named(state: Any, shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in zip(state._fields, shapes, strict=True))
