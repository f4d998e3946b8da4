"""Softmax attention with a term for each key, and its log-sum-exp, in a Mosaic GPU kernel."""

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
    store,
    zeros,
)
from simrf_jax._src.attention.pallas_inputs import LOG2E

LARGEST = 1e31  # Larger components of a query count as not finite, as in the XLA implementation.
LEAST = -1e30  # Below all logits.


class Read(NamedTuple):
    """Outputs of an attention, and the log-sum-exp of its logits.

    Attributes:
      out: In the layout of the rows that attend, zeros where no key is visible.
      lse: ``[B, heads, padded length]``, to base 2; minus infinity where no key is visible, and NaN
        where the output is NaN.
    """

    out: jax.Array
    lse: jax.Array


def attend(rows: Vectors, keys: Vectors, values: Vectors, terms: jax.Array, interpret: Any) -> Read:
    """Lets each row attend to all keys.

    A row or a value that is not finite turns the outputs of the row, or of all rows, into NaN. The
    keys must be finite, except those whose terms are NaN.

    Args:
      rows: Rows that attend: queries, or the rows of W.
      keys: Keys, whose products with the rows are logits to base 2.
      values: Values in the layout of the keys.
      terms: ``[B, heads, padded length]`` to add to the logits of the keys; minus infinity hides
        one, and those of the padding are minus infinity.
      interpret: Parameters of the interpreter, or None to compile.
    """
    batch = terms.shape[0]
    num_heads = rows.parts[0].shape[2] if rows.are_tokens else terms.shape[1]
    tiles = ceil_div(rows.length, TILE * WARP_GROUPS)
    parts = 1 if rows.are_tokens else num_parts(batch * num_heads * tiles, keys.length)
    num = ceil_div(keys.length, TILE * parts)  # Tiles of keys of a part.
    padding = parts * num * TILE - terms.shape[-1]
    if padding:
        terms = jnp.pad(terms, [(0, 0), (0, 0), (0, padding)], constant_values=-jnp.inf)
    padded = ceil_div(rows.length, TILE) * TILE
    dtype = jnp.bfloat16 if parts == 1 else jnp.float32
    shape = (batch, rows.length, num_heads) if rows.are_tokens else (batch, num_heads, padded)
    outputs = (
        jax.ShapeDtypeStruct((parts * shape[0], *shape[1:], values.dim), dtype),
        jax.ShapeDtypeStruct((parts * batch, num_heads, padded), jnp.float32),
    )
    scratch = {
        "row_tiles": memory(WARP_GROUPS, len(rows.parts), TILE, rows.dim),
        "key_tiles": [memory(STAGES, TILE, keys.dim) for _ in keys.parts],
        "value_tiles": memory(STAGES, TILE, values.dim),
        "term_tiles": plgpu.SMEM((STAGES, TILE), jnp.float32),
        "out_tiles": memory(WARP_GROUPS, TILE, values.dim, dtype=dtype),
        "lse_tiles": plgpu.SMEM((WARP_GROUPS, TILE), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=len(rows.parts), num_barriers=WARP_GROUPS),
        "full": plgpu.Barrier(num_arrivals=len(keys.parts) + 2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=WARP_GROUPS, num_barriers=STAGES),
    }

    def attention_pass(
        *refs: Any,
        row_tiles: Any,
        key_tiles: Any,
        value_tiles: Any,
        term_tiles: Any,
        out_tiles: Any,
        lse_tiles: Any,
        loaded: Any,
        full: Any,
        free: Any,
    ) -> None:
        row_refs, key_refs = refs[: len(rows.parts)], refs[len(rows.parts) : -4]
        value_ref, term_ref, out_ref, lse_ref = refs[-4:]
        place = Place(lax.axis_index("batch"), lax.axis_index("head"), num_heads)
        part, group = lax.axis_index("part"), lax.axis_index("warp_group")
        start = (lax.axis_index("tile") * WARP_GROUPS + group) * TILE

        @pl.when(group == WARP_GROUPS)
        def _() -> None:
            copies = [
                Copy(ref, tile, keys.are_tokens)
                for ref, tile in zip(key_refs, key_tiles, strict=True)
            ]
            copies.append(Copy(value_ref, value_tiles, values.are_tokens))
            copies.append(Copy(term_ref, term_tiles))
            load(place, copies, full, free, part * (num * TILE), num)

        @pl.when(group < WARP_GROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            own = [row_tiles.at[group, i] for i in range(len(rows.parts))]
            for ref, tile in zip(row_refs, own, strict=True):
                source = place.of(ref, start, rows.are_tokens)
                plgpu.copy_gmem_to_smem(source, tile, loaded.at[group])
            plgpu.barrier_wait(loaded.at[group])
            square = (TILE, TILE)

            def step(i: jax.Array, carry: Any) -> Any:
                total, denominator, top = carry
                slot = slot_of(i)
                plgpu.barrier_wait(full.at[slot])
                logits = products(own, [tile.at[slot] for tile in key_tiles])
                logits += along(read(term_tiles.at[slot], 1), 1, square)
                new = jnp.maximum(top, logits.max(axis=1))
                shrink = jnp.exp2(top - new)
                weights = jnp.exp2(logits - along(new, 0, square))
                denominator = denominator * shrink + weights.sum(axis=1)
                total *= along(shrink, 0, total.shape)
                total = add_weighted(total, weights, value_tiles.at[slot], interpret)
                # Ordinary reads, too, must be over before the next tile is copied.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                return total, denominator, new

            carry = (zeros(TILE, values.dim), zeros(TILE), zeros(TILE) + LEAST)
            total, denominator, top = lax.fori_loop(0, num, step, carry)
            nothing = denominator == 0
            inverse = jnp.where(nothing, 0.0, 1 / jnp.where(nothing, 1.0, denominator))
            out = total * along(inverse, 0, total.shape)
            if rows.are_tokens:
                tile = read(own[0]).astype(jnp.float32)
                bad = jnp.where(jnp.abs(tile) <= LARGEST, 0.0, jnp.nan).sum(axis=1)
            else:
                bad = jnp.where(jnp.abs(out) < jnp.inf, 0.0, jnp.nan).sum(axis=1)
            out_tiles.at[group][...] = (out + along(bad, 0, out.shape)).astype(dtype)
            lse = top + jnp.log(denominator) * LOG2E
            lse_tiles.at[group][...] = jnp.where(nothing, -jnp.inf, lse) + bad
            to = Place(part * batch + place.batch, place.head, num_heads)
            store(out_tiles.at[group], to.of(out_ref, start, rows.are_tokens))
            store(lse_tiles.at[group], to.of(lse_ref, start))

    grid = (batch, num_heads, parts, tiles)
    arrays = (*rows.parts, *keys.parts, *values.parts, terms)
    found = Read(*call(attention_pass, arrays, outputs, scratch, grid, interpret))
    return found if parts == 1 else _merged(found, parts)


def _merged(found: Read, parts: int) -> Read:
    """Merges the outputs for the parts of the keys."""
    out, lse = (x.reshape(parts, -1, *x.shape[1:]) for x in found)
    top = jnp.max(lse, axis=0, keepdims=True)
    # A row that no key reaches has minus infinity everywhere, and zeros.
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2(lse - top)
    total = jnp.sum(weights, axis=0, keepdims=True)
    weights /= jnp.where(total == 0, 1, total)
    out = jnp.sum(weights[..., None] * out, axis=0)
    return Read(out.astype(jnp.bfloat16), (top + jnp.log2(total))[0])
