"""The Pallas kernels of the gradient of causal attention, which recompute the features.

The gradient of a query needs the keys before it, so the first kernel goes over the tiles in order.
That of a key needs the queries after it, so the second goes in the reverse order, and carries the
gradient of the state. It reads what the first has left: the gradients of the numerators and the
denominators, and the largest exponents before each tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.backward import (
    Gradients,
    gradient_of_sums,
    of_tokens,
)
from simrf_jax._src.attention.pallas_tpu.blocks import Grid, call, cost, result
from simrf_jax._src.attention.pallas_tpu.causal import (
    QueryHead,
    finite_queries,
    in_either_way,
    name_of,
    read,
    weights_of,
)
from simrf_jax._src.attention.pallas_tpu.heads import (
    HIDDEN,
    TILE,
    Links,
    Refs,
    Shape,
    of_head,
    query_products,
)
from simrf_jax._src.attention.pallas_tpu.sums import Sums
from simrf_jax._src.attention.pallas_tpu.tiles import (
    Tile,
    begin,
    columns,
    in_last_segment,
    load,
    next_maxima,
    pass_on,
    poison_of,
    sum_keys,
    tile_scratch,
)


class Passed(NamedTuple):
    """Arrays that the kernel of the queries leaves to that of the keys.

    Attributes:
      of_sums: Gradients of numerators and denominators, ``[B, N, D + TILE, T]``; zeros at queries
        that are not finite, or see a key that is not.
      maxima: Largest exponents before each tile, ``[B, K, m, tiles]``: column t before tile t.
    """

    of_sums: Any
    maxima: Any


def backward(shape: Shape, operands: Refs, of_outputs: jax.Array | Sums) -> Gradients:
    """Returns the gradients of queries, keys and values.

    Args:
      shape: Sizes of the kernel.
      operands: Arrays of the forward pass.
      of_outputs: Gradient of the outputs, ``[B, N, D, T]``, or of the ``Sums``, where of the rows
        only the denominators have a gradient.
    """
    of_query, passed = _queries(shape, operands, of_outputs)
    name = name_of(shape, gives_sums=isinstance(of_outputs, Sums))
    return Gradients(of_query, *_keys(shape, operands, passed, name))


def _queries(
    shape: Shape, operands: Refs, of_outputs: jax.Array | Sums
) -> tuple[jax.Array, Passed]:
    """Returns the gradient of the queries, and the arrays that the gradient of the keys needs."""
    grid = Grid.in_order(shape, operands, is_reversed=shape.is_reversed)
    batch, num_heads, _, length = operands.query.shape
    both = (operands, of_outputs)
    specs = (
        grid.operands(),
        jax.tree.map(lambda x: grid.of_queries(x.shape[2]), of_outputs),
    )
    of_query = result(operands.query.shape, shape.dtype, both)
    of_sums = result((batch, num_heads, shape.columns, length), shape.dtype, of_query)
    num_key_heads, tiles = operands.key.shape[1], shape.key_tiles
    maxima = result((batch, num_key_heads, shape.num_features, tiles), jnp.float32, of_query)
    of_query, *passed = call(
        functools.partial(_query_kernel, shape, jax.tree.structure(both), grid.key_tile),
        shape,
        both,
        specs,
        (of_query, of_sums, maxima),
        (
            grid.of_queries(shape.dim),
            grid.of_queries(shape.columns),
            grid.of_maxima(),
        ),
        grid=grid.sizes,
        scratch_shapes=tile_scratch(shape, operands),
        name=f"{name_of(shape, gives_sums=isinstance(of_outputs, Sums))}_query_gradient",
        **cost(shape, operands, passes=2),
    )
    return of_query, Passed(*passed)


def _query_kernel(shape: Shape, tree: Any, tile_of: Any, *refs: Any) -> None:
    operands, of_outputs = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    of_query, *passed = refs[tree.num_leaves : tree.num_leaves + 3]
    step = pl.program_id(2)
    tile, _ = Tile.of(shape, operands, list(refs[tree.num_leaves + 3 :]))
    begin(tile, step)
    number = tile_of(step)
    is_rare = load(shape, operands, tile, number)
    _write_maxima(shape, tile, Passed(*passed).maxima, number)
    attend = functools.partial(
        _of_queries,
        shape,
        operands,
        of_outputs,
        tile,
        of_query,
        Passed(*passed).of_sums,
        number * shape.query_tile,
    )
    in_either_way(shape, is_rare, attend)


def _write_maxima(shape: Shape, tile: Tile, out: Any, number: jax.Array) -> None:
    """Writes the largest exponents before the tile into its own column of a block."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, out.shape[2:], 1)
    own = lanes == jax.lax.rem(number, out.shape[3])
    for head in range(shape.num_heads):
        out[0, head] = jnp.where(own, tile.maxima[head], out[0, head])


def _of_queries(
    shape: Shape,
    refs: Refs,
    of_outputs: Any,
    tile: Tile,
    of_query: Any,
    of_sums_out: Any,
    first: jax.Array,
    head: QueryHead,
    *,
    is_rare: bool,
) -> Links:
    """Writes the gradient of the queries of a head, and adds its keys to the state."""
    number, of_key = head.number, head.of_key
    hides = isinstance(of_outputs, Sums)
    found = yield from read(shape, refs, tile, head, is_rare=is_rare, hides=hides)
    more = sum_keys(shape, tile, of_key, found.weights) if head.is_last else None
    yield
    if isinstance(of_outputs, Sums):
        of_sums, fine = _given(shape, of_outputs, number, first)
    else:
        sums = found.sums + poison_of(shape, tile, of_key, is_rare=is_rare)
        of_sums, fine = gradient_of_sums(shape, sums, of_outputs[0, number], first)
    of_sums, fine = jnp.where(found.finite, of_sums, 0), fine & found.finite
    of_sums_out[0, number] = of_sums
    of_pairs = shape.dot(tile.values[of_key], of_sums, 0, 0)
    of_psi = shape.dot(found.state.astype(shape.dtype), _of_state(tile, of_sums), 1, 0)
    if more is not None:
        pass_on(shape, tile, of_key, found.state, more, is_rare=is_rare)
    yield
    of_logits = found.weights.of_queries(shape, of_psi, of_pairs)
    of_products = shape.of_products(jnp.where(fine, of_logits, 0))
    yield
    gradient = shape.project_back(of_head(refs.query_rows, of_key), of_products)
    of_query[0, number] = gradient.astype(of_query.dtype)


def _of_state(tile: Tile, of_sums: jax.Array) -> jax.Array:
    """Returns the gradient of the sums that queries read from the state, ``[D + TILE, tile]``."""
    if tile.segments is None:
        return of_sums
    return jnp.where(tile.segments.read_state, of_sums, 0)


def _given(
    shape: Shape, of_outputs: Sums, number: Any, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the sums, as ``gradient_of_sums`` does, and which are queries."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, shape.query_tile), 1)
    is_query = first + lanes < shape.num_queries
    is_first = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == 0
    below = jnp.where(is_first & is_query, of_outputs.rows[0, number][:1], 0)
    of_numerators = jnp.where(is_query, of_outputs.numerators[0, number], 0)
    of_sums = jnp.concatenate([of_numerators, below.astype(shape.dtype)], axis=0)
    return of_sums, is_query


class Later(NamedTuple):
    """The gradient of the state, summed over the queries of later tiles.

    Attributes:
      sums: ``[key heads, m, D + TILE]``.
      units: The exponents of its units, ``[key heads, m, tile]``: the maxima before the next tile.
      squared: The vectors whose squared norms are in the keys' exponents, ``[key heads, H, tile]``.
    """

    sums: Any
    units: Any
    squared: Any


def _keys(shape: Shape, operands: Refs, passed: Passed, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of keys and values."""
    grid = Grid.in_order(shape, operands, is_reversed=not shape.is_reversed)
    both = (operands, passed)
    specs = (
        grid.operands(),
        Passed(grid.of_queries(shape.columns), grid.of_maxima()),
    )
    n, m, length = shape.num_heads, shape.num_features, shape.key_tile
    later = Later(
        sums=pltpu.VMEM((n, m, shape.columns), jnp.float32),
        units=pltpu.VMEM((n, m, length), jnp.float32),
        squared=pltpu.VMEM((n, shape.dim, length), jnp.float32),
    )
    of_key, of_value = call(
        functools.partial(_key_kernel, shape, jax.tree.structure(both), grid.key_tile),
        shape,
        both,
        specs,
        tuple(result(x.shape, x.dtype, both) for x in (operands.key, operands.value)),
        (grid.of_keys(shape.dim), grid.of_keys(shape.value_dim)),
        grid=grid.sizes,
        scratch_shapes=(*tile_scratch(shape, operands), *later),
        name=f"{name}_key_gradient",
        **cost(shape, operands, passes=2),
    )
    return of_key, of_value


def _key_kernel(shape: Shape, tree: Any, tile_of: Any, *refs: Any) -> None:
    operands, passed = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    out = Gradients(None, *refs[tree.num_leaves : tree.num_leaves + 2])
    tile, scratch = Tile.of(shape, operands, list(refs[tree.num_leaves + 2 :]))
    later, step = Later(*scratch), pl.program_id(2)
    number = tile_of(step)

    @pl.when(step == 0)
    def _() -> None:
        later.sums[...] = jnp.zeros_like(later.sums)
        later.units[...] = jnp.full_like(later.units, -HIDDEN)

    _read_maxima(shape, tile, passed.maxima, number)
    is_rare = load(shape, operands, tile, number, squared=later.squared)
    attend = functools.partial(_of_keys, shape, operands, passed.of_sums, tile, later, out, number)
    in_either_way(shape, is_rare, attend)


def _read_maxima(shape: Shape, tile: Tile, maxima: Any, number: jax.Array) -> None:
    """Reads the largest exponents before the tile, as ``_write_maxima`` left them."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, maxima.shape[2:], 1)
    own = lanes == jax.lax.rem(number, maxima.shape[3])
    for head in range(shape.num_heads):
        column = jnp.max(jnp.where(own, maxima[0, head], -jnp.inf), axis=1, keepdims=True)
        tile.maxima[head] = jnp.broadcast_to(column, tile.maxima.shape[1:])


class KeySums(NamedTuple):
    """Sums over query heads of one key head.

    Attributes:
      of_values: Gradient of the values, ``[D + TILE, tile]``.
      of_state: Gradient of the state before the tile, ``[m, D + TILE]``.
      of_logits: Gradient of the exponents of the keys, ``[m, tile]``.
    """

    of_values: jax.Array
    of_state: jax.Array
    of_logits: jax.Array


def _of_keys(
    shape: Shape,
    refs: Refs,
    of_sums: Any,
    tile: Tile,
    later: Later,
    out: Gradients,
    tile_number: jax.Array,
    head: QueryHead,
    *,
    is_rare: bool,
) -> Links:
    """Writes the gradients of a head's keys and values, and updates that of the state."""
    number, of_key = head.number, head.of_key
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, shape.query_tile), 1)
    is_query = tile_number * shape.query_tile + lanes < shape.num_queries
    sums = jnp.where(is_query, of_sums[0, number], 0)
    products = query_products(shape, refs, of_key, number, is_query & finite_queries(refs, number))
    yield
    weights = weights_of(shape, refs, tile, of_key, products, is_rare=is_rare)
    yield
    pairs = weights.pairs(shape)
    of_pairs = shape.dot(tile.values[of_key], sums, 0, 0)
    yield
    found = KeySums(
        of_values=shape.dot(sums, pairs, 1, 1),
        of_state=shape.dot(weights.of_state, _of_state(tile, sums), 1, 1),
        of_logits=weights.of_logits(shape, of_pairs),
    )
    if head.group > 0:
        found = KeySums(*map(jnp.add, head.passed.pop(), found))
    if not head.is_last:
        head.passed.append(found)
        return
    yield
    before, maxima, units = tile.maxima[of_key], next_maxima(shape, tile, of_key), later.units
    of_later = later.sums[of_key] * columns(shape, jnp.exp2(maxima - units[of_key]))
    of_later = of_later.astype(shape.dtype)
    phi = in_last_segment(tile, jnp.exp2(tile.logits[of_key] - maxima), 0).astype(shape.dtype)
    of_values = found.of_values + shape.dot(of_later, phi, 0, 0)
    of_phi = shape.dot(of_later, tile.values[of_key], 1, 0)
    fade = columns(shape, jnp.exp2(before - units[of_key]))
    if tile.segments is not None:
        fade = jnp.where(tile.segments.continues, fade, 0)
    later.sums[of_key] = later.sums[of_key] * fade + found.of_state
    # Where there is no state, its contribution is zero in any units.
    units[of_key] = jnp.where(before > HIDDEN, before, 0)
    yield
    out.value[0, of_key] = of_values[: shape.value_dim].astype(out.value.dtype)
    of_tile = of_tokens(
        shape,
        refs,
        later.squared[of_key],
        found.of_logits + phi * of_phi,
        of_key,
    )
    out.key[0, of_key] = of_tile.astype(out.key.dtype)
