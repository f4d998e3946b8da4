"""Closed forms: conformity, mean squared errors and densities, in float64 NumPy.

They are what experiments are compared with, and say without a draw which coupling to use: simplex
rows for positive features, orthogonal ones for hyperbolic and trigonometric features.
"""

from simrf_jax.theory.conformity import log_conformity
from simrf_jax.theory.density import resultant_norm_pdf
from simrf_jax.theory.mse import kernel_mse, mse_ratio

__all__ = ["kernel_mse", "log_conformity", "mse_ratio", "resultant_norm_pdf"]
