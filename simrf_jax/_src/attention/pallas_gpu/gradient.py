"""The gradient of softmax attention for one side, rows, keys or queries, in a Mosaic GPU kernel.

An attention gives a vector x of one side and a vector y of the other the weight
``p = exp2(x . y + a + b)``, with numbers a of x and b of y. The gradient of a logit is
``g = p (u . z - c - e)``, where u and c belong to x, and z and e to y. The sums over the other side
are the gradients ``sum g y`` of x, ``sum p z`` of u and ``sum g`` of a. So one reduction computes
the gradients of rows, where u are the gradients of their outputs, and of keys, where u are values.
"""

from __future__ import annotations

import dataclasses
import math
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

LN2 = math.log(2)


def side_of(
    are_tokens: bool,
    vectors: tuple[jax.Array, ...],
    others: jax.Array,
    terms: jax.Array,
    offsets: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> Side:
    """Returns a side of an attention.

    Args:
      are_tokens: True for tokens.
      vectors: x or y, as parts that are added.
      others: u or z, in the same layout.
      terms: a or b; minus infinity where p must be 0, whatever the other numbers are.
      offsets: c or e, or None for zeros.
      positions: Positions of tokens, for a band.
    """
    given = ((terms, -math.inf), (offsets, 0.0), (positions, math.inf))
    numbers, fills = zip(*((x, fill) for x, fill in given if x is not None), strict=True)
    return Side(are_tokens, (*vectors, others), numbers, fills)


class OfOutputs(NamedTuple):
    """The numbers and vectors of queries that the gradients of an attention need.

    Attributes:
      is_good: False where an output is not finite or a query sees no key, ``[B, T, N, 1]``.
      terms: a, ``[B, N, T or more]``.
      offsets: c, ``[B, N, T]``.
      others: u, zeros where a query is not good, ``[B, T, N, D]``.
    """

    is_good: jax.Array
    terms: jax.Array
    offsets: jax.Array
    others: jax.Array

    @classmethod
    def of(cls, out: jax.Array, lse: jax.Array, of_out: jax.Array) -> OfOutputs:
        """Returns it for outputs, their log-sum-exps and their gradients."""
        is_finite = jnp.isfinite(lse)
        terms = jnp.where(is_finite, -lse, -jnp.inf)
        is_good = jnp.swapaxes(is_finite[..., : out.shape[1]], 1, 2)[..., None]
        offsets = jnp.where(is_good, of_out.astype(jnp.float32) * out.astype(jnp.float32), 0)
        offsets = jnp.swapaxes(jnp.sum(offsets, axis=-1), 1, 2)
        return cls(is_good, terms, offsets, jnp.where(is_good, of_out, 0))  # 0 * NaN is not 0.


def gradients(
    side: Side,
    other: Side,
    num_heads: int,
    interpret: Any,
    *,
    others: bool,
    terms: bool,
    band: Band | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of a side, in its layout, those of rows in float32.

    Args:
      side: The side whose gradients are computed.
      other: The other side.
      num_heads: Number of heads for which there are gradients.
      interpret: Parameters of the interpreter, or None to compile.
      others: True to return ``sum p z``, too.
      terms: True to return ``sum g``, too, ``[B, heads, padded length]``.
      band: The others that have weights, for tokens; None for all.

    Returns:
      First ``sum g y``, times log 2, because the logits are to base 2.
    """
    batch = side.numbers[0].shape[0]
    gradient = _Gradient(side, other, interpret, others, terms, band)
    found = reduce(gradient, batch, num_heads, interpret)
    if side.are_tokens:
        return found
    return tuple(jnp.sum(x, axis=0, dtype=jnp.float32) for x in found)


@dataclasses.dataclass(frozen=True)
class _Gradient(Reduction):
    """The sums of a gradient, of which those of ``others`` and ``terms`` may be left out."""

    name: ClassVar[str] = "gradient_pass"
    own: Side
    other: Side
    interpret: Any
    others: bool
    terms: bool
    band: Band | None

    @property
    def dims(self) -> tuple[int, ...]:
        *_, vectors, others = (x.shape[-1] for x in self.own.vectors)
        return (vectors, others) if self.others else (vectors,)

    @property
    def width(self) -> int:
        return 64

    @property
    def num_numbers(self) -> int:
        return int(self.terms)

    def start(self) -> Any:
        return [zeros(TILE, dim) for dim in self.dims], zeros(TILE) if self.terms else None

    def add(self, sums: Any, own: Tile, other: Tile) -> Any:
        (of_vectors, *of_others), of_terms = sums
        last = None if self.band is None else -1  # Positions are the last numbers.
        (*mine, my_others), (term, *my_offsets) = own.vectors, own.numbers[:last]
        (*vectors, others), (other_term, *offsets) = other.vectors, other.numbers[:last]
        square = (TILE, others.shape[-2])
        shift = along(read(term, 0), 0, square) + along(read(other_term, 1), 1, square)
        weights = products(mine, vectors) + shift
        is_seen = shift > -jnp.inf
        if self.band is not None:
            is_seen &= self.band.holds(own, other)
        weights = jnp.where(is_seen, jnp.exp2(weights), 0.0)
        if self.others:  # First, because then fewer registers are in use.
            of_others = [add_weighted(of_others[0], weights, others, self.interpret)]
        of_weights = products([my_others], [others])
        for x in my_offsets:
            of_weights -= along(read(x, 0), 0, square)
        for x in offsets:
            of_weights -= along(read(x, 1), 1, square)
        of_logits = jnp.where(weights > 0, weights * of_weights, 0.0)
        if self.terms:
            of_terms += of_logits.sum(axis=1)
        # The first part of W is as exact as the weights.
        of_vectors = add_weighted(of_vectors, of_logits, vectors[0], self.interpret)
        return [of_vectors, *of_others], of_terms

    def finish(self, sums: Any, own: Tile) -> tuple[list[jax.Array], list[jax.Array]]:
        (of_vectors, *of_others), of_terms = sums
        return [of_vectors * LN2, *of_others], [of_terms] if self.terms else []
