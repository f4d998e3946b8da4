r"""Causal random-feature attention in a Mosaic GPU kernel, or in reverse.

A program goes through the chunks of a head in order, or in the reverse order. It carries the state
of the rows of W: the mean of the values that each row has read so far, and the log-sum-exp of its
exponents. The state of packed sequences is that of the segment of the last key. Each of two
warp groups has half of the rows and half of the queries of a chunk. For each chunk,

1. a row writes its state to shared memory, and the features of the keys of the chunk. Features are
   in the row's unit, the largest exponent of the state and the chunk. Then the row adds the keys of
   the chunk to its state.
2. a query reads the state of before the chunk, if it is of its segment, and the keys of the chunk
   that it sees. Its weight for a key is the product of their features, summed over the rows, so
   two matrix products read the chunk.

The unit of a row may come from a key that a query must not see, and be so large that the features
of the keys it does see vanish. Where a feature could, ``Program.by_pairs`` computes the weights of
the chunk key by key, with a unit for each pair of a query and a key.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from simrf_jax._src.attention.pallas_gpu import flash
from simrf_jax._src.attention.pallas_gpu.flash import LARGEST, LEAST, Read
from simrf_jax._src.attention.pallas_gpu.kernels import (
    OWN,
    REGISTERS,
    REGISTERS_TO_LOAD,
    SMS,
    WARP_GROUPS,
    Side,
    Tile,
    launch,
    load_in_turn,
    slot_of,
)
from simrf_jax._src.attention.pallas_gpu.operands import NO_SEGMENT
from simrf_jax._src.attention.pallas_gpu.tiles import (
    TILE,
    Place,
    add_weighted,
    along,
    ceil_div,
    memory,
    products,
    read,
    zeros,
)
from simrf_jax._src.attention.pallas_inputs import LOG2E, bfloat16_parts

CHUNK = ROWS = OWN
LEAST_CHUNKS = 4  # Of a program; fewer would not repay the work of another one.
LIMIT = 100.0  # Exponents further below their unit may be too small.


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
      queries: Queries, and numbers of the segments of packed sequences, if there are any.
      keys: The same number of keys, their values and their terms; minus infinity hides a key, and
        NaN marks one that is not finite or has a value that is not. Numbers of segments follow
        those of the queries, and then all values must be finite.
      rows: W of queries and W of keys, to base 2, two parts each, and logarithms of what multiplies
        the features of a row.
    """

    queries: Side
    keys: Side
    rows: Side

    @property
    def is_packed(self) -> bool:
        """True if there are segments."""
        return len(self.queries.numbers) > 0


def attend(operands: Operands, interpret: Any, *, is_reversed: bool) -> Read:
    """Lets each query attend to the keys up to the one in its place, or from it on.

    A key or a value that is not finite turns the outputs of the queries that see it into NaN, and
    a query that is not, its own output.

    Args:
      operands: The arrays.
      interpret: Parameters of the interpreter, or None to compile.
      is_reversed: True to attend to the keys from that in the query's place on.
    """
    scan = Scan(*operands, 2, is_reversed, operands.is_packed)
    return Read(*scan.run(Attention, interpret))


@dataclasses.dataclass(frozen=True)
class Scan:
    """A kernel that goes through the chunks of a head in order.

    Attributes:
      own: Tokens for which there are results. A kernel overwrites their first vectors in shared
        memory by vectors that result, and each token has one number that results.
      others: The same number of tokens, and their values. Each own token sees those up to the one
        in its place.
      rows: Rows of W of the own tokens and of the others, two parts each, and their terms.
      stages: Chunks that are loaded at once.
      is_reversed: True to go from the last chunk to the first one, so that each own token sees
        the others from the one in its place on.
      is_packed: True if the last numbers of both sides are those of segments of packed sequences.
        An own token sees only others of its segment.
    """

    own: Side
    others: Side
    rows: Side
    stages: int
    is_reversed: bool
    is_packed: bool

    @property
    def parts(self) -> int:
        """Number of programs that share the chunks of a head."""
        num_programs = self.own.vectors[0].shape[0] * self.num_heads
        num_chunks = ceil_div(self.own.length, CHUNK)
        return max(1, min(SMS // num_programs, num_chunks // LEAST_CHUNKS))

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a program."""
        return ceil_div(self.own.length, CHUNK * self.parts)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return max(x.vectors[0].shape[2] for x in (self.own, self.others))

    def run(self, program: type[Program], interpret: Any) -> tuple[jax.Array, ...]:
        """Runs the kernel.

        Args:
          program: Work of a warp group on a chunk.
          interpret: Parameters of the interpreter, or None to compile.

        Returns:
          Vectors ``[B, length, N, dim]``, and numbers ``[B, N, length]``.
        """
        own, others, rows, stages = self.own, self.others, self.rows, self.stages
        batch, num = own.vectors[0].shape[0], self.num_chunks
        before = self._before(interpret) if self.parts > 1 else []

        def kernel(
            refs: Any,
            out_refs: Any,
            *,
            row_tiles: Any,
            tiles: Any,
            loaded: Any,
            full: Any,
            free: Any,
            **memory: Any,
        ) -> None:
            token_refs, refs = refs[: len(tiles)], refs[len(tiles) :]
            row_refs, before_refs = refs[: len(row_tiles)], refs[len(row_tiles) :]
            place = Place(lax.axis_index("batch"), lax.axis_index("head"), self.num_heads)
            part, group = lax.axis_index("part"), lax.axis_index("warp_group")

            def start(step: Any) -> Any:
                last = self.parts * num - 1
                chunk = part * num + step
                return (last - chunk if self.is_reversed else chunk) * CHUNK

            @pl.when(group == WARP_GROUPS)
            def _() -> None:
                plgpu.set_max_registers(REGISTERS_TO_LOAD, action="decrease")
                rows.copy(place, 0, row_refs, row_tiles, loaded)
                if before:
                    of_part = Place(part * batch + place.batch, place.head, self.num_heads)
                    units, _, _, offsets, flags = memory["numbers"]
                    targets = [memory["means"], units, *([flags] if self.is_packed else [])]
                    targets.append(offsets)  # Which some others do not have.
                    for source, target in zip(before_refs, targets, strict=False):
                        plgpu.copy_gmem_to_smem(of_part.of(source, 0, ROWS), target, loaded)

                def load(step: Any, _: int, slot: Any) -> None:
                    targets = [x.at[slot] for x in tiles]
                    both = zip(self._split(token_refs), self._split(targets), strict=True)
                    for side, (refs, to) in zip((own, others), both, strict=True):
                        side.copy(place, start(step), refs, to, full.at[slot])

                load_in_turn(load, free, num, stages)

            @pl.when(group < WARP_GROUPS)
            def _() -> None:
                plgpu.set_max_registers(REGISTERS, action="increase")
                plgpu.barrier_wait(loaded)
                mine = program(self, group, row_tiles, interpret, **memory)
                plgpu.barrier_arrive(memory["have_read"])

                def step(i: jax.Array, state: Any) -> Any:
                    slot = slot_of(i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    of_own, of_others = self._split([x.at[slot] for x in tiles])
                    tile = own.tile([x.at[mine.half] for x in of_own])
                    state = mine.advance(state, tile, others.tile(of_others))
                    first = start(i) + group * TILE
                    *vector_refs, number_ref = out_refs
                    # Those that result are in the place of the first ones.
                    for x, ref in zip(tile.vectors, vector_refs, strict=False):
                        target = place.of(ref, first, TILE, are_tokens=True)
                        plgpu.copy_smem_to_gmem(x, target)
                    number = memory["found"].at[group]
                    plgpu.copy_smem_to_gmem(number, place.of(number_ref, first, TILE))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(free.at[slot])
                    return state

                lax.fori_loop(0, num, step, mine.start())
                plgpu.barrier_wait(memory["have_read"])
                plgpu.wait_smem_to_gmem(0)

        covered = self.parts * num * CHUNK
        arrays = [*own.arrays(covered), *others.arrays(covered), *rows.arrays(0), *before]
        outputs, scratch = self._outputs(program), self._memory(len(before))
        grid = (batch, self.num_heads, self.parts, 1)
        found = launch(program.name, kernel, arrays, outputs, scratch, grid, interpret)
        *vectors, numbers = found
        return *vectors, numbers[..., : own.length]

    def _before(self, interpret: Any) -> list[jax.Array]:
        """Returns the state of the rows before the first chunk of each part.

        It has means of the values, ``[parts * B, heads, ROWS, D]``, log-sum-exps and, if there are
        such numbers, segments and means of the offsets.
        """
        others, rows = self.others, Side(False, self.rows.vectors[2:])
        terms, *offsets = (x[..., : others.length] for x in others.numbers)
        last_segments = None
        if self.is_packed:
            *offsets, segments = offsets
            terms, last_segments = self._of_last_segments(terms, segments)
        # Hidden ones and those of segments that have ended may not be finite, and 0 * NaN is not 0.
        is_some = jnp.swapaxes(terms != -jnp.inf, 1, 2)[..., None]
        vectors, values = (jnp.where(is_some, x, 0) for x in others.vectors)

        def attend(values: jax.Array) -> Read:
            side = Side(True, (vectors, values), (terms,), others.fills[:1])
            num_heads = vectors.shape[2]
            return flash.attend(rows, side, num_heads, interpret, parts=self.parts)

        means, lse = attend(values)
        found = [means]
        if offsets:
            found.append(attend(_as_vectors(offsets[0], values))[0][..., :3])
        if self.is_reversed:
            lse, *found = (jnp.flip(x, axis=0) for x in (lse, *found))
        # A part, along the second axis, sees those before it, along the first one.
        is_before = jnp.tri(self.parts, k=-1, dtype=bool).T[..., None]
        if last_segments is not None:  # That of the part just before.
            is_before &= last_segments[:, None] == jnp.roll(last_segments, 1, axis=0)[None]
        weights, lse = flash.shares(jnp.where(is_before[..., None, None], lse[:, None], -jnp.inf))
        # What is not finite remains in the log-sum-exps alone, because 0 * NaN is not 0.
        weights, *found = (jnp.where(jnp.isnan(x), 0, x) for x in (weights, *found))
        means, *offsets = (
            jnp.einsum("jibkm,jbkmd->ibkmd", weights, x, precision="highest") for x in found
        )
        state = [means.astype(jnp.bfloat16), lse, *(jnp.sum(x, axis=-1) for x in offsets)]
        if last_segments is not None:
            before = jnp.roll(last_segments, 1, axis=0).at[0].set(NO_SEGMENT)
            before = jnp.broadcast_to(before[..., None, None], (*before.shape, 1, ROWS))
            state.insert(2, before)
        return [x.reshape(-1, *x.shape[2:]) for x in state]

    def _of_last_segments(
        self, terms: jax.Array, segments: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns terms that show of each part only its last segment, and the numbers of these.

        Args:
          terms: ``[B, heads, length]``.
          segments: ``[B, 1, length]``.

        Returns:
          The terms, and the last segments ``[parts, B]`` in the order of the kernel.
        """
        size = self.num_chunks * CHUNK
        padding = [(0, 0), (0, 0), (0, self.parts * size - self.others.length)]
        of_parts = jnp.pad(segments, padding, mode="edge")
        of_parts = of_parts.reshape(len(segments), 1, self.parts, size)
        last = of_parts[..., :1] if self.is_reversed else of_parts[..., -1:]
        is_last = (of_parts == last).reshape(len(segments), 1, -1)[..., : self.others.length]
        last = last[:, 0, :, 0].T
        return jnp.where(is_last, terms, -jnp.inf), last[::-1] if self.is_reversed else last

    def _outputs(self, program: type[Program]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays that result."""
        batch, length = self.own.vectors[0].shape[:2]
        # A copy would write the numbers of chunks after the last one to the next head.
        covered = self.parts * self.num_chunks * CHUNK
        vectors = [
            jax.ShapeDtypeStruct((batch, length, self.num_heads, x.shape[-1]), jnp.bfloat16)
            for x in self.own.vectors[: program.num_vectors]
        ]
        return [*vectors, jax.ShapeDtypeStruct((batch, self.num_heads, covered), jnp.float32)]

    def _memory(self, num_before: int) -> dict[str, Any]:
        """Returns the shared memory and the barriers, for a number of arrays of the state."""
        own, others, rows, stages = self.own, self.others, self.rows, self.stages
        num_arrays = len(own.arrays(0)) + len(others.arrays(0))
        return {
            "row_tiles": rows.memory(ROWS),
            "tiles": own.memory(stages, CHUNK) + others.memory(stages, CHUNK),
            "means": memory(ROWS, self.others.vectors[1].shape[-1]),
            "features": memory(ROWS, CHUNK),
            # Of rows: units, weights and exponents of the state, its offsets, and flags.
            "numbers": [plgpu.SMEM((ROWS,), jnp.float32) for _ in range(5)],
            "of_other": plgpu.SMEM((2, ROWS), jnp.float32),
            "found": plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=len(rows.arrays(0)) + num_before),
            "full": plgpu.Barrier(num_arrivals=num_arrays, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=stages),
            "written": plgpu.Barrier(num_arrivals=WARP_GROUPS),
            "have_read": plgpu.Barrier(num_arrivals=WARP_GROUPS),
        }

    def _split(self, refs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns references of the own tokens, and of the others."""
        num = len(self.own.vectors) + len(self.own.numbers)
        return refs[:num], refs[num:]


def _as_vectors(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """Returns vectors in bfloat16 whose first three components sum to numbers ``[B, heads, T]``."""
    parts = bfloat16_parts(jnp.swapaxes(numbers, 1, 2)[:, : like.shape[1], :, None], 3)
    return jnp.pad(jnp.concatenate(parts, axis=-1), [(0, 0)] * 3 + [(0, like.shape[-1] - 3)])


class Program(abc.ABC):
    """Work of a warp group on a chunk: for half of the rows of W, and half of the own tokens.

    Attributes:
      name: Name of the kernel in a profile.
      num_vectors: Number of vectors that result.
      scan: The kernel.
      group: Number of the warp group.
      half: Its rows, and its tokens.
    """

    name: ClassVar[str]
    num_vectors: ClassVar[int] = 1

    def __init__(
        self,
        scan: Scan,
        group: jax.Array,
        row_tiles: Any,
        interpret: Any,
        *,
        means: Any,
        features: Any,
        numbers: Any,
        of_other: Any,
        found: Any,
        written: Any,
        have_read: Any,
    ):
        self.scan, self.group, self.interpret = scan, group, interpret
        self.half = pl.ds(group * TILE, TILE)
        self.own_rows, self.row_terms = row_tiles[:2], row_tiles[4]
        self.other_rows = [x.at[self.half] for x in row_tiles[2:4]]
        self.means, self.features, self.of_other, self.found = means, features, of_other, found
        self.units, self.weights, self.exponents, self.offsets, self.flags = numbers
        self.written, self.have_read = written, have_read

    @abc.abstractmethod
    def in_units(self, own: Tile, others: Tile) -> None:
        """Writes the results, where exponents are not far below the units."""

    @abc.abstractmethod
    def by_pairs(self, own: Tile, others: Tile) -> None:
        """Writes the results at any exponents, and of tokens that may not be finite."""

    def start(self) -> Any:
        """Returns the state of the own rows before the first chunk.

        It has sums of values, their denominators and maxima as in ``flash``, sums of offsets, and
        the number of the segment of the last token.
        """
        dim, is_packed = self.means.shape[-1], self.scan.is_packed
        if self.scan.parts == 1:
            segment = jnp.float32(NO_SEGMENT) if is_packed else None
            return zeros(TILE, dim), zeros(TILE), zeros(TILE) + LEAST, zeros(TILE), segment
        lse = read(self.units.at[self.half], 0)
        means = read(self.means.at[self.half]).astype(jnp.float32)
        is_some = lse > LEAST
        top = jnp.where(is_some, lse, LEAST)
        offset = zeros(TILE)
        if self.has_offsets:
            offset += jnp.where(is_some, read(self.offsets.at[self.half], 0), 0.0)
        segment = self.flags[self.group * TILE] if is_packed else None
        denominator = jnp.where(lse < jnp.inf, jnp.where(is_some, 1.0, 0.0), jnp.nan)
        return means, denominator, top, offset, segment

    @property
    def has_offsets(self) -> bool:
        """True if the others have offsets."""
        return len(self.scan.others.numbers) > 1 + self.scan.is_packed

    def advance(self, state: Any, own: Tile, others: Tile) -> Any:
        """Writes the results of the own tokens, and returns the state after the others."""
        total, denominator, top, offset, self.segment = state
        exponents = self.exponents_of(others.vectors[0], others.numbers[0])
        square = exponents.shape
        unit = jnp.maximum(top, exponents.max(axis=1))
        # What is below LIMIT may be lost.
        below = jnp.where(exponents > -jnp.inf, along(unit, 0, square) - exponents, 0.0).max(axis=1)
        nothing = denominator == 0
        some = jnp.where(nothing, 1.0, denominator)
        of_state = top + jnp.log(some) * LOG2E
        # A denominator of NaN tells that the state has a token that is not finite.
        has_some = denominator > 0
        below = jnp.maximum(below, jnp.where(has_some, unit - of_state, 0.0))
        inverse = jnp.where(has_some, 1 / some, 0.0)
        features = jnp.exp2(exponents - along(unit, 0, square)).astype(jnp.bfloat16)
        row_terms = read(self.row_terms.at[self.half], 0)
        plgpu.barrier_wait(self.have_read)
        self.features.at[self.half][...] = features
        self.means.at[self.half][...] = (total * along(inverse, 0, total.shape)).astype(
            jnp.bfloat16
        )
        self.units.at[self.half][...] = unit + row_terms
        self.weights.at[self.half][...] = jnp.where(nothing, 0.0, jnp.exp2(of_state - unit))
        self.exponents.at[self.half][...] = jnp.where(nothing, -jnp.inf, of_state + row_terms)
        self.offsets.at[self.half][...] = offset / some
        self.flags.at[self.half][...] = jnp.where(below > LIMIT, 1.0, 0.0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.written)
        segment = self.segment
        if self.scan.is_packed:
            segment = others.numbers[-1][0 if self.scan.is_reversed else CHUNK - 1]
            is_last = along(read(others.numbers[-1], 1), 1, square) == segment
            exponents = jnp.where(is_last, exponents, -jnp.inf)
            # A state that ends is shrunk to nothing, and its denominator may be NaN.
            goes_on = zeros(TILE) + segment == self.segment
            denominator = jnp.where(goes_on, denominator, 0.0)
            top = jnp.where(goes_on, top, LEAST)
            unit = jnp.maximum(top, exponents.max(axis=1))
            features = jnp.exp2(exponents - along(unit, 0, square)).astype(jnp.bfloat16)
        shrink = jnp.exp2(top - unit)
        features = features.astype(jnp.float32)
        denominator = denominator * shrink + features.sum(axis=1)
        if self.has_offsets:
            offset = offset * shrink
            offset += (features * along(read(others.numbers[1], 1), 1, square)).sum(axis=1)
        total *= along(shrink, 0, total.shape)
        total = add_weighted(total, features, others.vectors[1], self.interpret)
        plgpu.barrier_wait(self.written)
        found = self.largest_flag(others, segment)

        @pl.when(found == 0)
        def _() -> None:
            self.in_units(own, others)

        @pl.when(found > 0)
        def _() -> None:
            self.by_pairs(own, others)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.have_read)
        denominator += jnp.where(found > 2, jnp.nan, 0.0)
        return total, denominator, unit, offset, segment

    def exponents_of(self, vectors: Any, terms: Any) -> jax.Array:
        """Returns the exponents of the features of other tokens, of the own rows."""
        logits = products(self.other_rows, [vectors])
        terms = along(read(terms, 1), 1, logits.shape)
        # Keys that are not finite have terms of NaN.
        return jnp.where(terms > -jnp.inf, logits + terms, -jnp.inf)

    def largest_flag(self, others: Tile, segment: Any) -> jax.Array:
        """Returns 1 if a row has a flag, 2 if a token is not finite, and 3 if the state sees it."""
        terms = read(others.numbers[0], 1)
        bad = jnp.where(terms == terms, 0.0, 3.0)
        if self.scan.is_packed:
            bad = jnp.where(read(others.numbers[-1], 1) == segment, bad, jnp.minimum(bad, 2.0))
        flags = jnp.maximum(read(self.flags, 1), bad)
        own = self.found.at[self.group]
        # Rows of a matrix that are all the same, because a maximum over an axis is at hand.
        own[...] = along(flags, 1, (TILE, CHUNK)).max(axis=1)
        plgpu.commit_smem()
        return self.found[self.group, 0]

    def is_visible(self, own: Tile, others: Tile, start: int, size: int) -> jax.Array:
        """Returns which of some others of the chunk the own tokens see, ``[TILE, size]``."""
        square = (TILE, size)
        mine, theirs = (_iota(square, axis) for axis in (0, 1))
        mine += self.group * TILE
        theirs += start
        found = theirs >= mine if self.scan.is_reversed else theirs <= mine
        if not self.scan.is_packed:
            return found
        of_others = read(others.numbers[-1].at[pl.ds(start, size)], 1)
        return found & (along(read(own.numbers[-1], 0), 0, square) == along(of_others, 1, square))

    def if_in_segment(self, own: Tile, x: jax.Array, otherwise: float) -> jax.Array:
        """Returns ``[TILE, rows]`` where the own tokens see the state, and a number elsewhere."""
        if not self.scan.is_packed:
            return x
        is_seen = read(own.numbers[-1], 0) == self.segment
        return jnp.where(along(jnp.where(is_seen, 1.0, 0.0), 0, x.shape) > 0, x, otherwise)

    def wait(self) -> None:
        """Waits for the other warp group."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.written)
        plgpu.barrier_wait(self.written)

    def one_by_one(self, exponents: jax.Array, start: Any, add: Callable[..., Any]) -> Any:
        """Calls a function for each of ``TILE`` others, with its exponents of all rows.

        Args:
          exponents: Exponents of the others, of the own rows.
          start: Sums over none of them.
          add: Function of which is its column, of its exponents and of sums; returns the next sums.
        """

        def of_other(i: jax.Array, sums: Any) -> Any:
            is_other = _iota((TILE, TILE), 1) == i
            slot = slot_of(i, 2)
            mine = self.of_other.at[slot, self.half]
            mine[...] = jnp.where(is_other, exponents, 0.0).sum(axis=1)
            self.wait()
            return add(is_other, read(self.of_other.at[slot], 1), sums)

        return lax.fori_loop(0, TILE, of_other, start)


class Attention(Program):
    """The outputs of queries, and their log-sum-exps."""

    name = "causal_pass"

    def in_units(self, own: Tile, others: Tile) -> None:
        logits = products(own.vectors, self.own_rows)
        logits += along(read(self.units, 1), 1, logits.shape)
        top = logits.max(axis=1)
        weights = jnp.exp2(logits - along(top, 0, logits.shape))
        of_state = weights * along(read(self.weights, 1), 1, logits.shape)
        of_state = self.if_in_segment(own, of_state, 0.0)
        denominator = of_state.sum(axis=1)
        total = zeros(TILE, self.means.shape[-1])
        total = add_weighted(total, of_state, self.means, self.interpret)
        weights = weights.astype(jnp.bfloat16)
        for start in range(0, CHUNK, TILE):  # Not at once, because there are too few registers.
            keys = pl.ds(start, TILE)
            features = self.features.at[:, keys]
            pairs = add_weighted(zeros(TILE, TILE), weights, features, self.interpret)
            pairs = jnp.where(self.is_visible(own, others, start, TILE), pairs, 0.0)
            denominator += pairs.sum(axis=1)
            total = add_weighted(total, pairs, others.vectors[1].at[keys], self.interpret)
        self.write(own, (total, denominator, top), zeros(TILE))

    def by_pairs(self, own: Tile, others: Tile) -> None:
        key, value = others.vectors
        self.hide(value)
        logits = products(own.vectors, self.own_rows)
        of_state = logits + along(read(self.exponents, 1), 1, logits.shape)
        of_state = self.if_in_segment(own, of_state, -jnp.inf)
        sums = zeros(TILE, self.means.shape[-1]), zeros(TILE), zeros(TILE) + LEAST
        sums = flash.add(sums, of_state, self.means, self.interpret)
        logits += along(read(self.row_terms, 1), 1, logits.shape)
        square = (TILE, TILE)

        def add(is_key: jax.Array, exponents: jax.Array, pairs: jax.Array) -> jax.Array:
            of_rows = logits + along(exponents, 1, logits.shape)
            top = jnp.maximum(of_rows.max(axis=1), LEAST)
            total = jnp.exp2(of_rows - along(top, 0, logits.shape)).sum(axis=1)
            return jnp.where(is_key, along(top + jnp.log(total) * LOG2E, 0, square), pairs)

        for start in range(0, CHUNK, TILE):
            keys = pl.ds(start, TILE)
            exponents = self.exponents_of(key.at[keys], others.numbers[0].at[keys])
            pairs = self.one_by_one(exponents, zeros(*square), add)
            pairs = jnp.where(self.is_visible(own, others, start, TILE), pairs, -jnp.inf)
            sums = flash.add(sums, pairs, value.at[keys], self.interpret)
        terms = along(read(others.numbers[0], 1), 1, (TILE, CHUNK))
        is_bad = self.is_visible(own, others, 0, CHUNK) & (terms != terms)
        self.write(own, sums, jnp.where(is_bad, jnp.nan, 0.0).sum(axis=1))

    def hide(self, value: Any) -> None:
        """Sets components of the values that are not finite to zero, because 0 * NaN is not 0."""
        own = value.at[self.half]
        x = read(own).astype(jnp.float32)
        self.wait()  # Both warp groups have added the values to their states.
        own[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(jnp.bfloat16)
        self.wait()

    def write(self, own: Tile, sums: Any, bad: jax.Array) -> None:
        """Writes outputs in the place of their queries, and their log-sum-exps."""
        total, denominator, top = sums
        tile = read(own.vectors[0]).astype(jnp.float32)
        bad += jnp.where(jnp.abs(tile) <= LARGEST, 0.0, jnp.nan).sum(axis=1)
        nothing = denominator == 0
        inverse = jnp.where(nothing, 0.0, 1 / jnp.where(nothing, 1.0, denominator))
        out = total * along(inverse, 0, total.shape)
        # A state of keys that are not finite shows here alone.
        bad += jnp.where(jnp.abs(out) < jnp.inf, 0.0, jnp.nan).sum(axis=1)
        out += along(bad, 0, total.shape)
        own.vectors[0][...] = out.astype(jnp.bfloat16)
        lse = jnp.where(nothing, -jnp.inf, top + jnp.log(denominator) * LOG2E)
        self.found.at[self.group][...] = lse + bad


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
