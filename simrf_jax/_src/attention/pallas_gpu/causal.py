r"""Causal random-feature attention in a Mosaic GPU kernel.

A program goes through the chunks of a head in order, and carries what the rows of W have read of
the keys so far: one warp group for each half of the rows. For each chunk,

1. each row adds the keys of the chunk to its state. Before, it writes the mean of the values, as it
   was, and the features of the keys of the chunk to shared memory, in the row's unit: the largest
   exponent of the state and the chunk.
2. each query reads the state, and the keys of its chunk up to its own: the products of its features
   with theirs are sums over the rows, so that two matrix products read the chunk.

In a unit, the keys before a query may be too small for a number, because of a larger key after it.
Then the features of each pair have a unit of their own, key by key (``_pairs``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from simrf_jax._src.attention.pallas_gpu import flash
from simrf_jax._src.attention.pallas_gpu.flash import LARGEST, LEAST
from simrf_jax._src.attention.pallas_gpu.kernels import (
    REGISTERS,
    REGISTERS_TO_LOAD,
    SMS,
    WARP_GROUPS,
    Side,
    launch,
    slot_of,
)
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
from simrf_jax._src.attention.pallas_inputs import LOG2E

CHUNK = ROWS = TILE * WARP_GROUPS
STAGES = 2  # Chunks that are loaded at once.
LEAST_CHUNKS = 4  # Of a program; fewer would not repay the work of another one.
LIMIT = 100.0  # Exponents further below their unit may be too small.


def attend(
    query: jax.Array,
    keys: Side,
    query_rows: tuple[jax.Array, ...],
    key_rows: tuple[jax.Array, ...],
    row_terms: jax.Array,
    interpret: Any,
) -> jax.Array:
    """Lets each query attend to the keys up to its own.

    A key or a value that is not finite, which a term of NaN marks, turns the outputs from its own
    query on into NaN, and a query that is not, its own output.

    Args:
      query: ``[B, T, N, H]``.
      keys: As many keys, their values and their terms; minus infinity hides one.
      query_rows: W of queries, to base 2, as parts ``[1, 1 or K, ROWS, H]``.
      key_rows: W of keys.
      row_terms: Logarithms of what multiplies the features of a row, ``[1, 1 or K, ROWS]``.
      interpret: Parameters of the interpreter, or None to compile.

    Returns:
      ``[B, T, N, D]``.
    """
    batch, length, num_heads, _ = query.shape
    dim = keys.vectors[1].shape[-1]
    chunks = ceil_div(length, CHUNK)
    parts = max(1, min(SMS // (batch * num_heads), chunks // LEAST_CHUNKS))
    num = ceil_div(chunks, parts)  # Chunks of a program.
    tokens = Side(True, (query, *keys.vectors), keys.numbers, keys.fills)
    rows = Side(False, (*query_rows, *key_rows), (row_terms,), (-jnp.inf,))
    before: list[jax.Array] = []
    if parts > 1:
        num_key_heads = keys.vectors[0].shape[2]
        side = Side(False, key_rows)
        before = _before(flash.attend_in_parts(side, keys, num_key_heads, parts, interpret))
    scratch = {
        "row_tiles": rows.memory(ROWS),
        "tiles": tokens.memory(STAGES, CHUNK),
        "means": memory(ROWS, dim),
        "features": memory(ROWS, CHUNK),
        # Of rows: units, weights and exponents of the state, and flags.
        "numbers": [plgpu.SMEM((ROWS,), jnp.float32) for _ in range(4)],
        "of_key": plgpu.SMEM((2, ROWS), jnp.float32),
        "found": plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=len(rows.arrays(0)) + len(before)),
        "full": plgpu.Barrier(num_arrivals=len(tokens.arrays(0)), num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=STAGES),
        "written": plgpu.Barrier(num_arrivals=WARP_GROUPS),
        "have_read": plgpu.Barrier(num_arrivals=WARP_GROUPS),
    }

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
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, group = lax.axis_index("part"), lax.axis_index("warp_group")
        first = part * num

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS_TO_LOAD, action="decrease")
            rows.copy(place, 0, row_refs, row_tiles, loaded)
            if before:
                of_part = Place(part * batch + place.batch, place.head, num_heads)
                targets = memory["means"], memory["numbers"][0]
                for source, target in zip(before_refs, targets, strict=True):
                    plgpu.copy_gmem_to_smem(of_part.of(source, 0, ROWS), target, loaded)

            def load(step: Any, slot: Any) -> None:
                targets = [x.at[slot] for x in tiles]
                tokens.copy(place, (first + step) * CHUNK, token_refs, targets, full.at[slot])

            for step in range(min(STAGES, num)):
                load(step, step)

            @pl.loop(0, num)
            def _(step: jax.Array) -> None:
                slot = slot_of(step, STAGES)
                plgpu.barrier_wait(free.at[slot])

                @pl.when(step + STAGES < num)
                def _() -> None:
                    load(step + STAGES, slot)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            plgpu.barrier_wait(loaded)
            program = _Program(group, row_tiles, interpret=interpret, **memory)
            plgpu.barrier_arrive(memory["have_read"])

            def step(i: jax.Array, state: Any) -> Any:
                slot = slot_of(i, STAGES)
                plgpu.barrier_wait(full.at[slot])
                query, *others = (x.at[slot] for x in tiles)
                state = program.attend(state, query.at[program.half], *others)
                start = (first + i) * CHUNK + group * TILE
                target = place.of(out_refs[0], start, TILE, are_tokens=True)
                plgpu.copy_smem_to_gmem(query.at[program.half], target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free.at[slot])
                return state

            lax.fori_loop(0, num, step, program.start(is_first=not before))
            plgpu.barrier_wait(memory["have_read"])
            plgpu.wait_smem_to_gmem(0)

    outputs = [jax.ShapeDtypeStruct((batch, length, num_heads, dim), jnp.bfloat16)]
    arrays = [*tokens.arrays(parts * num * CHUNK), *rows.arrays(0), *before]
    grid = (batch, num_heads, parts, 1)
    (out,) = launch("causal_pass", kernel, arrays, outputs, scratch, grid, interpret)
    return out


def _before(found: flash.Read) -> list[jax.Array]:
    """Returns what rows read of all parts of the keys before each part, its number first."""
    out, lse = found
    parts = len(out)
    is_before = jnp.tri(parts, k=-1, dtype=bool)[..., None, None, None]
    of_parts = jnp.where(is_before, lse, -jnp.inf)
    top = jnp.max(of_parts, axis=1)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2(of_parts - top[:, None])
    total = jnp.sum(weights, axis=1)
    weights /= jnp.where(total == 0, 1, total)[:, None]
    out = jnp.where(jnp.isfinite(lse)[..., None], out, 0)  # 0 * NaN is not 0.
    out = jnp.einsum("ijbkm,jbkmd->ibkmd", weights, out, precision="highest")
    lse = top + jnp.log2(total)
    return [x.reshape(-1, *x.shape[2:]) for x in (out.astype(jnp.bfloat16), lse)]


class _Program:
    """A warp group's part of a program.

    Args:
      group: Number of the warp group.
      row_tiles: Rows of W of queries and of keys, two parts each, and their terms.
      interpret: Parameters of the interpreter, or None to compile.
      means, features, numbers, of_key, found: Shared memory.
      written, have_read: Barriers of the warp groups.
    """

    def __init__(
        self,
        group: jax.Array,
        row_tiles: Any,
        *,
        interpret: Any,
        means: Any,
        features: Any,
        numbers: Any,
        of_key: Any,
        found: Any,
        written: Any,
        have_read: Any,
    ):
        self.half = pl.ds(group * TILE, TILE)
        self.group, self.interpret = group, interpret
        self.query_rows, self.row_terms = row_tiles[:2], row_tiles[4]
        self.key_rows = [x.at[self.half] for x in row_tiles[2:4]]
        self.means, self.features, self.of_key, self.found = means, features, of_key, found
        self.units, self.weights, self.exponents, self.flags = numbers
        self.written, self.have_read = written, have_read

    def start(self, *, is_first: bool) -> Any:
        """Returns the state of the own rows before the first chunk: sums, as in ``flash``."""
        dim = self.means.shape[-1]
        if is_first:
            return zeros(TILE, dim), zeros(TILE), zeros(TILE) + LEAST
        lse = read(self.units.at[self.half], 0)
        means = read(self.means.at[self.half]).astype(jnp.float32)
        means += along(jnp.where(lse < jnp.inf, 0.0, jnp.nan), 0, means.shape)
        is_some = lse > LEAST
        return means, jnp.where(is_some, 1.0, 0.0), jnp.where(is_some, lse, LEAST)

    def attend(self, state: Any, query: Any, key: Any, value: Any, terms: Any) -> Any:
        """Writes the outputs of a tile of queries in their place, and returns the next state."""
        total, denominator, top = state
        exponents = self.exponents_of(key, terms)
        square = exponents.shape
        unit = jnp.maximum(top, exponents.max(axis=1))
        # What is below LIMIT may be lost.
        below = jnp.where(exponents > -jnp.inf, along(unit, 0, square) - exponents, 0.0).max(axis=1)
        nothing = denominator == 0
        some = jnp.where(nothing, 1.0, denominator)
        of_state = top + jnp.log(some) * LOG2E
        below = jnp.maximum(below, jnp.where(nothing, 0.0, unit - of_state))
        features = jnp.exp2(exponents - along(unit, 0, square)).astype(jnp.bfloat16)
        plgpu.barrier_wait(self.have_read)
        self.features.at[self.half][...] = features
        means = total * along(1 / some, 0, total.shape)
        self.means.at[self.half][...] = means.astype(jnp.bfloat16)
        row_terms = read(self.row_terms.at[self.half], 0)
        self.units.at[self.half][...] = unit + row_terms
        self.weights.at[self.half][...] = jnp.where(nothing, 0.0, jnp.exp2(of_state - unit))
        self.exponents.at[self.half][...] = jnp.where(nothing, -jnp.inf, of_state + row_terms)
        self.flags.at[self.half][...] = jnp.where(below > LIMIT, 1.0, 0.0)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.written)
        shrink = jnp.exp2(top - unit)
        denominator = denominator * shrink + features.astype(jnp.float32).sum(axis=1)
        total *= along(shrink, 0, total.shape)
        total = add_weighted(total, features, value, self.interpret)
        plgpu.barrier_wait(self.written)
        found = self.largest_flag(terms)

        @pl.when(found == 0)
        def _() -> None:
            self.write(query, *self.in_units(query, value), zeros(TILE))

        @pl.when(found > 0)
        def _() -> None:
            self.hide(value, found > 1)
            self.write(query, *self.by_pairs(query, key, value, terms), self.bad_keys(terms))

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.have_read)
        total += jnp.where(found > 1, jnp.nan, 0.0)
        return total, denominator, unit

    def exponents_of(self, key: Any, terms: Any) -> jax.Array:
        """Returns the exponents of the features of keys, of the own rows."""
        logits = products(self.key_rows, [key])
        terms = along(read(terms, 1), 1, logits.shape)
        # Keys that are not finite have terms of NaN.
        return jnp.where(terms > -jnp.inf, logits + terms, -jnp.inf)

    def largest_flag(self, terms: Any) -> jax.Array:
        """Returns 2 if a key is not finite, 1 if a row has a flag, and 0 otherwise."""
        terms = read(terms, 1)
        flags = jnp.maximum(read(self.flags, 1), jnp.where(terms == terms, 0.0, 2.0))
        own = self.found.at[self.group]
        # Rows of a matrix that are all the same, because a maximum over an axis is at hand.
        own[...] = along(flags, 1, (TILE, CHUNK)).max(axis=1)
        plgpu.commit_smem()
        return self.found[self.group, 0]

    def in_units(self, query: Any, value: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the sums that queries read, and their denominators."""
        logits = products([query], self.query_rows)
        logits += along(read(self.units, 1), 1, logits.shape)
        weights = jnp.exp2(logits - along(logits.max(axis=1), 0, logits.shape))
        of_state = weights * along(read(self.weights, 1), 1, logits.shape)
        denominator = of_state.sum(axis=1)
        total = zeros(TILE, self.means.shape[-1])
        total = add_weighted(total, of_state, self.means, self.interpret)
        weights = weights.astype(jnp.bfloat16)
        for start in range(0, CHUNK, TILE):  # Not at once, because there are too few registers.
            keys = pl.ds(start, TILE)
            features = self.features.at[:, keys]
            pairs = add_weighted(zeros(TILE, TILE), weights, features, self.interpret)
            pairs = jnp.where(self.is_visible(start, TILE), pairs, 0.0)
            denominator += pairs.sum(axis=1)
            total = add_weighted(total, pairs, value.at[keys], self.interpret)
        return total, denominator

    def is_visible(self, start: int, size: int) -> jax.Array:
        """Returns which of some keys of the chunk the queries see, ``[TILE, size]``."""
        queries, keys = (_iota((TILE, size), axis) for axis in (0, 1))
        return keys + start <= queries + self.group * TILE

    def bad_keys(self, terms: Any) -> jax.Array:
        """Returns NaN for the queries that see a key that is not finite, and 0 for others."""
        terms = along(read(terms, 1), 1, (TILE, CHUNK))
        is_bad = self.is_visible(0, CHUNK) & (terms != terms)
        return jnp.where(is_bad, jnp.nan, 0.0).sum(axis=1)

    def write(self, query: Any, total: jax.Array, denominator: jax.Array, bad: jax.Array) -> None:
        """Writes outputs in the place of their queries."""
        tile = read(query).astype(jnp.float32)
        bad += jnp.where(jnp.abs(tile) <= LARGEST, 0.0, jnp.nan).sum(axis=1)
        nothing = denominator == 0
        inverse = jnp.where(nothing, 0.0, 1 / jnp.where(nothing, 1.0, denominator))
        out = total * along(inverse, 0, total.shape) + along(bad, 0, total.shape)
        query[...] = out.astype(jnp.bfloat16)

    def hide(self, value: Any, is_needed: jax.Array) -> None:
        """Sets components of the values that are not finite to zero, because 0 * NaN is not 0."""

        @pl.when(is_needed)
        def _() -> None:
            own = value.at[self.half]
            x = read(own).astype(jnp.float32)
            self.meet()  # Both warp groups have added the values to their states.
            own[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(jnp.bfloat16)
            self.meet()

    def meet(self) -> None:
        """Waits for the other warp group."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.written)
        plgpu.barrier_wait(self.written)

    def by_pairs(self, query: Any, key: Any, value: Any, terms: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the sums that queries read, and their denominators, at any exponents."""
        logits = products([query], self.query_rows)
        of_state = logits + along(read(self.exponents, 1), 1, logits.shape)
        sums = zeros(TILE, self.means.shape[-1]), zeros(TILE), zeros(TILE) + LEAST
        sums = flash.add(sums, of_state, self.means, self.interpret)
        logits += along(read(self.row_terms, 1), 1, logits.shape)
        square = (TILE, TILE)
        for start in range(0, CHUNK, TILE):
            keys = pl.ds(start, TILE)
            exponents = self.exponents_of(key.at[keys], terms.at[keys])

            def of_key(i: jax.Array, pairs: Any, exponents: Any = exponents) -> Any:
                is_key = _iota(square, 1) == i
                slot = slot_of(i, 2)
                mine = self.of_key.at[slot, self.half]
                mine[...] = jnp.where(is_key, exponents, 0.0).sum(axis=1)
                self.meet()
                of_rows = logits + along(read(self.of_key.at[slot], 1), 1, logits.shape)
                peak = jnp.maximum(of_rows.max(axis=1), LEAST)
                total = jnp.exp2(of_rows - along(peak, 0, logits.shape)).sum(axis=1)
                return jnp.where(is_key, along(peak + jnp.log(total) * LOG2E, 0, square), pairs)

            pairs = lax.fori_loop(0, TILE, of_key, zeros(*square))
            pairs = jnp.where(self.is_visible(start, TILE), pairs, -jnp.inf)
            sums = flash.add(sums, pairs, value.at[keys], self.interpret)
        return sums[0], sums[1]


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
