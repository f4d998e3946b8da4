"""The orthogonality gap: by how much orthogonal rows beat iid ones."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.moments import log_relative_moments
from simrf_jax.theory.mse import FEATURES
from simrf_jax.theory.numerics import over_chunks
from simrf_jax.theory.oscillation import SERIES_BELOW, kummer
from simrf_jax.theory.pairs import coupled_pairs

_INFINITE_FROM = 1000.0  # t = v^2, where e^t has long overflowed.


def orthogonality_gap(
    distance: ArrayLike, dim: int, num_features: int, *, features: str = "positive"
) -> np.ndarray | np.float64:
    r"""Mean squared error of iid features less that of orthogonal ones, without the prefactor.

    .. math::
        \Delta = \frac{P}{m} \left(e^{t} - {}_1F_1\!\left(d; \tfrac d2; \tfrac t2\right)\right)
        = \frac Pm \sum_k \frac{t^k}{k!} \left(1 - \prod_{j<k} \frac{d+j}{d+2j}\right), \qquad
        t = \begin{cases} v^2 & \text{positive, hyperbolic} \\
        -z^2 & \text{trigonometric} \end{cases}

    where :math:`v = |x + y|`, :math:`z = |x - y|`, and :math:`P = \sum_b r_b (r_b - 1) / m` over
    the blocks of :math:`r_b \le d` rows, which is the paper's m - 1 for :math:`m \le d`, and d - 1
    for multiples of d. To be multiplied by the prefactor of the features and the kernel, which the
    paper's Eqs. 25 and 26 write out for the Gaussian kernel: :math:`e^{-2x^2-2y^2}` for positive
    and hyperbolic features and 1 for trigonometric ones (softmax kernel: :math:`e^{-x^2-y^2}` and
    :math:`e^{x^2+y^2}`).

    The gap is positive for positive and hyperbolic features, which share it, but at distance 0.
    That of trigonometric features is positive up to a first root (:math:`z \approx 3` in 3 to 12
    dimensions), where its sign changes, and in more than 4 dimensions changes again; in 2
    dimensions it has no root.

    Args:
      distance: v, or z for trigonometric features; any shape, at least 0.
      dim: Dimension d.
      num_features: Rows m of the projection.
      features: The feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.

    Returns:
      float64 array of the shape of ``distance``: to 12 digits, for trigonometric features beyond
      z = 1.5 to an error of 1e-15; infinite for positive ones where e^(v^2) overflows, v > 26.6.

    Raises:
      TypeError: If ``dim`` or ``num_features`` is not an integer, or ``distance`` not real.
      ValueError: If the feature map is unknown or a number is out of range.

    Example:
      >>> import numpy as np
      >>> np.round(orthogonality_gap([0.5, 1.0, 2.0], 64, 64), 6)
      array([5.940000e-04, 1.962500e-02, 5.543422e+00])
      >>> np.round(orthogonality_gap([1.0, 3.0, 4.0], 4, 4, features="trigonometric"), 6)
      array([ 0.029507,  0.001134, -0.000922])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Corollary 4.4 and Theorem 4.5, Eqs. 25 (with
      the :math:`2^k k!` of Eq. 69) and 26.
    """
    dim = checks.positive_int("dim", dim)
    num_features = checks.positive_int("num_features", num_features)
    checks.one_of("features", features, FEATURES)
    with np.errstate(over="ignore"):
        t = arguments.norms("distance", distance) ** 2
    result = np.where(np.isnan(t), np.nan, 0.0)
    for pairs in coupled_pairs(num_features, dim, "orthogonal", "regular"):
        known = ~np.isnan(t)
        gap = _oscillating_gap if features == "trigonometric" else _growing_gap
        result[known] = pairs.weight / num_features * gap(t[known], dim)
    return result[()]


def _growing_gap(t: np.ndarray, dim: int) -> np.ndarray:
    """The sum for t >= 0, all of whose terms are positive."""
    inside = t < _INFINITE_FROM
    result = np.full(t.shape, np.inf)
    peak = np.max(t[inside], initial=0.0)
    k = np.arange(2.0, int(peak + 12 * np.sqrt(peak) + 60))
    log_r = log_relative_moments(dim, 0.0, k.size + 1)[2:]
    log_coefficients = np.log(-np.expm1(log_r)) - special.gammaln(k + 1)

    def gap(t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", over="ignore"):
            log_terms = k * np.log(t)[:, None] + log_coefficients
            return np.exp(special.logsumexp(log_terms, axis=1))

    result[inside] = over_chunks(gap, t[inside], k.size)
    return result


def _oscillating_gap(t: np.ndarray, dim: int) -> np.ndarray:
    """The sum at -t, for t >= 0: directly, where the signs would cost its digits."""
    small = t < SERIES_BELOW
    k = np.arange(2.0, 42.0)
    deficits = -np.expm1(log_relative_moments(dim, 0.0, k.size + 1)[2:])
    result = np.exp(-t) - kummer(t / 2, dim)
    result[small] = (-t[small, None]) ** k @ (deficits / special.factorial(k))
    return result
