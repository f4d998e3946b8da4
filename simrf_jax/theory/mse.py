"""Mean squared errors of kernel estimates by random features."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features import KERNELS, Kernel
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.oscillation import trigonometric_ratio
from simrf_jax.theory.pairs import Pairs, coupled_pairs
from simrf_jax.theory.series import positive_series

# The feature maps that have closed forms.
Features: TypeAlias = Literal["positive", "hyperbolic", "trigonometric"]
FEATURES = get_args(Features)


def kernel_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    *,
    coupling: ClosedFormCoupling,
    features: Features = "positive",
    kernel: Kernel = "gaussian",
    block: BlockMode = "regular",
    log: bool = False,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the mean squared error of a random-feature kernel estimate.

    .. math::
        \mathrm{MSE} = E(\hat K(x, y) - K(x, y))^2 = \frac{A}{m} \Big[ V_1 + \sum_b
        \frac{r_b (r_b - 1)}{m} (C_{c_b} - C_\text{iid}) \Big]

    The sum runs over the row blocks b. Row block b has :math:`r_b` rows, whose pairs have cosine
    :math:`c_b`. The table gives the other terms, where :math:`v = |x + y|`, :math:`z = |x - y|`,
    and :math:`\rho_c` is the conformity of a pair of rows (see ``log_conformity``).

    =============  ====================  ========================  ==============  ============
    features       :math:`V_1`           :math:`C_c`               A, Gaussian     A, softmax
    =============  ====================  ========================  ==============  ============
    positive       e^(2v^2) - e^(v^2)    rho_c(v^2)                e^(-2x^2-2y^2)  e^(-x^2-y^2)
    hyperbolic     (e^(v^2) - 1)^2 / 2   even part of rho_c(v^2)   e^(-2x^2-2y^2)  e^(-x^2-y^2)
    trigonometric  (1 - e^(-z^2))^2 / 2  even part of rho_c(-z^2)  1               e^(x^2+y^2)
    =============  ====================  ========================  ==============  ============

    The even part is even in c. :math:`C_\text{iid}` is :math:`e^{v^2}`, or :math:`e^{-z^2}` for
    trigonometric features.

    The formula is exact for Haar rotations. Hadamard rotations, Givens rotations and fast
    projections work in the next power of two of dim. To obtain nearly their error, pad x and y with
    zeros to that dimension.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``. The leading shapes of x and y broadcast.
      num_features: Number of rows m of the projection. Hyperbolic and trigonometric features have
        2m entries.
      coupling: Coupling of the rows: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      kernel: Kernel that is estimated: ``"gaussian"`` or ``"softmax"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      log: If true, return the logarithm, which does not overflow.

    Returns:
      float64 array of the broadcast leading shape. At x = -y (x = y for trigonometric features) the
      estimate is exact, and the result is 0, or -inf if ``log``.

    Raises:
      TypeError: If ``num_features`` is not an integer, x or y is not real, or ``log`` is not
        Boolean.
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
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 10 and 11 for positive features and
      Eq. 74 for trigonometric features, https://arxiv.org/abs/2301.13856
      Choromanski et al., Hybrid Random Features (ICLR 2022), Lemma 2.2 for hyperbolic and
      trigonometric features with iid rows, https://arxiv.org/abs/2110.04367
      Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022), for hyperbolic and trigonometric
      features, https://arxiv.org/abs/2205.15317
    """
    num_features = checks.positive_int("num_features", num_features)
    log = checks.boolean("log", log)
    checks.one_of("kernel", kernel, KERNELS)
    x, y = arguments.vectors(x, y)
    pairs = _pairs(num_features, x.shape[-1], coupling, features, block)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sign = -1 if features == "trigonometric" else 1
        t = np.sum((x + sign * y) ** 2, axis=-1)
        log_mse = _log_variance(x, y, t, features, kernel) - np.log(num_features)
        log_mse += np.log(_ratio_to_iid(np.asarray(t), x.shape[-1], pairs, features))
        return log_mse[()] if log else np.exp(log_mse)[()]


def mse_ratio(
    v: ArrayLike,
    num_features: int,
    dim: int,
    *,
    coupling: ClosedFormCoupling,
    features: Features = "positive",
    baseline: ClosedFormCoupling = "iid",
    block: BlockMode = "regular",
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the ratio of two couplings' mean squared errors, which depends on one distance only.

    .. math::
        \frac{\mathrm{MSE}_\text{coupling}}{\mathrm{MSE}_\text{baseline}}, \qquad
        \frac{\mathrm{MSE}_c}{\mathrm{MSE}_\text{iid}} = 1 + \sum_b \frac{r_b (r_b - 1)}{m}
        \frac{C_{c_b} - C_\text{iid}}{V_1}

    ``kernel_mse`` defines the symbols.

    Args:
      v: Distances :math:`|x + y|`, or :math:`|x - y|` for trigonometric features; any shape, at
        least 0. At 0, where both errors vanish, the result is the limit of the ratio.
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      coupling: Coupling in the numerator: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      baseline: Coupling in the denominator: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.

    Returns:
      float64 array of the shape of ``v``. It is the same for the Gaussian and the softmax kernel.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``v`` is not real.
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
      Reid et al., Simplex Random Features (ICML 2023), Fig. 6 and Sec. 5.1,
      https://arxiv.org/abs/2301.13856
    """
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    arguments.coupling("baseline", baseline, dim)
    pairs = _pairs(num_features, dim, coupling, features, block)
    with np.errstate(over="ignore"):
        t = np.asarray(arguments.norms("v", v) ** 2)
    ratio = _ratio_to_iid(t, dim, pairs, features)
    if baseline == "iid":
        return ratio[()]
    baseline_pairs = coupled_pairs(num_features, dim, baseline, block)
    return (ratio / _ratio_to_iid(t, dim, baseline_pairs, features))[()]


def _pairs(
    num_features: int, dim: int, coupling: ClosedFormCoupling, features: Features, block: BlockMode
) -> tuple[Pairs, ...]:
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("features", features, FEATURES)
    checks.one_of("block", block, BLOCK_MODES)
    return coupled_pairs(num_features, dim, coupling, block)


def _ratio_to_iid(
    t: Float64[np.ndarray, "*shape"],
    dim: int,
    pairs: tuple[Pairs, ...],
    features: Features,
) -> Float64[np.ndarray, "*shape"]:
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
    x: Float64[np.ndarray, "*#batch dim"],
    y: Float64[np.ndarray, "*#batch dim"],
    t: Float64[np.ndarray, "*#batch"] | np.float64,
    features: Features,
    kernel: Kernel,
) -> Float64[np.ndarray, "*#batch"] | np.float64:
    """Returns the logarithm of A V_1, the variance of one iid feature."""
    log_gap = np.log(-np.expm1(-t))
    if features == "trigonometric":
        log_prefactor = np.sum(x**2, axis=-1) + np.sum(y**2, axis=-1) if kernel == "softmax" else 0
        return log_prefactor + 2 * log_gap - np.log(2)
    # The scale unites the prefactor A and the e^{2t} of V_1: e^{2t - 2x^2 - 2y^2} = e^{4 x.y}.
    dots = np.sum(x * y, axis=-1)
    log_scale = 4 * dots if kernel == "gaussian" else t + 2 * dots
    return log_scale + (log_gap if features == "positive" else 2 * log_gap - np.log(2))
