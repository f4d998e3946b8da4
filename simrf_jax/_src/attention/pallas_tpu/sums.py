"""Sums that queries read of some of their keys, which can be merged with those of other keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.inputs.call import quotient
from simrf_jax._src.attention.pallas_tpu.heads import HIDDEN

# Numbers of each query besides its numerators, padded to one tile of float32.
ROWS = 8


class Sums(NamedTuple):
    """Sums that queries read of some of their keys, by a kernel.

    Attributes:
      numerators: ``[B, N, D, T]``, weighted sums of the values.
      rows: ``[B, N, ROWS, T]`` in float32: the denominators; the exponents of the units of both, to
        base 2, ``HIDDEN`` where no key is visible; and 1 where a query or a key that it sees is not
        finite, and 0 elsewhere. No sum includes such queries and keys.
    """

    numerators: Any
    rows: Any

    def times(self, factors: jax.Array) -> Sums:
        """Returns the sums multiplied by 2 to the power of ``[B, N, T]``."""
        units = jax.lax.stop_gradient(self.rows[:, :, 1]) + factors
        return self._replace(rows=self.rows.at[:, :, 1].set(units))


def rows_of_sums(denominators: jax.Array, units: jax.Array, poisoned: jax.Array) -> jax.Array:
    """Returns the rows of ``Sums``, ``[ROWS, tile]``, from one ``[1, tile]`` for each.

    The units of a query that sees no key might be those of keys after it, so they are left out.
    """
    row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, denominators.shape[1]), 0)
    units = jnp.where(denominators > 0, units, HIDDEN)
    flags = jnp.where(poisoned, 1.0, 0.0)
    return jnp.where(row == 0, denominators, jnp.where(row == 1, units, flags))


def merge(parts: list[Sums]) -> jax.Array:
    """Returns the outputs ``[B, N, D, T]`` of all keys; zeros where no key is visible.

    Args:
      parts: Sums over disjoint sets of keys.
    """
    units = [part.rows[:, :, 1] for part in parts]
    most = jax.lax.stop_gradient(jnp.maximum(jax.tree.reduce(jnp.maximum, units), HIDDEN))
    weights = [jnp.exp2(unit - most) for unit in units]
    both = list(zip(weights, parts, strict=True))
    denominators = sum(weight * part.rows[:, :, 0] for weight, part in both)
    nothing = denominators == 0
    divisors = jnp.where(nothing, 1, denominators)
    inverse = jnp.where(nothing, 0, quotient(jnp.ones_like(divisors), divisors))
    numerators = sum(weight[:, :, None] * part.numerators for weight, part in both)
    poisoned = sum(jax.lax.stop_gradient(part.rows[:, :, 2]) for part in parts) > 0
    out = jnp.where(poisoned[:, :, None], jnp.nan, numerators * inverse[:, :, None])
    return out.astype(parts[0].numerators.dtype)
