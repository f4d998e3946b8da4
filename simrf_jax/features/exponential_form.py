"""Exponential features as arrays: what a fused kernel needs to know of a feature map."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax.projections import (
    Projection,
    StructuredProjection,
    WeightedProjection,
    add_half_log_weights,
    product,
    rows_of,
)


class ExponentialForm(NamedTuple):
    r"""The features of one side of a map whose features are exponentials of quadratic functions.

    .. math:: \log \phi(x)_i = w_i \cdot x + b_i - \tfrac12 |M x - c|^2 + g \cdot x + a
        - \tfrac12 \log m

    The last two terms, the same for all vectors and features, cancel in attention, but not beside
    exact weights.

    Attributes:
      rows: w, ``[m, H]``, in float32 at least.
      offsets: b, ``[m]``; None for zeros.
      stretch: M, ``[H, H]``; None for the identity.
      slope: g, ``[H]``; None for zeros.
      center: c, ``[H]``; None for zeros. The form has one only with a stretch.
      constant: a, a number; None for zero.
    """

    rows: Float[Array, "*K m H"]
    offsets: Float[Array, "*K m"] | None = None
    stretch: Float[Array, "*K H H"] | None = None
    slope: Float[Array, "*K H"] | None = None
    center: Float[Array, "*K H"] | None = None
    constant: Float[Array, "*K"] | None = None


def dense_rows(projection: Projection) -> Float[Array, "num_features dim"]:
    """Returns the rows of a projection as an array, in float32 at least."""
    rows = rows_of(projection)
    if isinstance(rows, StructuredProjection):
        return product(jnp.eye(rows.shape[-1]), rows).T
    rows = jnp.asarray(rows)
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


def form_of_rows(projection: Projection) -> ExponentialForm:
    """Returns the form of positive features of the rows of W."""
    rows = dense_rows(projection)
    if not isinstance(projection, WeightedProjection):
        return ExponentialForm(rows)
    return ExponentialForm(rows, add_half_log_weights(jnp.zeros_like(rows[:, 0]), projection))
