"""Segments of packed sequences in the causal kernels.

A query sees keys of its own segment only. Segments follow each other, so the state holds the keys
of one segment alone: that of the last key of the tiles before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax.attention.pallas_tpu.heads import HIDDEN, TILE, Shape

# Rows of the array of segments, padded to one tile of float32.
SEGMENT_ROWS = 8


class Segments(NamedTuple):
    """The segments of the tokens of a tile.

    Attributes:
      of_queries: ``[1, tile]``.
      of_keys: ``[1, tile]``; other ones than those of the queries if keys were moved.
      before: ``[1, tile]``, that of the last key before the tile, at each place; -1 in the first.
      last: ``[1, tile]``, that of the last key of the tile, at each place.
      same: ``[tile, tile]``, True where a key, on the first axis, is of the segment of a query.
      same_keys: The same of keys on both axes.
    """

    of_queries: jax.Array
    of_keys: jax.Array
    before: jax.Array
    last: jax.Array
    same: jax.Array
    same_keys: jax.Array

    @classmethod
    def take(cls, rows: Any) -> Segments:
        """Returns the segments of a tile from the block ``[1, 1, SEGMENT_ROWS, tile]``."""
        of_queries, of_keys, before, last = (rows[0, 0][row : row + 1] for row in range(4))
        column = as_column(of_keys, of_keys.shape[1])
        return cls(of_queries, of_keys, before, last, column == of_queries, column == of_keys)

    @property
    def read_state(self) -> jax.Array:
        """``[1, tile]``, True at queries of the segment of the state."""
        return self.of_queries == self.before

    @property
    def continues(self) -> jax.Array:
        """``[1, 1]``, True if the last key is of the segment of the state."""
        return (self.before == self.last)[:, :1]

    @property
    def in_last(self) -> jax.Array:
        """``[1, tile]``, True at keys of the segment of the last key."""
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
      maxima: Those of the state, ``[m, tile]``.
      logits: Exponents of the keys' features, ``[m, tile]``.
      visible: ``[1, tile]``, True at visible keys.
      earlier: ``[tile, tile]``, True where the first of two keys comes before the second.
    """
    before = jnp.where(segments.same_keys & earlier, 1.0, 0.0)
    is_first = visible & ~_any(shape, visible, before)
    firsts = jnp.where(is_first, logits, 0)

    def of(same: jax.Array, own: jax.Array) -> jax.Array:
        chosen = jnp.where(same, 1.0, 0.0)
        # One term is not zero, so the sum is exact.
        first = _exact(firsts, chosen)
        first = jnp.where(_any(shape, is_first, chosen), first, HIDDEN)
        carried = (own == segments.before) & (maxima[:1] > HIDDEN)
        return jnp.where(carried, maxima, first)

    return (
        of(segments.same_keys, segments.of_keys),
        of(segments.same, segments.of_queries),
    )


def _any(shape: Shape, flags: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns ``[1, tile]``, True where a flag ``[1, tile]`` meets a one of a column."""
    rows = jnp.broadcast_to(jnp.where(flags, 1.0, 0.0), (TILE, flags.shape[1]))
    return shape.dot(rows.astype(shape.dtype), matrix.astype(shape.dtype), 1, 0)[:1] > 0


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
