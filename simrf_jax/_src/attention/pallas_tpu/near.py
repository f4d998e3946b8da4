"""The Pallas kernel of exact attention to the keys of a band.

A grid step takes a tile of queries and the window of key tiles that holds the bands of all of them,
side by side along the lanes. The module ``near_backward`` has the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.blocks import call, result
from simrf_jax._src.attention.pallas_tpu.choice import LANES
from simrf_jax._src.attention.pallas_tpu.heads import (
    HIDDEN,
    TILE,
    Links,
    Shape,
    are_finite,
    interleave,
    keep,
    of_head,
)
from simrf_jax._src.attention.pallas_tpu.segments import as_column
from simrf_jax._src.attention.pallas_tpu.sums import ROWS, Sums, rows_of_sums


class NearRefs(NamedTuple):
    """Arrays of a kernel; inside it, tokens are lists with one block for each tile of a window.

    Attributes:
      query: ``[B, N, H, T]``.
      key: ``[B, K, H, S]``.
      value: ``[B, K, D, S]``.
      log_weights: ``[B, 1 or K, 1, S]``, or None.
      query_segments: Numbers of the segments, ``[B, 1, 1, T]``, or None.
      key_segments: ``[B, 1, 1, S]``, or None.
      factor: ``[1, 1]``, multiplies the products of queries and keys to give logits of base 2.
    """

    query: Any
    key: Any
    value: Any
    log_weights: Any
    query_segments: Any
    key_segments: Any
    factor: Any


@dataclasses.dataclass(frozen=True)
class Band:
    """The keys that a query sees, and the tiles that hold them.

    Attributes:
      shape: Sizes; those of features are ignored.
      bandwidth: Distance of the farthest key.
      is_causal: True if later keys are hidden.
    """

    shape: Shape
    bandwidth: int
    is_causal: bool

    @property
    def keys(self) -> range:
        """Tiles of the window of keys, relative to the tile of the queries."""
        reach = pl.cdiv(self.bandwidth, LANES)
        return range(-reach, 1 if self.is_causal else reach + 1)

    @property
    def queries(self) -> range:
        """Tiles of the window of the queries that may see a tile of keys, relative to it."""
        return range(1 - self.keys.stop, 1 - self.keys.start)

    def holds(self, keys: range, queries: range) -> jax.Array:
        """Returns ``[keys, queries]``, True where a key is in the band of a query.

        Args:
          keys: Tiles of the keys.
          queries: Tiles of the queries.
        """
        size = (len(keys) * LANES, len(queries) * LANES)
        key = jax.lax.broadcasted_iota(jnp.int32, size, 0) + keys.start * LANES
        query = jax.lax.broadcasted_iota(jnp.int32, size, 1) + queries.start * LANES
        latest = 0 if self.is_causal else self.bandwidth
        return (key - query >= -self.bandwidth) & (key - query <= latest)

    def grid(self, num_key_heads: int, batch: int, steps: int) -> tuple[int, int, int]:
        """Returns the sizes of the grid: batch, blocks of heads, and steps over tiles."""
        return batch, num_key_heads // self.shape.num_heads, steps

    def cost(self, refs: NearRefs, *, products: int) -> dict[str, int]:
        """Returns the multiplications and exponentials of a kernel, for ``blocks.call``.

        Args:
          refs: The arrays.
          products: Number of products with all logits or weights.
        """
        pairs = refs.query.size // refs.query.shape[2] * len(self.keys) * LANES
        width = (self.shape.dim + self.shape.value_dim) // 2
        return {"multiplications": products * pairs * width, "exponentials": pairs}

    def blocks(
        self, like: jax.Array, num_key_heads: int, tiles: Iterable[int], width: int | None = None
    ) -> list[pl.BlockSpec]:
        """Returns the blocks of ``[B, heads, width, length]`` for tiles relative to the step's.

        Beyond the ends a block holds some other tile, which must not be used.

        Args:
          like: An array of these sizes.
          num_key_heads: Number K of key heads.
          tiles: The tiles.
          width: Width of the blocks, if it differs from that of ``like``.
        """
        _, heads, rows, length = like.shape
        block = (1, max(1, heads * self.shape.num_heads // num_key_heads), width or rows, LANES)
        last = pl.cdiv(length, LANES) - 1

        def block_of(tile: int, b: Any, h: Any, step: Any) -> Any:
            return b, h if heads > 1 else 0, 0, jnp.clip(step + tile, 0, last)

        return [pl.BlockSpec(block, functools.partial(block_of, tile)) for tile in tiles]

    def operands(self, refs: NearRefs, queries: range) -> tuple[NearRefs, NearRefs]:
        """Returns the arrays for each tile of the windows, and their blocks.

        Args:
          refs: The arrays.
          queries: Tiles of the window of queries.
        """
        num_key_heads = refs.key.shape[1]

        def spread(refs: NearRefs, get: Any) -> NearRefs:
            keys = self.keys
            tiles = NearRefs(queries, keys, keys, keys, queries, keys, range(1))
            both = zip(refs, tiles, strict=True)
            return NearRefs(*(None if x is None else get(x, window) for x, window in both))

        arrays = spread(refs, lambda x, window: [x] * len(window))._replace(factor=refs.factor)
        of_tokens = refs._replace(factor=None)
        specs = spread(of_tokens, lambda x, window: self.blocks(x, num_key_heads, window))
        return arrays, specs._replace(factor=pl.BlockSpec(memory_space=pltpu.SMEM))


def read_sums(band: Band, refs: NearRefs) -> Sums:
    """Returns the sums over the keys of the band.

    Args:
      band: The band.
      refs: The arrays.
    """
    shape, own = band.shape, range(1)
    batch, num_heads, _, length = refs.query.shape
    num_key_heads = refs.key.shape[1]
    both, specs = band.operands(refs, own)
    sizes = ((shape.value_dim, shape.dtype), (ROWS, jnp.float32))
    return Sums(
        *call(
            functools.partial(_kernel, band, jax.tree.structure(both)),
            shape,
            both,
            specs,
            [result((batch, num_heads, width, length), dtype, refs) for width, dtype in sizes],
            [
                *band.blocks(refs.query, num_key_heads, own, shape.value_dim),
                *band.blocks(refs.query, num_key_heads, own, ROWS),
            ],
            grid=band.grid(num_key_heads, batch, shape.query_tiles),
            name="sums_in_a_band",
            **band.cost(refs, products=2),
        )
    )


def _kernel(band: Band, tree: Any, *refs: Any) -> None:
    shape, step = band.shape, pl.program_id(2)
    operands = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    out = Sums(*refs[tree.num_leaves :])
    holds = in_segment(band, operands, band.keys, range(1), range(1))
    seen = jnp.where(holds, 1.0, 0.0).astype(shape.dtype)
    interleave(_heads(band, operands, step, holds, seen, out), shape.heads_at_once)


def _heads(
    band: Band, refs: NearRefs, step: Any, holds: jax.Array, seen: jax.Array, out: Sums
) -> Iterator[Links]:
    shape, kept = band.shape, {}

    def head(number: int) -> Links:
        of_key, group = divmod(number, shape.groups)
        if group == 0:
            kept[of_key] = take_window(band, refs, of_key, step, band.keys)
        keys, (query, is_finite) = kept[of_key], take_queries(band, refs, number, step, range(1))
        yield
        logits = logits_of(shape, refs, keys, query, holds)
        yield
        unit = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), HIDDEN)
        weights = jnp.exp2(logits - unit).astype(shape.dtype)
        yield
        sums = shape.dot(keys.values, weights, 1, 0)
        nonfinite = jnp.broadcast_to(keys.nonfinite, (TILE, keys.nonfinite.shape[1])).astype(
            shape.dtype
        )
        sees_nonfinite = shape.dot(nonfinite, seen, 1, 0)[:1] > 0
        yield
        out.numerators[0, number] = sums[: shape.value_dim].astype(out.numerators.dtype)
        denominators = sums[shape.value_dim : shape.value_dim + 1]
        out.rows[0, number] = rows_of_sums(denominators, unit, sees_nonfinite | ~is_finite)

    return map(head, range(shape.num_heads * shape.groups))


def in_segment(band: Band, refs: NearRefs, keys: range, queries: range, window: range) -> jax.Array:
    """Returns ``[keys, queries]``, True where a key is in the band and the segment of a query.

    Args:
      band: The band.
      refs: The blocks.
      keys: Tiles of the keys.
      queries: Tiles of the queries.
      window: Tiles of all blocks of queries.
    """
    holds = band.holds(keys, queries)
    if refs.key_segments is None:
        return holds
    of_keys = side_by_side(refs.key_segments, 0, keys, band.keys)
    of_queries = side_by_side(refs.query_segments, 0, queries, window)
    return holds & (as_column(of_keys, of_queries.shape[1]) == of_queries)


class Window(NamedTuple):
    """Keys and values of some tiles, zeros at those that are hidden or not finite.

    Attributes:
      keys: ``[H, keys]``.
      values: ``[D + TILE, keys]``; row D has ones at visible keys, and all others are zeros.
      log_weights: ``[keys, 128]``, equal along the last axis; ``2 * HIDDEN`` at hidden keys.
      nonfinite: ``[1, keys]``, 1 at visible keys that are not finite, and 0 elsewhere.
    """

    keys: jax.Array
    values: jax.Array
    log_weights: jax.Array
    nonfinite: jax.Array


def side_by_side(blocks: Any, head: Any, tiles: range, window: range) -> jax.Array:
    """Returns the tiles of a head among the blocks of a window, ``[width, len(tiles) * 128]``."""
    chosen = [blocks[tile - window.start] for tile in tiles]
    return jnp.concatenate([of_head(block[0], head) for block in chosen], axis=1)


def _are_tokens(step: Any, tiles: range, length: int) -> jax.Array:
    """Returns ``[1, len(tiles) * 128]``, True at tokens, and False beyond the ends."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, len(tiles) * LANES), 1)
    position = (step + tiles.start) * LANES + lanes
    return (position >= 0) & (position < length)


def take_window(band: Band, refs: NearRefs, head: Any, step: Any, tiles: range) -> Window:
    """Returns the keys of a head in tiles relative to the step's."""
    shape = band.shape
    key, value = (side_by_side(x, head, tiles, band.keys) for x in (refs.key, refs.value))
    visible, log_weights = _are_tokens(step, tiles, shape.num_keys), None
    if refs.log_weights is not None:
        log_weights = side_by_side(refs.log_weights, head, tiles, band.keys)
        visible &= ~(log_weights <= HIDDEN / 2)  # NaN is visible.
    finite = are_finite(key, value, log_weights)
    nonfinite, visible = jnp.where(visible & ~finite, 1.0, 0.0), visible & finite
    is_first = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == 0
    ones = jnp.where(is_first & visible, 1, 0).astype(shape.dtype)
    row = jnp.where(visible, jnp.zeros(()) if log_weights is None else log_weights, 2 * HIDDEN)
    column = as_column(row, LANES)
    values = jnp.concatenate([keep(value, visible), ones], axis=0)
    return Window(keep(key, visible), values, column, nonfinite)


def take_queries(
    band: Band, refs: NearRefs, number: Any, step: Any, tiles: range, window: range = range(1)
) -> tuple[jax.Array, jax.Array]:
    """Returns queries ``[H, queries]``, zeros where ``[1, queries]`` is False.

    It is False at queries that are not finite, and beyond the ends.

    Args:
      band: The band.
      refs: The blocks.
      number: Number of the query head.
      step: Step of the grid.
      tiles: Tiles relative to the step's.
      window: Tiles of all blocks.
    """
    query = side_by_side(refs.query, number, tiles, window)
    square = jnp.sum(jnp.square(query.astype(jnp.float32)), axis=0, keepdims=True)
    finite = (square < jnp.inf) & _are_tokens(step, tiles, band.shape.num_queries)
    return keep(query, finite), finite


def logits_of(
    shape: Shape, refs: NearRefs, keys: Window, query: jax.Array, holds: jax.Array
) -> jax.Array:
    """Returns logits of base 2, ``[keys, queries]``, at most ``HIDDEN`` where nothing is seen."""
    products = shape.dot(keys.keys, query, 0, 0) * refs.factor[0, 0]
    column = jnp.concatenate([keys.log_weights] * (query.shape[1] // LANES), axis=1)
    return jnp.where(holds, products + column, 2 * HIDDEN)
