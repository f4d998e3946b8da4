"""Segments of packed sequences in the causal kernels.

A query sees only keys of its own segment. Segments follow each other, so the state holds keys of
only one segment: that of the last key of the previous tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.pallas_tpu.heads import HIDDEN, TILE, Shape

# Rows of the array of segments, padded to one tile of float32.
SEGMENT_ROWS = 8


class Segments(NamedTuple):
    """The segments of the tokens of a tile.

    Attributes:
      of_queries: ``[1, tile]``.
      of_keys: ``[1, tile]``; they differ from those of the queries if keys were moved.
      before: ``[1, tile]``, the segment of the last key before the tile, repeated; -1 in the first
        tile.
      last: ``[1, tile]``, the segment of the last key of the tile, repeated.
      same: ``[tile, tile]``, True where a key, on the first axis, shares the segment of a query.
      same_keys: The same, with keys on both axes.
    """

    of_queries: jax.Array
    of_keys: jax.Array
    before: jax.Array
    last: jax.Array
    same: jax.Array
    same_keys: jax.Array

    @classmethod
    def take(cls, shape: Shape, rows: Any) -> Segments:
        """Returns the segments of a tile from the block ``[1, 1, SEGMENT_ROWS, tile]``."""
        of_queries, of_keys, before, last = (rows[0, 0][row : row + 1] for row in range(4))
        column = as_column(of_keys, of_keys.shape[1])
        same = same_keys = column == of_keys
        if shape.is_moved:
            same = column == of_queries
        return cls(of_queries, of_keys, before, last, same, same_keys)

    @property
    def read_state(self) -> jax.Array:
        """``[1, tile]``, True at queries in the segment of the state."""
        return self.of_queries == self.before

    @property
    def continues(self) -> jax.Array:
        """``[1, 1]``, True if the last key is in the segment of the state."""
        return (self.before == self.last)[:, :1]

    @property
    def in_last(self) -> jax.Array:
        """``[1, tile]``, True at keys in the segment of the last key."""
        return self.of_keys == self.last


def as_column(row: jax.Array, width: int) -> jax.Array:
    """Returns ``[length, width]``, equal along the last axis, of ``[1, length]``."""
    return jnp.broadcast_to(row, (width, row.shape[1])).T


def references(
    shape: Shape,
    segments: Segments,
    maxima: jax.Array,
    logits: jax.Array,
    visible: jax.Array,
    earlier: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the units of the keys and of the queries of a tile, ``[m, tile]``.

    They are the maxima of the state, if it holds keys of the segment, or else the exponents of the
    first visible key of the segment in the tile.

    Args:
      shape: Sizes.
      segments: The segments.
      maxima: Largest exponents in the state, ``[m, tile]``.
      logits: Exponents of the keys' features, ``[m, tile]``.
      visible: ``[1, tile]``, True at visible keys.
      earlier: ``[tile, tile]``, True where the first of two keys comes before the second.
    """
    before = jnp.where(segments.same_keys & earlier, 1.0, 0.0)
    is_first = visible & ~_any(shape, visible, before)
    firsts = _split(shape, jnp.where(is_first, logits, 0))

    def of(same: jax.Array, own: jax.Array) -> jax.Array:
        chosen = jnp.where(same, 1.0, 0.0)
        # Only one term is not zero, so the sums are exact.
        parts = _dot(shape, firsts, chosen)
        first = sum(jnp.split(parts, parts.shape[0] // logits.shape[0], axis=0))
        first = jnp.where(_any(shape, is_first, chosen), first, HIDDEN)
        carried = (own == segments.before) & (maxima[:1] > HIDDEN)
        return jnp.where(carried, maxima, first)

    of_keys = of(segments.same_keys, segments.of_keys)
    return of_keys, of(segments.same, segments.of_queries) if shape.is_moved else of_keys


def _any(shape: Shape, flags: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns ``[1, tile]``, True where a flag ``[1, tile]`` meets a one of a column."""
    rows = jnp.broadcast_to(jnp.where(flags, 1.0, 0.0), (TILE, flags.shape[1]))
    return _dot(shape, rows.astype(_narrow(shape)), matrix)[:1] > 0


def _narrow(shape: Shape) -> Any:
    return jnp.float32 if shape.interpret else jnp.bfloat16


def _split(shape: Shape, x: jax.Array) -> jax.Array:
    """Returns three stacked bfloat16 numbers that add up to each number."""
    if shape.interpret:  # XLA's CPU backend has no bfloat16 x bfloat16 = float32.
        return x
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return jnp.concatenate(parts, axis=0)


def _dot(shape: Shape, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies matrices of ``_narrow`` numbers, with sums in float32."""
    return jax.lax.dot_general(
        a,
        b.astype(_narrow(shape)),
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if shape.interpret else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
