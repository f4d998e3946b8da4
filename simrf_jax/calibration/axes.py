"""Rows of W that keep their place when another fit turns the axes of a calibration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax.calibration.jacobi import left_singular_vectors
from simrf_jax.features.calibrated import Calibrated


@jax.jit
def turn_rows(
    rows: Float[Array, "*K m H"], before: Calibrated | None, after: Calibrated
) -> Float[Array, "*K m H"]:
    r"""Returns W for another calibration, such that features change no more than the fit did.

    A fit chooses axes, those of the tilt, along which it is diagonal. Small changes of the data may
    turn them by any angle, and then rows that stay where they are would be other random rows, as
    after a redraw. With the polar decomposition M = O S of each ``query_matrix``, S depends
    continuously on the covariances and O holds the axes, so rows are multiplied by
    :math:`O_{before} O_{after}^\top`. Their norms and angles stay as they are.

    Args:
      rows: W of each key head.
      before: The calibration that the rows belong to; None for rows that were just drawn.
      after: The new calibration, of the same shape.
    """

    def turn(rows: Float[Array, "m H"], calibration: Calibrated) -> Float[Array, "m H"]:
        return _matmul(rows, _axes(calibration).T)

    def turn_back(rows: Float[Array, "m H"], calibration: Calibrated) -> Float[Array, "m H"]:
        return _matmul(rows, _axes(calibration))

    flat = rows.reshape(-1, *rows.shape[-2:])
    if before is not None:
        flat = jax.vmap(turn_back)(flat, _flat(before))
    return jax.vmap(turn)(flat, _flat(after)).reshape(rows.shape)


def _flat(calibration: Calibrated) -> Calibrated:
    """Returns the calibration of all heads of a stack of layers, with one leading axis."""
    lead = calibration.query_mean.ndim - 1
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[lead:]), calibration)


def _axes(calibration: Calibrated) -> Float[Array, "H H"]:
    """Returns the orthogonal factor of the polar decompositions of the matrices of one head.

    M = O S and its inverse transpose, O times the inverse of S, share it with their sum, which is
    far from singular where they are not.
    """
    matrix = calibration.query_matrix + calibration.key_matrix
    vectors, values = left_singular_vectors(matrix)
    axes = _matmul(vectors / values[None], _matmul(vectors.T, matrix))
    # A step of Newton and Schulz removes what rounding left of other factors, to first order.
    return 1.5 * axes - 0.5 * _matmul(axes, _matmul(axes.T, axes))


def _matmul(left: Float[Array, "m H"], right: Float[Array, "H n"]) -> Float[Array, "m n"]:
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
