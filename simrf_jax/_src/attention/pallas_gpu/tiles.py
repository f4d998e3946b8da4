"""Tiles of vectors in a Mosaic GPU kernel: where they lie, how they are copied and multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # Rows of a matrix product of a warp group.


class Place(NamedTuple):
    """The sequence and the head of a program, among ``num_heads``."""

    batch: jax.Array
    head: jax.Array
    num_heads: int

    def of(self, ref: Any, start: Any, size: int, are_tokens: bool = False) -> Any:
        """Returns some tokens, or some rows or numbers ``[B or 1, heads or 1, length, ...]``."""
        num_heads = ref.shape[2 if are_tokens else 1]
        # Query heads share the rows and the keys of their key head.
        head = lax.div(self.head, jnp.asarray(self.num_heads // num_heads, self.head.dtype))
        if are_tokens:
            return ref.at[self.batch, pl.ds(start, size), head]
        return ref.at[self.batch if ref.shape[0] > 1 else 0, head, pl.ds(start, size)]


def ceil_div(a: int, b: int) -> int:
    """Returns the quotient, rounded up."""
    return -(-a // b)


def memory(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Returns shared memory, of which ``wgmma`` can multiply the last two axes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def products(a: Sequence[Any], b: Sequence[Any]) -> jax.Array:
    """Returns all products of vectors of two tiles in shared memory, given as parts."""

    def multiply(total: Any) -> jax.Array:
        for left in a:
            for right in b:
                plgpu.wgmma(total, left, right.transpose((1, 0)))
        return total[...]

    shape = (a[0].shape[-2], b[0].shape[-2])
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_weighted(total: jax.Array, weights: jax.Array, vectors: Any, interpret: Any) -> jax.Array:
    """Adds the sums of vectors in shared memory with ``weights``, ``[TILE, number]``."""
    if interpret is not None:
        # The interpreter of jax 0.11 has no products of registers and no accumulators that remain.
        weights = weights.astype(vectors.dtype).astype(jnp.float32)
        return total + jnp.dot(weights, vectors[...].astype(jnp.float32))

    def multiply(total: Any) -> None:
        plgpu.wgmma(total, weights.astype(vectors.dtype), vectors)

    return pl.run_state(multiply)(plgpu.ACC.init(total))


def along(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array in which ``x`` lies along an axis."""
    return lax.broadcast_in_dim(x, shape, [axis])


def zeros(*shape: int) -> jax.Array:
    """Returns zeros in registers: a matrix, or one number for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def read(ref: Any, axis: int | None = None) -> jax.Array:
    """Returns a matrix in shared memory, or numbers that lie along an axis of one."""
    load: Any = plgpu.load  # Before jax 0.11 it had another argument.
    layout = plgpu.Layout.WGMMA
    return load(ref, layout=layout if axis is None else layout.reduce(1 - axis))
