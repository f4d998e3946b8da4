"""Paired projections: the rows of W and their negatives, of which only one half is multiplied."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from simrf_jax import one_line
from simrf_jax.projections.structured import Projection, StructuredProjection
from simrf_jax.projections.weighted import WeightedProjection


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class PairedProjection(StructuredProjection):
    """The rows of W and their negatives, for half the cost of projecting.

    With orthogonal rows it is a cross-polytope whose pairs share a norm, as
    ``draw_projection(..., coupling="cross_polytope", norms="pair")`` draws it, but for the order of
    the rows. Positive features of it are ``hyperbolic_features`` of the rows. It takes the place of
    an array for every feature map, in ``project`` and in attention.

    Attributes:
      rows: One row of each pair, ``[..., num_pairs, dim]``, an array or a ``FastProjection``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 64, 64, coupling="orthogonal")
      >>> pairs = simrf_jax.PairedProjection(w)
      >>> pairs.shape
      (128, 64)
      >>> x = jax.random.normal(jax.random.key(1), (64,))
      >>> u = simrf_jax.project(x, w)
      >>> bool(jnp.all(simrf_jax.project(x, pairs) == jnp.concatenate([u, -u])))
      True
    """

    rows: Projection

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of W with the negatives, ``[..., 2 num_pairs, dim]``."""
        rows = np.shape(self.rows)
        if len(rows) < 2:
            raise ValueError(f"rows must be [..., num_pairs, dim], got shape {rows}.")
        *stack, num_pairs, dim = rows
        return (*stack, 2 * num_pairs, dim)

    @property
    def dtype(self) -> jnp.dtype:
        """Returns the floating type of the rows."""
        return jnp.result_type(self.rows)

    def draw_like(self, key: Key[Array, ""], options: Any) -> PairedProjection:
        """Draws another ``PairedProjection`` of the same shape and dtype.

        Args:
          key: A typed PRNG key.
          options: ``DrawOptions`` to draw one row of each pair by.

        Raises:
          TypeError: If the rows are no array, or the options draw weights.
        """
        if isinstance(self.rows, StructuredProjection):
            raise self.no_redraw()
        drawn = options.draw(key, *np.shape(self.rows), dtype=self.dtype)
        if isinstance(drawn, StructuredProjection):
            raise self.no_redraw()
        return PairedProjection(drawn)


def with_negatives(projection: Projection) -> PairedProjection | WeightedProjection:
    """Returns the rows of W and their negatives, which have the same weights.

    Args:
      projection: W, an array or a structured projection.
    """
    if not isinstance(projection, WeightedProjection):
        return PairedProjection(projection)
    log_weights = jnp.asarray(projection.log_weights)
    return WeightedProjection(
        PairedProjection(projection.rows), jnp.concatenate([log_weights, log_weights], axis=-1)
    )


def both_signs(u: Float[Array, "*batch num_pairs"]) -> Float[Array, "*batch num_features"]:
    """Returns what rows give, and after it what their negatives give."""
    return jnp.concatenate([u, -u], axis=-1)
