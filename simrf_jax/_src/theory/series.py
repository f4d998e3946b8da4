r"""Power series of conformities, and of mean squared errors of coupled rows relative to iid rows.

For a pair of rows at a fixed cosine :math:`c`, :math:`|w_i + w_j|^2 = r^2 (1 + c \sin\phi)` with
:math:`r \sim \chi_{2d}` independent of :math:`\phi`, whose density is proportional to
:math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. Hence

.. math::
    \frac{E |w_i + w_j|^{2k}}{E |w_i + w_j|^{2k}_\text{iid}} = r_k I_k(c), \qquad
    r_k = \prod_{j<k} \frac{d+j}{d+2j}, \qquad I_k(c) = E_\phi (1 + c \sin\phi)^k.

These are Eqs. 23 and 24 of Reid et al., Simplex Random Features (ICML 2023), in a form without
cancellation. Two rows of equal norms have :math:`|w_i + w_j|^2 = 2 (1 + c) a^2`, hence the relative
moments :math:`(1 + c)^k`. Those of antithetic norms are computed by quadrature over the norm.

Without the prefactor that all couplings share, the mean squared error is

.. math::
    V_1 + \sum_b P_b (C_{c_b} - C_\text{iid}) = \sum_k \frac{t^k}{k!} V_k q_k, \qquad
    q_k = 1 - \sum_b \frac{P_b}{V_k} (1 - r_k E_k(c_b)), \qquad t = v^2

where :math:`P_b = r_b (r_b - 1) / m` for row block b of :math:`r_b` rows at cosine :math:`c_b`. For
positive features :math:`V_k = 2^k - 1` and :math:`E_k = I_k(c)`. Hyperbolic features have the even
parts of these, :math:`V_k = 2^{k-1} - 1` and :math:`E_k = (I_k(c) + I_k(-c)) / 2`. Trigonometric
features have the series of hyperbolic features at :math:`-t`, with :math:`t = z^2`.

The ratio to iid is thus a mean of the ratios :math:`q_k` of single degrees, with positive weights.
Apart from the :math:`q_k`, there is no subtraction, neither at small :math:`t`, where both errors
vanish, nor at large :math:`t`, where both overflow.

The conformity of trigonometric features is a characteristic function, whose absolute value is at
most 1. At large distances the direct difference of conformities therefore keeps its digits, where
the series in :math:`-z^2` loses them.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax._src.theory.pairs import Pairs, Rows
from simrf_jax._src.theory.quadrature import (
    Nodes,
    Vector,
    antithetic_rule,
    over_chunks,
    phi_rule,
    sum_by_ratios,
)

_ROUNDING = 1e-14  # Ratios of single degrees are 0, or at least about 1 / d^2.
# The series of trigonometric features is used below this t = z^2, and the direct difference above
# it. Both keep 13 digits for several units around it.
SERIES_BELOW = 2.25
_HERMITE = 40  # Nodes of the Gauss-Hermite rule.
_TAIL_FROM = 90.0  # The asymptotic series of kummer is used from this y on.


def log_series(t: Vector, dim: int, cosine: float) -> Vector:
    """Returns the logarithm of the conformity rho_c(t), from all significant terms.

    Args:
      t: Squared norms v^2, at least 0.
      dim: Dimension d.
      cosine: Cosine c of the angle between the rows.
    """
    # r_k falls with k, and I_k grows by a factor of at most 1 + max(c, 0) per step, so the largest
    # term is at or before k = peak.
    peak = np.max(t, initial=0.0) * (1 + max(cosine, 0.0))
    log_moments = log_relative_moments(dim, cosine, int(peak + 12 * np.sqrt(peak) + 60))
    k = np.arange(1.0, log_moments.size)
    log_coefficients = log_moments[1:] - special.gammaln(k + 1)
    # The sum omits its leading 1, which would absorb the digits of a small log rho.
    with np.errstate(divide="ignore"):
        return np.logaddexp(0, log_powers(np.log(t), k, log_coefficients))


def log_parallel_asymptote(t: Vector, dim: int) -> Vector:
    r"""Returns the logarithm of :math:`e^{-t} \rho_1(t)` for large t.

    With :math:`n = d / 2` and :math:`w = v \cos(\tfrac\phi2 + \tfrac\pi4)`, it is the integral

    .. math::
        \frac{2}{v B(n, \frac12)} \int e^{-w^2} \Big(1 - \frac{2 w^2}{t}\Big)^{d-1}
        \Big(1 - \frac{w^2}{t}\Big)^{-1/2} {}_1F_1(-n; n; w^2 - t)\, dw

    by Gauss-Hermite quadrature, with the asymptotic series of :math:`{}_1F_1` (DLMF 13.7.2), which
    ends. The omitted parts are below :math:`e^{-t/2}`.

    Args:
      t: Squared norms v^2, at least 500 + 9 d.
      dim: Dimension d.
    """
    n = dim / 2
    roots, weights = np.polynomial.hermite.hermgauss(_HERMITE)

    def log_integral(t: Vector) -> Vector:
        x = roots**2 / t[:, None]
        y = t[:, None] * (1 - x)
        series = sum_by_ratios(
            np.ones_like(y), lambda k: (k - n) * (k + 1 - dim) / ((k + 1) * y), dim
        )
        return np.log(((1 - 2 * x) ** (dim - 1) * (1 - x) ** (n - 0.5) * series) @ weights)

    log_factor = special.gammaln(n) - special.gammaln(dim) - special.betaln(n, 0.5) + np.log(2)
    return over_chunks(log_integral, t, _HERMITE) + (n - 0.5) * np.log(t) + log_factor


def log_relative_moments(
    dim: int, cosine: float, degrees: int
) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns the logarithm of r_k I_k(c) for k = 0, ..., ``degrees``."""
    if not cosine:
        return _log_r(dim, degrees)
    sines, log_weights = phi_rule(dim)
    log_i = log_powers(np.arange(degrees + 1.0), np.log1p(cosine * sines), log_weights)
    return _log_r(dim, degrees) + log_i


def log_powers(x: Vector, exponents: Nodes, log_weights: Nodes) -> Vector:
    """Returns the logarithm of the weighted sum of e^(x exponent) for each x."""
    return over_chunks(
        lambda x: special.logsumexp(x[:, None] * exponents + log_weights, axis=1), x, exponents.size
    )


def _scaled_deficits(dim: int, pairs: Pairs, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns 2^-k (1 - M_k) for k = 0, ..., ``degrees``, with M_k the relative moments of pairs.

    The result has full relative accuracy for independent norms and c <= 0, and for equal norms. The
    function forms neither 2^k nor moments that grow like (1 + c)^k for c > 0.
    """
    k, cosine = np.arange(degrees + 1.0), pairs.cosine
    log_scale = -k * np.log(2)
    if pairs.norms == "equal":
        log_base = np.log1p(cosine) if cosine > -1 else -800.0  # Its exponential is 0.
        return -_scaled_powers_minus_1(k, np.array([log_base]))[:, 0]
    if pairs.norms == "antithetic":
        norms, others, log_weights = antithetic_rule(dim, np.sqrt(dim + 2.0 * k.size))
        log_squares = np.log((norms**2 + others**2 + 2 * cosine * norms * others) / 4)
        # An iid pair has |w_i + w_j|^2 = 2 chi^2_d, whose moments are 4^k (d/2)_k.
        log_moments = np.concatenate([[0.0], np.cumsum(np.log(dim / 2 + k[:-1]))])
        log_relative = log_powers(k, log_squares, log_weights) - log_moments
        return np.exp(log_scale) - np.exp(log_relative + log_scale)
    log_r = _log_r(dim, degrees)
    deficits = -np.exp(log_scale) * np.expm1(log_r)
    if not cosine:
        return deficits
    sines, log_weights = phi_rule(dim)
    log_bases, weights = np.log1p(cosine * sines), np.exp(log_weights)
    scaled_i_minus_1 = over_chunks(
        lambda k: _scaled_powers_minus_1(k, log_bases) @ weights, k, sines.size
    )
    return deficits - np.exp(log_r) * scaled_i_minus_1


def _scaled_powers_minus_1(
    k: Float64[np.ndarray, " k"], log_bases: Nodes
) -> Float64[np.ndarray, "k nodes"]:
    """Returns 2^-k (base^k - 1) for each k and base."""
    growth = k[:, None] * log_bases
    scale = np.exp((-k * np.log(2))[:, None] + np.maximum(growth, 0))
    return scale * np.sign(growth) * -np.expm1(-np.abs(growth))


def _log_r(dim: int, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns the logarithm of r_k for k = 0, ..., ``degrees``."""
    j = np.arange(float(degrees))
    return np.concatenate([[0.0], np.cumsum(np.log1p(-j / (dim + 2 * j)))])


@functools.lru_cache(maxsize=64)
def _degree_ratios(rows: Rows, even: bool) -> Float64[np.ndarray, " degrees"]:
    """Returns the ratios q_k from the first degree with variance until they are constant.

    Args:
      rows: Rows of the projection.
      even: If true, the series is that of hyperbolic features, whose first degree with variance is
        2; otherwise that of positive features, whose first degree with variance is 1.

    Returns:
      The ratios, one for each degree.
    """
    degrees, first = 64, 2 if even else 1
    while True:
        degrees *= 2
        differences = np.zeros(degrees + 1 - first)
        scaled_v = _scaled_variances(np.arange(first, degrees + 1.0), even)
        for kind in rows.pairs:
            if _is_identical(kind, even):
                continue
            deficits = _scaled_deficits(rows.dim, kind, degrees)
            if even:
                mirrored = kind._replace(cosine=-kind.cosine)
                deficits = (deficits + _scaled_deficits(rows.dim, mirrored, degrees)) / 2
            differences += kind.weight * deficits[first:] / scaled_v
        if abs(differences[-1]) < 1e-17:
            return without_rounding(_last_ratio(rows, even) - differences)


def _last_ratio(rows: Rows, even: bool) -> float:
    """Returns the limit of the ratios q_k, which is above 1 if features are duplicated."""
    return 1 + sum(kind.weight for kind in rows.pairs if _is_identical(kind, even))


def _is_identical(kind: Pairs, even: bool) -> bool:
    """Returns whether the two rows of each pair have the same feature, even if ``even``."""
    return kind.norms == "equal" and (kind.cosine == 1 or (even and kind.cosine == -1))


def without_rounding(ratios: Vector) -> Vector:
    """Replaces rounding errors by 0, for degrees that the rows integrate exactly."""
    return np.where(np.abs(ratios) < _ROUNDING, 0.0, ratios)


def _scaled_variances(k: Vector, even: bool) -> Vector:
    """Returns 2^-k V_k, for the even parts if ``even``."""
    return (1 - 2 ** (1 - k)) / 2 if even else 1 - 2**-k


def positive_series(t: Vector, rows: Rows, *, even: bool) -> Vector:
    """Returns the mean squared error of positive or hyperbolic features relative to iid rows.

    Args:
      t: Squared norms v^2, at least 0.
      rows: Rows of the projection.
      even: If true, the features are hyperbolic; otherwise they are positive.

    Returns:
      The ratio at each t.
    """
    ratios = _degree_ratios(rows, even)
    # The weights are nearly those of Poisson(2t). At t_max they are negligible at all degrees whose
    # ratio differs from 1.
    t_max = ratios.size
    degrees = int(2 * t_max + 14 * np.sqrt(2 * t_max) + 60)
    first = 2 if even else 1
    k = np.arange(first, first + degrees, dtype=np.float64)
    last = _last_ratio(rows, even)
    q = np.concatenate([ratios, np.full(degrees - ratios.size, last)])
    log_coefficients = np.log(_scaled_variances(k, even)) - special.gammaln(k + 1)

    def mean_ratio(t: Vector) -> Vector:
        log_weights = k * np.log(2 * t)[:, None] + log_coefficients
        weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
        return weights @ q / weights.sum(axis=1)

    return np.piecewise(
        t,
        [t == 0, (t > 0) & (t < t_max)],
        [q[0], lambda t: over_chunks(mean_ratio, t, degrees), last],
    )


def trigonometric_ratio(t: Vector, rows: Rows) -> Vector:
    """Returns the mean squared error of trigonometric features relative to iid rows.

    Args:
      t: Squared distances z^2, at least 0.
      rows: Rows of the projection.

    Returns:
      The ratio at each distance.
    """
    return np.piecewise(t, [t < SERIES_BELOW], [_alternating_series, _direct_ratio], rows)


def _alternating_series(t: Vector, rows: Rows) -> Vector:
    """Returns the ratio for distances z^2 from 0 to 3 or so."""
    k = np.arange(2.0, 50.0)
    coefficients = 2**k * _scaled_variances(k, even=True) / special.factorial(k)
    coefficients *= _degree_ratios(rows, even=True)[: k.size]

    def ratio(t: Vector) -> Vector:
        return (-t[:, None]) ** (k - 2) @ coefficients / (special.exprel(-t) ** 2 / 2)

    return over_chunks(ratio, t, k.size)


def _direct_ratio(t: Vector, rows: Rows) -> Vector:
    gap = np.zeros_like(t)
    for weight, cosine, _ in rows.pairs:
        gap += weight * (np.exp(-t) - _even_conformity(t, rows.dim, cosine))
    return 1 - gap / (np.expm1(-t) ** 2 / 2)


def _even_conformity(t: Vector, dim: int, cosine: float) -> Vector:
    r"""Returns the part of :math:`\rho_c(-t)` that is even in c, for t = z^2."""
    if not cosine:
        return over_chunks(lambda t: kummer(t / 2, dim), t, 1)
    sines, log_weights = phi_rule(dim)
    bases = np.concatenate([1 + cosine * sines, 1 - cosine * sines]) / 2
    weights = np.tile(np.exp(log_weights) / 2, 2)
    return over_chunks(lambda t: kummer(t[:, None] * bases, dim) @ weights, t, bases.size)


def kummer(y: Float64[np.ndarray, "*shape"], dim: int) -> Float64[np.ndarray, "*shape"]:
    r"""Returns :math:`{}_1F_1(d; d/2; -y)` with an absolute error of at most 1e-15.

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
    # For even d the tail is at most e^{-y/2}, and for odd d it is y^-d. Below 1e-17 it counts as 0.
    tail = _algebraic_tail if dim % 2 and dim < 11 else 0.0
    return np.piecewise(y, [y < _TAIL_FROM], [_poisson_average, tail], dim)


def _poisson_average(y: Vector, dim: int) -> Vector:
    n, largest = dim / 2, np.max(y, initial=0.0)
    num_terms = int(largest + 14 * np.sqrt(largest) + 40)
    return sum_by_ratios(np.exp(-y), lambda j: y * ((j - n) / ((j + n) * (j + 1))), num_terms)


def _algebraic_tail(y: Vector, dim: int) -> Vector:
    """Returns the asymptotic series, whose terms still decrease at k = 30 for d <= 9, y >= 90."""
    n = dim / 2
    first = special.gamma(n) * special.rgamma(-n) * y ** -float(dim)
    return sum_by_ratios(first, lambda k: (dim + k) * (n + 1 + k) / ((k + 1) * y), 30)
