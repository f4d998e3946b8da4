"""Tiles of vectors in a Mosaic GPU kernel: where they lie, how they are loaded and multiplied.

A program has two warp groups that compute, each for a tile of vectors that stay in its shared
memory, and one that loads the tiles of the other side, which both warp groups read in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from simrf_jax._src.attention.pallas_inputs import without_x64

TILE = 64  # Rows of a matrix product of a warp group.
WARP_GROUPS = 2  # That compute.
STAGES = 2  # Tiles that are loaded at once.
SMS = 132  # Of an H100 or H200 with SXM.
LEAST_PART = 4  # Fewer tiles would not repay the work of another program.
# Registers of a thread: those of the warp group that loads go to the others.
REGISTERS, REGISTERS_TO_LOAD = 240, 24


class Vectors(NamedTuple):
    """Vectors that a kernel reads, in bfloat16.

    Attributes:
      parts: Arrays whose sum they are: one, or two for the rows of W. Tokens are
        ``[B, length, heads, dim]``, and rows ``[B or 1, heads or 1, length, dim]``.
      are_tokens: True for tokens.
    """

    parts: tuple[jax.Array, ...]
    are_tokens: bool

    @property
    def length(self) -> int:
        """Number of vectors of a head."""
        return self.parts[0].shape[1 if self.are_tokens else 2]

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return self.parts[0].shape[-1]


class Place(NamedTuple):
    """The sequence and the head of a program, among ``num_heads``."""

    batch: jax.Array
    head: jax.Array
    num_heads: int

    def of(self, ref: Any, start: jax.Array, are_tokens: bool = False) -> Any:
        """Returns a tile of tokens, or of rows or numbers ``[B or 1, heads or 1, length, ...]``."""
        num_heads = ref.shape[2 if are_tokens else 1]
        # Query heads share the rows and the keys of their key head.
        head = lax.div(self.head, jnp.asarray(self.num_heads // num_heads, self.head.dtype))
        if are_tokens:
            return ref.at[self.batch, pl.ds(start, TILE), head]
        return ref.at[self.batch if ref.shape[0] > 1 else 0, head, pl.ds(start, TILE)]


class Copy(NamedTuple):
    """An array, and the shared memory that its tiles are copied to."""

    source: Any
    target: Any
    are_tokens: bool = False


def ceil_div(a: int, b: int) -> int:
    """Returns the quotient, rounded up."""
    return -(-a // b)


def num_parts(programs: int, length: int) -> int:
    """Returns into how many parts a length is split, so that all multiprocessors have work.

    Args:
      programs: Number of programs without a split.
      length: Length that each of them reads.
    """
    return max(1, min(SMS // programs, ceil_div(length, TILE) // LEAST_PART))


def memory(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Returns shared memory, of which ``wgmma`` can multiply the last two axes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load(
    place: Place,
    copies: Sequence[Copy],
    full: Any,
    free: Any,
    first: jax.Array,
    num: int,
) -> None:
    """Loads tiles one after the other, while the other warp groups compute.

    Args:
      place: Sequence and head.
      copies: Arrays, and memory ``[STAGES, ...]`` of the tiles.
      full: Barriers that say that a tile has been loaded.
      free: Barriers that say that it has been read.
      first: Position of the first tile.
      num: Number of tiles.
    """

    def load_tile(step: Any, slot: Any) -> None:
        for copy in copies:
            tile = place.of(copy.source, first + step * TILE, copy.are_tokens)
            plgpu.copy_gmem_to_smem(tile, copy.target.at[slot], full.at[slot])

    plgpu.set_max_registers(REGISTERS_TO_LOAD, action="decrease")
    for step in range(min(STAGES, num)):
        load_tile(step, step)

    # To the end, because the interpreter wants all phases of a barrier to be seen.
    @pl.loop(0, num)
    def _(step: jax.Array) -> None:
        slot = slot_of(step)
        plgpu.barrier_wait(free.at[slot])

        @pl.when(step + STAGES < num)
        def _() -> None:
            load_tile(step + STAGES, slot)


def slot_of(step: jax.Array) -> jax.Array:
    """Returns the memory of a step's tile."""
    return lax.rem(step, jnp.asarray(STAGES, step.dtype))


def products(a: Sequence[Any], b: Sequence[Any]) -> jax.Array:
    """Returns ``[TILE, TILE]``, the products of vectors in shared memory, given as parts."""

    def multiply(total: Any) -> jax.Array:
        for left in a:
            for right in b:
                plgpu.wgmma(total, left, right.transpose((1, 0)))
        return total[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))


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


def store(tile: Any, target: Any) -> None:
    """Copies a tile of shared memory to an array, after which it can be written again."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0)


def call(body: Any, arrays: Any, outputs: Any, scratch: Any, grid: Any, interpret: Any) -> Any:
    """Calls a kernel.

    Args:
      body: Function of references to the arrays, to the outputs and, by name, to the scratch.
      arrays: Arrays to read.
      outputs: Shapes of the outputs.
      scratch: Memory and barriers, by name.
      grid: Sizes of the grid: the batch, the heads, the parts of the streamed side, and tiles.
      interpret: Parameters of the interpreter, or None to compile.
    """
    options = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=scratch,
        grid=grid,
        grid_names=("batch", "head", "part", "tile"),
        num_threads=WARP_GROUPS + 1,
        thread_name="warp_group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )
    with without_x64():
        return kernel(*arrays)
