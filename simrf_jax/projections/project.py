"""Projection of vectors by W, which may be an array or a structured projection."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from simrf_jax import checks
from simrf_jax.projections.fast import FastProjection, apply_fast
from simrf_jax.projections.paired import PairedProjection, both_signs
from simrf_jax.projections.structured import Projection, StructuredProjection
from simrf_jax.projections.weighted import WeightedProjection


def as_projection(
    projection: Float[ArrayLike, "*shape"] | StructuredProjection,
) -> Float[Array, "*shape"] | StructuredProjection:
    """Returns a projection as an array of a floating type, or unchanged if it is structured.

    The rows of a ``PairedProjection`` are treated likewise.

    Args:
      projection: Array-like of a floating type, or a ``StructuredProjection``.

    Raises:
      TypeError: If the projection is None or is not floating.
    """
    if isinstance(projection, PairedProjection):
        return PairedProjection(as_projection(projection.rows))
    if isinstance(projection, StructuredProjection):
        return projection
    if projection is None:
        raise TypeError("projection must be an array [num_features, dim], got None.")
    return checks.floating("projection", projection)


def rows_of(projection: Projection) -> Projection:
    """Returns the rows of a ``WeightedProjection``, and any other projection as it is.

    Args:
      projection: W, an array or a structured projection.

    Raises:
      TypeError: If the projection is None.
      ValueError: If a ``WeightedProjection`` has not one log weight for each row.
    """
    if projection is None:
        raise _refuse(projection)
    if not isinstance(projection, WeightedProjection):
        return projection
    _ = projection.shape  # Raises if the shapes of the parts do not match.
    return as_projection(projection.rows)


def add_half_log_weights(
    exponent: Float[Array, "*batch num_features"], projection: Projection
) -> Float[Array, "*batch num_features"]:
    """Adds half the log weight of each row, the share of either side of a product.

    Args:
      exponent: Logarithms of features, one for each row.
      projection: W. Without a ``WeightedProjection`` the exponents stay as they are.

    Raises:
      TypeError: If the log weights are not floating.
    """
    if not isinstance(projection, WeightedProjection):
        return exponent
    log_weights = checks.floating("log_weights", projection.log_weights).astype(exponent.dtype)
    return exponent + jnp.broadcast_to(0.5 * log_weights, exponent.shape)


def unweighted(
    projection: Projection,
) -> Float[Array, "*stack num_features dim"] | FastProjection | PairedProjection:
    """Returns a projection whose rows have no weights.

    Args:
      projection: W, as ``as_projection`` returns it.

    Raises:
      TypeError: If it is a structured projection other than a ``FastProjection``, or a
        ``PairedProjection`` of arrays or of one.
    """
    if isinstance(projection, PairedProjection):
        return PairedProjection(unweighted(projection.rows))
    if not isinstance(projection, jax.Array | FastProjection):
        raise _refuse(projection)
    return projection


def _refuse(projection: Projection | None) -> TypeError:
    """Returns the error for a projection that has no rows of equal weight."""
    if isinstance(projection, WeightedProjection):
        return TypeError(
            "projection must have rows of equal weight here, got a WeightedProjection, whose log "
            "weights only positive, hyperbolic, optimal positive and calibrated features can "
            "honour."
        )
    return TypeError(
        "projection must be an array [num_features, dim], a FastProjection or a PairedProjection, "
        f"got {kind_of(projection)}."
    )


def kind_of(projection: Any) -> str:
    """Returns what a projection is, for an error: the name of its class, an array, or None."""
    if projection is None:
        return "None"
    return "an array" if isinstance(projection, jax.Array) else type(projection).__name__


def project(
    x: Float[ArrayLike, "*batch dim"], projection: Projection
) -> Float[Array, "*batch num_features"]:
    r"""Projects vectors onto the rows of a projection, :math:`y_i = w_i \cdot x`.

    Args:
      x: Vectors.
      projection: W, ``[num_features, dim]``, as an array, a ``FastProjection`` or a
        ``PairedProjection``.

    Returns:
      The projected vectors, in float32 at least. Every feature map uses these numbers as
      logits, which bfloat16 would round to a few per cent.

    Raises:
      TypeError: If ``x`` or ``projection`` is not floating, or ``projection`` is a structured
        projection of another kind.
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
    if isinstance(projection, PairedProjection):
        return both_signs(product(x, projection.rows))
    if not isinstance(projection, jax.Array | FastProjection):
        raise _refuse(projection)
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
