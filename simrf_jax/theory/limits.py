"""Limits of the ratio of mean squared errors: small distances and high dimensions."""

from __future__ import annotations

import math

import numpy as np
from jax.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.projections.blocks import BLOCK_MODES
from simrf_jax.theory import arguments
from simrf_jax.theory.mse import FEATURES
from simrf_jax.theory.pairs import coupled_pairs

_FAR = 1e4  # t = z^2, where e^-t is 0.


def small_distance_prefactor(
    dim: int,
    num_features: int | None = None,
    *,
    coupling: str = "simplex",
    features: str = "positive",
    block: str = "regular",
) -> np.float64:
    r"""Ratio to the iid mean squared error in the limit of small distances.

    .. math::
        \lim_{v \to 0} \frac{\mathrm{MSE}_c}{\mathrm{MSE}_\text{iid}} =
        \begin{cases} 1 + \sum_b P_b\, c_b\, \mu^2 / d & \text{positive} \\
        1 - \sum_b P_b (1 - c_b^2 d) / (d + 2) & \text{hyperbolic, trigonometric} \end{cases}
        \qquad \mu = E \chi_d = \frac{\sqrt 2\, \Gamma(\frac{d+1}{2})}{\Gamma(\frac d2)},

    over the blocks of :math:`r_b` rows at cosine :math:`c_b`, :math:`P_b = r_b (r_b - 1) / m`. The
    paper's prefactor of :math:`v^2`; in blocks that are whole simplices it is :math:`1 - \mu^2/d`,
    about 1 / (2d), whatever their sizes, and it is 1 for orthogonal positive features. What
    ``mse_ratio`` is at 0.

    Args:
      dim: Dimension d.
      num_features: Rows m of the projection, by default d, as in the paper.
      coupling: How rows are coupled: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      features: The feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      block: Sizes of the blocks, ``"regular"`` or ``"square"``, as in ``draw_projection``.

    Returns:
      The limit, to an error of 2e-16.

    Raises:
      TypeError: If ``dim`` or ``num_features`` is not an integer.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        or a number is out of range.

    Example:
      >>> print(f"{small_distance_prefactor(64):.7f}")
      0.0077817
      >>> print(f"{small_distance_prefactor(64, coupling='orthogonal', features='hyperbolic'):.7f}")
      0.0454545

    References:
      Reid et al., Simplex Random Features (ICML 2023), Sec. 5.1.
    """
    dim = checks.positive_int("dim", dim)
    num_features = dim if num_features is None else num_features
    num_features = checks.positive_int("num_features", num_features)
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("features", features, FEATURES)
    checks.one_of("block", block, BLOCK_MODES)
    pairs = coupled_pairs(num_features, dim, coupling, block)
    if features == "positive":
        slope = sum(p * c for p, c in pairs)  # -1 for regular blocks: nothing of the 1 is left.
        return np.float64((1 + slope) - slope * mean_norm_deficit(dim))
    return np.float64(1 - sum(p * (1 - c**2 * dim) for p, c in pairs) / (dim + 2))


def mean_norm_deficit(dim: int) -> float:
    r""":math:`1 - \mu^2 / d`, the variance of a row's norm over d, to full relative accuracy.

    By :math:`\mu_d\, \mu_{d+1} = d`, and the logarithm's series in 1/d once that is small enough.

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


def asymptotic_ratio(z: ArrayLike, dim: int, num_features: int) -> np.ndarray | np.float64:
    r"""Ratio of the errors of orthogonal and iid trigonometric features, in high dimensions.

    .. math::
        \frac{\mathrm{MSE}_\text{orthogonal}}{\mathrm{MSE}_\text{iid}} \approx
        1 - \frac Pd \frac{z^4 e^{-z^2}}{(1 - e^{-z^2})^2}
        = 1 - \frac Pd \left(\frac{z^2/2}{\sinh(z^2/2)}\right)^2, \qquad z = |x - y|,

    to the leading order in 1/d, with P = m - 1 for one block, :math:`m \le d`, and
    :math:`\sum_b r_b (r_b - 1) / m` over the blocks of :math:`r_b` rows for more. ``mse_ratio`` is
    exact.

    Args:
      z: Distances :math:`|x - y|`, any shape, at least 0.
      dim: Dimension d.
      num_features: Rows m of the projection.

    Returns:
      float64 array of the shape of ``z``.

    Raises:
      TypeError: If ``dim`` or ``num_features`` is not an integer, or ``z`` not real.
      ValueError: If a number is out of range.

    Example:
      >>> from simrf_jax.theory import mse_ratio
      >>> exact = mse_ratio(1.0, 512, 64, coupling="orthogonal", features="trigonometric")
      >>> print(f"{asymptotic_ratio(1.0, 512, 64):.4f} {exact:.4f}")
      0.8867 0.8868

    References:
      Reid et al., Simplex Random Features (ICML 2023), Corollary 4.6, Eq. 27; Yu et al., Orthogonal
      Random Features (NeurIPS 2016).
    """
    dim = checks.positive_int("dim", dim)
    num_features = checks.positive_int("num_features", num_features)
    with np.errstate(over="ignore"):
        t = np.minimum(arguments.norms("z", z) ** 2, _FAR)
    weight = sum(p for p, _ in coupled_pairs(num_features, dim, "orthogonal", "regular"))
    return (1 - weight / dim * np.exp(-t) / special.exprel(-t) ** 2)[()]
