"""Weighted projections: W with the logarithm of a weight for each row."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from simrf_jax import one_line
from simrf_jax.projections.structured import Projection, StructuredProjection


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "log_weights"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedProjection(StructuredProjection):
    r"""A projection whose rows count with different weights.

    Positive and hyperbolic features give half of each log weight to either side, so that

    .. math::
        \phi(x) \cdot \phi(y) = \frac1m \sum_i e^{l_i}\, e^{w_i \cdot (x + y)}
            e^{-(|x|^2 + |y|^2)/2}

    for the softmax kernel. The estimate is unbiased if :math:`e^{l_i}` is the density of the
    standard normal law at :math:`w_i` over the density of the law that :math:`w_i` was drawn by.
    Other feature maps refuse weights. A log weight of minus infinity leaves its row out.

    Attributes:
      rows: W, ``[..., num_features, dim]``, an array or a ``FastProjection``.
      log_weights: Logarithms l of the weights, ``[..., num_features]``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 65, 64)
      >>> weighted = simrf_jax.WeightedProjection(w, jnp.full(65, -1.0))
      >>> x = jnp.full(64, 0.05)
      >>> plain, less = (simrf_jax.positive_features(x, each) for each in (w, weighted))
      >>> bool(jnp.allclose(less @ less, jnp.exp(-1) * (plain @ plain)))
      True
    """

    rows: Projection
    log_weights: Float[ArrayLike, "*stack num_features"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of W, ``[..., num_features, dim]``."""
        rows, weights = np.shape(self.rows), np.shape(self.log_weights)
        if len(rows) < 2 or weights != rows[:-1]:
            raise ValueError(
                "rows must be [..., num_features, dim], and log_weights must be "
                f"[..., num_features] with the same leading axes, got {rows} and {weights}."
            )
        return rows

    @property
    def dtype(self) -> jnp.dtype:
        """Returns the floating type of the rows."""
        return jnp.result_type(self.rows)

    def draw_like(self, key: Key[Array, ""], options: Any) -> WeightedProjection:
        """Draws another ``WeightedProjection`` of the same shapes and dtypes.

        Args:
          key: A typed PRNG key.
          options: ``DrawOptions`` that draw weighted rows.

        Raises:
          TypeError: If the rows are no array, or the options draw rows without weights. No key can
            draw weights that were made in another way.
        """
        if isinstance(self.rows, StructuredProjection):
            raise self.no_redraw()
        drawn = options.draw(key, *self.shape, dtype=self.dtype)
        if not isinstance(drawn, WeightedProjection):
            raise self.no_redraw()
        dtype = jnp.result_type(self.log_weights)
        return WeightedProjection(drawn.rows, jnp.asarray(drawn.log_weights, dtype))
