"""Projection of vectors by W, which may be an array or a structured projection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from simrf_jax import checks
from simrf_jax.projections.fast import FastProjection, apply_fast
from simrf_jax.projections.structured import Projection, as_projection
from simrf_jax.projections.weighted import WeightedProjection


def unweighted(projection: Projection) -> Float[Array, "*stack num_features dim"] | FastProjection:
    """Returns a projection whose rows have no weights.

    Args:
      projection: W, as ``as_projection`` returns it.

    Raises:
      TypeError: If it is a structured projection other than a ``FastProjection``.
    """
    if isinstance(projection, WeightedProjection):
        raise TypeError(
            "projection must have rows of equal weight here, got a WeightedProjection, whose log "
            "weights only positive, hyperbolic and optimal positive features can honour."
        )
    if not isinstance(projection, jax.Array | FastProjection):
        raise TypeError(
            "projection must be an array [num_features, dim] or a FastProjection, "
            f"got {None if projection is None else type(projection).__name__}."
        )
    return projection


def project(
    x: Float[ArrayLike, "*batch dim"], projection: Projection
) -> Float[Array, "*batch num_features"]:
    r"""Projects vectors onto the rows of a projection, :math:`y_i = w_i \cdot x`.

    Args:
      x: Vectors.
      projection: W, ``[num_features, dim]``, as an array or a ``FastProjection``.

    Returns:
      The projected vectors, in float32 at least. Every feature map uses these numbers as
      logits, which bfloat16 would round to a few per cent.

    Raises:
      TypeError: If ``x`` or ``projection`` is not floating, or ``projection`` is a structured
        projection other than a ``FastProjection``.
      ValueError: If the shapes do not match, or ``projection`` has no rows.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.project(jnp.array([1.0, 2.0]), jnp.array([[3.0, 0.0], [0.0, 5.0], [1.0, 1.0]]))
      Array([ 3., 10.,  3.], dtype=float32)
    """
    return product(checks.floating("x", x), as_projection(projection))


def product(
    x: Float[Array, "*batch dim"], projection: Projection
) -> Float[Array, "*batch num_features"]:
    """Returns ``project`` of arrays of floating types; see there.

    Args:
      x: Vectors.
      projection: W, as ``as_projection`` returns it.
    """
    projection = unweighted(projection)
    if projection.ndim != 2:
        raise ValueError(
            f"projection must be [num_features, dim], got shape {projection.shape}; "
            "use jax.vmap for a stack of projections."
        )
    if projection.shape[0] == 0:
        raise ValueError(f"projection must have at least one feature, got {projection.shape}.")
    if x.ndim < 1 or x.shape[-1] != projection.shape[-1]:
        raise ValueError(
            f"x must be [..., dim] with the projection's dim={projection.shape[-1]}, "
            f"got shape {x.shape}."
        )
    compute = functools.reduce(jnp.promote_types, (x.dtype, projection.dtype, jnp.float32))
    if isinstance(projection, FastProjection):
        return apply_fast(x.astype(compute), projection)
    return jnp.einsum(
        "...d,md->...m",
        x.astype(compute),
        projection.astype(compute),
        precision=jax.lax.Precision.HIGHEST,
    )
