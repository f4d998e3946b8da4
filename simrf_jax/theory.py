"""Closed forms of conformities, mean squared errors and densities, in float64 NumPy.

Tests and experiments compare their results with these values. The closed forms also show, without a
draw, which coupling to use: simplex rows for positive features, cross-polytopes where there are at
least twice as many features as dimensions, and orthogonal rows for hyperbolic and trigonometric
features. ``simrf_jax.selection`` chooses one for given queries and keys. Two functions are
numerical instead: ``log_conformity_of_rows`` takes given rows, and ``optimal_directions`` finds the
least conformity that given norms allow.
"""

from simrf_jax._src.theory.harmonics import estimate_covariance
from simrf_jax._src.theory.limits import (
    asymptotic_ratio,
    orthogonality_gap,
    small_distance_prefactor,
)
from simrf_jax._src.theory.mse import hybrid_mse, kernel_mse, mse_ratio
from simrf_jax._src.theory.optimum import optimal_directions
from simrf_jax._src.theory.positive import optimal_parameter, relative_bias
from simrf_jax._src.theory.resultant import (
    log_conformity,
    log_conformity_of_rows,
    resultant_norm_pdf,
)

__all__ = [
    "asymptotic_ratio",
    "estimate_covariance",
    "hybrid_mse",
    "kernel_mse",
    "log_conformity",
    "log_conformity_of_rows",
    "mse_ratio",
    "optimal_directions",
    "optimal_parameter",
    "orthogonality_gap",
    "relative_bias",
    "resultant_norm_pdf",
    "small_distance_prefactor",
]
