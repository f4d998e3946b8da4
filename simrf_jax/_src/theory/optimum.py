"""Numerical minimization of the conformity of rows with given norms."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import optimize

from simrf_jax._src import checks
from simrf_jax._src.projections.couplings import NUM_SWEEPS
from simrf_jax._src.projections.row_blocks import simplex_vertices
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.quadrature import Vector, log_hyp0f1
from simrf_jax._src.theory.resultant import log_conformity_of_rows, log_mean_exp, squared_resultants

Directions: TypeAlias = Float64[np.ndarray, "m coordinates"]


class OptimalDirections(NamedTuple):
    """Directions that give rows of given norms the least conformity.

    Attributes:
      directions: Unit vectors, before the random rotation.
      log_conformity: Logarithm of the conformity of the rows.
    """

    directions: Float64[np.ndarray, "m dim"]
    log_conformity: np.float64


def optimal_directions(norms: ArrayLike, v: float, dim: int) -> OptimalDirections:
    r"""Finds the directions :math:`s_i` of rows of given norms with the least conformity.

    .. math::
        \min_{|s_i| = 1} \sum_{i \ne j}
        {}_0F_1\!\left(; \tfrac d2; \tfrac{v^2 |a_i s_i + a_j s_j|^2}{4}\right)

    This minimum is the benchmark for couplings that may depend on the norms: no coupling does
    better at this v. The method is too slow for practical use, and its solution depends on v, hence
    on the pair x, y.

    The problem is convex in the cosines of the angles between the rows. The function optimizes the
    directions by L-BFGS, starting from both the ``simplex`` and the ``simplex_plus`` directions, so
    the result is never worse than either.

    Args:
      norms: Norms a of the rows, ``[m]``, with m from 2 to d + 1.
      v: The norm :math:`|x + y|`, one number of at least 0.
      dim: Dimension d.

    Returns:
      A named tuple of ``directions``, unit vectors ``[m, dim]`` before the random rotation, and
      ``log_conformity``, the logarithm of the conformity of the rows.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``norms`` or ``v`` is not real.
      ValueError: If a norm or ``v`` is negative or not finite, ``norms`` is not ``[m]`` with m from
        2 to d + 1, or ``v`` is not one number.

    Example:
      >>> import numpy as np
      >>> norms = np.array([2.3989, 2.7767, 1.9412, 3.2903, 1.8301, 1.8830])
      >>> print(f"{np.exp(optimal_directions(norms, 1.0, 6).log_conformity):.4f}")
      2.0512

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 12 and "numerically optimised" in
      Fig. 4, https://arxiv.org/abs/2301.13856
    """
    dim = checks.positive_int("dim", dim)
    norms, distance = arguments.norms("norms", norms), arguments.norms("v", v)
    if distance.shape or not np.isfinite(distance):
        raise ValueError(f"v must be one finite number, got {v}.")
    if norms.ndim != 1 or not 2 <= norms.size <= dim + 1 or not np.all(np.isfinite(norms)):
        raise ValueError(
            f"norms must be [m] and finite, with m from 2 to dim + 1 = {dim + 1}, got {norms}."
        )
    simplex = simplex_vertices(norms.size)
    starts = [against_the_rest(simplex, norms), simplex]
    candidates = starts + [descent(start, norms, float(distance), dim)[-1] for start in starts]
    directions = min(
        candidates, key=lambda s: float(log_conformity_of_rows(v, norms[:, None] * s, dim=dim))
    )
    directions = np.pad(directions, [(0, 0), (0, dim - directions.shape[1])])
    achieved = log_conformity_of_rows(v, norms[:, None] * directions)
    return OptimalDirections(directions, np.float64(achieved))


def against_the_rest(
    directions: Directions, norms: Float64[np.ndarray, " m"], num_sweeps: int = NUM_SWEEPS
) -> Directions:
    """Computes ``projections.couplings.minimize_resultant`` in float64 NumPy.

    Starting from the simplex, it returns the directions of ``simplex_plus``.

    Args:
      directions: Unit vectors to start from.
      norms: Norms of the rows.
      num_sweeps: Number of sweeps; each turns every row once.

    Returns:
      Unit vectors.
    """
    directions = directions.copy()
    for _ in range(num_sweeps):
        resultant = norms @ directions
        for i, norm in enumerate(norms):
            rest = resultant - norm * directions[i]
            length = np.linalg.norm(rest)
            if length > 0:
                directions[i] = -rest / length
            resultant = rest + norm * directions[i]
    return directions


def descent(
    start: Directions, norms: Float64[np.ndarray, " m"], v: float, dim: int
) -> Float64[np.ndarray, "iterations m coordinates"]:
    """Minimizes the conformity by L-BFGS and returns the path to the local minimum.

    Args:
      start: Unit vectors to start from.
      norms: Norms of the rows.
      v: The norm :math:`|x + y|`.
      dim: Dimension d.

    Returns:
      Unit vectors before the first iteration and after each. The first are ``start``, and the last
      are the local minimum. The path is only ``start`` if its log conformity is not positive and
      finite.
    """
    scale = float(log_conformity_of_rows(v, norms[:, None] * start, dim=dim))
    if not 0 < scale < np.inf:
        return start[None]

    def objective(flat: Vector) -> tuple[float, Vector]:
        points = flat.reshape(start.shape)
        # L-BFGS may change the lengths of the points; only their directions matter.
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        s = points / lengths
        value, gradient = _log_conformity_and_gradient(norms[:, None] * s, v, dim)
        gradient = norms[:, None] * gradient
        tangent = gradient - s * np.sum(gradient * s, axis=1, keepdims=True)
        # Dividing by the initial value gives the tolerances the same meaning at every v.
        return value / scale, (tangent / lengths).ravel() / scale

    way = [start.ravel()]
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-9}
    optimize.minimize(
        objective, way[0], jac=True, method="L-BFGS-B", callback=way.append, options=options
    )
    points = np.reshape(way, (-1, *start.shape))
    return points / np.linalg.norm(points, axis=-1, keepdims=True)


def _log_conformity_and_gradient(rows: Directions, v: float, dim: int) -> tuple[float, Directions]:
    """Returns the log conformity of rows and its gradient with respect to the rows."""
    x = v**2 * squared_resultants(rows) / 4
    log_terms = log_hyp0f1(dim / 2, x)
    value = log_mean_exp(log_terms)
    # The derivative of 0F1(; b; x) is 0F1(; b + 1; x) / b. The gradient of the log of the mean
    # divides it by the mean, whose logarithm is ``value``.
    log_slopes = log_hyp0f1(dim / 2 + 1, x) - value
    pull = np.zeros((len(rows), len(rows)))
    i, j = np.triu_indices(len(rows), 1)
    pull[i, j] = v**2 / dim * np.exp(log_slopes) / len(x)
    pull += pull.T
    return float(value), np.sum(pull, axis=1, keepdims=True) * rows + pull @ rows
