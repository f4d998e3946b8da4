r"""Errors of positive features relative to the kernel, for any parameter and law of the norms.

Optimal positive features are importance sampling from a Gaussian of another width. They have a
parameter A < 1/8. One row estimates the kernel, relative to its value, by

.. math::
    f(w) = (1 - 4A)^{d/2}\, e^{2A |w|^2 + \sqrt{1 - 4A}\, w \cdot u - v^2/2}, \qquad
    w \sim N(0, I), \quad |u| = v = |x + y|,

which has mean 1. With :math:`\rho = 1 / (1 - 8A)`, two rows of independent norms have the same
:math:`E f f'` for every A, because the weights and the norms are then averaged separately for each
row. Two rows with a common norm, at an angle of cosine c, have

.. math::
    E f f' = \Big(\frac{1 + \rho}{2 \sqrt\rho}\Big)^d
    \exp\Big(v^2 \Big(\frac{(1 + \rho)(1 + c)}{2} - 1\Big)\Big).

At c = 1 this is the second moment of one row, :math:`S(A) = (\dots)^d e^{\rho v^2}`.

Far away, two rows at an angle of cosine c < 1 are not correlated, whatever the joint law of their
norms. Let :math:`h(y) = E e^{a y}`, and :math:`\kappa^2 = 2 (1 + \rho) v^2 \ge 2 v^2`. By the
inequality of Cauchy and Schwarz over the norms, and by :math:`a y \le \sigma y_+^2 / 2 + a^2 / (2
\sigma)` for any :math:`\sigma > 1`,

.. math::
    \frac{E f f'}{S(A)} \le e^{-\kappa^2/2} E \sqrt{h(\kappa s_1) h(\kappa s_1')}
    \le \Big(1 - \frac1\sigma\Big)^{-d/2} \exp\Big(-\frac{\kappa^2}{2}
    \Big(1 - \sigma \frac{1 + \max(c, 0)}{2}\Big)\Big),

where :math:`s_1` and :math:`s_1'` are coordinates of the two directions. No pair of rows has a
cosine between 1/2 and 1. With :math:`\sigma = 1.2`, all pairs therefore add at most
:math:`e^{-40}` to S(A) from :math:`v^2 = 500 + 9 d` on.

Rows with the fixed norm :math:`\sqrt d` (``norms="sqrt_dim"``) estimate another kernel. The
Gauss-Radau rule (``norms="radau"``) has rows of the norm :math:`\sqrt{d + 2}` with the total weight
:math:`w = d / (d + 2)`, and one row of zeros with the weight 1 - w. It integrates the norm's powers
0, 2 and 4 exactly, so its bias begins with :math:`v^6`. One row of the norm a has the mean :math:`b
= {}_0F_1(; \tfrac d2; \tfrac{a^2 v^2}{4})\, e^{-v^2/2}`, and two rows at the angle of cosine c have
:math:`C_c = {}_0F_1(; \tfrac d2; \tfrac{a^2 v^2 (1 + c)}{2})\, e^{-v^2}`. Hence n rows have

.. math::
    E \Big(\frac{\hat K}{K} - 1\Big)^2 = \big(w b + (1 - w) e^{-v^2/2} - 1\big)^2
    + \frac{w^2}{n} \Big[C_1 - b^2 + \sum_b P_b (C_{c_b} - b^2)\Big].
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax._src import checks
from simrf_jax._src.projections import FIXED_NORMS, NORMS, Norms
from simrf_jax._src.projections.norms import squared_norm
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import Features, Numbers
from simrf_jax._src.theory.pairs import Pairs, Rows
from simrf_jax._src.theory.quadrature import PANELS, Nodes, Vector, antithetic_rule, log_hyp0f1
from simrf_jax._src.theory.series import (
    log_parallel_asymptote,
    log_series,
    positive_series,
    without_rounding,
)

_FAR = 1e100  # Antithetic norms have no effect on errors beyond this t.
_SMALL = 1.0  # Below this t = v^2 the error is a sum of small terms, and above it a difference.
_LARGE_INFLATION = 100.0  # From this logarithm on, a difference keeps all digits at small t, too.
_HUGE = 1e300  # Fixed norms are at their limit from this t on, where products with t may overflow.
_DEGREES = 40  # With fixed norms, terms beyond this degree are below 1e-30 for t <= 1.


def optimal_parameter(
    mean_squared_distance: ArrayLike, dim: int
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the parameter A of optimal positive features in closed form.

    .. math::
        A^* = \frac{1 - 2\varphi - \sqrt{(2\varphi + 1)^2 + 8\varphi}}{16}, \qquad
        \varphi = \frac{v^2}{d}, \quad v = |x + y|.

    It minimizes the second moment of the estimate at a given v, and the mean of its logarithm if
    :math:`v^2` is a mean over pairs. It is negative except at v = 0. It is the same for every
    coupling of rows with independent norms, because only the second moment of a single row depends
    on A. Where norms are coupled, it is nearly optimal.

    Args:
      mean_squared_distance: The mean of :math:`|x + y|^2`, any shape, at least 0.
      dim: Dimension d.

    Returns:
      float64 array of the shape of ``mean_squared_distance``.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``mean_squared_distance`` is not real.
      ValueError: If a number is out of range.

    Example:
      >>> print(f"{optimal_parameter(4.0, 64):.6f}")
      -0.028361

    References:
      Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022), Theorem 3.3,
      https://arxiv.org/abs/2205.15317
      Likhosherstov et al., FAVOR# (2023), for the mean of the logarithm,
      https://arxiv.org/abs/2302.00787
    """
    dim = checks.positive_int("dim", dim)
    phi = arguments.norms("mean_squared_distance", mean_squared_distance) / dim
    half_root = np.hypot(phi + 0.5, np.sqrt(2) * np.sqrt(phi))
    # Each form avoids cancellation on its side, and neither overflows.
    with np.errstate(divide="ignore", invalid="ignore"):
        small, large = -phi / 2 / (0.5 - phi + half_root), (0.5 - phi) / 8 - half_root / 8
    return np.where(phi < 0.5, small, large)[()]


def relative_bias(
    v: ArrayLike, dim: int, *, norms: Norms
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the relative bias of positive features, the mean of the estimate over K, minus 1.

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
    return bias(arguments.squared_norms("v", v), dim, norms)[()]


def log_relative_mse(
    t: Float64[np.ndarray, "*#shape"],
    parameter: Float64[np.ndarray, "*#shape"],
    rows: Rows,
    features: Features,
    growth: int,
) -> Float64[np.ndarray, "*shape"]:
    """Returns the log of e^(-growth t) E(K_hat / K - 1)^2 for positive or hyperbolic features.

    Args:
      t: Squared norms v^2.
      parameter: Parameter A of the features, 0 for plain features and for fixed norms.
      rows: Rows of the projection.
      features: Feature map.
      growth: 0, or 1 for a result that hardly grows with t far away, so that ratios keep their
        digits. Infinite t then count as the largest float64.
    """
    rows = rows.with_antipodes() if features == "hyperbolic" else rows
    t = np.minimum(t, np.finfo(np.float64).max) if growth else t
    t, parameter = np.broadcast_arrays(t, parameter)
    largest, limit = (_HUGE, -np.inf) if rows.norms in FIXED_NORMS else (np.inf, np.inf)
    log_variance = np.where(t >= largest, limit, np.nan)
    small = (t < _SMALL) & (log_inflation(parameter, rows.dim) < _LARGE_INFLATION)
    large = ~small & (t < largest)
    with np.errstate(divide="ignore"):
        terms = _sum_of_terms(t[small], parameter[small], rows)
        log_variance[small] = np.log(terms) - growth * t[small]
        log_variance[large] = _log_difference(t[large], parameter[large], rows, growth)
        log_variance += 2 * np.log(rows.weight) - np.log(rows.num_rows)
        log_squared_bias = 2 * np.log(np.abs(bias(t, rows.dim, rows.norms)))
    if growth:
        log_squared_bias -= growth * t
    return np.asarray(np.logaddexp(log_variance, log_squared_bias))


def _sum_of_terms(t: Vector, parameter: Vector, rows: Rows) -> Vector:
    """Returns m times the variance, as the value at A = 0 plus the change due to A."""
    if rows.norms in FIXED_NORMS:
        return _sum_of_terms_of_fixed_norms(t, rows)
    total = np.expm1(t) * positive_series(t, rows, even=False)
    for pair in rows.kinds:
        if pair.norms == "equal":
            exponent = _exponent_of_change(t, parameter, rows.dim, pair.cosine)
            total += pair.weight * np.exp(pair.cosine * t) * np.expm1(exponent)
        elif pair.norms == "antithetic":
            cases = zip(t, parameter, strict=True)
            changes = [_antithetic_change(*case, rows.dim, pair.cosine) for case in cases]
            total += pair.weight * np.array(changes)
    return total


def _sum_of_terms_of_fixed_norms(t: Vector, rows: Rows) -> Vector:
    """Returns the bracket of the formula for fixed norms as a series without negative terms."""
    dim, k = rows.dim, np.arange(1.0, _DEGREES)
    # Two independent unit vectors have E(1 + cosine)^k = prod_{0 < j < k} (d - 1 + 2j)/(d - 1 + j).
    independent = np.cumprod(np.concatenate([[1.0], (dim - 1 + 2 * k) / (dim - 1 + k)]))[:-1]
    total, size = np.zeros_like(k), np.zeros_like(k)
    for weight, cosine, _ in rows.kinds:
        total += weight * ((1 + cosine) ** k - independent)
        size += weight * ((1 + cosine) ** k + independent)
    coefficients = size * without_rounding(total / size) / special.factorial(k)
    coefficients *= np.cumprod(squared_norm(rows.norms, dim) / (dim + 2 * (k - 1)))
    return np.exp(-t) * (t[:, None] ** k @ coefficients)


def _log_difference(t: Vector, parameter: Vector, rows: Rows, growth: int) -> Vector:
    """Returns the log of m e^(-growth t) times the variance from moments of rows and pairs."""
    logs = [
        np.log(pair.weight) + _log_moment(pair, t, parameter, rows, growth) for pair in rows.kinds
    ]
    log_moments = special.logsumexp(logs, axis=0)
    log_means = np.log(sum(pair.weight for pair in rows.kinds)) - growth * t
    if rows.norms in FIXED_NORMS:
        log_means += 2 * log_hyp0f1(rows.dim / 2, squared_norm(rows.norms, rows.dim) * t / 4) - t
    # If the variance is 0, as for one norm in one dimension, rounding must not make it negative.
    return log_moments + np.log(-np.expm1(np.minimum(log_means - log_moments, 0)))


def _log_moment(pair: Pairs, t: Vector, parameter: Vector, rows: Rows, growth: int) -> Vector:
    """Returns the log of e^(-growth t) E f f' for the two rows of a pair."""
    dim, cosine = rows.dim, pair.cosine
    if rows.norms in FIXED_NORMS:
        square = squared_norm(rows.norms, dim)
        return log_hyp0f1(dim / 2, square * t * (1 + cosine) / 2) - (1 + growth) * t
    if pair.norms == "equal":
        slope = cosine - growth + excess_of_rho(parameter) * (1 + cosine) / 2
        return slope * t + log_inflation(parameter, dim)
    # Pairs at an angle are negligible beyond this t, as shown at the top.
    near, result = t < 500 + 9 * dim, np.full_like(t, -np.inf)
    if pair.norms == "independent":
        result[near] = log_series(t[near], dim, cosine) - (1 + growth) * t[near]
        if cosine == 1:
            result[~near] = log_parallel_asymptote(t[~near], dim) - growth * t[~near]
        return result
    near |= cosine == 1
    cases = zip(np.minimum(t[near], _FAR), parameter[near], strict=True)
    moments = [_log_antithetic_moment(*case, dim, cosine) for case in cases]
    result[near] = np.array(moments) - growth * t[near]
    return result


def _exponent_of_change(t: Vector, parameter: Vector, dim: int, cosine: float) -> Vector:
    """Returns the term that A adds to the log of E f f' for two rows with a common norm."""
    return log_inflation(parameter, dim) + excess_of_rho(parameter) * (1 + cosine) / 2 * t


def bias(t: Float64[np.ndarray, "*shape"], dim: int, norms: Norms) -> Float64[np.ndarray, "*shape"]:
    """Returns the relative bias of the estimate.

    Args:
      t: Squared norms v^2.
      dim: Dimension d.
      norms: Law of the norms.
    """
    if norms not in FIXED_NORMS:
        return np.where(np.isnan(t), np.nan, 0.0)
    square = squared_norm(norms, dim)
    weight = dim / square
    k = np.arange(1.0, _DEGREES)
    ratios = weight * np.cumprod(square / (dim + 2 * (k - 1)))
    coefficients = without_rounding(ratios - 1) / special.factorial(k)

    def series(t: Vector) -> Vector:
        return np.exp(-t / 2) * ((t[:, None] / 2) ** k @ coefficients)

    def difference(t: Vector) -> Vector:
        log_mean = log_hyp0f1(dim / 2, square * t / 4) - t / 2
        return weight * np.expm1(log_mean) + (1 - weight) * np.expm1(-t / 2)

    conditions = [t < _SMALL, (t >= _SMALL) & (t < _HUGE), t >= _HUGE]
    return np.piecewise(t, conditions, [series, difference, -1.0, np.nan])


def excess_of_rho(parameter: Numbers | float) -> Numbers | float:
    """Returns rho - 1."""
    return 8 * parameter / (1 - 8 * parameter)


def log_inflation(parameter: Numbers | float, dim: int) -> Numbers:
    """Returns d log((1 + rho) / (2 sqrt(rho))), to full relative accuracy for small A."""
    return dim * np.log1p(2 * np.sinh(np.log1p(-8 * parameter) / 4) ** 2)


def _log_antithetic_moment(t: float, parameter: float, dim: int, cosine: float) -> float:
    """Returns the log of E f f' for two rows with F(a) + F(a') = 1."""
    norms, others, log_weights = rule_of_features(t, parameter, dim)
    log_products = _log_product(t, parameter, dim, cosine, norms, others)
    return special.logsumexp(log_products + log_weights)


def _antithetic_change(t: float, parameter: float, dim: int, cosine: float) -> float:
    """Returns E f f' for two rows with F(a) + F(a') = 1, minus its value at A = 0."""
    norms, others, log_weights = rule_of_features(t, parameter, dim)
    with_tilt = np.expm1(_log_product(t, parameter, dim, cosine, norms, others))
    without = np.expm1(_log_product(t, 0.0, dim, cosine, norms, others))
    return np.exp(log_weights) @ (with_tilt - without)


def _log_product(
    t: float, parameter: float, dim: int, cosine: float, norms: Nodes, others: Nodes
) -> Nodes:
    """Returns the log of E f f' over rotations, for given norms of the two rows."""
    squares = norms**2 + others**2
    log_weights = dim * np.log1p(-4 * parameter) + 2 * parameter * squares
    squared_resultants = np.maximum(squares + 2 * cosine * norms * others, 0)
    return log_weights + log_hyp0f1(dim / 2, (1 - 4 * parameter) * t * squared_resultants / 4) - t


def rule_of_features(
    t: float, parameter: float, dim: int, panels: int = PANELS
) -> tuple[Nodes, Nodes, Nodes]:
    """Returns the ``antithetic_rule`` for features at v^2 = t and at parameter A.

    Args:
      t: Squared norm v^2.
      parameter: Parameter A of the features.
      dim: Dimension d.
      panels: Number of panels of 20 nodes.
    """
    tilt = 1 - 4 * parameter
    peak = dim**0.5 + float(np.sqrt(t / min(1.0, tilt)))
    return antithetic_rule(dim, peak, panels, width=max(1.0, tilt) ** -0.5)
