"""The Pallas kernel of the gradient of exact attention to the keys of a band.

The gradient of a tile of queries takes the window of keys of the forward pass. That of a tile of
keys takes the window of the queries whose bands may contain one of these keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from simrf_jax._src.attention.pallas_tpu.backward import Gradients
from simrf_jax._src.attention.pallas_tpu.blocks import call, result
from simrf_jax._src.attention.pallas_tpu.heads import HIDDEN, LN2, TILE, Links, interleave
from simrf_jax._src.attention.pallas_tpu.near import (
    Band,
    NearRefs,
    in_segment,
    logits_of,
    side_by_side,
    take_queries,
    take_window,
)
from simrf_jax._src.attention.pallas_tpu.sums import Sums


class Given(NamedTuple):
    """The arrays that the gradient takes in addition to the operands.

    Attributes:
      rows: The rows of the ``Sums`` that the forward pass returned.
      of_sums: The gradient of the sums; of the rows, only the denominators have a gradient.
    """

    rows: Any
    of_sums: Sums


def backward(band: Band, refs: NearRefs, given: Given) -> Gradients:
    """Returns the gradients of queries, keys and values.

    Args:
      band: The band.
      refs: The arrays of the forward pass.
      given: Rows and gradient of the sums.
    """
    shape, own, num_key_heads = band.shape, range(1), refs.key.shape[1]
    operands, specs = band.operands(refs, band.queries)
    spread = jax.tree.map(lambda x: [x] * len(band.queries), given)
    more = jax.tree.map(lambda x: band.blocks(x, num_key_heads, band.queries), given)
    both = (operands, spread)
    tokens = (refs.query, refs.key, refs.value)
    steps = max(shape.query_tiles, shape.key_tiles)
    return Gradients(
        *call(
            functools.partial(_kernel, band, jax.tree.structure(both)),
            shape,
            both,
            (specs, more),
            [result(x.shape, x.dtype, (refs, given)) for x in tokens],
            [spec for x in tokens for spec in band.blocks(x, num_key_heads, own)],
            grid=band.grid(num_key_heads, refs.query.shape[0], steps),
            name="sums_in_a_band_gradient",
            **band.cost(refs, products=5),
        )
    )


def _kernel(band: Band, tree: Any, *refs: Any) -> None:
    shape, step = band.shape, pl.program_id(2)
    operands, given = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    out = Gradients(*refs[tree.num_leaves :])

    # Past the last tile of queries or of keys, a step handles only the other.
    @pl.when(step < shape.query_tiles)
    def _() -> None:
        interleave(_of_queries(band, operands, given, step, out), shape.heads_at_once)

    @pl.when(step < shape.key_tiles)
    def _() -> None:
        interleave(_of_keys(band, operands, given, step, out), shape.heads_at_once)


def _take_given(
    band: Band, given: Given, number: Any, tiles: range, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the units of queries, and the gradients of their sums, ``[D + TILE, queries]``."""
    rows, of_rows, of_numerators = (
        side_by_side(x, number, tiles, band.queries)
        for x in (given.rows, given.of_sums.rows, given.of_sums.numerators)
    )
    is_first = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == 0
    below = jnp.where(is_first & finite, of_rows[:1], 0).astype(of_numerators.dtype)
    of_sums = jnp.concatenate([jnp.where(finite, of_numerators, 0), below], axis=0)
    return jnp.where(finite, rows[1:2], HIDDEN), of_sums


def _of_queries(
    band: Band, refs: NearRefs, given: Given, step: Any, out: Gradients
) -> Iterator[Links]:
    """Returns the steps of the heads for the gradients of a tile of queries."""
    shape, own, kept = band.shape, range(1), {}
    holds = in_segment(band, refs, band.keys, own, band.queries)

    def head(number: int) -> Links:
        of_key, group = divmod(number, shape.groups)
        if group == 0:
            kept[of_key] = take_window(band, refs, of_key, step, band.keys)
        keys = kept[of_key]
        query, finite = take_queries(band, refs, number, step, own, band.queries)
        units, of_sums = _take_given(band, given, number, own, finite)
        yield
        logits = logits_of(shape, refs, keys, query, holds & finite)
        of_weights = shape.dot(keys.values, of_sums, 0, 0)
        yield
        of_logits = (jnp.exp2(logits - units) * of_weights).astype(shape.dtype)
        yield
        of_query = shape.dot(keys.keys, of_logits, 1, 0) * (LN2 * refs.factor[0, 0])
        out.query[0, number] = of_query.astype(out.query.dtype)

    return map(head, range(shape.num_heads * shape.groups))


def _of_keys(
    band: Band, refs: NearRefs, given: Given, step: Any, out: Gradients
) -> Iterator[Links]:
    """Returns the steps of the heads for the gradients of a tile of keys and values."""
    shape, own, kept = band.shape, range(1), {}
    sums: dict[int, tuple[jax.Array, jax.Array]] = {}
    holds = in_segment(band, refs, own, band.queries, band.queries)

    def head(number: int) -> Links:
        of_key, group = divmod(number, shape.groups)
        if group == 0:
            kept[of_key] = take_window(band, refs, of_key, step, own)
        keys = kept[of_key]
        query, finite = take_queries(band, refs, number, step, band.queries, band.queries)
        units, of_sums = _take_given(band, given, number, band.queries, finite)
        yield
        logits = logits_of(shape, refs, keys, query, holds & finite)
        of_weights = shape.dot(keys.values, of_sums, 0, 0)
        yield
        weights = jnp.exp2(logits - units)
        of_logits = (weights * of_weights).astype(shape.dtype)
        yield
        of_key_tile = shape.dot(query, of_logits, 1, 1) * (LN2 * refs.factor[0, 0])
        of_value = shape.dot(of_sums, weights.astype(shape.dtype), 1, 1)[: shape.value_dim]
        if group > 0:
            before = sums.pop(of_key)
            of_key_tile, of_value = before[0] + of_key_tile, before[1] + of_value
        if group < shape.groups - 1:
            sums[of_key] = of_key_tile, of_value
            return
        yield
        out.key[0, of_key] = of_key_tile.astype(out.key.dtype)
        out.value[0, of_key] = of_value.astype(out.value.dtype)

    return map(head, range(shape.num_heads * shape.groups))
