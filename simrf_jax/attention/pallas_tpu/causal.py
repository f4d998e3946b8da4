"""The kernel of causal attention: tiles of tokens in order, each after the state of those before.

A query reads the state of earlier tiles by features, and the keys of its own tile up to its own
one by one. ``weights`` says how. Keys and values that are not finite are taken out of all sums, and
the queries that see them get NaN in the end.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax.attention.pallas_tpu.blocks import Grid, compiler_params, result
from simrf_jax.attention.pallas_tpu.heads import (
    HIDDEN,
    Links,
    Refs,
    Shape,
    divide,
    interleave,
    query_logits,
    take_keys,
    with_offsets,
)
from simrf_jax.attention.pallas_tpu.weights import (
    LARGEST,
    Weights,
    at_or_before,
    in_common_units,
    in_units_of_halves,
)


class Tile(NamedTuple):
    """The keys of a tile, and what is kept from tile to tile.

    Attributes:
      logits: Exponents of the keys' features, ``[key heads, m, tile]``.
      values: Values with the row of ones, ``[key heads, D + TILE, tile]``.
      spoils: ``[key heads, 1, tile]``, 1 at keys that are not finite, and 0 elsewhere.
      maxima: The largest exponents of earlier tiles, ``[key heads, m, tile]``, equal along the last
        axis, so that nothing has to be spread over the lanes again.
      state: Sums over earlier tiles, ``[key heads, m, D + TILE]``, in units of the maxima.
      spoiled: ``[key heads, 1, tile]``, NaN if a key of an earlier tile is not finite, or else 0.
    """

    logits: Any
    values: Any
    spoils: Any
    maxima: Any
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
        state=pltpu.VMEM((n, m, shape.columns), jnp.float32),
        spoiled=pltpu.VMEM((n, 1, length), jnp.float32),
    )


def forward(shape: Shape, operands: Refs) -> jax.Array:
    """Returns the outputs ``[B, N, D, T]``.

    Args:
      shape: Sizes of the kernel.
      operands: Arrays, as ``Refs`` describes their blocks, with as many keys as queries.
    """
    batch, num_heads, *_ = operands.query.shape
    grid = Grid.in_order(shape, operands)
    arrays, tree = jax.tree.flatten(operands)
    return pl.pallas_call(
        functools.partial(_kernel, shape, tree),
        grid=grid.sizes,
        in_specs=jax.tree.leaves(grid.operands()),
        out_specs=grid.of_queries(shape.value_dim),
        out_shape=result(
            (batch, num_heads, shape.value_dim, shape.num_queries), shape.dtype, operands
        ),
        scratch_shapes=tile_scratch(shape),
        compiler_params=compiler_params(),
        interpret=shape.interpret,
        name="causal_random_feature_attention",
    )(*arrays)


def _kernel(shape: Shape, tree: Any, *refs: Any) -> None:
    operands, out = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves]
    tile, step = Tile(*refs[tree.num_leaves + 1 :]), pl.program_id(2)
    begin(tile, step)
    is_rare = load(shape, operands, tile, step)

    def attend(*, is_rare: bool) -> None:
        interleave(_attend(shape, operands, tile, out, is_rare=is_rare), shape.heads_at_once)

    pl.when(jnp.logical_not(is_rare))(functools.partial(attend, is_rare=False))
    pl.when(is_rare)(functools.partial(attend, is_rare=True))


def begin(tile: Tile, step: jax.Array) -> None:
    """Empties the state, in the first step of a program."""

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
      tile: Where they go.
      number: Number of the tile.
      squared: Where the vectors go whose squared norms are in the exponents, or None.

    Returns:
      Whether a key of any head asks for ``in_units_of_halves``, or is not finite.
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
        above = keys.logits - reference_of(tile, head_number)
        largest = jnp.max(above, axis=0, keepdims=True)
        rare.append((largest > LARGEST) | (keys.spoils > 0))

    interleave(map(head, range(shape.num_heads)), shape.heads_at_once)
    anywhere = functools.reduce(jnp.logical_or, rare)
    return jnp.max(jnp.where(anywhere, 1.0, 0.0)) > 0


def reference_of(tile: Tile, head: int) -> jax.Array:
    """Returns the units of a tile, ``[m, tile]``, equal along the last axis.

    They are the largest exponents of earlier tiles and of the tile's first key, which all queries
    of the tile see.
    """
    maxima, first = tile.maxima[head], tile.logits[head, :, :1]
    return jnp.maximum(maxima, jnp.broadcast_to(first, maxima.shape))


class Readout(NamedTuple):
    """What a query head reads in a tile.

    Attributes:
      weights: The weights of its queries.
      pairs: Those of the keys of the tile, keys first, ``[tile, tile]``.
      state: Sums over earlier tiles, ``[m, D + TILE]``, in units of the tile's reference.
      sums: Numerators and denominators, ``[D + TILE, tile]``.
    """

    weights: Weights
    pairs: jax.Array
    state: jax.Array
    sums: jax.Array


def read(
    shape: Shape, refs: Refs, tile: Tile, number: int, *, is_rare: bool
) -> Generator[None, None, Readout]:
    """Reads the earlier tiles, and the keys of the tile up to each query, in four links."""
    of_key = number // shape.groups
    exponents = query_logits(shape, refs, number)
    yield
    reference = reference_of(tile, of_key)
    weights = weights_of(shape, refs, tile, number, exponents, is_rare=is_rare)
    yield
    pairs = weights.pairs(shape)
    yield
    state = tile.state[of_key] * columns(shape, jnp.exp2(tile.maxima[of_key] - reference))
    sums = shape.dot(state.astype(shape.dtype), weights.of_state, 0, 0)
    yield
    sums += shape.dot(tile.values[of_key], pairs, 1, 0)
    return Readout(weights, pairs, state, sums)


def weights_of(
    shape: Shape, refs: Refs, tile: Tile, number: int, exponents: jax.Array, *, is_rare: bool
) -> Weights:
    """Returns the weights of a query head, from the exponents of its features."""
    of_key = number // shape.groups
    find = in_units_of_halves if is_rare else in_common_units
    exponents = with_offsets(refs, of_key, exponents)
    return find(shape, exponents, tile.logits[of_key], reference_of(tile, of_key))


def sum_keys(shape: Shape, tile: Tile, head: int, weights: Weights, *, is_rare: bool) -> jax.Array:
    """Returns the sums over the keys of the tile, ``[m, D + TILE]``.

    They are in units of the reference or, if ``is_rare`` since they may overflow in these, in
    units of ``next_maxima``.
    """
    phi = weights.of_keys
    if is_rare:
        phi = jnp.exp2(tile.logits[head] - next_maxima(tile, head)).astype(shape.dtype)
    return shape.dot(phi, tile.values[head], 1, 1)


def pass_on(
    shape: Shape, tile: Tile, head: int, state: jax.Array, more: jax.Array, *, is_rare: bool
) -> None:
    """Leaves the sums over the keys up to the end of the tile to the next tile.

    Args:
      shape: Sizes.
      tile: The tile.
      head: Number of the key head.
      state: Sums over earlier tiles, in units of the reference.
      more: Sums over the keys of the tile, of ``sum_keys``.
      is_rare: True for the weights of ``in_units_of_halves``.
    """
    maxima = next_maxima(tile, head)
    fade = columns(shape, jnp.exp2(reference_of(tile, head) - maxima))
    tile.state[head] = state * fade + more if is_rare else (state + more) * fade
    tile.maxima[head] = maxima
    if is_rare:
        spoils = jnp.max(tile.spoils[head], axis=1, keepdims=True) > 0
        tile.spoiled[head] = tile.spoiled[head] + jnp.where(spoils, jnp.nan, 0)


def spoiled_of(shape: Shape, tile: Tile, head: int, *, is_rare: bool) -> jax.Array:
    """Returns ``[1, tile]``, NaN at queries that see a key that is not finite, and 0 elsewhere."""
    if not is_rare:
        return tile.spoiled[head]
    return tile.spoiled[head] + jnp.where(at_or_before(shape, tile.spoils[head]), jnp.nan, 0)


def _attend(shape: Shape, refs: Refs, tile: Tile, out: Any, *, is_rare: bool) -> Iterator[Links]:
    def head(number: int) -> Links:
        of_key, group = divmod(number, shape.groups)
        found = yield from read(shape, refs, tile, number, is_rare=is_rare)
        if group == shape.groups - 1:
            more = sum_keys(shape, tile, of_key, found.weights, is_rare=is_rare)
        yield
        outputs, _ = divide(shape, found.sums)
        outputs += spoiled_of(shape, tile, of_key, is_rare=is_rare)
        out[0, number] = outputs.astype(out.dtype)
        if group == shape.groups - 1:
            yield
            pass_on(shape, tile, of_key, found.state, more, is_rare=is_rare)

    return map(head, range(shape.num_heads * shape.groups))


def next_maxima(tile: Tile, head: int) -> jax.Array:
    """Returns the largest exponents up to the end of the tile, ``[m, tile]``."""
    largest = jnp.max(tile.logits[head], axis=1, keepdims=True)
    return jnp.maximum(reference_of(tile, head), largest)


def columns(shape: Shape, x: jax.Array) -> jax.Array:
    """Returns ``[m, D + TILE]`` of ``[m, tile]`` that is equal along the last axis."""
    missing = shape.columns - x.shape[1]
    if missing <= 0:
        return x[:, : shape.columns]
    return jnp.concatenate([x] * -(-shape.columns // x.shape[1]), axis=1)[:, : shape.columns]
