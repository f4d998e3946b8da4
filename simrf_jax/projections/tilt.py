"""Tilted projections: rows of another variance, with the weights that make up for it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from simrf_jax.projections.fast import FastProjection
from simrf_jax.projections.paired import PairedProjection
from simrf_jax.projections.project import rows_of, unweighted
from simrf_jax.projections.structured import Projection
from simrf_jax.projections.weighted import WeightedProjection


def tilted(projection: Projection, parameter: Real[ArrayLike, ""]) -> WeightedProjection:
    r"""Returns a projection with rows of another variance, and with their weights.

    The rows :math:`\sqrt{1 - 4A}\, w_i` have the log weights

    .. math:: l_i = 2 A |w_i|^2 + \tfrac d2 \log(1 - 4A),

    which are those of the standard normal density over the density of these rows, if the
    :math:`w_i` are marginally standard normal. Any weights that the projection has are added.

    Args:
      projection: W without leading axes. A ``FastProjection`` has its d and its norms in the padded
        dimension.
      parameter: A, one number below 1/4.

    Returns:
      A ``WeightedProjection`` of float32 at least.
    """
    rows = unweighted(rows_of(projection))
    compute = jnp.promote_types(rows.dtype, jnp.float32)
    parameter = jnp.asarray(parameter, compute)
    # The first two terms of l are large and nearly cancel for long rows, so |w|^2 stands beside its
    # mean d.
    excess, dim = _excess_of_squared_norms(rows, compute)
    constant = dim * (2 * parameter + 0.5 * jnp.log1p(-4 * parameter))
    log_weights = 2 * parameter * excess + constant
    if isinstance(projection, WeightedProjection):
        log_weights += jnp.asarray(projection.log_weights, compute)
    return WeightedProjection(_scaled(rows, jnp.sqrt(1 - 4 * parameter)), log_weights)


def _excess_of_squared_norms(
    rows: Projection, dtype: jnp.dtype
) -> tuple[Float[Array, " num_features"], int]:
    """Returns the squared norm of each row minus the dimension, and the dimension."""
    if isinstance(rows, PairedProjection):
        excess, dim = _excess_of_squared_norms(rows.rows, dtype)
        return jnp.concatenate([excess, excess]), dim
    if isinstance(rows, FastProjection):
        dim = rows.signs.shape[-1]
        squares = jnp.square(rows.row_norms.astype(dtype)) - dim
        return jnp.pad(squares, (0, rows.num_zero_rows), constant_values=-dim), dim
    rows = jnp.asarray(rows, dtype)
    return jnp.sum(jnp.square(rows) - 1, axis=-1), rows.shape[-1]


def _scaled(rows: Projection, factor: Float[Array, ""]) -> Projection:
    if isinstance(rows, PairedProjection):
        return PairedProjection(_scaled(rows.rows, factor))
    if isinstance(rows, FastProjection):
        return dataclasses.replace(rows, row_norms=rows.row_norms.astype(factor.dtype) * factor)
    return jnp.asarray(rows, factor.dtype) * factor


def check_chi_norms(projection: Projection) -> None:
    """Raises ``ValueError`` if the norms of the rows are known, and fixed.

    Padded rotations cut rows of fixed norms to other norms, which pass. Only the options of the
    draw show them, which the Flax adapters check.

    Args:
      projection: W, maybe with leading axes. Nothing is known of a traced one.
    """
    rows = unweighted(rows_of(projection))
    if isinstance(rows, PairedProjection):
        check_chi_norms(rows.rows)
        return
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(rows)):
        return
    if isinstance(rows, FastProjection):
        norms, dim = jax.device_get(rows.row_norms), rows.signs.shape[-1]
    else:
        norms, dim = (
            np.linalg.norm(jax.device_get(rows).astype(np.float64), axis=-1),
            rows.shape[-1],
        )
    norms = norms[norms > 0].astype(np.float64)
    # Rows that share one chi norm are as equal, and come this near with a small probability.
    tolerance = max(1e-5, float(jnp.finfo(rows.dtype).eps) / 8)
    for law, norm in (("sqrt_dim", dim**0.5), ("radau", (dim + 2) ** 0.5)):
        if norms.size > 1 and np.allclose(norms, norm, rtol=tolerance, atol=0):
            raise ValueError(
                "projection must have rows whose norms are chi variables, got norms of "
                f"{norm:.4g} as norms={law!r} draws them, with which tilted rows estimate another "
                "kernel."
            )
