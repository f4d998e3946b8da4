"""Averages over angles and norms of rows, with a Bessel function and bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy import special

Vector: TypeAlias = Float64[np.ndarray, " n"]
Nodes: TypeAlias = Float64[np.ndarray, " nodes"]
# Nodes, or functions of them, and the logarithms of the weights, which add up to 1.
Rule: TypeAlias = tuple[Nodes, Nodes]

_CHUNK = 2**18  # Largest size of a temporary array, which then takes 2 MiB.
_MAX_LOG = 600.0  # The power series of 0F1 is used below this logarithm, because e^600 is finite.
_ANGLES = 256  # Nodes of the rule over phi.
_NORMS, PANELS = 20, 48  # Gauss-Legendre nodes of the rules over norms in each of equal panels.
_SPREAD = 10.0  # Beyond the peak plus this, integrands are below 1e-20 of their maximum.


@functools.lru_cache(maxsize=64)
def phi_rule(dim: int) -> Rule:
    r"""Returns a quadrature rule for averages over :math:`\phi` of functions of :math:`\sin\phi`.

    The density of :math:`\phi` is proportional to :math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. By
    symmetry the nodes cover only half of that range.

    Args:
      dim: Dimension d.

    Returns:
      Two arrays: :math:`\sin\phi` at the nodes, and the logarithms of the weights. The
      weights add up to 1.
    """
    roots, weights = np.polynomial.legendre.leggauss(_ANGLES)
    # The substitution phi = (pi / 2) u^2 on half of the range puts nodes where (1 + c sin(phi))^k
    # peaks: toward 0 for c < 0, where the peak has width 1/k, and toward pi/2 for c > 0.
    u = (roots + 1) / 2
    sines = np.sin(np.pi / 2 * u**2)
    log_weights = np.log(weights * u) + (dim - 1) * np.log(sines)
    # The weights are normalized by their own sum, because gamma functions would add an error of
    # 1e-13, and small ratios would multiply it by 2 dim.
    return sines, log_weights - special.logsumexp(log_weights)


@functools.lru_cache(maxsize=64)
def chi_rule(
    dim: int, peak: float, panels: int = PANELS, start: float = 0.0, width: float = 1.0
) -> Rule:
    r"""Returns a quadrature rule for averages over the chi law of a norm.

    Args:
      dim: Dimension d.
      peak: Largest norm at which an integrand has its maximum.
      panels: Number of panels of 20 nodes.
      start: Least norm; smaller norms are ignored.
      width: Factor below 1 by which the peak of integrands and the range around it are smaller. If
        it is small, the rest of the law of the norms has as many panels of its own.

    Returns:
      The norms, and the logarithms of the weights, which add up to 1.
    """
    roots, weights = np.polynomial.legendre.leggauss(_NORMS)
    ranges = [(start, max(peak, dim**0.5) + _SPREAD)]
    near, far = max(width * peak, start) + width * _SPREAD, dim**0.5 + _SPREAD
    if near < ranges[0][1] / 2:
        ranges = [(a, b) for a, b in ((start, near), (near, far)) if a < b]
    edges = [np.linspace(a, b, panels, endpoint=False) for a, b in ranges]
    halves = np.repeat([(e[1] - e[0]) / 2 for e in edges], panels)[:, None]
    norms = (np.concatenate(edges)[:, None] + halves * (1 + roots)).ravel()
    log_density = (dim - 1) * np.log(norms) - norms**2 / 2
    log_weights = (np.log(halves / halves[0]) + np.log(weights)).ravel() + log_density
    return norms, log_weights - special.logsumexp(log_weights)


def antithetic_rule(
    dim: int, peak: float, panels: int = PANELS, width: float = 1.0
) -> tuple[Nodes, Nodes, Nodes]:
    """Returns a rule for averages over pairs of norms a and a' with F(a) + F(a') = 1.

    F is the chi distribution function. The averaged functions must be symmetric in a and a'.

    Args:
      dim: Dimension d.
      peak: Largest norm at which an integrand has its maximum.
      panels: Number of panels of 20 nodes.
      width: Width of integrands; see ``chi_rule``.

    Returns:
      The larger norms, the smaller norms, and the logarithms of the weights, which add up to 1.
    """
    median = float(np.sqrt(2 * special.gammaincinv(dim / 2, 0.5)))
    norms, log_weights = chi_rule(dim, peak, panels, median, width)
    others = np.sqrt(2 * special.gammaincinv(dim / 2, special.gammaincc(dim / 2, norms**2 / 2)))
    return norms, others, log_weights


def log_hyp0f1(
    b: float, x: Float64[np.ndarray, "*shape"] | np.float64
) -> Float64[np.ndarray, "*shape"]:
    r"""Returns the logarithm of :math:`{}_0F_1(; b; x)`.

    With :math:`b = d/2` and :math:`x = v^2 r^2 / 4`, :math:`{}_0F_1` is the average of
    :math:`e^{w \cdot u}` over all directions of w in d dimensions, where :math:`|w| = r` and
    :math:`|u| = v`.

    Args:
      b: A number of at least 1/2.
      x: Numbers of at least 0. Infinite and NaN values are returned unchanged.

    Returns:
      The logarithms.

    Example:
      >>> import numpy as np
      >>> x = np.array([1.0, 1e3, 1e9])  # cosh is 0F1(; 1/2; x^2 / 4)
      >>> np.round(log_hyp0f1(0.5, x**2 / 4), 6)
      array([4.33781000e-01, 9.99306853e+02, 9.99999999e+08])
    """
    x = np.asarray(x)
    bound = np.minimum(2 * np.sqrt(x), x / b)  # The logarithm is at most this large.
    result = np.array(x, dtype=np.float64)
    small, large = bound < _MAX_LOG, (bound >= _MAX_LOG) & np.isfinite(x)
    result[small] = np.log1p(_series(b, x[small], np.max(bound[small], initial=0.0)))
    result[large] = _uniform_expansion(b - 1, 2 * np.sqrt(x[large])) + special.gammaln(b)
    return result


def _series(b: float, x: Vector, bound: float) -> Vector:
    """Returns the power series without its leading 1, if its logarithm is at most ``bound``."""
    # The terms are largest where k (k + b) = x, which is before k = bound.
    num_terms = int(bound + 12 * np.sqrt(bound) + 30)
    return sum_by_ratios(x / b, lambda k: x / ((k + 2) * (b + k + 1)), num_terms)


def sum_by_ratios(
    first: Float64[np.ndarray, "*shape"],
    ratio: Callable[[int], Float64[np.ndarray, "*#shape"]],
    num_terms: int,
) -> Float64[np.ndarray, "*shape"]:
    """Returns the sum of a series from its first term and the ratios of successive terms.

    Args:
      first: The first term.
      ratio: Function of k that returns the ratio of term k + 1 to term k.
      num_terms: Number of terms after the first.
    """
    term, total = first, first.copy()
    for k in range(num_terms):
        term = term * ratio(k)
        total += term
    return total


def _uniform_expansion(order: float, z: Vector) -> Vector:
    r"""Returns the logarithm of :math:`(2/z)^\nu I_\nu(z)`.

    The function uses Debye's expansion (DLMF 10.41.3) in powers of :math:`1/q`, with
    :math:`q = \sqrt{\nu^2 + z^2}`.

    Args:
      order: Order :math:`\nu`.
      z: Arguments z.
    """
    q = np.hypot(order, z)
    p2 = (order / q) ** 2
    u1 = (3 - 5 * p2) / 24
    u2 = (81 - 462 * p2 + 385 * p2**2) / 1152
    u3 = (30375 - 369603 * p2 + 765765 * p2**2 - 425425 * p2**3) / 414720
    correction = (u1 + (u2 + u3 / q) / q) / q
    return q - order * np.log((order + q) / 2) - np.log(2 * np.pi * q) / 2 + np.log1p(correction)


def over_chunks(function: Callable[[Vector], Vector], values: Vector, width: int) -> Vector:
    """Applies a vectorized function to an array in chunks, to bound its memory.

    Args:
      function: Vectorized function of an array ``[n]`` that returns an array ``[n]``.
      values: Arguments of the function.
      width: Size of the function's temporary arrays per value.

    Returns:
      The function's results for all values.
    """
    rows = max(1, _CHUNK // width)
    starts = range(0, values.size, rows)
    return np.concatenate([values[:0], *(function(values[i : i + rows]) for i in starts)])
