"""Masks, biases, sequence lengths and segments, and their effect on each key.

Linear attention sums over the keys once for all queries, so it can weight or hide a key for all
queries of a head, but not for a single query. All that it can honor of a mask, a bias and lengths
is one array: a log weight for each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Integer, Shaped

from simrf_jax._src import checks

# A size may be symbolic under jax.export.
Size: TypeAlias = Any
Shape: TypeAlias = tuple[Size, ...]

# Arrays, which may also be given as lists.
Mask: TypeAlias = Bool[ArrayLike, "..."] | Sequence[Bool[ArrayLike, ""]]
Lengths: TypeAlias = Integer[ArrayLike, "..."] | Sequence[Integer[ArrayLike, ""]]

# The same, before Call.of and lay_out check their types.
Unchecked: TypeAlias = Shaped[ArrayLike, "..."] | Sequence[Shaped[ArrayLike, ""]]


def to_int32(
    x: Integer[np.ndarray, "*shape"] | Integer[Array, "*shape"],
) -> Integer[Array, "*shape"]:
    """Returns integers as int32; those that do not fit become the nearest, instead of wrapping."""
    if x.dtype == jnp.int32:
        return jnp.asarray(x)
    xp: Any = jnp if isinstance(x, jax.Array) else np
    theirs, ours = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    x = xp.clip(x, max(theirs.min, ours.min), min(theirs.max, ours.max))
    return jnp.asarray(x, jnp.int32)


def as_array(name: str, x: Unchecked) -> Shaped[Array, " ..."]:
    """Returns lengths or segment ids as an array.

    Raises:
      ValueError: If they do not fit the integers of JAX, which would wrap them.
    """
    if isinstance(x, jax.Array) or checks.is_traced(x):
        return jnp.asarray(x)
    given = np.asarray(x)
    array = jnp.asarray(given)
    if array.dtype != given.dtype and np.issubdtype(given.dtype, np.integer):
        is_wrapped = given.astype(array.dtype) != given
        if np.any(is_wrapped):
            raise ValueError(
                f"{name} must fit {array.dtype.name}, as jax_enable_x64 is off, got "
                f"{given[is_wrapped].flat[0]}."
            )
    return array


def within_lengths(
    name: str, lengths: Integer[ArrayLike, "*batch"], batch: Shape, length: Size
) -> Bool[Array, "*batch {length}"]:
    """Returns ``[*batch, length]``, True at the positions before each sequence's length."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype.name}.")
    if lengths.shape != batch:
        raise ValueError(f"{name} must have the batch shape {batch}, got {lengths.shape}.")
    positions = jnp.arange(length).reshape((1,) * len(batch) + (length,))
    return positions < to_int32(lengths)[..., None].astype(positions.dtype)


def segment_numbers(
    segment_ids: Integer[ArrayLike, "*batch T"],
    batch: Shape,
    query_length: Size,
    key_length: Size,
) -> Integer[Array, "*batch T"]:
    """Returns ``[*batch, length]``, the segments numbered from 0.

    An id that recurs after a different one begins a new segment.
    """
    segment_ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got {segment_ids.dtype.name}.")
    if query_length != key_length:
        raise ValueError(
            "segment_ids are for self-attention, with equal numbers of queries and keys, got "
            f"{query_length} queries and {key_length} keys."
        )
    if segment_ids.shape != (*batch, query_length):
        raise ValueError(
            f"segment_ids must be [batch..., length] = {(*batch, query_length)}, got shape "
            f"{segment_ids.shape}."
        )
    begins = segment_ids[..., 1:] != segment_ids[..., :-1]
    begins = jnp.pad(begins, [(0, 0)] * len(batch) + [(min(1, query_length), 0)])
    return jnp.cumsum(begins, axis=-1, dtype=jnp.int32)


def one_row(
    name: str, x: Unchecked, target: Shape
) -> Shaped[Array, " ..."] | Shaped[np.ndarray, " ..."]:
    """Returns a mask or bias that has one row for all queries.

    Args:
      name: ``"mask"`` or ``"bias"``.
      x: Array that broadcasts to the target, after adding batch axes of size 1 if needed.
      target: ``[*batch, heads, query_length, key_length]``.

    Raises:
      TypeError: If a mask is not boolean, or a bias not floating.
      ValueError: If it does not broadcast, or may differ between queries: it has several rows that
        differ or whose values are unknown. Only NumPy arrays have known values under ``jit``.
    """
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    shape = (1,) * (len(target) - x.ndim) + x.shape
    fits = (have in (1, want) for have, want in zip(shape, target, strict=False))
    if len(shape) != len(target) or not all(fits):
        raise ValueError(
            f"{name} must be broadcastable to [batch..., heads, query length, key length] = "
            f"{target}, got shape {x.shape}."
        )
    if differs_between_queries(x):
        of_masks = (
            "is_causal=True for a causal mask; in Flax adapters, masks='factored' for products of "
            "masks of queries and of keys; "
        )
        raise ValueError(
            f"{name} of shape {x.shape} may differ between queries, which linear attention cannot "
            "honor: it sums over the keys once for all queries. What works: "
            f"{of_masks if name == 'mask' else ''}a {name} with a query axis of size 1 ([batch..., "
            f"1, 1, key length], such as {name}[..., :1, :] if all queries share it); "
            "key_value_seq_lengths and query_seq_lengths."
        )
    if name == "mask" and x.dtype != jnp.bool:
        raise TypeError(
            f"mask must be boolean (True to attend), got {x.dtype.name}; pass an additive mask as "
            "bias."
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"bias must be floating, got {x.dtype.name}.")
    return x[..., :1, :] if shape[-2] > 1 else x


def differs_between_queries(x: Shaped[Array, " ..."] | Shaped[np.ndarray, " ..."]) -> bool:
    """Returns whether a mask or bias has several rows, unless they are known to be equal."""
    if x.ndim < 2 or x.shape[-2] <= 1:
        return False
    # The values of a NumPy array are known, even under jit.
    return not (isinstance(x, np.ndarray) and bool((x == x[..., :1, :]).all()))


def per_key(x: Shaped[Array, " ..."], target: Shape) -> Shaped[Array, ...]:
    """Drops the query axis of a mask or bias that has one row for all queries.

    Args:
      x: Array that broadcasts to the target, after adding batch axes of size 1 if needed.
      target: ``[*batch, heads, query_length, key_length]``.

    Returns:
      ``[..., 1 or heads, key_length]``, with batch axes of size 1 where it had none.
    """
    shape = (1,) * (len(target) - x.ndim) + x.shape
    if shape[-2] == 0:  # With no queries, any value works.
        return jnp.ones((*shape[:-2], target[-1]), x.dtype)
    x = jnp.reshape(x, shape)[..., 0, :]
    return jnp.broadcast_to(x, (*x.shape[:-1], target[-1]))
