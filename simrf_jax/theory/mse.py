"""Mean squared errors of the kernel estimates of random features."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features import KERNELS
from simrf_jax.projections.blocks import BLOCK_MODES
from simrf_jax.theory import arguments
from simrf_jax.theory.oscillation import trigonometric_ratio
from simrf_jax.theory.pairs import Pairs, coupled_pairs
from simrf_jax.theory.series import positive_series

FEATURES = ("positive", "hyperbolic", "trigonometric")


def kernel_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    *,
    coupling: str,
    features: str = "positive",
    kernel: str = "gaussian",
    block: str = "regular",
    log: bool = False,
) -> np.ndarray | np.float64:
    r"""Mean squared error :math:`E(\hat K(x, y) - K(x, y))^2` of a random-feature estimate.

    .. math::
        \mathrm{MSE} = \frac{A}{m} \Big[ V_1 + \sum_b \frac{r_b (r_b - 1)}{m}
        (C_{c_b} - C_\text{iid}) \Big]

    over the blocks b of :math:`r_b` rows whose pairs have cosine :math:`c_b`, with

    =============  ========================  ============================  =======================
    features       :math:`V_1`               :math:`C_c`                   A, Gaussian and softmax
    =============  ========================  ============================  =======================
    positive       e^(2v^2) - e^(v^2)        rho_c(v^2)                    e^(-2x^2-2y^2), its root
    hyperbolic     (e^(v^2) - 1)^2 / 2       even part of rho_c(v^2)       e^(-2x^2-2y^2), its root
    trigonometric  (1 - e^(-z^2))^2 / 2      even part of rho_c(-z^2)      1, e^(x^2+y^2)
    =============  ========================  ============================  =======================

    where :math:`v = |x + y|`, :math:`z = |x - y|`, and :math:`\rho_c` is the conformity of a pair.
    Exact for Haar rotations. Hadamard and Givens ones, and fast projections, work in the next power
    of two: pad x and y with zeros to it, for nearly their error.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``; the leading shapes broadcast.
      num_features: Rows m of the projection. Hyperbolic and trigonometric features have 2m entries.
      coupling: How rows are coupled: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      features: The feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      kernel: ``"gaussian"`` or ``"softmax"``.
      block: Sizes of the blocks, ``"regular"`` or ``"square"``, as in ``draw_projection``.
      log: Whether to return the logarithm, which does not overflow.

    Returns:
      float64 array of the broadcast leading shape. Where x = -y (x = y for trigonometric features)
      the estimate is exact: 0, or -inf.

    Raises:
      TypeError: If ``num_features`` is not an integer, x or y not real, or ``log`` not boolean.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        ``num_features`` is less than 1, or the shapes do not match.

    Example:
      >>> import numpy as np
      >>> x, y = np.array([0.3, -0.1, 0.2, 0.0]), np.array([0.1, 0.4, 0.0, 0.2])
      >>> for coupling in ("iid", "orthogonal", "simplex"):
      ...     print(coupling, f"{kernel_mse(x, y, 4, coupling=coupling):.6f}")
      iid 0.067514
      orthogonal 0.063185
      simplex 0.017573

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 10 and 11; Likhosherstov et al., Chefs'
      Random Tables, and Choromanski et al., Hybrid Random Features, for the other two maps.
    """
    num_features = checks.positive_int("num_features", num_features)
    log = checks.boolean("log", log)
    checks.one_of("kernel", kernel, KERNELS)
    x, y = arguments.vectors(x, y)
    pairs = _pairs(x.shape[-1], num_features, coupling, features, block)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sign = -1 if features == "trigonometric" else 1
        t = np.sum((x + sign * y) ** 2, axis=-1)
        log_mse = _log_variance(x, y, t, features, kernel) - np.log(num_features)
        log_mse += np.log(_ratio_to_iid(t, x.shape[-1], pairs, features))
        return log_mse[()] if log else np.exp(log_mse)[()]


def mse_ratio(
    v: ArrayLike,
    dim: int,
    num_features: int,
    *,
    coupling: str,
    features: str = "positive",
    baseline: str = "iid",
    block: str = "regular",
) -> np.ndarray | np.float64:
    r"""Ratio of two couplings' mean squared errors, which depends on one distance only.

    .. math::
        \frac{\mathrm{MSE}_\text{coupling}}{\mathrm{MSE}_\text{baseline}}, \qquad
        \frac{\mathrm{MSE}_c}{\mathrm{MSE}_\text{iid}} = 1 + \sum_b \frac{r_b (r_b - 1)}{m}
        \frac{C_{c_b} - C_\text{iid}}{V_1}

    Args:
      v: Distances :math:`|x + y|`, or :math:`|x - y|` for trigonometric features; any shape, at
        least 0. The ratio at 0, where both errors vanish, is the limit.
      dim: Dimension d.
      num_features: Rows m of the projection.
      coupling: The coupling in question: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      features: The feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      baseline: The coupling to compare with, one of the same.
      block: Sizes of the blocks, ``"regular"`` or ``"square"``, as in ``draw_projection``.

    Returns:
      float64 array of the shape of ``v``, the same for both kernels.

    Raises:
      TypeError: If ``dim`` or ``num_features`` is not an integer, or ``v`` not real.
      ValueError: If a name is unknown, a coupling has no closed form or needs a larger dimension,
        or a number is out of range.

    Example:
      >>> import numpy as np
      >>> v = np.array([0.1, 1.0, 2.0])
      >>> np.round(mse_ratio(v, 64, 64, coupling="orthogonal"), 5)
      array([0.99525, 0.73109, 0.87876])
      >>> np.round(mse_ratio(v, 64, 64, coupling="simplex"), 5)
      array([0.00821, 0.1705 , 0.81761])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Fig. 6 and Sec. 5.1.
    """
    dim = checks.positive_int("dim", dim)
    num_features = checks.positive_int("num_features", num_features)
    arguments.coupling("baseline", baseline, dim)
    pairs = _pairs(dim, num_features, coupling, features, block)
    with np.errstate(over="ignore"):
        t = arguments.norms("v", v) ** 2
    ratio = _ratio_to_iid(t, dim, pairs, features)
    if baseline == "iid":
        return ratio[()]
    baseline_pairs = coupled_pairs(num_features, dim, baseline, block)
    return (ratio / _ratio_to_iid(t, dim, baseline_pairs, features))[()]


def _pairs(
    dim: int, num_features: int, coupling: str, features: str, block: str
) -> tuple[Pairs, ...]:
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("features", features, FEATURES)
    checks.one_of("block", block, BLOCK_MODES)
    return coupled_pairs(num_features, dim, coupling, block)


def _ratio_to_iid(t: np.ndarray, dim: int, pairs: tuple[Pairs, ...], features: str) -> np.ndarray:
    result = np.where(np.isnan(t), np.nan, 1.0)
    if pairs:
        known = ~np.isnan(t)
        if features == "trigonometric":
            result[known] = trigonometric_ratio(t[known], dim, pairs)
        else:
            even = features == "hyperbolic"
            result[known] = positive_series(t[known], dim, pairs, even=even)
    return result


def _log_variance(
    x: np.ndarray, y: np.ndarray, t: np.ndarray, features: str, kernel: str
) -> np.ndarray:
    """Logarithm of the variance of one iid feature, A V_1."""
    log_gap = np.log(-np.expm1(-t))
    if features == "trigonometric":
        log_prefactor = np.sum(x**2, axis=-1) + np.sum(y**2, axis=-1) if kernel == "softmax" else 0
        return log_prefactor + 2 * log_gap - np.log(2)
    # The prefactor and the e^{2t} of V_1 in one: e^{2t - 2x^2 - 2y^2} = e^{4 x.y}.
    dots = np.sum(x * y, axis=-1)
    log_scale = 4 * dots if kernel == "gaussian" else t + 2 * dots
    return log_scale + (log_gap if features == "positive" else 2 * log_gap - np.log(2))
