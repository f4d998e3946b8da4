"""The keys of a tile, and the state that passes from tile to tile, in the causal kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.heads import (
    HIDDEN,
    Keys,
    Links,
    Refs,
    Shape,
    interleave,
    keep,
    take_keys,
)
from simrf_jax._src.attention.pallas_tpu.segments import Segments, references
from simrf_jax._src.attention.pallas_tpu.weights import (
    Weights,
    at_or_before,
    limits,
    pairs_of,
    places,
)


class Tile(NamedTuple):
    """The keys of a tile, and the sums that are kept from tile to tile.

    Attributes:
      logits: Exponents of the keys' features, ``[key heads, m, tile]``.
      values: Values with the row of ones, ``[key heads, D + TILE, tile]``.
      nonfinite: ``[key heads, 1, tile]``, 1 at keys that are not finite, and 0 elsewhere.
      maxima: The largest exponents of earlier tiles, ``[key heads, m, tile]``, equal along the last
        axis, so that they need not be broadcast over the lanes again.
      reference: Units of the tile, of the same shape: the maxima or, if no earlier key is visible,
        the exponents of the first visible key.
      state: Sums over earlier tiles, ``[key heads, m, D + TILE]``, in units of the maxima.
      poisoned: ``[key heads, 1, tile]``, NaN if a key of an earlier tile is not finite, or else 0.
      of_queries: The reference of queries, which differs from that of keys if keys were moved. With
        segments neither is equal along the last axis.
      segments: The segments of its tokens, or None. With segments, ``maxima``, ``state`` and
        ``poisoned`` are those of the segment of the last key before the tile.
    """

    logits: Any
    values: Any
    nonfinite: Any
    maxima: Any
    reference: Any
    state: Any
    poisoned: Any
    of_queries: Any
    segments: Segments | None

    @classmethod
    def of(cls, shape: Shape, refs: Refs, scratch: list[Any]) -> tuple[Tile, list[Any]]:
        """Returns the tile in the memory of ``tile_scratch``, and the memory that follows."""
        logits, values, nonfinite, maxima, reference, state, poisoned, *rest = scratch
        of_queries, segments = reference, None
        if refs.segments is not None:
            segments = Segments.take(shape, refs.segments)
            if shape.is_moved:
                of_queries, *rest = rest
        arrays = (logits, values, nonfinite, maxima, reference, state, poisoned, of_queries)
        return cls(*arrays, segments), rest


def tile_scratch(shape: Shape, refs: Refs) -> list[Any]:
    """Returns the memory of a ``Tile``."""
    n, m, length = shape.num_heads, shape.num_features, shape.key_tile
    features, row = (pltpu.VMEM((n, size, length), jnp.float32) for size in (m, 1))
    values = pltpu.VMEM((n, shape.columns, length), shape.dtype)
    state = pltpu.VMEM((n, m, shape.columns), jnp.float32)
    arrays = [features, values, row, features, features, state, row]
    return [*arrays, features] if shape.is_moved and refs.segments is not None else arrays


def begin(tile: Tile, step: jax.Array) -> None:
    """Resets the state, in the first step of a program."""

    @pl.when(step == 0)
    def _() -> None:
        tile.maxima[...] = jnp.full_like(tile.maxima, 2 * HIDDEN)
        tile.state[...] = jnp.zeros_like(tile.state)
        tile.poisoned[...] = jnp.zeros_like(tile.poisoned)


def load(shape: Shape, refs: Refs, tile: Tile, number: jax.Array, squared: Any = None) -> jax.Array:
    """Takes the keys of a tile.

    Args:
      shape: Sizes.
      refs: Operands.
      tile: The tile, which receives them.
      number: Number of the tile.
      squared: Array that receives the vectors whose squared norms are in the exponents; or None.

    Returns:
      True if a key of any head needs ``in_units_of_halves``, or is not finite.
    """
    rare: list[jax.Array] = []

    def head(head_number: int) -> Links:
        keys = take_keys(shape, refs, head_number, number * shape.key_tile, is_causal=True)
        yield
        tile.logits[head_number] = keys.logits
        tile.values[head_number] = keys.values
        tile.nonfinite[head_number] = keys.nonfinite
        if squared is not None:
            vectors = keys.tokens if keys.stretched is None else keys.stretched
            squared[head_number] = vectors.astype(jnp.float32)
        reference = _set_references(shape, refs, tile, head_number, keys)
        above = keys.logits - reference
        largest = jnp.max(above, axis=0, keepdims=True)
        rare.append((largest > limits(keys.values)) | (keys.nonfinite > 0))

    interleave(map(head, range(shape.num_heads)), shape.heads_at_once)
    anywhere = functools.reduce(jnp.logical_or, rare)
    return jnp.max(jnp.where(anywhere, 1.0, 0.0)) > 0


def _set_references(shape: Shape, refs: Refs, tile: Tile, head: int, keys: Keys) -> jax.Array:
    """Sets the units of a tile and returns those of its keys; see ``Tile``."""
    maxima = tile.maxima[head]
    if tile.segments is not None:
        of_keys, of_queries = pairs_of(shape)
        reference, tile.of_queries[head] = references(
            shape, tile.segments, maxima, keys.logits, keys.visible, of_keys < of_queries
        )
        tile.reference[head] = reference
        return reference
    if refs.log_weights is None and not shape.is_reversed:
        first = keys.logits[:, :1]
    else:
        place = places(shape, (1, shape.key_tile), 1)
        own = jnp.where(keys.visible, place, shape.key_tile)
        is_first = keys.visible & (own == jnp.min(own, axis=1, keepdims=True))
        first = jnp.max(jnp.where(is_first, keys.logits, HIDDEN), axis=1, keepdims=True)
    reference = jnp.where(maxima > HIDDEN, maxima, first)
    tile.reference[head] = reference
    return reference


def sum_keys(shape: Shape, tile: Tile, head: Any, weights: Weights) -> jax.Array:
    """Returns the sums over the keys of the tile, ``[m, D + TILE]``, in units of the reference."""
    values = tile.values[head]
    if tile.segments is not None:
        values = keep(values, tile.segments.in_last)
    return shape.dot(weights.of_keys, values, 1, 1)


def pass_on(
    shape: Shape, tile: Tile, head: Any, state: jax.Array, more: jax.Array, *, is_rare: bool
) -> None:
    """Stores the sums over the keys up to the end of the tile for the next tile.

    Args:
      shape: Sizes.
      tile: The tile.
      head: Number of the key head.
      state: Sums over earlier tiles, in units of the reference.
      more: Sums over the keys of the tile, in the same units.
      is_rare: True if a key of any head needs ``in_units_of_halves``, or is not finite.
    """
    logits, reference, nonfinite = tile.logits[head], tile.reference[head], tile.nonfinite[head]
    maxima, poisoned = next_maxima(shape, tile, head), tile.poisoned[head]
    fade = columns(shape, jnp.exp2(_last_reference(shape, tile, head) - maxima))
    if tile.segments is not None:
        state = jnp.where(tile.segments.continues, state, 0)
        poisoned = jnp.where(tile.segments.continues, poisoned, 0)
        nonfinite = jnp.where(tile.segments.in_last, nonfinite, 0)
    total = (state + more) * fade
    if is_rare:
        # Only where a key was clamped, so that the bits of other heads do not change.
        phi = in_last_segment(tile, jnp.exp2(logits - maxima), 0).astype(shape.dtype)
        again = state * fade + shape.dot(phi, tile.values[head], 1, 1)
        above = jnp.max(logits - reference, axis=0, keepdims=True) - limits(tile.values[head])
        above = in_last_segment(tile, above, 0)
        total = jnp.where(jnp.max(above, keepdims=True) > 0, again, total)
        is_poisoned = jnp.max(nonfinite, axis=1, keepdims=True) > 0
        poisoned += jnp.where(is_poisoned, jnp.nan, 0)
    if is_rare or tile.segments is not None:
        tile.poisoned[head] = poisoned
    tile.state[head] = total
    tile.maxima[head] = maxima


def poison_of(shape: Shape, tile: Tile, head: Any, *, is_rare: bool) -> jax.Array:
    """Returns ``[1, tile]``, NaN at queries that see a key that is not finite, and 0 elsewhere."""
    segments, poisoned = tile.segments, tile.poisoned[head]
    if segments is not None:
        poisoned = jnp.where(segments.read_state, poisoned, 0)
    if not is_rare:
        return poisoned
    return poisoned + jnp.where(at_or_before(shape, tile.nonfinite[head], segments), jnp.nan, 0)


def next_maxima(shape: Shape, tile: Tile, head: Any) -> jax.Array:
    """Returns the largest exponents up to the end of the tile, ``[m, tile]``."""
    logits = in_last_segment(tile, tile.logits[head], HIDDEN)
    return jnp.maximum(_last_reference(shape, tile, head), jnp.max(logits, axis=1, keepdims=True))


def in_last_segment(tile: Tile, x: jax.Array, fill: float) -> jax.Array:
    """Returns ``x`` at keys in the segment of the last key, and ``fill`` elsewhere."""
    return x if tile.segments is None else jnp.where(tile.segments.in_last, x, fill)


def _last_reference(shape: Shape, tile: Tile, head: Any) -> jax.Array:
    """Returns the units of the last key, ``[m, tile]``, equal along the last axis."""
    reference = tile.reference[head]
    if tile.segments is None:
        return reference
    last = reference[:, :1] if shape.is_reversed else reference[:, -1:]
    return jnp.broadcast_to(last, reference.shape)


def columns(shape: Shape, x: jax.Array) -> jax.Array:
    """Returns ``[m, D + TILE]`` from ``[m, tile]``, both constant along the last axis."""
    missing = shape.columns - x.shape[1]
    if missing <= 0:
        return x[:, : shape.columns]
    return jnp.concatenate([x] * -(-shape.columns // x.shape[1]), axis=1)[:, : shape.columns]
