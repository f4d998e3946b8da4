"""Limits and differences of mean squared errors.

The limits are those of the ratio to iid rows at small distances and in high dimensions. The
orthogonality gap is the error of iid rows minus that of orthogonal rows.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax._src import checks
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections import BlockMode
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import FEATURES, ClosedFormCoupling, Features
from simrf_jax._src.theory.mse import checked_kernel
from simrf_jax._src.theory.oscillating import trigonometric_gap
from simrf_jax._src.theory.pairs import coupled_rows
from simrf_jax._src.theory.quadrature import Vector
from simrf_jax._src.theory.series import SERIES_BELOW, kummer, log_powers, log_relative_moments

_FAR = 1e4  # From this t = z^2 on, e^-t is 0 in float64.
_INFINITE_FROM = 1000.0  # The gap is infinite from this t = v^2 on; e^t overflows well below it.


def small_distance_prefactor(
    num_features: int,
    dim: int | None = None,
    *,
    coupling: ClosedFormCoupling = "simplex",
    features: Features = "positive",
    block: BlockMode = "regular",
) -> np.float64:
    r"""Returns the mean squared error relative to iid rows in the limit of small distances.

    .. math::
        \lim_{v \to 0} \frac{\mathrm{MSE}_c}{\mathrm{MSE}_\text{iid}} =
        \begin{cases} 1 + \sum_b P_b\, c_b\, \mu^2 / d & \text{positive} \\
        1 - \sum_b P_b (1 - c_b^2 d) / (d + 2) & \text{hyperbolic, trigonometric} \end{cases}
        \qquad \mu = E \chi_d = \frac{\sqrt 2\, \Gamma(\frac{d+1}{2})}{\Gamma(\frac d2)}.

    The sums run over the row blocks b. Row block b has :math:`r_b` rows, whose pairs have cosine
    :math:`c_b`, and :math:`P_b = r_b (r_b - 1) / m`. For trigonometric features the distance is
    :math:`|x - y|` instead of :math:`v = |x + y|`. ``mse_ratio`` returns this limit at distance 0.

    The paper calls the limit the prefactor of :math:`v^2`. For positive features it is
    :math:`1 - \mu^2/d`, about 1 / (2d), if the row blocks are whole simplices of any sizes, and it
    is 1 for orthogonal rows.

    Args:
      num_features: Number of rows m of the projection.
      dim: Dimension d. The default is m, as in the paper.
      coupling: Coupling of the rows: ``"iid"``, ``"orthogonal"``, ``"simplex"`` or
        ``"cross_polytope"``.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.

    Returns:
      The limit as a float64 number, with an error of at most 2e-16.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        or a number is out of range.

    Example:
      >>> print(f"{small_distance_prefactor(64):.7f}")
      0.0077817
      >>> print(f"{small_distance_prefactor(64, coupling='orthogonal', features='hyperbolic'):.7f}")
      0.0454545

    References:
      Reid et al., Simplex Random Features (ICML 2023), Sec. 5.1, https://arxiv.org/abs/2301.13856
    """
    checks.one_of("features", features, FEATURES)
    num_features = checks.positive_int("num_features", num_features)
    rows = coupled_rows(num_features, num_features if dim is None else dim, coupling, block)
    if features == "positive":
        # The slope is -1 if all row blocks are whole simplices, so 1 + slope is exactly 0.
        slope = sum(p * c for p, c, _ in rows.pairs)
        return np.float64((1 + slope) - slope * mean_norm_deficit(rows.dim))
    gain = sum(p * (1 - c**2 * rows.dim) for p, c, _ in rows.pairs)
    return np.float64(1 - gain / (rows.dim + 2))


def mean_norm_deficit(dim: int) -> float:
    r"""Returns :math:`1 - \mu^2 / d`, the variance of a row's norm divided by d.

    The result has full relative accuracy. The recurrence :math:`\mu_d\, \mu_{d+1} = d` raises d
    until a series of the logarithm in 1/d converges fast enough.

    Args:
      dim: Dimension d.

    Example:
      >>> import math
      >>> print(f"{mean_norm_deficit(2):.12f} {1 - math.pi / 4:.12f}")
      0.214601836603 0.214601836603
    """
    log_ratio = 0.0
    while dim < 40:
        log_ratio += math.log1p(-1 / (dim + 1) ** 2)
        dim += 2
    h = 1 / dim
    coefficients = (-1 / 2, 1 / 12, -1 / 10, 17 / 56, -31 / 18)
    log_ratio += sum(c * h ** (2 * i + 1) for i, c in enumerate(coefficients))
    return -math.expm1(log_ratio)


def asymptotic_ratio(
    z: ArrayLike, num_features: int, dim: int
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the ratio of orthogonal to iid errors of trigonometric features in high dimensions.

    .. math::
        \frac{\mathrm{MSE}_\text{orthogonal}}{\mathrm{MSE}_\text{iid}} \approx
        1 - \frac Pd \frac{z^4 e^{-z^2}}{(1 - e^{-z^2})^2}
        = 1 - \frac Pd \left(\frac{z^2/2}{\sinh(z^2/2)}\right)^2, \qquad z = |x - y|.

    The approximation holds to the leading order in 1/d; ``mse_ratio`` is exact. P = m - 1 for one
    row block, that is, for :math:`m \le d`. For more row blocks, :math:`P = \sum_b r_b (r_b - 1) /
    m` over the row blocks b of :math:`r_b` rows.

    Args:
      z: Distances :math:`|x - y|`, any shape, at least 0.
      num_features: Number of rows m of the projection.
      dim: Dimension d.

    Returns:
      float64 array of the shape of ``z``.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``z`` is not real.
      ValueError: If a number is out of range.

    Example:
      >>> from simrf_jax.theory import mse_ratio
      >>> exact = mse_ratio(1.0, 64, 512, coupling="orthogonal", features="trigonometric")
      >>> print(f"{asymptotic_ratio(1.0, 64, 512):.4f} {exact:.4f}")
      0.8867 0.8868

    References:
      Reid et al., Simplex Random Features (ICML 2023), Corollary 4.6, Eq. 27,
      https://arxiv.org/abs/2301.13856
      Yu et al., Orthogonal Random Features (NeurIPS 2016), https://arxiv.org/abs/1610.09072
    """
    rows = coupled_rows(num_features, dim, "orthogonal")
    t = np.minimum(arguments.squared_norms("z", z), _FAR)
    weight = sum(pair.weight for pair in rows.pairs)
    return (1 - weight / dim * np.exp(-t) / special.exprel(-t) ** 2)[()]


def orthogonality_gap(
    distance: ArrayLike,
    num_features: int,
    dim: int,
    *,
    features: Features = "positive",
    kernel: ScaleMixture = GAUSSIAN,
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
      kernel: Kernel that trigonometric features estimate. The formula is for the Gaussian kernel;
        other kernels use the covariance of ``theory.oscillating``.

    Returns:
      float64 array of the shape of ``distance``. It is accurate to 12 digits, or to an error of
      1e-15 for trigonometric features beyond z = 1.5. The gap of positive and hyperbolic features
      is infinite where e^(v^2) overflows, that is, for v > 26.6.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``distance`` is not real.
      ValueError: If the feature map is unknown, a number is out of range, or the features do not
        estimate the kernel.

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
    kernel = checked_kernel(kernel, features)
    rows = coupled_rows(num_features, dim, "orthogonal")
    weight = sum(pair.weight for pair in rows.pairs) / rows.num_rows
    t = arguments.squared_norms("distance", distance)
    gap = _oscillating_gap if features == "trigonometric" else _growing_gap
    if not weight:
        return np.where(np.isnan(t), np.nan, 0.0)[()]
    if kernel != GAUSSIAN:
        return np.piecewise(t, [~np.isnan(t)], [trigonometric_gap, np.nan], rows, kernel)[()]
    return weight * np.piecewise(t, [~np.isnan(t)], [gap, np.nan], rows.dim)[()]


def _growing_gap(t: Vector, dim: int) -> Vector:
    """Returns the sum over k for t >= 0, in which all terms are positive."""
    inside = t < _INFINITE_FROM
    peak = np.max(t[inside], initial=0.0)
    k = np.arange(2.0, int(peak + 12 * np.sqrt(peak) + 60))
    log_r = log_relative_moments(dim, 0.0, k.size + 1)[2:]
    log_coefficients = np.log(-np.expm1(log_r)) - special.gammaln(k + 1)
    result = np.full_like(t, np.inf)
    with np.errstate(divide="ignore", over="ignore"):
        result[inside] = np.exp(log_powers(np.log(t[inside]), k, log_coefficients))
    return result


def _oscillating_gap(t: Vector, dim: int) -> Vector:
    """Returns the sum over k at -t for t >= 0, or its closed form where the sum loses digits."""
    small = t < SERIES_BELOW
    k = np.arange(2.0, 42.0)
    deficits = -np.expm1(log_relative_moments(dim, 0.0, k.size + 1)[2:])
    result = np.exp(-t) - kummer(t / 2, dim)
    result[small] = (-t[small, None]) ** k @ (deficits / special.factorial(k))
    return result
