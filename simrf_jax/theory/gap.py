"""The orthogonality gap: the mean squared error of iid rows minus that of orthogonal rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.moments import log_relative_moments
from simrf_jax.theory.mse import FEATURES, Features
from simrf_jax.theory.numerics import over_chunks
from simrf_jax.theory.oscillation import SERIES_BELOW, kummer
from simrf_jax.theory.pairs import coupled_pairs

_INFINITE_FROM = 1000.0  # The gap is infinite from this t = v^2 on; e^t overflows well below it.


def orthogonality_gap(
    distance: ArrayLike, num_features: int, dim: int, *, features: Features = "positive"
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the mean squared error of iid minus that of orthogonal rows, without the prefactor.

    .. math::
        \Delta = \frac{P}{m} \left(e^{t} - {}_1F_1\!\left(d; \tfrac d2; \tfrac t2\right)\right)
        = \frac Pm \sum_k \frac{t^k}{k!} \left(1 - \prod_{j<k} \frac{d+j}{d+2j}\right), \qquad
        t = \begin{cases} v^2 & \text{positive, hyperbolic} \\
        -z^2 & \text{trigonometric} \end{cases}

    Here :math:`v = |x + y|`, :math:`z = |x - y|`, and :math:`P = \sum_b r_b (r_b - 1) / m` over the
    row blocks b of :math:`r_b \le d` rows. P is the paper's m - 1 for :math:`m \le d`, and it is
    d - 1 if m is a multiple of d.

    To obtain the difference of the errors, multiply the gap by the prefactor of the features and
    the kernel. The paper's Eqs. 25 and 26 include the prefactor of the Gaussian kernel, which is
    :math:`e^{-2x^2-2y^2}` for positive and hyperbolic features and 1 for trigonometric ones. The
    prefactors of the softmax kernel are :math:`e^{-x^2-y^2}` and :math:`e^{x^2+y^2}`.

    Positive and hyperbolic features have the same gap, which is positive except at distance 0. The
    gap of trigonometric features is positive up to a first root (:math:`z \approx 3` in 3 to 12
    dimensions), where its sign changes. In more than 4 dimensions the sign changes again, and in 2
    dimensions there is no root. If m = 1 or d = 1, no two rows are coupled and the gap is 0.

    Args:
      distance: The norm v, or the distance z for trigonometric features; any shape, at least 0.
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.

    Returns:
      float64 array of the shape of ``distance``. It is accurate to 12 digits, or to an error of
      1e-15 for trigonometric features beyond z = 1.5. The gap of positive and hyperbolic features
      is infinite where e^(v^2) overflows, that is for v > 26.6.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``distance`` is not real.
      ValueError: If the feature map is unknown or a number is out of range.

    Example:
      >>> import numpy as np
      >>> np.round(orthogonality_gap([0.5, 1.0, 2.0], 64, 64), 6)
      array([5.940000e-04, 1.962500e-02, 5.543422e+00])
      >>> np.round(orthogonality_gap([1.0, 3.0, 4.0], 4, 4, features="trigonometric"), 6)
      array([ 0.029507,  0.001134, -0.000922])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Corollary 4.4, Eq. 25 (with the
      :math:`2^k k!` of Eq. 69), and Theorem 4.5, Eq. 26, https://arxiv.org/abs/2301.13856
    """
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    checks.one_of("features", features, FEATURES)
    with np.errstate(over="ignore"):
        t = arguments.norms("distance", distance) ** 2
    result = np.where(np.isnan(t), np.nan, 0.0)
    for pairs in coupled_pairs(num_features, dim, "orthogonal", "regular"):
        known = ~np.isnan(t)
        gap = _oscillating_gap if features == "trigonometric" else _growing_gap
        result[known] = pairs.weight / num_features * gap(t[known], dim)
    return result[()]


def _growing_gap(t: Float64[np.ndarray, " n"], dim: int) -> Float64[np.ndarray, " n"]:
    """Returns the sum over k for t >= 0, in which all terms are positive."""
    inside = t < _INFINITE_FROM
    result = np.full(t.shape, np.inf)
    peak = np.max(t[inside], initial=0.0)
    k = np.arange(2.0, int(peak + 12 * np.sqrt(peak) + 60))
    log_r = log_relative_moments(dim, 0.0, k.size + 1)[2:]
    log_coefficients = np.log(-np.expm1(log_r)) - special.gammaln(k + 1)

    def gap(t: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        with np.errstate(divide="ignore", over="ignore"):
            log_terms = k * np.log(t)[:, None] + log_coefficients
            return np.exp(special.logsumexp(log_terms, axis=1))

    result[inside] = over_chunks(gap, t[inside], k.size)
    return result


def _oscillating_gap(t: Float64[np.ndarray, " n"], dim: int) -> Float64[np.ndarray, " n"]:
    """Returns the sum over k at -t for t >= 0, or its closed form where the sum loses digits."""
    small = t < SERIES_BELOW
    k = np.arange(2.0, 42.0)
    deficits = -np.expm1(log_relative_moments(dim, 0.0, k.size + 1)[2:])
    result = np.exp(-t) - kummer(t / 2, dim)
    result[small] = (-t[small, None]) ** k @ (deficits / special.factorial(k))
    return result
