"""The grid of a Pallas kernel, and the block of each array that one grid step sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.choice import LANES
from simrf_jax._src.attention.pallas_tpu.heads import Refs, Shape

# A function from a grid step to the number of a tile.
Tile: TypeAlias = Callable[[Any], Any]

# Bytes of a core's VMEM that a kernel may take: more than the compiler's default, and less than the
# 64 MiB of the smallest core from v5e on.
VMEM_LIMIT = 48 * 2**20


def call(
    kernel: Callable[..., None],
    shape: Shape,
    operands: Any,
    specs: Any,
    out_shape: Any,
    out_specs: Any,
    *,
    grid: tuple[int, ...],
    name: str,
    multiplications: int,
    exponentials: int,
    scratch_shapes: Any = (),
) -> Any:
    """Runs a kernel whose grid is the batch, blocks of heads, and steps over tiles.

    Args:
      kernel: The kernel, a function of references to the operands' leaves, the outputs and the
        scratch.
      shape: Sizes of the kernel.
      operands: Arrays.
      specs: Their blocks.
      out_shape: Types of the outputs.
      out_specs: Their blocks.
      grid: Sizes of the grid.
      name: Name of the kernel in profiles.
      multiplications: Number of multiplications in all products, for XLA's scheduler.
      exponentials: Number of exponentials, for XLA's scheduler.
      scratch_shapes: Scratch memory that the kernel keeps from step to step.
    """
    arrays = jax.tree.leaves(operands)
    moved = [*arrays, *jax.tree.leaves(out_shape)]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=jax.tree.leaves(specs),
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * multiplications,
            transcendentals=exponentials,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
        ),
        interpret=shape.interpret,
        name=name,
    )(*arrays)


def cost(shape: Shape, refs: Refs, *, passes: int = 1) -> dict[str, int]:
    """Returns the multiplications and exponentials of a kernel of features, for ``call``.

    Args:
      shape: Sizes of the kernel.
      refs: Its operands.
      passes: Number of times features are computed and multiplied by values or gradients.
    """
    tokens = sum(x.size // x.shape[2] for x in (refs.query, refs.key))
    features = passes * tokens * shape.num_features
    widths = shape.passes * shape.dim + shape.value_dim
    return {"multiplications": features * widths, "exponentials": features}


def result(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over all mesh axes that an operand varies over."""

    def mixed(operands: Any) -> jax.Array:
        firsts = [jnp.ravel(x)[0].astype(dtype) for x in jax.tree.leaves(operands)]
        return jnp.broadcast_to(sum(firsts), shape)

    return jax.eval_shape(mixed, operands)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a kernel: batch, blocks of heads, and steps over tiles.

    Attributes:
      shape: Sizes of the kernel.
      arrays: The operands.
      steps: Number of steps.
      query_tile: Function from a step to the tile of the queries.
      key_tile: Function from a step to the tile of the keys.
      tile_of_gradient: Function from a step to the tile of the gradients of the keys.
    """

    shape: Shape
    arrays: Refs
    steps: int
    query_tile: Tile
    key_tile: Tile
    tile_of_gradient: Tile

    @classmethod
    def keys_first(cls, shape: Shape, arrays: Refs, *, is_gradient: bool) -> Grid:
        """Returns a grid over the tiles of keys, then of queries, then of keys for the gradient.

        While a step does not need an array, its block stays at the position that is needed next or
        was needed last, so that no block is loaded in vain.
        """
        keys, both = shape.key_tiles, shape.key_tiles + shape.query_tiles

        def of_queries(step: Any) -> Any:
            return jnp.clip(step - keys, 0, shape.query_tiles - 1)

        def of_keys(step: Any) -> Any:
            if not is_gradient:
                return jnp.minimum(step, keys - 1)
            return jnp.where(step < keys, step, jnp.maximum(step - both, 0))

        def of_gradient(step: Any) -> Any:
            return jnp.maximum(step - both, 0)

        steps = both + keys if is_gradient else both
        return cls(shape, arrays, steps if shape.is_tiled else 1, of_queries, of_keys, of_gradient)

    @classmethod
    def in_order(cls, shape: Shape, arrays: Refs, *, is_reversed: bool = False) -> Grid:
        """Returns a grid over tiles of queries and keys at the same positions."""
        last = shape.query_tiles - 1

        def tile(step: Any) -> Any:
            return last - step if is_reversed else step

        return cls(shape, arrays, shape.query_tiles, tile, tile, tile)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the grid."""
        batch, heads, *_ = self.arrays.key.shape
        return batch, heads // self.shape.num_heads, self.steps

    def of_queries(self, width: int) -> pl.BlockSpec:
        """Returns the block of an array ``[B, N, width, T]``."""
        heads = self.shape.num_heads * self.shape.groups
        block = (1, heads, width, self.shape.query_tile)
        return pl.BlockSpec(block, lambda b, h, step: (b, h, 0, self.query_tile(step)))

    def of_keys(self, width: int, *, is_gradient: bool = False) -> pl.BlockSpec:
        """Returns the block of an array ``[B, K, width, S]``."""
        block = (1, self.shape.num_heads, width, self.shape.key_tile)
        tile = self.tile_of_gradient if is_gradient else self.key_tile
        return pl.BlockSpec(block, lambda b, h, step: (b, h, 0, tile(step)))

    def of_rows(self, rows: jax.Array) -> pl.BlockSpec:
        """Returns the block of an array ``[1 or K, ...]``."""
        if rows.shape[0] == 1:
            return pl.BlockSpec(rows.shape, lambda b, h, step: (0, 0, 0))
        return pl.BlockSpec((self.shape.num_heads, *rows.shape[1:]), lambda b, h, step: (h, 0, 0))

    def of_maxima(self) -> pl.BlockSpec:
        """Returns the block of an array ``[B, K, m, key tiles]``: the columns of many tiles."""
        block = (1, self.shape.num_heads, self.shape.num_features, LANES)
        return pl.BlockSpec(
            block, lambda b, h, step: (b, h, 0, jax.lax.div(self.key_tile(step), LANES))
        )

    def operands(self) -> Refs:
        """Returns the blocks of the operands."""
        arrays, shape = self.arrays, self.shape
        log_weights = None
        if arrays.log_weights is not None:
            each = arrays.log_weights.shape[1] > 1
            log_weights = pl.BlockSpec(
                (1, shape.num_heads if each else 1, 1, shape.key_tile),
                lambda b, h, step: (b, h if each else 0, 0, self.key_tile(step)),
            )
        return Refs(
            query=self.of_queries(shape.dim),
            key=self.of_keys(shape.dim),
            value=self.of_keys(shape.value_dim),
            query_rows=self.of_rows(arrays.query_rows),
            key_rows=self.of_rows(arrays.key_rows),
            offsets=None if arrays.offsets is None else self.of_rows(arrays.offsets),
            center=None if arrays.center is None else self.of_rows(arrays.center),
            factor=pl.BlockSpec(memory_space=pltpu.SMEM),
            log_weights=log_weights,
            segments=None if arrays.segments is None else self._of_segments(),
        )

    def _of_segments(self) -> pl.BlockSpec:
        block = (1, 1, *self.arrays.segments.shape[2:3], self.shape.key_tile)
        return pl.BlockSpec(block, lambda b, h, step: (b, 0, 0, self.key_tile(step)))
