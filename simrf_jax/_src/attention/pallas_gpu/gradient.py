"""The gradient of softmax attention for one side, rows or keys, in a Mosaic GPU kernel.

An attention gives a vector x of one side and a vector y of the other the weight
``p = exp2(x . y + a + b)``, with numbers a of x and b of y. The gradient of a logit is
``g = p (u . z - c - e)``, where u and c belong to x, and z and e to y. The sums over the other side
are the gradients ``sum g y`` of x, ``sum p z`` of u and ``sum g`` of a. So one kernel computes the
gradients of rows, where u are the gradients of their outputs, and of keys, where u are values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from simrf_jax._src.attention.pallas_gpu.tiles import (
    REGISTERS,
    STAGES,
    TILE,
    WARP_GROUPS,
    Copy,
    Place,
    Vectors,
    add_weighted,
    along,
    call,
    ceil_div,
    load,
    memory,
    num_parts,
    products,
    read,
    slot_of,
    store,
    zeros,
)

LN2 = math.log(2)


class Side(NamedTuple):
    """One side of an attention.

    Attributes:
      vectors: x or y.
      others: u or z, in the same layout.
      terms: a or b, ``[B, heads, padded length]``; minus infinity where p must be 0, whatever the
        other numbers are.
      offsets: c or e, in the same layout, or None for zeros.
    """

    vectors: Vectors
    others: Vectors
    terms: jax.Array
    offsets: jax.Array | None = None

    def vector_arrays(self) -> tuple[jax.Array, ...]:
        """Returns the arrays of the vectors, part by part, the other vectors last."""
        return (*self.vectors.parts, *self.others.parts)

    def number_arrays(self, length: int) -> tuple[jax.Array, ...]:
        """Returns the terms and, if there are any, the offsets, padded to a length."""

        def padded(x: jax.Array, fill: float) -> jax.Array:
            padding = [(0, 0), (0, 0), (0, max(0, length - x.shape[-1]))]
            return jnp.pad(x, padding, constant_values=fill)

        terms = padded(self.terms, -jnp.inf)
        return (terms,) if self.offsets is None else (terms, padded(self.offsets, 0))


def gradients(
    side: Side, other: Side, num_heads: int, interpret: Any, *, others: bool, terms: bool
) -> tuple[jax.Array, ...]:
    """Returns the gradients of a side, in its layout, those of rows in float32.

    Args:
      side: The side whose gradients are computed.
      other: The other side.
      num_heads: Number of heads for which there are gradients.
      interpret: Parameters of the interpreter, or None to compile.
      others: True to return ``sum p z``, too.
      terms: True to return ``sum g``, too, ``[B, heads, padded length]``.

    Returns:
      First ``sum g y``, times log 2, because the logits are to base 2.
    """
    own, batch = side.vectors, side.terms.shape[0]
    tiles = ceil_div(own.length, TILE * WARP_GROUPS)
    parts = 1 if own.are_tokens else num_parts(batch * num_heads * tiles, other.vectors.length)
    num = ceil_div(other.vectors.length, TILE * parts)
    padded = ceil_div(own.length, TILE) * TILE
    shape = (batch, own.length, num_heads) if own.are_tokens else (batch, num_heads, padded)

    def output(dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((parts * shape[0], *shape[1:], dim), jnp.bfloat16)

    dims = [own.dim, side.others.dim] if others else [own.dim]
    outputs = [output(dim) for dim in dims]
    if terms:
        outputs.append(jax.ShapeDtypeStruct((parts * batch, num_heads, padded), jnp.float32))
    vectors, streamed = side.vector_arrays(), other.vector_arrays()
    numbers = side.number_arrays(padded)
    streamed_numbers = other.number_arrays(num * TILE * parts)
    num_own, num_streamed = len(vectors) + len(numbers), len(streamed) + len(streamed_numbers)
    scratch = {
        "own_tiles": [memory(WARP_GROUPS, TILE, x.shape[-1]) for x in vectors],
        "own_numbers": [plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32) for _ in numbers],
        "tiles": [memory(STAGES, TILE, x.shape[-1]) for x in streamed],
        "numbers": [plgpu.SMEM((STAGES, TILE), jnp.float32) for _ in streamed_numbers],
        # Of one output after the other, because two may not fit.
        "out_tiles": {dim: memory(WARP_GROUPS, TILE, dim) for dim in dims},
        "out_numbers": plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=num_own, num_barriers=WARP_GROUPS),
        "full": plgpu.Barrier(num_arrivals=num_streamed, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=STAGES),
    }

    def gradient_pass(*refs: Any, **memory: Any) -> None:
        own_refs, refs = refs[:num_own], refs[num_own:]
        streamed_refs, out_refs = refs[:num_streamed], refs[num_streamed:]
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, group = lax.axis_index("part"), lax.axis_index("warp_group")
        start = (lax.axis_index("tile") * WARP_GROUPS + group) * TILE

        def copies(refs: Any, tiles: Any, numbers: Any, are_tokens: bool) -> list[Copy]:
            of_vectors = zip(refs[: len(tiles)], tiles, strict=True)
            of_numbers = zip(refs[len(tiles) :], numbers, strict=True)
            return [Copy(*pair, are_tokens) for pair in of_vectors] + [
                Copy(*pair) for pair in of_numbers
            ]

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            tiles, numbers = memory["tiles"], memory["numbers"]
            of_other = copies(streamed_refs, tiles, numbers, other.vectors.are_tokens)
            load(place, of_other, memory["full"], memory["free"], part * (num * TILE), num)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            loaded, numbers = memory["loaded"].at[group], memory["own_numbers"]
            for copy in copies(own_refs, memory["own_tiles"], numbers, own.are_tokens):
                source = place.of(copy.source, start, copy.are_tokens)
                plgpu.copy_gmem_to_smem(source, copy.target.at[group], loaded)
            plgpu.barrier_wait(loaded)
            mine = [tile.at[group] for tile in memory["own_tiles"]]
            term, *offset = (read(x.at[group], 0) for x in numbers)
            square = (TILE, TILE)

            def step(i: jax.Array, carry: Any) -> Any:
                of_vectors, of_others, of_terms = carry
                slot = slot_of(i)
                plgpu.barrier_wait(memory["full"].at[slot])
                tiles = [tile.at[slot] for tile in memory["tiles"]]
                terms_of_step, *offset_of_step = (x.at[slot] for x in memory["numbers"])
                shift = along(term, 0, square) + along(read(terms_of_step, 1), 1, square)
                logits = products(mine[:-1], tiles[:-1]) + shift
                weights = jnp.where(shift > -jnp.inf, jnp.exp2(logits), 0.0)
                if others:  # First, because then fewer registers are in use.
                    of_others = add_weighted(of_others, weights, tiles[-1], interpret)
                of_weights = products(mine[-1:], tiles[-1:])
                for x in offset:
                    of_weights -= along(x, 0, square)
                for x in offset_of_step:
                    of_weights -= along(read(x, 1), 1, square)
                of_logits = jnp.where(weights > 0, weights * of_weights, 0.0)
                if terms:
                    of_terms += of_logits.sum(axis=1)
                # The first part of W is as exact as the weights.
                of_vectors = add_weighted(of_vectors, of_logits, tiles[0], interpret)
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory["free"].at[slot])
                return of_vectors, of_others, of_terms

            carry = (
                zeros(TILE, own.dim),
                zeros(TILE, side.others.dim) if others else None,
                zeros(TILE) if terms else None,
            )
            of_vectors, of_others, of_terms = lax.fori_loop(0, num, step, carry)
            to = Place(part * batch + place.batch, place.head, num_heads)
            for x, ref in zip((of_vectors * LN2, of_others), out_refs, strict=False):
                if x is not None:
                    tile = memory["out_tiles"][x.shape[-1]].at[group]
                    tile[...] = x.astype(jnp.bfloat16)
                    store(tile, to.of(ref, start, own.are_tokens))
            if terms:
                numbers = memory["out_numbers"].at[group]
                numbers[...] = of_terms
                store(numbers, to.of(out_refs[-1], start))

    grid = (batch, num_heads, parts, tiles)
    arrays = (*vectors, *numbers, *streamed, *streamed_numbers)
    found = call(gradient_pass, arrays, outputs, scratch, grid, interpret)
    if own.are_tokens:
        return tuple(found)
    return tuple(
        jnp.sum(x.reshape(parts, batch, *x.shape[1:]), axis=0, dtype=jnp.float32) for x in found
    )
