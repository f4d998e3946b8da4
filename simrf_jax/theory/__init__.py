"""Closed forms: conformity, mean squared errors and densities, in float64 NumPy.

They are what experiments are compared with, and say without a draw which coupling to use: simplex
rows for positive features, orthogonal ones for hyperbolic and trigonometric features. For rows that
are given, their conformity and the least that their norms allow are numerical.
"""

from simrf_jax.theory.conformity import log_conformity
from simrf_jax.theory.density import resultant_norm_pdf
from simrf_jax.theory.gap import orthogonality_gap
from simrf_jax.theory.hybrid import hybrid_mse
from simrf_jax.theory.limits import asymptotic_ratio, small_distance_prefactor
from simrf_jax.theory.mse import kernel_mse, mse_ratio
from simrf_jax.theory.optimum import OptimalDirections, optimal_directions
from simrf_jax.theory.rows import log_conformity_of_rows

__all__ = [
    "OptimalDirections",
    "asymptotic_ratio",
    "hybrid_mse",
    "kernel_mse",
    "log_conformity",
    "log_conformity_of_rows",
    "mse_ratio",
    "optimal_directions",
    "orthogonality_gap",
    "resultant_norm_pdf",
    "small_distance_prefactor",
]
