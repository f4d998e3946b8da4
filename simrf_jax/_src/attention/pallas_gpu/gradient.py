"""The gradient of softmax attention for one side, rows or keys, in a Mosaic GPU kernel.

An attention gives a vector x of one side and a vector y of the other the weight
``p = exp2(x . y + a + b)``, with numbers a of x and b of y. The gradient of a logit is
``g = p (u . z - c - e)``, where u and c belong to x, and z and e to y. The sums over the other side
are the gradients ``sum g y`` of x, ``sum p z`` of u and ``sum g`` of a. So one reduction computes
the gradients of rows, where u are the gradients of their outputs, and of keys, where u are values.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.pallas_gpu.kernels import Reduction, Side, Tile, reduce
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
) -> Side:
    """Returns a side of an attention.

    Args:
      are_tokens: True for tokens.
      vectors: x or y, as parts that are added.
      others: u or z, in the same layout.
      terms: a or b; minus infinity where p must be 0, whatever the other numbers are.
      offsets: c or e, or None for zeros.
    """
    numbers = (terms,) if offsets is None else (terms, offsets)
    return Side(are_tokens, (*vectors, others), numbers, (-math.inf, 0.0)[: len(numbers)])


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
    batch = side.numbers[0].shape[0]
    found = reduce(_Gradient(side, other, interpret, others, terms), batch, num_heads, interpret)
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
        (*mine, my_others), (term, *my_offsets) = own
        (*vectors, others), (other_term, *offsets) = other
        square = (TILE, others.shape[-2])
        shift = along(read(term, 0), 0, square) + along(read(other_term, 1), 1, square)
        weights = products(mine, vectors) + shift
        weights = jnp.where(shift > -jnp.inf, jnp.exp2(weights), 0.0)
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
