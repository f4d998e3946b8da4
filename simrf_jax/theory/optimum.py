"""The least conformity that rows of given norms can have, by numerical optimisation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy import optimize

from simrf_jax import checks
from simrf_jax.projections.blocks import simplex_vertices
from simrf_jax.projections.couplings import NUM_SWEEPS
from simrf_jax.theory import arguments
from simrf_jax.theory.bessel import log_hyp0f1
from simrf_jax.theory.rows import log_conformity_of_rows, log_mean_exp, squared_resultants


class OptimalDirections(NamedTuple):
    """Where rows of given norms conform least.

    Attributes:
      directions: Unit vectors ``[m, dim]``, before the random rotation.
      log_conformity: Logarithm of the conformity of the rows.
    """

    directions: np.ndarray
    log_conformity: np.float64


def optimal_directions(norms: ArrayLike, v: float, dim: int) -> OptimalDirections:
    r"""Directions of rows of given norms with the least conformity, at one distance.

    .. math::
        \min_{|s_i| = 1} \sum_{i \ne j}
        {}_0F_1\!\left(; \tfrac d2; \tfrac{v^2 |a_i s_i + a_j s_j|^2}{4}\right)

    is the benchmark for couplings that may depend on the norms: no coupling does better at this v.
    It is too slow for use and its solution depends on v, hence on the pair x, y. The problem is
    convex in the cosines; in the directions it is solved by L-BFGS from both the simplex and
    simplex_plus, so that the result is never worse than either.

    Args:
      norms: Norms a of the rows, ``[m]``, with m from 2 to d + 1.
      v: The distance :math:`|x + y|`, at least 0.
      dim: Dimension d.

    Returns:
      ``OptimalDirections``: unit vectors ``[m, dim]`` and the logarithm of their conformity.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``norms`` or ``v`` not real.
      ValueError: If a norm or ``v`` is negative or not finite, or a shape is not as above.

    Example:
      >>> import numpy as np
      >>> norms = np.array([2.3989, 2.7767, 1.9412, 3.2903, 1.8301, 1.8830])
      >>> print(f"{np.exp(optimal_directions(norms, 1.0, 6).log_conformity):.4f}")
      2.0512

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 12 and Fig. 4, "numerically optimised".
    """
    dim = checks.positive_int("dim", dim)
    norms, distance = arguments.norms("norms", norms), arguments.norms("v", v)
    if distance.shape or not np.isfinite(distance):
        raise ValueError(f"v must be one finite number, got {v}.")
    if norms.ndim != 1 or not 2 <= norms.size <= dim + 1 or not np.all(np.isfinite(norms)):
        raise ValueError(
            f"norms must be [m], finite, m from 2 to dim + 1 = {dim + 1}, got {norms}."
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
    directions: np.ndarray, norms: np.ndarray, num_sweeps: int = NUM_SWEEPS
) -> np.ndarray:
    """``projections.couplings.minimise_resultant`` in float64 NumPy: SimRF+ from the simplex."""
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


def descent(start: np.ndarray, norms: np.ndarray, v: float, dim: int) -> np.ndarray:
    """The way down from unit vectors ``[m, coordinates]`` to the local optimum below them.

    Returns:
      Unit vectors ``[1 + iterations, m, coordinates]`` from the start on; the last are the optimum.
    """
    scale = float(log_conformity_of_rows(v, norms[:, None] * start, dim=dim))
    if not 0 < scale < np.inf:
        return start[None]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        points = flat.reshape(start.shape)
        # Lengths do not matter.
        lengths = np.linalg.norm(points, axis=1, keepdims=True)
        s = points / lengths
        value, gradient = _log_conformity_and_gradient(norms[:, None] * s, v, dim)
        gradient = norms[:, None] * gradient
        tangent = gradient - s * np.sum(gradient * s, axis=1, keepdims=True)
        # In units of the start: tolerances then mean the same at every v.
        return value / scale, (tangent / lengths).ravel() / scale

    way = [start.ravel()]
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-9}
    optimize.minimize(
        objective, way[0], jac=True, method="L-BFGS-B", callback=way.append, options=options
    )
    points = np.reshape(way, (-1, *start.shape))
    return points / np.linalg.norm(points, axis=-1, keepdims=True)


def _log_conformity_and_gradient(rows: np.ndarray, v: float, dim: int) -> tuple[float, np.ndarray]:
    x = v**2 * squared_resultants(rows) / 4
    log_terms = log_hyp0f1(dim / 2, x)
    value = log_mean_exp(log_terms)
    # d/dx 0F1(; b; x) = 0F1(; b + 1; x) / b, and each pair's share of the sum beside it.
    log_slopes = log_hyp0f1(dim / 2 + 1, x) - value
    pull = np.zeros((len(rows), len(rows)))
    i, j = np.triu_indices(len(rows), 1)
    pull[i, j] = v**2 / dim * np.exp(log_slopes) / len(x)
    pull += pull.T
    return float(value), np.sum(pull, axis=1, keepdims=True) * rows + pull @ rows
