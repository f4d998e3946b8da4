"""Projection of vectors by W, an array or a record."""

from __future__ import annotations

from jaxtyping import Array, ArrayLike, Float

from simrf_jax._src import checks
from simrf_jax._src.projections.record import Projection
from simrf_jax._src.projections.structured import ProjectionLike


def project(
    x: Float[ArrayLike, "*batch dim"], projection: ProjectionLike
) -> Float[Array, "*batch num_features"]:
    r"""Projects vectors onto the rows of a projection, :math:`y_i = w_i \cdot x`.

    Args:
      x: Vectors.
      projection: W, ``[num_features, dim]``, as an array or a ``Projection``.

    Returns:
      The projected vectors, at least in float32. Every feature map uses these numbers as logits,
      which bfloat16 would round to a few percent.

    Raises:
      TypeError: If ``x`` or ``projection`` is not floating, or ``projection`` has weights or is
        a structured projection of another kind.
      ValueError: If the shapes do not match, or ``projection`` has no rows.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.project(jnp.array([1.0, 2.0]), jnp.array([[3.0, 0.0], [0.0, 5.0], [1.0, 1.0]]))
      Array([ 3., 10.,  3.], dtype=float32)
    """
    return product(checks.floating("x", x), projection)


def product(
    x: Float[Array, "*batch dim"], projection: ProjectionLike
) -> Float[Array, "*batch num_features"]:
    """Returns ``project`` for vectors that are already a floating array.

    Args:
      x: Vectors.
      projection: W, an array or a ``Projection``.
    """
    return Projection.of(projection).apply(x)
