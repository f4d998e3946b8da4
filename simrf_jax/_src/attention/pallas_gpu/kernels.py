"""Mosaic GPU kernels that sum, for each vector of one side, over all vectors of the other side.

One side is the tokens of a head, and the other one the rows of W or, in a band, tokens. The *own*
side is the one for whose vectors there are results. What is summed is a ``Reduction``, such as
attention or a gradient.

A program has two warp groups that compute, each for a tile of the own side, and a third one that
loads. There are two schedules:

- ``_stream_other``: tiles of the own side stay in shared memory, and the other side is streamed
  past them.
- ``_stream_own``: the rows of a head stay in shared memory, and the tokens, which are the own side,
  are streamed past them. A program then has many tiles of tokens. With only one, it would spend
  most of its time on its beginning and its end, because there are few rows to sum over.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from simrf_jax._src.attention.pallas_gpu.tiles import (
    TILE,
    Place,
    along,
    ceil_div,
    memory,
    read,
)
from simrf_jax._src.attention.pallas_inputs import without_x64

WARP_GROUPS = 2  # That compute.
OWN = WARP_GROUPS * TILE  # Vectors of the own side that a program takes at once.
SMS = 132  # Of an H100 or H200 with SXM.
SHARED_MEMORY = 220 * 2**10  # Of a program, less what barriers and the alignment take.
MOST_STAGES = 4  # Tiles that are loaded at once.
LEAST_PART = 4  # Fewer tiles would not repay the work of another program.
OVERHEAD = 2  # Steps in the time of which a program begins and ends.
MOST_ROWS = 256  # That stay in shared memory.
WIDEST = 128  # Rows that a tile of tokens is reduced over at once.
# Registers of a thread: those of the warp group that loads go to the others.
REGISTERS, REGISTERS_TO_LOAD = 240, 24


class Side(NamedTuple):
    """Vectors and numbers of the tokens or of the rows of all heads.

    Attributes:
      are_tokens: True for tokens.
      vectors: Arrays in bfloat16. Tokens are ``[B, length, heads, dim]``, and rows
        ``[B or 1, heads or 1, length, dim]``, their length a multiple of ``TILE``.
      numbers: Arrays in float32, ``[B or 1, heads or 1, length or more]``.
      fills: Numbers of vectors that do not exist, one for each array of numbers.
    """

    are_tokens: bool
    vectors: tuple[jax.Array, ...]
    numbers: tuple[jax.Array, ...] = ()
    fills: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Number of vectors of a head."""
        return self.vectors[0].shape[1 if self.are_tokens else 2]

    def arrays(self, length: int) -> list[jax.Array]:
        """Returns the vectors and the numbers, these padded to a length."""
        padded = []
        for x, fill in zip(self.numbers, self.fills, strict=True):
            padding = max(0, length - x.shape[-1])
            padded.append(jnp.pad(x, [(0, 0), (0, 0), (0, padding)], constant_values=fill))
        return [*self.vectors, *padded]

    def memory(self, *shape: int) -> list[Any]:
        """Returns shared memory for ``shape`` of the vectors and numbers of each array."""
        vectors = [memory(*shape, x.shape[-1]) for x in self.vectors]
        return vectors + [plgpu.SMEM(shape, jnp.float32) for _ in self.numbers]

    def bytes(self, number: int) -> int:
        """Returns the bytes of some vectors and their numbers."""
        dims = sum(x.shape[-1] for x in self.vectors)
        return number * (2 * dims + 4 * len(self.numbers))

    def tile(self, refs: Sequence[Any]) -> Tile:
        """Returns references to one tile of each array."""
        return Tile(list(refs[: len(self.vectors)]), list(refs[len(self.vectors) :]))

    def copy(self, place: Place, start: Any, sources: Any, targets: Any, barrier: Any) -> None:
        """Begins to copy the vectors from ``start`` on, as many as the targets hold."""
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            is_vector = i < len(self.vectors)
            size = target.shape[-2 if is_vector else -1]
            part = place.of(source, start, size, is_vector and self.are_tokens)
            plgpu.copy_gmem_to_smem(part, target, barrier)


class Tile(NamedTuple):
    """References to vectors ``[size, dim]`` and numbers ``[size]`` of a side in shared memory."""

    vectors: list[Any]
    numbers: list[Any]


class Band(NamedTuple):
    """The vectors of the other side that belong to a vector of the own side.

    The last numbers of both sides are their positions.

    Attributes:
      before: Distance to the first one.
      after: Distance to the last one.
    """

    before: int
    after: int

    @property
    def reverse(self) -> Band:
        """The band of the other side."""
        return Band(self.after, self.before)

    def holds(self, own: Tile, other: Tile) -> jax.Array:
        """Returns which pairs of two tiles are in the band."""
        square = (own.numbers[-1].shape[-1], other.numbers[-1].shape[-1])
        distance = along(read(other.numbers[-1], 1), 1, square)
        distance -= along(read(own.numbers[-1], 0), 0, square)
        return (distance >= -self.before) & (distance <= self.after)


class Reduction(abc.ABC):
    """Sums for each vector of one side over all vectors of the other, or over those of a band.

    Attributes:
      name: Name of the kernel in a profile.
      own: The side for which there are results.
      other: The other side.
      band: The others that count; None for all.
    """

    name: ClassVar[str]
    own: Side
    other: Side
    band: Band | None

    @property
    @abc.abstractmethod
    def dims(self) -> tuple[int, ...]:
        """Sizes of the vectors that result."""

    @property
    @abc.abstractmethod
    def num_numbers(self) -> int:
        """Number of the numbers that result for each vector of the side."""

    @property
    @abc.abstractmethod
    def width(self) -> int:
        """Vectors of the other side in a tile, where it is streamed."""

    @abc.abstractmethod
    def start(self) -> Any:
        """Returns the sums over nothing."""

    @abc.abstractmethod
    def add(self, sums: Any, own: Tile, other: Tile) -> Any:
        """Returns the sums with those over another tile."""

    @abc.abstractmethod
    def finish(self, sums: Any, own: Tile) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the vectors and the numbers that result."""


class Store(NamedTuple):
    """Shared memory from which the results of a program's tiles are copied to their arrays.

    Attributes:
      reduction: The reduction.
      dtype: Type of the vectors.
      is_shared: True if vectors of one size leave one after the other, by the same memory.
    """

    reduction: Reduction
    dtype: Any
    is_shared: bool

    @property
    def dims(self) -> list[int]:
        """Sizes of the vectors in the memory."""
        dims = self.reduction.dims
        return list(dict.fromkeys(dims)) if self.is_shared else list(dims)

    def bytes(self) -> int:
        """Returns the bytes of the memory."""
        of_vectors = sum(self.dims) * jnp.dtype(self.dtype).itemsize
        return OWN * (of_vectors + 4 * self.reduction.num_numbers)

    def memory(self) -> list[Any]:
        """Returns the memory, of vectors first."""
        vectors = [memory(WARP_GROUPS, TILE, dim, dtype=self.dtype) for dim in self.dims]
        return vectors + [plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32)] * self.reduction.num_numbers

    def store(self, results: Any, tiles: Any, refs: Any, place: Place, start: Any) -> None:
        """Begins to copy results, from registers."""
        vectors, numbers = results
        are_tokens = self.reduction.own.are_tokens
        for i, (x, ref) in enumerate(zip(vectors, refs, strict=False)):
            tile = tiles[self.dims.index(x.shape[-1]) if self.is_shared else i]
            if self.is_shared and i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile[...] = x.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, place.of(ref, start, TILE, are_tokens))
        for x, ref, tile in zip(
            numbers, refs[len(vectors) :], tiles[len(self.dims) :], strict=True
        ):
            tile[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, place.of(ref, start, TILE))

    def shapes(self, batch: int, num_heads: int, covered: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays.

        Args:
          batch: Number of sequences.
          num_heads: Number of heads.
          covered: Vectors in the tiles of all programs. A copy leaves out the vectors after the
            last one of a head, but writes numbers after it to the next head.
        """
        own = self.reduction.own
        padded = ceil_div(own.length, TILE) * TILE
        shape = (own.length, num_heads) if own.are_tokens else (num_heads, padded)
        dims = self.reduction.dims
        vectors = [jax.ShapeDtypeStruct((batch, *shape, dim), self.dtype) for dim in dims]
        number = jax.ShapeDtypeStruct((batch, num_heads, covered), jnp.float32)
        return vectors + [number] * self.reduction.num_numbers

    def cut(self, found: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the results, whose numbers have the padded length."""
        padded = ceil_div(self.reduction.own.length, TILE) * TILE
        num = len(self.reduction.dims)
        return (*found[:num], *(x[..., :padded] for x in found[num:]))


def reduce(
    reduction: Reduction,
    batch: int,
    num_heads: int,
    interpret: Any,
    *,
    dtype: Any = jnp.bfloat16,
    parts: int | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a reduction for all heads.

    Args:
      reduction: The reduction.
      batch: Number of sequences.
      num_heads: Number of heads for which there are results.
      interpret: Parameters of the interpreter, or None to compile.
      dtype: Type of the vectors that result, where several programs share the other side.
      parts: By how many programs rows share the other side; None to choose it.

    Returns:
      Vectors in the layout of the own side, and numbers ``[B, heads, padded length]``; those of
      rows with a leading axis of the programs that share the other side.
    """
    own, other = reduction.own, reduction.other
    is_short = not other.are_tokens and other.length <= MOST_ROWS
    if own.are_tokens and is_short and _stages_of_own(reduction) > 0:
        return _stream_own(reduction, batch, num_heads, interpret)
    return _stream_other(reduction, batch, num_heads, interpret, dtype, parts)


def _stream_other(
    reduction: Reduction,
    batch: int,
    num_heads: int,
    interpret: Any,
    dtype: Any,
    parts: int | None,
) -> tuple[jax.Array, ...]:
    own, other, width, band = reduction.own, reduction.other, reduction.width, reduction.band
    tiles = ceil_div(own.length, OWN)
    if own.are_tokens:
        parts = 1
    elif parts is None:
        parts = min(SMS // (batch * num_heads * tiles), ceil_div(other.length, width) // LEAST_PART)
        parts = max(1, parts)
    num = ceil_div(other.length, width * parts)  # Tiles of a part.
    length = num * width * parts
    if band is not None:
        before, after = (ceil_div(x, width) for x in band)
        num = min(before + OWN // width + after, num)
        length = tiles * OWN + num * width
    store = Store(reduction, jnp.bfloat16 if parts == 1 else dtype, is_shared=True)
    used = own.bytes(OWN) + store.bytes()
    stages = min(MOST_STAGES, num, (SHARED_MEMORY - used) // other.bytes(width))
    scratch = {
        "own_tiles": own.memory(WARP_GROUPS, TILE),
        "tiles": other.memory(stages, width),
        "out_tiles": store.memory(),
        "loaded": plgpu.Barrier(num_arrivals=len(own.arrays(0)), num_barriers=WARP_GROUPS),
        "full": plgpu.Barrier(num_arrivals=len(other.arrays(0)), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=stages),
    }

    def kernel(
        refs: Any,
        out_refs: Any,
        *,
        own_tiles: Any,
        tiles: Any,
        out_tiles: Any,
        loaded: Any,
        full: Any,
        free: Any,
    ) -> None:
        own_refs, refs = refs[: len(own_tiles)], refs[len(own_tiles) :]
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, tile, group = map(lax.axis_index, ("part", "tile", "warp_group"))
        start = tile * OWN + group * TILE

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS_TO_LOAD, action="decrease")

            def load(step: Any, _: int, slot: Any) -> None:
                first = part * num
                if band is not None:
                    first = jnp.maximum(tile * (OWN // width) - before, 0)
                first += step
                other.copy(place, first * width, refs, [x.at[slot] for x in tiles], full.at[slot])

            load_in_turn(load, free, num, stages)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            targets = [x.at[group] for x in own_tiles]
            own.copy(place, start, own_refs, targets, loaded.at[group])
            plgpu.barrier_wait(loaded.at[group])
            own_tile = own.tile(targets)

            def step(i: jax.Array, sums: Any) -> Any:
                slot = slot_of(i, stages)
                plgpu.barrier_wait(full.at[slot])
                sums = reduction.add(sums, own_tile, other.tile([x.at[slot] for x in tiles]))
                # Ordinary reads, too, must be over before the next tile is copied.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                return sums

            sums = lax.fori_loop(0, num, step, reduction.start())
            results = reduction.finish(sums, own_tile)
            to = Place(part * batch + place.batch, place.head, num_heads)
            store.store(results, [x.at[group] for x in out_tiles], out_refs, to, start)
            plgpu.wait_smem_to_gmem(0)

    outputs = store.shapes(parts * batch, num_heads, tiles * OWN)
    arrays = [*own.arrays(ceil_div(own.length, TILE) * TILE), *other.arrays(length)]
    grid = (batch, num_heads, parts, tiles)
    found = store.cut(launch(reduction.name, kernel, arrays, outputs, scratch, grid, interpret))
    if own.are_tokens:
        return found
    return tuple(x.reshape(parts, batch, *x.shape[1:]) for x in found)


def _stages_of_own(reduction: Reduction) -> int:
    """Returns for how many tiles of tokens there is memory, beside all rows of a head."""
    used = reduction.other.bytes(reduction.other.length)
    used += Store(reduction, jnp.bfloat16, is_shared=False).bytes()
    return min(2, (SHARED_MEMORY - used) // reduction.own.bytes(OWN))


def _stream_own(
    reduction: Reduction, batch: int, num_heads: int, interpret: Any
) -> tuple[jax.Array, ...]:
    own, other, stages = reduction.own, reduction.other, _stages_of_own(reduction)
    store = Store(reduction, jnp.bfloat16, is_shared=False)
    steps = ceil_div(own.length, OWN)
    parts = _parts(batch * num_heads, steps)
    num = ceil_div(steps, parts)
    scratch = {
        "own_tiles": own.memory(stages * WARP_GROUPS, TILE),
        "rows": other.memory(other.length),
        "out_tiles": store.memory(),
        "loaded": plgpu.Barrier(num_arrivals=len(other.arrays(0))),
        "full": plgpu.Barrier(num_arrivals=len(own.arrays(0)), num_barriers=stages * WARP_GROUPS),
        "free": plgpu.Barrier(num_barriers=stages * WARP_GROUPS),
    }

    def kernel(
        refs: Any,
        out_refs: Any,
        *,
        own_tiles: Any,
        rows: Any,
        out_tiles: Any,
        loaded: Any,
        full: Any,
        free: Any,
    ) -> None:
        own_refs, refs = refs[: len(own_tiles)], refs[len(own_tiles) :]
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, group = lax.axis_index("part"), lax.axis_index("warp_group")

        def start(step: Any, group: Any) -> Any:
            return ((part * num + step) * WARP_GROUPS + group) * TILE

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS_TO_LOAD, action="decrease")

            def load(step: Any, group: int, slot: Any) -> None:
                targets = [x.at[slot] for x in own_tiles]
                own.copy(place, start(step, group), own_refs, targets, full.at[slot])

            other.copy(place, 0, refs, rows, loaded)
            load_in_turn(load, free, num, stages, WARP_GROUPS)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            plgpu.barrier_wait(loaded)

            @pl.loop(0, num)
            def _(step: jax.Array) -> None:
                slot = slot_of(step, stages) * WARP_GROUPS + group
                plgpu.barrier_wait(full.at[slot])
                own_tile = own.tile([x.at[slot] for x in own_tiles])
                sums = reduction.start()
                for block in _blocks(other.length):
                    sums = reduction.add(sums, own_tile, other.tile([x.at[block] for x in rows]))
                results = reduction.finish(sums, own_tile)
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                # The results of the step before have left.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                tiles = [x.at[group] for x in out_tiles]
                store.store(results, tiles, out_refs, place, start(step, group))

            plgpu.wait_smem_to_gmem(0)

    outputs = store.shapes(batch, num_heads, parts * num * OWN)
    arrays = [*own.arrays(ceil_div(own.length, TILE) * TILE), *other.arrays(other.length)]
    grid = (batch, num_heads, parts, 1)
    return store.cut(launch(reduction.name, kernel, arrays, outputs, scratch, grid, interpret))


def _parts(programs: int, steps: int) -> int:
    """Returns by how many programs to share steps, so that the last of them end soonest."""

    def time(parts: int) -> int:
        return ceil_div(programs * parts, SMS) * (OVERHEAD + ceil_div(steps, parts))

    return min(range(1, steps + 1), key=time)


def _blocks(length: int) -> Iterator[Any]:
    """Yields slices of rows, as wide as possible."""
    start = 0
    while start < length:
        size = min(WIDEST, length - start)
        yield pl.ds(start, size)
        start += size


def load_in_turn(
    load: Callable[[Any, int, Any], None], free: Any, num: int, stages: int, tiles: int = 1
) -> None:
    """Loads the tiles of all steps, each as soon as there is memory for it.

    Args:
      load: Function of the step, the number of the tile in the step and the slot of memory, which
        begins to copy the tile.
      free: Barriers, one for each slot, at which those that have read a tile arrive.
      num: Number of steps.
      stages: Number of steps whose tiles have memory at once.
      tiles: Number of tiles of a step.
    """
    for step in range(min(stages, num)):
        for tile in range(tiles):
            load(step, tile, step * tiles + tile)

    # To the end, because the interpreter wants all phases of a barrier to be seen.
    @pl.loop(0, num)
    def _(step: jax.Array) -> None:
        for tile in range(tiles):
            slot = slot_of(step, stages) * tiles + tile
            plgpu.barrier_wait(free.at[slot])

            @pl.when(step + stages < num)
            def _(tile: int = tile, slot: Any = slot) -> None:
                load(step + stages, tile, slot)


def slot_of(step: jax.Array, stages: int) -> jax.Array:
    """Returns the number of the memory of a step's tile."""
    return lax.rem(step, jnp.asarray(stages, step.dtype))


def launch(
    name: str,
    kernel: Any,
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    grid: tuple[int, ...],
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel.

    Args:
      name: Name in a profile.
      kernel: Function of references to the arrays and the outputs and, by name, to the scratch.
      arrays: Arrays to read.
      outputs: Shapes of the outputs.
      scratch: Memory and barriers, by name.
      grid: Sizes of the grid: the batch, the heads, the programs that share a side, and tiles.
      interpret: Parameters of the interpreter, or None to compile.
    """

    def body(*refs: Any, **memory: Any) -> None:
        kernel(refs[: len(arrays)], refs[len(arrays) :], **memory)

    body.__name__ = name
    options = {} if interpret is None else {"interpret": interpret}
    run = plgpu.kernel(
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
        return tuple(run(*arrays))
