r"""Errors of positive features whose rows have one fixed norm.

Rows of the norm :math:`\sqrt d` (``norms="sqrt_dim"``) estimate another kernel. The Gauss-Radau
rule (``norms="radau"``) has rows of the norm :math:`\sqrt{d + 2}` with the total weight
:math:`w = d / (d + 2)`, and one row of zeros with the weight 1 - w. It integrates the norm's
powers 0, 2 and 4 exactly, so that its bias begins with :math:`v^6`.

Relative to the kernel, one row of norm a has the mean
:math:`b = {}_0F_1(; \tfrac d2; \tfrac{a^2 v^2}{4})\, e^{-v^2/2}`, and two rows at the angle of
cosine c have :math:`C_c = {}_0F_1(; \tfrac d2; \tfrac{a^2 v^2 (1 + c)}{2})\, e^{-v^2}`. With n
rows, hence

.. math::
    E \Big(\frac{\hat K}{K} - 1\Big)^2 = \big(w b + (1 - w) e^{-v^2/2} - 1\big)^2
    + \frac{w^2}{n} \Big[C_1 - b^2 + \sum_b P_b (C_{c_b} - b^2)\Big].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.projections import FIXED_NORMS, NORMS, Norms
from simrf_jax.theory import arguments
from simrf_jax.theory.bessel import log_hyp0f1
from simrf_jax.theory.pairs import Pairs
from simrf_jax.theory.series import without_rounding

_SMALL = 1.0  # Below this t = v^2 the power series is used, and above it a difference.
_DEGREES = 40  # Terms beyond this degree are below 1e-30 for t <= 1.


class FixedNorm(NamedTuple):
    """Norm of the rows, and the weight that they have together.

    Attributes:
      squared_norm: Square of the norm.
      weight: Total weight of the rows. The row of zeros has the rest.
    """

    squared_norm: float
    weight: float


def fixed_norm(norms: Norms, dim: int) -> FixedNorm:
    """Returns the rule of ``"sqrt_dim"`` or ``"radau"``."""
    return FixedNorm(dim, 1.0) if norms == "sqrt_dim" else FixedNorm(dim + 2.0, dim / (dim + 2))


def num_weighted_rows(num_features: int, norms: Norms) -> int:
    """Returns the number of rows other than the row of zeros, which counts as a feature.

    Args:
      num_features: Number of features m.
      norms: Law of the norms.
    """
    if norms != "radau":
        return num_features
    if num_features < 2:
        raise ValueError(
            "norms='radau' needs num_features of at least 2, for a row of zeros and others, "
            f"got {num_features}."
        )
    return num_features - 1


def relative_bias(
    v: ArrayLike, dim: int, *, norms: Norms
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the relative bias of positive features, the mean of the estimate over K, less 1.

    The bias is 0 for the laws of norms that keep rows Gaussian. For the Gauss-Radau rule it is

    .. math::
        \frac{d}{d + 2}\, {}_0F_1\!\left(; \tfrac d2; \tfrac{(d + 2) v^2}{4}\right) e^{-v^2/2}
        + \frac{2}{d + 2}\, e^{-v^2/2} - 1 = -\frac{v^6}{24 (d + 4)} + \dots, \qquad v = |x + y|.

    Args:
      v: Norms :math:`|x + y|`, any shape, at least 0.
      dim: Dimension d.
      norms: Law of the norms; see ``kernel_mse``.

    Returns:
      float64 array of the shape of ``v``.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``v`` is not real.
      ValueError: If ``norms`` is unknown or a number is out of range.

    Example:
      >>> for v in (0.5, 1.0, 2.0):
      ...     print(f"{relative_bias(v, 64, norms='radau'):.1e}")
      -9.2e-06
      -5.3e-04
      -2.4e-02
    """
    dim = checks.positive_int("dim", dim)
    checks.one_of("norms", norms, NORMS)
    with np.errstate(over="ignore"):
        t = np.asarray(arguments.norms("v", v) ** 2)
    if norms not in FIXED_NORMS:
        return np.where(np.isnan(t), np.nan, 0.0)[()]
    return bias(t, dim, fixed_norm(norms, dim))[()]


def log_relative_mse(
    t: Float64[np.ndarray, "*shape"],
    num_rows: int,
    dim: int,
    pairs: tuple[Pairs, ...],
    rule: FixedNorm,
) -> Float64[np.ndarray, "*shape"]:
    """Returns the log of E(K_hat / K - 1)^2 for positive features with one fixed norm.

    Args:
      t: Squared norms v^2.
      num_rows: Number of rows, without a row of zeros.
      dim: Dimension d.
      pairs: Coupled pairs of the rows.
      rule: The norm and its weight.
    """
    t = np.asarray(t)
    log_variance = np.full(t.shape, np.nan)
    small, large = t < _SMALL, (t >= _SMALL) & np.isfinite(t)
    log_variance[np.isposinf(t)] = -np.inf
    with np.errstate(divide="ignore"):
        log_variance[small] = np.log(_sum_of_terms(t[small], dim, pairs, rule))
        log_variance[large] = _log_difference(t[large], dim, pairs, rule)
        log_variance += 2 * np.log(rule.weight) - np.log(num_rows)
        return np.asarray(np.logaddexp(log_variance, 2 * np.log(np.abs(bias(t, dim, rule)))))


def bias(
    t: Float64[np.ndarray, "*shape"], dim: int, rule: FixedNorm
) -> Float64[np.ndarray, "*shape"]:
    """Returns the relative bias of the estimate at the squared norms t = v^2."""
    k = np.arange(1.0, _DEGREES)
    ratios = rule.weight * np.cumprod(rule.squared_norm / (dim + 2 * (k - 1)))
    coefficients = without_rounding(ratios - 1) / special.factorial(k)
    small = t < _SMALL
    result = np.full(t.shape, np.nan)
    result[small] = np.exp(-t[small] / 2) * ((t[small, None] / 2) ** k @ coefficients)
    result[np.isposinf(t)] = -1.0
    large = (t >= _SMALL) & np.isfinite(t)
    log_mean = log_hyp0f1(dim / 2, rule.squared_norm * t[large] / 4) - t[large] / 2
    zero_row = (1 - rule.weight) * np.expm1(-t[large] / 2)
    result[large] = rule.weight * np.expm1(log_mean) + zero_row
    return result


def _sum_of_terms(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...], rule: FixedNorm
) -> Float64[np.ndarray, " n"]:
    """Returns the bracket of the formula as a power series without negative terms."""
    k = np.arange(1.0, _DEGREES)
    # Two independent unit vectors have E(1 + cosine)^k = prod_{0 < j < k} (d - 1 + 2j)/(d - 1 + j).
    independent = np.cumprod(np.concatenate([[1.0], (dim - 1 + 2 * k) / (dim - 1 + k)]))[:-1]
    total, size = 2**k - independent, 2**k + independent
    for weight, cosine, _ in pairs:
        total += weight * ((1 + cosine) ** k - independent)
        size += weight * ((1 + cosine) ** k + independent)
    coefficients = size * without_rounding(total / size) / special.factorial(k)
    coefficients *= np.cumprod(rule.squared_norm / (dim + 2 * (k - 1)))
    return np.exp(-t) * (t[:, None] ** k @ coefficients)


def _log_difference(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...], rule: FixedNorm
) -> Float64[np.ndarray, " n"]:
    """Returns the log of the bracket of the formula from its terms."""

    def log_mean(cosine: float) -> Float64[np.ndarray, " n"]:
        return log_hyp0f1(dim / 2, rule.squared_norm * t * (1 + cosine) / 2)

    logs = [log_mean(1.0), *(np.log(p.weight) + log_mean(p.cosine) for p in pairs)]
    log_moments = special.logsumexp(logs, axis=0)
    log_ones = np.log(1 + sum(p.weight for p in pairs))
    log_squared_mean = 2 * log_hyp0f1(dim / 2, rule.squared_norm * t / 4)
    return log_moments + np.log(-np.expm1(log_ones + log_squared_mean - log_moments)) - t
