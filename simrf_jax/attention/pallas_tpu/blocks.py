"""The grid of a kernel, and the block of each array that a step of it sees."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax.attention.pallas_tpu.heads import Refs, Shape

# Bytes of a core's own memory that a kernel may take: more than the compiler's default, and less
# than the 64 MiB of the smallest core from v5e on.
VMEM_LIMIT = 48 * 2**20


def compiler_params() -> Any:
    """Returns the options of the compiler."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )


def result(shape: tuple[int, ...], dtype: Any, operands: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over all mesh axes that an operand varies over."""

    def mixed(operands: Any) -> jax.Array:
        firsts = [jnp.ravel(x)[0].astype(dtype) for x in jax.tree.leaves(operands)]
        return jnp.broadcast_to(sum(firsts), shape)

    return jax.eval_shape(mixed, operands)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a kernel: batch, blocks of heads, and steps over tiles.

    The steps of a forward pass are the tiles of the keys, then those of the queries. The gradient
    goes over the keys once more. While a step does not need an array, its block stays where it is
    needed next or was needed last, so that nothing is moved in vain.

    Attributes:
      shape: Sizes of the kernel.
      arrays: The operands.
      direction: ``"forward"`` or ``"backward"``.
    """

    shape: Shape
    arrays: Refs
    direction: Literal["forward", "backward"]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the grid."""
        batch, heads, *_ = self.arrays.key.shape
        steps = 1
        if self.shape.is_tiled:
            steps = self.shape.key_tiles + self.shape.query_tiles
            steps += self.shape.key_tiles if self.direction == "backward" else 0
        return batch, heads // self.shape.num_heads, steps

    def _query_tile(self, step: Any) -> Any:
        return jnp.clip(step - self.shape.key_tiles, 0, self.shape.query_tiles - 1)

    def _key_tile(self, step: Any) -> Any:
        if self.direction == "forward":
            return jnp.minimum(step, self.shape.key_tiles - 1)
        first = self.shape.key_tiles + self.shape.query_tiles
        return jnp.where(step < self.shape.key_tiles, step, jnp.maximum(step - first, 0))

    def _key_tile_of_gradient(self, step: Any) -> Any:
        return jnp.maximum(step - self.shape.key_tiles - self.shape.query_tiles, 0)

    def of_queries(self, width: int) -> pl.BlockSpec:
        """Returns the block of an array ``[B, N, width, T]``."""
        heads = self.shape.num_heads * self.shape.groups
        block = (1, heads, width, self.shape.query_tile)
        return pl.BlockSpec(block, lambda b, h, step: (b, h, 0, self._query_tile(step)))

    def of_keys(self, width: int, *, is_gradient: bool = False) -> pl.BlockSpec:
        """Returns the block of an array ``[B, K, width, S]``."""
        block = (1, self.shape.num_heads, width, self.shape.key_tile)
        tile = self._key_tile_of_gradient if is_gradient else self._key_tile
        return pl.BlockSpec(block, lambda b, h, step: (b, h, 0, tile(step)))

    def of_rows(self, rows: jax.Array) -> pl.BlockSpec:
        """Returns the block of an array ``[1 or K, ...]``."""
        if rows.shape[0] == 1:
            return pl.BlockSpec(rows.shape, lambda b, h, step: (0, 0, 0))
        return pl.BlockSpec((self.shape.num_heads, *rows.shape[1:]), lambda b, h, step: (h, 0, 0))

    def operands(self) -> Refs:
        """Returns the blocks of the operands."""
        arrays, shape = self.arrays, self.shape
        log_weights = None
        if arrays.log_weights is not None:
            each = arrays.log_weights.shape[1] > 1
            log_weights = pl.BlockSpec(
                (1, shape.num_heads if each else 1, 1, shape.key_tile),
                lambda b, h, step: (b, h if each else 0, 0, self._key_tile(step)),
            )
        return Refs(
            query=self.of_queries(shape.dim),
            key=self.of_keys(shape.dim),
            value=self.of_keys(shape.value_dim),
            query_rows=self.of_rows(arrays.query_rows),
            key_rows=self.of_rows(arrays.key_rows),
            offsets=None if arrays.offsets is None else self.of_rows(arrays.offsets),
            center=None if arrays.center is None else self.of_rows(arrays.center),
            half_square=pl.BlockSpec(memory_space=pltpu.SMEM),
            log_weights=log_weights,
        )
