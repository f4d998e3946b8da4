"""Quadrature over the norm of a row, and over antithetic pairs of norms."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float64
from scipy import special

_NODES, _PANELS = 20, 48  # Gauss-Legendre nodes in each of equal panels.
_SPREAD = 10.0  # Beyond the peak plus this, integrands are below 1e-20 of their maximum.


def chi_rule(
    dim: int, peak: float, panels: int = _PANELS
) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
    r"""Returns a quadrature rule for averages over the chi law of a norm.

    Args:
      dim: Dimension d.
      peak: Largest norm at which an integrand has its maximum.
      panels: Number of panels of 20 nodes.

    Returns:
      The norms, and the logarithms of the weights, which add up to 1.
    """
    return _rule(dim, 0.0, max(float(peak), dim**0.5) + _SPREAD, panels)


def antithetic_rule(
    dim: int, peak: float, panels: int = _PANELS
) -> tuple[
    Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]
]:
    """Returns a rule for averages over pairs of norms a and a' with F(a) + F(a') = 1.

    F is the chi distribution function. The averaged functions must be symmetric in a and a'.

    Args:
      dim: Dimension d.
      peak: Largest norm at which an integrand has its maximum.
      panels: Number of panels of 20 nodes.

    Returns:
      The larger norms, the smaller norms, and the logarithms of the weights, which add up to 1.
    """
    median = float(np.sqrt(2 * special.gammaincinv(dim / 2, 0.5)))
    norms, log_weights = _rule(dim, median, max(float(peak), dim**0.5) + _SPREAD, panels)
    others = np.sqrt(2 * special.gammaincinv(dim / 2, special.gammaincc(dim / 2, norms**2 / 2)))
    return norms, others, log_weights


@functools.lru_cache(maxsize=64)
def _rule(
    dim: int, start: float, stop: float, panels: int
) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
    roots, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.linspace(start, stop, panels + 1)
    half = (edges[1] - edges[0]) / 2
    norms = (edges[:-1, None] + half * (1 + roots)).ravel()
    log_density = (dim - 1) * np.log(norms) - norms**2 / 2
    log_weights = np.tile(np.log(weights), panels) + log_density
    return norms, log_weights - special.logsumexp(log_weights)
