"""Softmax attention with a term for each key, and its log-sum-exp, in a Mosaic GPU kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.pallas_gpu.kernels import Band, Reduction, Side, Tile, reduce
from simrf_jax._src.attention.pallas_gpu.tiles import (
    TILE,
    add_weighted,
    along,
    products,
    read,
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


def attend(
    rows: Side,
    keys: Side,
    num_heads: int,
    interpret: Any,
    *,
    band: Band | None = None,
    parts: int | None = None,
) -> Read:
    """Lets each row attend to all keys, or to those in a band.

    A row or a value that is not finite turns the outputs of the row, or of all rows, into NaN. The
    keys must be finite, except those whose terms are NaN.

    Args:
      rows: Rows that attend: queries, or the rows of W, as parts that are added.
      keys: Keys, whose products with the rows are logits to base 2, as parts, and their values;
        and terms to add to the logits, of which minus infinity hides a key.
      num_heads: Number of heads of the rows.
      interpret: Parameters of the interpreter, or None to compile.
      band: The band, for tokens that attend.
      parts: Number of parts of the keys with the same number of tiles, to each of which rows of W
        attend alone; the results, in float32, have the parts along a first axis.
    """
    batch = keys.numbers[0].shape[0]
    attention = _Attention(rows, keys, interpret, band)
    found = reduce(attention, batch, num_heads, interpret, dtype=jnp.float32, parts=parts)
    if rows.are_tokens or parts is not None:
        return Read(*found)
    out, lse = found
    if len(out) == 1:
        return Read(out[0], lse[0])
    weights, lse = shares(lse)
    return Read(jnp.sum(weights[..., None] * out, axis=0).astype(jnp.bfloat16), lse)


def shares(lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns weights with which to sum outputs along a first axis, and the log-sum-exps of all."""
    top = jnp.max(lse, axis=0)
    # Where no key is visible, all have minus infinity, and outputs of zeros.
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp2(lse - top[None])
    total = jnp.sum(weights, axis=0)
    return weights / jnp.where(total == 0, 1, total)[None], top + jnp.log2(total)


@dataclasses.dataclass(frozen=True)
class _Attention(Reduction):
    """The outputs of rows, and their log-sum-exps."""

    name: ClassVar[str] = "attention_pass"
    own: Side
    other: Side
    interpret: Any
    band: Band | None

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.other.vectors[-1].shape[-1],)

    @property
    def num_numbers(self) -> int:
        return 1

    @property
    def width(self) -> int:
        # As many as leave memory for three tiles or more.
        return 128 if sum(x.shape[-1] for x in self.other.vectors) <= 128 else 64

    def start(self) -> Any:
        return zeros(TILE, *self.dims), zeros(TILE), zeros(TILE) + LEAST

    def add(self, sums: Any, own: Tile, other: Tile) -> Any:
        *keys, values = other.vectors
        logits = products(own.vectors, keys)
        logits += along(read(other.numbers[0], 1), 1, logits.shape)
        if self.band is not None:
            logits = jnp.where(self.band.holds(own, other), logits, -jnp.inf)
        return add(sums, logits, values, self.interpret)

    def finish(self, sums: Any, own: Tile) -> tuple[list[jax.Array], list[jax.Array]]:
        total, denominator, top = sums
        nothing = denominator == 0
        inverse = jnp.where(nothing, 0.0, 1 / jnp.where(nothing, 1.0, denominator))
        out = total * along(inverse, 0, total.shape)
        if self.own.are_tokens:
            tile = read(own.vectors[0]).astype(jnp.float32)
            bad = jnp.where(jnp.abs(tile) <= LARGEST, 0.0, jnp.nan).sum(axis=1)
        else:
            bad = jnp.where(jnp.abs(out) < jnp.inf, 0.0, jnp.nan).sum(axis=1)
        lse = top + jnp.log(denominator) * LOG2E
        return [out + along(bad, 0, out.shape)], [jnp.where(nothing, -jnp.inf, lse) + bad]


def add(sums: Any, logits: jax.Array, values: Any, interpret: Any) -> Any:
    """Adds values in shared memory to the sums, the denominators and the maxima of rows."""
    total, denominator, top = sums
    new = jnp.maximum(top, logits.max(axis=1))
    shrink = jnp.exp2(top - new)
    weights = jnp.exp2(logits - along(new, 0, logits.shape))
    denominator = denominator * shrink + weights.sum(axis=1)
    total *= along(shrink, 0, total.shape)
    return add_weighted(total, weights, values, interpret), denominator, new
