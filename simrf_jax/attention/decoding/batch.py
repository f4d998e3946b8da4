"""States of any leading batch shape, and whether they fit the tokens that come."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax.attention.sequence_parallel import explicit_axes


def flatten(state: Any, expected: Any, batch: tuple[int, ...]) -> Any:
    """The state with one leading axis, if it fits the keys and values.

    Args:
      state: A named tuple of arrays ``[*batch, ...]``.
      expected: What it should be, in arrays or shapes ``[math.prod(batch), ...]``.
      batch: Leading shape.

    Raises:
      TypeError: If it is another kind of state, or of other dtypes.
      ValueError: If it has other shapes.
    """
    check_kind(state, type(expected))
    shapes = [(*batch, *x.shape[1:]) for x in expected]
    given = [jnp.shape(x) for x in state]
    if given != shapes:
        raise ValueError(
            f"state must have {_named(expected, shapes)} for these keys and values, got "
            f"{_named(expected, given)}."
        )
    dtypes = [x.dtype for x in expected]
    if (given := [x.dtype for x in state]) != dtypes:
        raise TypeError(
            f"state must have {_named(expected, dtypes)} for these keys and values, got "
            f"{_named(expected, given)}; make it with their dtype."
        )
    return jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), state)


def unflatten(state: Any, batch: tuple[int, ...]) -> Any:
    """The state with the leading shape of the inputs."""
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), state)


def check_kind(state: Any, kind: type) -> None:
    """Refuses another kind of state."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be of type {kind.__name__}, got {type(state).__name__}.")


def check_whole(**arrays: ArrayLike) -> None:
    """Refuses queries, keys or values whose length devices share."""
    if axes := explicit_axes({name: jnp.asarray(x) for name, x in arrays.items()}):
        raise ValueError(
            "Decoding takes tokens whose length is not sharded, got one sharded over the mesh axis "
            f"{', '.join(map(repr, axes))}; jax.reshard them."
        )


def check_step(query: jax.Array, key: jax.Array, num_key_heads: int) -> None:
    """Refuses what a step cannot attend to, by arrays ``[B, T, ...]`` as ``lay_out`` makes them."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            "A step of decoding takes as many keys as queries, got "
            f"{key.shape[1]} and {query.shape[1]}."
        )
    if key.shape[2] != num_key_heads:
        raise ValueError(
            "In decoding, mask and bias must be the same for the query heads that share a key "
            f"head, got one for each of {key.shape[2]} query heads, and {num_key_heads} key heads."
        )


def _named(state: Any, values: list[Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(state._fields, values, strict=True))
