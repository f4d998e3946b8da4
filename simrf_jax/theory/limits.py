"""Limits of the ratio of mean squared errors: small distances and high dimensions."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.mse import FEATURES, Features
from simrf_jax.theory.pairs import coupled_pairs

_FAR = 1e4  # From this t = z^2 on, e^-t is 0 in float64.


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
      The limit as a float64 number, to an error of 2e-16.

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
    num_features = checks.positive_int("num_features", num_features)
    dim = num_features if dim is None else checks.positive_int("dim", dim)
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("features", features, FEATURES)
    checks.one_of("block", block, BLOCK_MODES)
    pairs = coupled_pairs(num_features, dim, coupling, block)
    if features == "positive":
        # The slope is -1 if all row blocks are whole simplices, so that 1 + slope is exactly 0.
        slope = sum(p * c for p, c, _ in pairs)
        return np.float64((1 + slope) - slope * mean_norm_deficit(dim))
    return np.float64(1 - sum(p * (1 - c**2 * dim) for p, c, _ in pairs) / (dim + 2))


def mean_norm_deficit(dim: int) -> float:
    r"""Returns :math:`1 - \mu^2 / d`, the variance of a row's norm divided by d.

    The result has full relative accuracy. The recurrence :math:`\mu_d\, \mu_{d+1} = d` raises d
    until 1/d is small enough for a series of the logarithm in 1/d.

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
    row block, that is for :math:`m \le d`. For more row blocks,
    :math:`P = \sum_b r_b (r_b - 1) / m` over the row blocks b of :math:`r_b` rows.

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
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    with np.errstate(over="ignore"):
        t = np.minimum(arguments.norms("z", z) ** 2, _FAR)
    weight = sum(p for p, *_ in coupled_pairs(num_features, dim, "orthogonal", "regular"))
    return (1 - weight / dim * np.exp(-t) / special.exprel(-t) ** 2)[()]
