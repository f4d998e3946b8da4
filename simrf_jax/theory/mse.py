"""Mean squared errors of kernel estimates by random features."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features import KERNELS, Kernel
from simrf_jax.projections import FIXED_NORMS, Norms
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.theory import arguments, fixed_norms, proposal
from simrf_jax.theory.arguments import ClosedFormCoupling
from simrf_jax.theory.oscillation import trigonometric_ratio
from simrf_jax.theory.pairs import Pairs, coupled_pairs, with_antipodes
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
    norms: Norms = "chi",
    parameter: ArrayLike = 0.0,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the mean squared error of a random-feature kernel estimate.

    .. math::
        \mathrm{MSE} = E(\hat K(x, y) - K(x, y))^2 = \frac{A}{m} \Big[ V_1 + \sum_b
        \frac{r_b (r_b - 1)}{m} (C_{c_b} - C_\text{iid}) \Big]

    The sum runs over the row blocks b. Row block b has :math:`r_b` rows, whose pairs have cosine
    :math:`c_b`. The tables give the other terms, where :math:`v = |x + y|`, :math:`z = |x - y|`,
    and :math:`\rho_c` is the conformity of a pair of rows (see ``log_conformity``).

    =============  ================================  ==================================
    features       :math:`V_1`                       :math:`C_c`
    =============  ================================  ==================================
    positive       :math:`e^{2v^2} - e^{v^2}`        :math:`\rho_c(v^2)`
    hyperbolic     :math:`(e^{v^2} - 1)^2 / 2`       even part of :math:`\rho_c(v^2)`
    trigonometric  :math:`(1 - e^{-z^2})^2 / 2`      even part of :math:`\rho_c(-z^2)`
    =============  ================================  ==================================

    =============  ================================  ==================================
    features       A, Gaussian kernel                A, softmax kernel
    =============  ================================  ==================================
    positive       :math:`e^{-2|x|^2 - 2|y|^2}`      :math:`e^{-|x|^2 - |y|^2}`
    hyperbolic     :math:`e^{-2|x|^2 - 2|y|^2}`      :math:`e^{-|x|^2 - |y|^2}`
    trigonometric  1                                 :math:`e^{|x|^2 + |y|^2}`
    =============  ================================  ==================================

    The even part is even in c. :math:`C_\text{iid}` is :math:`e^{v^2}`, or :math:`e^{-z^2}` for
    trigonometric features.

    The tables are for norms of the chi law and ``parameter`` 0. A cross-polytope has pairs at the
    cosines -1 and 0. ``theory.proposal`` and ``theory.fixed_norms`` have the formulas for other
    norms and parameters, which count a bias as part of the error.

    The formula is exact for Haar rotations. Hadamard rotations, Givens rotations and fast
    projections work in the next power of two of dim. To obtain nearly their error, pad x and y with
    zeros to that dimension.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``. The leading shapes of x and y broadcast.
      num_features: Number of rows m of the projection. Hyperbolic and trigonometric features have
        2m entries.
      coupling: Coupling of the rows: ``"iid"``, ``"orthogonal"``, ``"simplex"`` or
        ``"cross_polytope"``, row blocks of 2d rows that are +- pairs of d orthogonal directions.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      kernel: Kernel that is estimated: ``"gaussian"`` or ``"softmax"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      log: If true, return the logarithm, which does not overflow.
      norms: Law of the row norms. Trigonometric features have a closed form for ``"chi"`` only.

        * ``"chi"``: independent norms of the chi law with d degrees of freedom, whose distribution
          function is F.
        * ``"antithetic"``: two consecutive rows of a row block have F(a) + F(a') = 1. In a
          cross-polytope the rows of a +- pair have one norm, and consecutive pairs are antithetic.
        * ``"shared"``: one chi norm for all rows of a row block.
        * ``"pair"``: one chi norm for both rows of each +- pair of a cross-polytope. These are the
          hyperbolic features of half as many orthogonal rows.
        * ``"sqrt_dim"``: the fixed norm :math:`\sqrt d`. The estimate has a large bias.
        * ``"radau"``: the fixed norm :math:`\sqrt{d + 2}` for all but one of the m rows, with the
          total weight d / (d + 2). One row of zeros has the rest. The estimate has a small bias,
          which ``relative_bias`` returns.
      parameter: Parameter A < 1/8 of optimal positive features, broadcastable to the leading shape.
        0 stands for positive (or hyperbolic) features as such; see ``optimal_parameter``.

    Returns:
      float64 array of the broadcast leading shape. At x = -y (x = y for trigonometric features) the
      estimate is exact, and the result is 0, or -inf if ``log``.

    Raises:
      TypeError: If ``num_features`` is not an integer, x or y is not real, or ``log`` is not
        Boolean.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        ``norms`` or ``parameter`` does not fit the others, ``num_features`` is less than 1, or the
        shapes do not match.

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
    design = _design(num_features, x.shape[-1], coupling, features, norms, parameter, block)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        sign = -1 if features == "trigonometric" else 1
        t = np.asarray(np.sum((x + sign * y) ** 2, axis=-1))
        if design.is_plain:
            log_mse = _log_variance(x, y, t, features, kernel) - np.log(num_features)
            log_mse += np.log(_ratio_to_iid(t, design))
        else:
            log_mse = 2 * _log_kernel(x, y, kernel) + _log_relative_mse(t, design)
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
    norms: Norms = "chi",
    parameter: ArrayLike = 0.0,
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
      coupling: Coupling in the numerator: ``"iid"``, ``"orthogonal"``, ``"simplex"`` or
        ``"cross_polytope"``.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      baseline: Coupling in the denominator, which has norms of the chi law and parameter 0.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      norms: Law of the row norms in the numerator; see ``kernel_mse``.
      parameter: Parameter A of the features in the numerator, broadcastable with ``v``; see
        ``kernel_mse``.

    Returns:
      float64 array of the shape of ``v``. It is the same for the Gaussian and the softmax kernel.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``v`` is not real.
      ValueError: If a name is unknown, a coupling has no closed form or needs a larger dimension,
        ``norms`` or ``parameter`` does not fit the others, or a number is out of range.

    Example:
      >>> import numpy as np
      >>> v = np.array([0.1, 1.0, 2.0])
      >>> np.round(mse_ratio(v, 64, 64, coupling="orthogonal"), 5)
      array([0.99525, 0.73109, 0.87876])
      >>> np.round(mse_ratio(v, 64, 64, coupling="simplex"), 5)
      array([0.00821, 0.1705 , 0.81761])
      >>> np.round(mse_ratio(v[1:], 128, 64, coupling="cross_polytope", norms="pair"), 5)
      array([0.0943 , 0.73921])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Fig. 6 and Sec. 5.1,
      https://arxiv.org/abs/2301.13856
    """
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    arguments.coupling("baseline", baseline, dim)
    design = _design(num_features, dim, coupling, features, norms, parameter, block)
    reference = _design(num_features, dim, baseline, features, "chi", 0.0, block)
    with np.errstate(over="ignore"):
        t = np.asarray(arguments.norms("v", v) ** 2)
    if design.is_plain:
        ratio = _ratio_to_iid(t, design)
        return (ratio if baseline == "iid" else ratio / _ratio_to_iid(t, reference))[()]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_ratio = _log_relative_mse(t, design) - _log_relative_mse(t, reference)
        return np.exp(log_ratio)[()]


class _Design(NamedTuple):
    """Checked arguments that determine the error of an estimate.

    Attributes:
      num_features: Number of rows m.
      dim: Dimension d.
      features: Feature map.
      norms: Law of the norms.
      parameter: Parameter A of the features.
      pairs: Coupled pairs of the rows, without a row of zeros.
    """

    num_features: int
    dim: int
    features: Features
    norms: Norms
    parameter: Float64[np.ndarray, "*shape"]
    pairs: tuple[Pairs, ...]

    @property
    def is_plain(self) -> bool:
        """True if the error is a multiple of that of iid rows by ``series``."""
        return self.norms not in FIXED_NORMS and not np.any(self.parameter)


def _design(
    num_features: int,
    dim: int,
    coupling: ClosedFormCoupling,
    features: Features,
    norms: Norms,
    parameter: ArrayLike,
    block: BlockMode,
) -> _Design:
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("features", features, FEATURES)
    checks.one_of("block", block, BLOCK_MODES)
    arguments.norm_law(norms, coupling)
    parameter = arguments.parameter(parameter, norms)
    if features == "trigonometric" and (norms != "chi" or np.any(parameter)):
        raise ValueError(
            "features='trigonometric' has closed forms for norms='chi' and parameter=0 only, "
            f"got norms={norms!r} and parameter={parameter}."
        )
    num_rows = fixed_norms.num_weighted_rows(num_features, norms)
    pairs = coupled_pairs(num_rows, dim, coupling, block, norms)
    return _Design(num_features, dim, features, norms, parameter, pairs)


def _log_relative_mse(
    t: Float64[np.ndarray, "*shape"], design: _Design
) -> Float64[np.ndarray, "*broadcast"]:
    """Returns the log of E(K_hat / K - 1)^2 of positive and hyperbolic features."""
    num_features, dim, features, norms, parameter, pairs = design
    num_rows = fixed_norms.num_weighted_rows(num_features, norms)
    if features == "hyperbolic":
        num_rows, pairs = 2 * num_rows, with_antipodes(pairs)
    if norms in FIXED_NORMS:
        rule = fixed_norms.fixed_norm(norms, dim)
        return fixed_norms.log_relative_mse(t, num_rows, dim, pairs, rule)
    return proposal.log_relative_mse(t, parameter, num_rows, dim, pairs)


def _ratio_to_iid(
    t: Float64[np.ndarray, "*shape"], design: _Design
) -> Float64[np.ndarray, "*shape"]:
    result = np.where(np.isnan(t), np.nan, 1.0)
    if design.pairs:
        known = ~np.isnan(t)
        if design.features == "trigonometric":
            result[known] = trigonometric_ratio(t[known], design.dim, design.pairs)
        else:
            even = design.features == "hyperbolic"
            result[known] = positive_series(t[known], design.dim, design.pairs, even=even)
    return result


def _log_kernel(
    x: Float64[np.ndarray, "*#batch dim"], y: Float64[np.ndarray, "*#batch dim"], kernel: Kernel
) -> Float64[np.ndarray, "*#batch"] | np.float64:
    if kernel == "softmax":
        return np.sum(x * y, axis=-1)
    return -np.sum((x - y) ** 2, axis=-1) / 2


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
