"""The gradient of softmax attention for one side, rows or keys, in a Mosaic GPU kernel.

An attention has the weights ``p = exp2(x . y + a + b)`` of a vector x of one side and a vector y of
the other, with numbers a and b of each. With the gradient of the output, that of the logits is
``g = p (u . z - c - e)``, where u, c belong to x, and z, e to y. The sums over the other side are the
gradients ``sum g y`` of x, ``sum p z`` of u and ``sum g`` of a. So one kernel computes the gradients
of rows, where u are their outputs' gradients, and those of keys, where u are their values.
"""

from __future__ import annotations

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
    zeros,
)


class Side(NamedTuple):
    """One side of an attention.

    Attributes:
      vectors: x or y.
      others: u or z, in the same layout.
      terms: a or b, ``[B, heads, padded length]``; minus infinity where p must be 0, whatever the
        other numbers are.
      offsets: c or e, in the same layout.
    """

    vectors: Vectors
    others: Vectors
    terms: jax.Array
    offsets: jax.Array


class Gradients(NamedTuple):
    """Sums over the other side, in the layout of this side; in float32 for rows.

    Attributes:
      vectors: ``sum g y``.
      others: ``sum p z``, or None if it was not asked for.
      terms: ``sum g``, ``[B, heads, padded length]``, or None.
    """

    vectors: jax.Array
    others: jax.Array | None
    terms: jax.Array | None


def gradients(
    side: Side, other: Side, num_heads: int, interpret: Any, *, others: bool, terms: bool
) -> Gradients:
    """Returns the gradients of a side.

    Args:
      side: The side whose gradients are computed.
      other: The other side.
      num_heads: Number of heads for which there are gradients.
      interpret: Parameters of the interpreter, or None to compile.
      others: True to return ``sum p z``.
      terms: True to return ``sum g``.
    """
    own, batch = side.vectors, side.terms.shape[0]
    tiles = ceil_div(own.length, TILE * WARP_GROUPS)
    parts = 1 if own.are_tokens else num_parts(batch * num_heads * tiles, other.vectors.length)
    # Narrow heads leave registers for longer tiles.
    size = TILE if max(own.dim, side.others.dim) == TILE else TILE // 2
    num = ceil_div(other.vectors.length, size * parts)
    padded = ceil_div(own.length, TILE) * TILE
    dtype = jnp.bfloat16 if own.are_tokens else jnp.float32
    shape = (batch, own.length, num_heads) if own.are_tokens else (batch, num_heads, padded)

    def output(dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((parts * shape[0], *shape[1:], dim), dtype)

    dims = [own.dim, side.others.dim] if others else [own.dim]
    outputs = [output(dim) for dim in dims]
    if terms:
        outputs.append(jax.ShapeDtypeStruct((parts * batch, num_heads, padded), jnp.float32))
    own_arrays = (*own.parts, *side.others.parts)
    streamed = (*other.vectors.parts, *other.others.parts)
    numbers = [_padded(x, padded, fill) for x, fill in _numbers(side)]
    streamed_numbers = [_padded(x, num * size * parts, fill) for x, fill in _numbers(other)]
    num_own, num_streamed = len(own_arrays) + 2, len(streamed) + 2
    scratch = {
        "own_tiles": [memory(WARP_GROUPS, TILE, x.shape[-1]) for x in own_arrays],
        "own_numbers": plgpu.SMEM((2, WARP_GROUPS, TILE), jnp.float32),
        "tiles": [memory(STAGES, size, x.shape[-1]) for x in streamed],
        "numbers": plgpu.SMEM((2, STAGES, size), jnp.float32),
        "out_tiles": [memory(WARP_GROUPS, TILE, dim, dtype=dtype) for dim in dims],
        "out_numbers": plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=num_own, num_barriers=WARP_GROUPS),
        "full": plgpu.Barrier(num_arrivals=num_streamed, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=STAGES),
    }

    def body(*refs: Any, **memory: Any) -> None:
        own_refs, refs = refs[:num_own], refs[num_own:]
        streamed_refs, out_refs = refs[:num_streamed], refs[num_streamed:]
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, group = lax.axis_index("part"), lax.axis_index("warp_group")
        start = (lax.axis_index("tile") * WARP_GROUPS + group) * TILE

        def copies(refs: Any, tiles: Any, numbers: Any, are_tokens: bool) -> list[Copy]:
            found = [Copy(*pair, are_tokens) for pair in zip(refs[:-2], tiles, strict=True)]
            return [*found, *(Copy(refs[i - 2], numbers.at[i]) for i in range(2))]

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            of_other = copies(
                streamed_refs, memory["tiles"], memory["numbers"], other.vectors.are_tokens
            )
            first = part * (num * size)
            load(place, of_other, memory["full"], memory["free"], first, size, num)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            loaded = memory["loaded"].at[group]
            for copy in copies(
                own_refs, memory["own_tiles"], memory["own_numbers"], own.are_tokens
            ):
                source = place.of(copy.source, start, TILE, copy.are_tokens)
                plgpu.copy_gmem_to_smem(source, copy.target.at[group], loaded)
            plgpu.barrier_wait(loaded)
            mine = [tile.at[group] for tile in memory["own_tiles"]]
            term, offset = (read(memory["own_numbers"].at[i, group], 0) for i in range(2))
            square = (TILE, size)

            def step(i: jax.Array, carry: Any) -> Any:
                of_vectors, of_others, of_terms = carry
                slot = slot_of(i)
                plgpu.barrier_wait(memory["full"].at[slot])
                tiles = [tile.at[slot] for tile in memory["tiles"]]
                terms_of_step, offsets = (
                    along(read(memory["numbers"].at[i, slot], 1), 1, square) for i in range(2)
                )
                shift = along(term, 0, square) + terms_of_step
                is_seen = shift > -jnp.inf
                logits = products(mine[:-1], tiles[:-1], size)
                weights = jnp.where(is_seen, jnp.exp2(logits + shift), 0.0)
                of_weights = products(mine[-1:], tiles[-1:], size)
                of_weights -= along(offset, 0, square) + offsets
                of_logits = jnp.where(is_seen, weights * of_weights, 0.0)
                # The first part of W is as exact as the weights.
                of_vectors = add_weighted(of_vectors, of_logits, tiles[0], interpret)
                if others:
                    of_others = add_weighted(of_others, weights, tiles[-1], interpret)
                if terms:
                    of_terms += of_logits.sum(axis=1)
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory["free"].at[slot])
                return of_vectors, of_others, of_terms

            carry = (
                zeros(TILE, own.dim),
                zeros(TILE, side.others.dim) if others else None,
                zeros(TILE) if terms else None,
            )
            *found, of_terms = lax.fori_loop(0, num, step, carry)
            to = Place(part * batch + place.batch, place.head, num_heads)
            for x, tile in zip(found, memory["out_tiles"], strict=False):
                tile.at[group][...] = x.astype(dtype)
            if terms:
                memory["out_numbers"].at[group][...] = of_terms
            plgpu.commit_smem()
            for tile, ref in zip(memory["out_tiles"], out_refs, strict=False):
                target = to.of(ref, start, TILE, own.are_tokens)
                plgpu.copy_smem_to_gmem(tile.at[group], target)
            if terms:
                target = to.of(out_refs[-1], start, TILE, False)
                plgpu.copy_smem_to_gmem(memory["out_numbers"].at[group], target)
            plgpu.wait_smem_to_gmem(0)

    grid = (batch, num_heads, parts, tiles)
    arrays = (*own_arrays, *numbers, *streamed, *streamed_numbers)
    found = list(call(body, arrays, outputs, scratch, grid, interpret))
    if not own.are_tokens:  # The parts and, for the heads of keys, their query heads are summed.
        found = [jnp.sum(x.reshape(parts, batch, *x.shape[1:]), axis=0) for x in found]
    of_terms = found.pop() if terms else None
    return Gradients(found[0], found[1] if others else None, of_terms)


def _numbers(side: Side) -> tuple[tuple[jax.Array, float], ...]:
    return (side.terms, -jnp.inf), (side.offsets, 0.0)


def _padded(x: jax.Array, length: int, fill: float) -> jax.Array:
    missing = length - x.shape[-1]
    if missing <= 0:
        return x
    return jnp.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=fill)
