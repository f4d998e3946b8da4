r"""Mean squared errors of trigonometric features at large distances.

The conformity of trigonometric features is a characteristic function, whose absolute value is at
most 1. At large distances the direct difference of conformities therefore keeps its digits, where
the series in :math:`-z^2` loses them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax.theory.numerics import over_chunks, phi_rule
from simrf_jax.theory.pairs import Pairs
from simrf_jax.theory.series import alternating_series

# The series is used below this t = z^2, and the direct difference above it. Both keep 13 digits for
# several units around it.
SERIES_BELOW = 2.25
_TAIL_FROM = 90.0  # The asymptotic series is used from this y on.


def trigonometric_ratio(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...]
) -> Float64[np.ndarray, " n"]:
    """Returns the mean squared error of trigonometric features relative to iid rows.

    Args:
      t: Squared distances z^2, at least 0.
      dim: Dimension d.
      pairs: Coupled pairs of the projection.

    Returns:
      The ratio at each distance.
    """
    small = t < SERIES_BELOW
    result = np.empty_like(t)
    result[small] = alternating_series(t[small], dim, pairs)
    result[~small] = _direct_ratio(t[~small], dim, pairs)
    return result


def _direct_ratio(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...]
) -> Float64[np.ndarray, " n"]:
    gap = np.zeros_like(t)
    for weight, cosine, _ in pairs:
        gap += weight * (np.exp(-t) - _even_conformity(t, dim, cosine))
    return 1 - gap / (np.expm1(-t) ** 2 / 2)


def _even_conformity(
    t: Float64[np.ndarray, " n"], dim: int, cosine: float
) -> Float64[np.ndarray, " n"]:
    r"""Returns the part of :math:`\rho_c(-t)` that is even in c, for t = z^2."""
    if not cosine:
        return over_chunks(lambda t: kummer(t / 2, dim), t, 1)
    sines, log_weights = phi_rule(dim)
    bases = np.concatenate([1 + cosine * sines, 1 - cosine * sines]) / 2
    weights = np.tile(np.exp(log_weights) / 2, 2)
    return over_chunks(lambda t: kummer(t[:, None] * bases, dim) @ weights, t, bases.size)


def kummer(y: Float64[np.ndarray, "*shape"], dim: int) -> Float64[np.ndarray, "*shape"]:
    r"""Returns :math:`{}_1F_1(d; d/2; -y)` to an absolute error of 1e-15 or less.

    Kummer's transformation turns the function into a Poisson average of numbers :math:`g_k` of
    absolute value at most 1, whose signs alternate up to k = d/2,

    .. math::
        {}_1F_1(d; \tfrac d2; -y) = e^{-y} \sum_k \frac{y^k}{k!} g_k, \qquad
        g_k = \prod_{j<k} \frac{j - d/2}{j + d/2}.

    ``scipy.special.hyp1f1`` is wrong at isolated points for these arguments.

    Args:
      y: Numbers of at least 0.
      dim: Dimension d.

    Returns:
      The values of the function.
    """
    n = dim / 2
    result = np.zeros_like(y)
    central, tail = y < _TAIL_FROM, y >= _TAIL_FROM
    result[central] = _poisson_average(y[central], n)
    if dim % 2 and dim < 11:
        result[tail] = _algebraic_tail(y[tail], dim)
    # For all other d the tail is below 1e-17: it is at most e^{-y/2} for even d, and y^-d for odd.
    return result


def _poisson_average(y: Float64[np.ndarray, " size"], n: float) -> Float64[np.ndarray, " size"]:
    largest = np.max(y, initial=0.0)
    term = np.exp(-y)
    total = term.copy()
    for j in range(int(largest + 14 * np.sqrt(largest) + 40)):
        term *= y * ((j - n) / ((j + n) * (j + 1)))
        total += term
    return total


def _algebraic_tail(y: Float64[np.ndarray, " size"], dim: int) -> Float64[np.ndarray, " size"]:
    """Returns the asymptotic series, whose terms still decrease at k = 30 for d <= 9, y >= 90."""
    n = dim / 2
    term = special.gamma(n) * special.rgamma(-n) * y ** -float(dim)
    total = term.copy()
    for k in range(30):
        term *= (dim + k) * (n + 1 + k) / ((k + 1) * y)
        total += term
    return total
