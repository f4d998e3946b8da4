"""The keys of a tile, and the state that passes from tile to tile, in the causal kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax.attention.pallas_tpu.heads import (
    HIDDEN,
    Keys,
    Links,
    Refs,
    Shape,
    interleave,
    take_keys,
)
from simrf_jax.attention.pallas_tpu.weights import Weights, at_or_before, limits, places


class Tile(NamedTuple):
    """The keys of a tile, and what is kept from tile to tile.

    Attributes:
      logits: Exponents of the keys' features, ``[key heads, m, tile]``.
      values: Values with the row of ones, ``[key heads, D + TILE, tile]``.
      spoils: ``[key heads, 1, tile]``, 1 at keys that are not finite, and 0 elsewhere.
      maxima: The largest exponents of earlier tiles, ``[key heads, m, tile]``, equal along the last
        axis, so that nothing has to be spread over the lanes again.
      reference: Units of the tile, likewise: the maxima or, if no earlier key is visible, the
        exponents of the first visible key.
      state: Sums over earlier tiles, ``[key heads, m, D + TILE]``, in units of the maxima.
      spoiled: ``[key heads, 1, tile]``, NaN if a key of an earlier tile is not finite, or else 0.
    """

    logits: Any
    values: Any
    spoils: Any
    maxima: Any
    reference: Any
    state: Any
    spoiled: Any


def tile_scratch(shape: Shape) -> Tile:
    """Returns the memory of a ``Tile``."""
    n, m, length = shape.num_heads, shape.num_features, shape.key_tile
    return Tile(
        logits=pltpu.VMEM((n, m, length), jnp.float32),
        values=pltpu.VMEM((n, shape.columns, length), shape.dtype),
        spoils=pltpu.VMEM((n, 1, length), jnp.float32),
        maxima=pltpu.VMEM((n, m, length), jnp.float32),
        reference=pltpu.VMEM((n, m, length), jnp.float32),
        state=pltpu.VMEM((n, m, shape.columns), jnp.float32),
        spoiled=pltpu.VMEM((n, 1, length), jnp.float32),
    )


def begin(tile: Tile, step: jax.Array) -> None:
    """Resets the state, in the first step of a program."""

    @pl.when(step == 0)
    def _() -> None:
        tile.maxima[...] = jnp.full_like(tile.maxima, 2 * HIDDEN)
        tile.state[...] = jnp.zeros_like(tile.state)
        tile.spoiled[...] = jnp.zeros_like(tile.spoiled)


def load(shape: Shape, refs: Refs, tile: Tile, number: jax.Array, squared: Any = None) -> jax.Array:
    """Takes the keys of a tile.

    Args:
      shape: Sizes.
      refs: Operands.
      tile: The tile, which receives them.
      number: Number of the tile.
      squared: Receives the vectors whose squared norms are in the exponents; or None.

    Returns:
      True if a key of any head asks for ``in_units_of_halves``, or is not finite.
    """
    rare: list[jax.Array] = []

    def head(head_number: int) -> Links:
        keys = take_keys(shape, refs, head_number, number * shape.key_tile, is_causal=True)
        yield
        tile.logits[head_number] = keys.logits
        tile.values[head_number] = keys.values
        tile.spoils[head_number] = keys.spoils
        if squared is not None:
            vectors = keys.tokens if keys.stretched is None else keys.stretched
            squared[head_number] = vectors.astype(jnp.float32)
        reference = _reference(shape, refs, tile.maxima[head_number], keys)
        tile.reference[head_number] = reference
        above = keys.logits - reference
        largest = jnp.max(above, axis=0, keepdims=True)
        rare.append((largest > limits(keys.values)) | (keys.spoils > 0))

    interleave(map(head, range(shape.num_heads)), shape.heads_at_once)
    anywhere = functools.reduce(jnp.logical_or, rare)
    return jnp.max(jnp.where(anywhere, 1.0, 0.0)) > 0


def _reference(shape: Shape, refs: Refs, maxima: jax.Array, keys: Keys) -> jax.Array:
    """Returns the units of a tile; see ``Tile``."""
    if refs.log_weights is None and not shape.is_reversed:
        first = keys.logits[:, :1]
    else:
        place = places(shape, (1, shape.key_tile), 1)
        own = jnp.where(keys.visible, place, shape.key_tile)
        is_first = keys.visible & (own == jnp.min(own, axis=1, keepdims=True))
        first = jnp.max(jnp.where(is_first, keys.logits, HIDDEN), axis=1, keepdims=True)
    return jnp.where(maxima > HIDDEN, maxima, first)


def sum_keys(shape: Shape, tile: Tile, head: Any, weights: Weights) -> jax.Array:
    """Returns the sums over the keys of the tile, ``[m, D + TILE]``, in units of the reference."""
    return shape.dot(weights.of_keys, tile.values[head], 1, 1)


def pass_on(
    shape: Shape, tile: Tile, head: Any, state: jax.Array, more: jax.Array, *, is_rare: bool
) -> None:
    """Leaves the sums over the keys up to the end of the tile to the next tile.

    Args:
      shape: Sizes.
      tile: The tile.
      head: Number of the key head.
      state: Sums over earlier tiles, in units of the reference.
      more: Sums over the keys of the tile, likewise.
      is_rare: True if a key of any head asks for ``in_units_of_halves``, or is not finite.
    """
    logits, reference, maxima = tile.logits[head], tile.reference[head], next_maxima(tile, head)
    fade = columns(shape, jnp.exp2(reference - maxima))
    total = (state + more) * fade
    if is_rare:
        # Only where a key was clamped, so that it does not change the bits of other heads.
        phi = jnp.exp2(logits - maxima).astype(shape.dtype)
        again = state * fade + shape.dot(phi, tile.values[head], 1, 1)
        above = jnp.max(logits - reference, axis=0, keepdims=True) - limits(tile.values[head])
        total = jnp.where(jnp.max(above, keepdims=True) > 0, again, total)
        spoils = jnp.max(tile.spoils[head], axis=1, keepdims=True) > 0
        tile.spoiled[head] = tile.spoiled[head] + jnp.where(spoils, jnp.nan, 0)
    tile.state[head] = total
    tile.maxima[head] = maxima


def spoiled_of(shape: Shape, tile: Tile, head: Any, *, is_rare: bool) -> jax.Array:
    """Returns ``[1, tile]``, NaN at queries that see a key that is not finite, and 0 elsewhere."""
    if not is_rare:
        return tile.spoiled[head]
    return tile.spoiled[head] + jnp.where(at_or_before(shape, tile.spoils[head]), jnp.nan, 0)


def next_maxima(tile: Tile, head: Any) -> jax.Array:
    """Returns the largest exponents up to the end of the tile, ``[m, tile]``."""
    largest = jnp.max(tile.logits[head], axis=1, keepdims=True)
    return jnp.maximum(tile.reference[head], largest)


def columns(shape: Shape, x: jax.Array) -> jax.Array:
    """Returns ``[m, D + TILE]`` of ``[m, tile]`` that is equal along the last axis."""
    missing = shape.columns - x.shape[1]
    if missing <= 0:
        return x[:, : shape.columns]
    return jnp.concatenate([x] * -(-shape.columns // x.shape[1]), axis=1)[:, : shape.columns]
