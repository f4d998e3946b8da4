"""Mean squared errors of kernel estimates by random features, and of the angular hybrid."""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax._src import checks
from simrf_jax._src.features import KERNELS, Kernel
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections import FIXED_NORMS, BlockMode, Norms
from simrf_jax._src.theory import arguments, oscillating
from simrf_jax._src.theory.arguments import FEATURES, ClosedFormCoupling, Features, Numbers, Vectors
from simrf_jax._src.theory.pairs import Rows, coupled_rows
from simrf_jax._src.theory.positive import log_relative_mse
from simrf_jax._src.theory.quadrature import Vector
from simrf_jax._src.theory.series import positive_series, trigonometric_ratio

_FAR = 1e5  # Squared distance from which on ``oscillating`` keeps more digits than ``series``.


def kernel_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    *,
    coupling: ClosedFormCoupling,
    features: Features = "positive",
    kernel: Kernel | ScaleMixture = "gaussian",
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

    The tables are for independent norms of the chi law and ``parameter`` 0. A cross-polytope has
    pairs at the cosines -1 and 0. ``theory.positive`` has the formulas for other norms and
    parameters of positive and hyperbolic features, which count a bias as part of the error, and
    ``theory.oscillating`` those for other norms and kernels of trigonometric features.

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
      kernel: Kernel that is estimated: ``"gaussian"``, ``"softmax"``, or for trigonometric features
        a ``ScaleMixture`` such as ``simrf_jax.kernels.Matern(1.5)``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      log: If true, return the logarithm, which does not overflow.
      norms: Joint law of the row norms, each of which has the distribution function F of the
        kernel, that of the chi law with d degrees of freedom for the Gaussian and softmax kernels.
        Trigonometric features do not support fixed norms, and other features do not support
        ``"stratified"``.

        * ``"chi"``: independent norms.
        * ``"antithetic"``: two consecutive rows of a row block have F(a) + F(a') = 1. In a
          cross-polytope the rows of a +- pair have one norm, and consecutive pairs are antithetic.
        * ``"shared"``: one norm for all rows of a row block.
        * ``"stratified"``: one norm from each of m equally probable strata. In two dimensions,
          where the tests have a reference, the result has six digits.
        * ``"pair"``: one norm for both rows of each +- pair of a cross-polytope. These are the
          hyperbolic features of half as many orthogonal rows.
        * ``"sqrt_dim"``: the fixed norm :math:`\sqrt d`. The estimate has a large bias.
        * ``"radau"``: the fixed norm :math:`\sqrt{d + 2}` for all but one of the m rows, with the
          total weight d / (d + 2). One row of zeros has the rest. The estimate has a small bias,
          which ``relative_bias`` returns.
      parameter: Parameter A < 1/8 of optimal positive features, broadcastable to the leading shape.
        0 gives plain positive (or hyperbolic) features; see ``optimal_parameter``.

    Returns:
      float64 array of the broadcast leading shape. At x = -y (x = y for trigonometric features) the
      estimate is exact if ``parameter`` is 0, and the result is 0, or -inf if ``log``.

    Raises:
      TypeError: If ``num_features`` is not an integer, x or y is not real, or ``log`` is not
        Boolean.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        ``kernel``, ``norms`` or ``parameter`` does not fit the other arguments, ``num_features`` is
        less than 1, or the shapes do not match.

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
    log = checks.boolean("log", log)
    mixture = checked_kernel(kernel, features)
    x, y = arguments.vectors(x, y)
    has_strata = features == "trigonometric"
    rows = coupled_rows(num_features, x.shape[-1], coupling, block, norms, has_strata=has_strata)
    parameter = _checked_parameter(parameter, rows, features)
    sign = -1 if features == "trigonometric" else 1
    dots = np.sum(x * y, axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        t = np.asarray(np.sum((x + sign * y) ** 2, axis=-1))
        if _is_oscillating(rows, features, mixture):
            log_mse = np.log(oscillating.trigonometric_mse(t.ravel(), rows, mixture))
            log_mse = log_mse.reshape(t.shape)
            if kernel == "softmax":
                log_mse += 2 * dots + t
        elif _is_plain(rows, parameter):
            # One feature has the variance K^2 e^t (1 - e^-t), or K^2 e^t (1 - e^-t)^2 / 2. This is
            # the logarithm of K^2 e^t without its cancellation.
            if kernel == "softmax":
                log_scale = 2 * dots + t
            else:
                log_scale = 4 * dots if sign == 1 else np.zeros(())
            log_gap = np.log(-np.expm1(-t))
            log_gaps = log_gap if features == "positive" else 2 * log_gap - np.log(2)
            log_ratio = np.log(_ratio_to_iid(t, rows, features, mixture))
            log_mse = log_scale + log_gaps - np.log(rows.num_rows) + log_ratio
        else:
            # The factor K^2 is e^(2 x . y), or e^(4 x . y - t) for the Gaussian kernel.
            growth = 0 if kernel == "softmax" else 1
            log_mse = log_relative_mse(t, parameter, rows, features, growth)
            log_mse += 2 * (1 + growth) * dots
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
    kernel: ScaleMixture = GAUSSIAN,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the ratio of two couplings' mean squared errors, which depends only on one distance.

    .. math::
        \frac{\mathrm{MSE}_\text{coupling}}{\mathrm{MSE}_\text{baseline}}, \qquad
        \frac{\mathrm{MSE}_c}{\mathrm{MSE}_\text{iid}} = 1 + \sum_b \frac{r_b (r_b - 1)}{m}
        \frac{C_{c_b} - C_\text{iid}}{V_1}

    ``kernel_mse`` defines the symbols.

    Args:
      v: Distances :math:`|x + y|`, or :math:`|x - y|` for trigonometric features; any shape, at
        least 0. At 0 the result is the limit of the ratio, which is infinite if
        ``parameter`` is not 0, because only the denominator vanishes. With other kernels it is the
        ratio at a distance of 1e-8 (1e-4 with antithetic or stratified norms). That is within 1e-8
        of the limit, except for Matérn kernels with ``nu`` between 1.5 and 2.5 (1.8e-2 at 2).
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      coupling: Coupling in the numerator: ``"iid"``, ``"orthogonal"``, ``"simplex"`` or
        ``"cross_polytope"``.
      features: Feature map: ``"positive"``, ``"hyperbolic"`` or ``"trigonometric"``.
      baseline: Coupling in the denominator, which has independent norms and parameter 0.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      norms: Law of the row norms in the numerator; see ``kernel_mse``.
      parameter: Parameter A of the features in the numerator, broadcastable with ``v``; see
        ``kernel_mse``.
      kernel: Kernel that trigonometric features estimate. The ratio is the same for the Gaussian
        and the softmax kernel.

    Returns:
      float64 array of the shape of ``v``.

    Raises:
      TypeError: If ``num_features`` or ``dim`` is not an integer, or ``v`` is not real.
      ValueError: If a name is unknown, a coupling has no closed form or needs a larger dimension,
        ``norms`` or ``parameter`` does not fit the other arguments, or a number is out of range.

    Example:
      >>> import numpy as np, simrf_jax
      >>> v = np.array([0.1, 1.0, 2.0])
      >>> np.round(mse_ratio(v, 64, 64, coupling="orthogonal"), 5)
      array([0.99525, 0.73109, 0.87876])
      >>> np.round(mse_ratio(v, 64, 64, coupling="simplex"), 5)
      array([0.00821, 0.1705 , 0.81761])
      >>> np.round(mse_ratio(v[1:], 128, 64, coupling="cross_polytope", norms="pair"), 5)
      array([0.0943 , 0.73921])
      >>> options = {"features": "trigonometric", "kernel": simrf_jax.kernels.Matern(1.5)}
      >>> np.round(mse_ratio(v, 64, 64, coupling="orthogonal", **options), 5)
      array([0.88597, 0.58314, 0.85218])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Fig. 6 and Sec. 5.1,
      https://arxiv.org/abs/2301.13856
    """
    mixture = checked_kernel(kernel, features)
    has_strata = features == "trigonometric"
    rows = coupled_rows(num_features, dim, coupling, block, norms, has_strata=has_strata)
    parameter = _checked_parameter(parameter, rows, features)
    arguments.coupling("baseline", baseline, rows.dim)
    reference = coupled_rows(num_features, dim, baseline, block)
    t = arguments.squared_norms("v", v)
    if _is_plain(rows, parameter):
        ratio = _ratio_to_iid(t, rows, features, mixture)
        if baseline != "iid":
            ratio /= _ratio_to_iid(t, reference, features, mixture)
        return ratio[()]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if rows.norms in FIXED_NORMS:  # At a distance of 0 this gives the limit.
            t = np.asarray(np.maximum(t, 1e-100))
        log_ratio = log_relative_mse(t, parameter, rows, features, growth=1)
        log_ratio -= log_relative_mse(t, np.zeros(()), reference, features, growth=1)
        return np.exp(log_ratio)[()]


def hybrid_mse(
    x: ArrayLike,
    y: ArrayLike,
    num_features: int,
    num_weights: int,
    *,
    coupling: ClosedFormCoupling,
    kernel: Kernel = "softmax",
    log: bool = False,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the mean squared error of the angular hybrid estimate of a kernel.

    .. math::
        \mathrm{MSE} = E(\hat K(x, y) - K(x, y))^2
        = E\hat\lambda^2\, \mathrm{MSE}_\text{hyperbolic}
        + E(1 - \hat\lambda)^2\, \mathrm{MSE}_\text{trigonometric}, \qquad
        E\hat\lambda^2 = a^2 + \frac{a (1 - a)}{n}, \qquad a = \frac{\theta_{x,y}}{\pi},

    Here :math:`\hat\lambda` is the estimate of the weight from n random vectors, and
    :math:`\theta_{x,y}` is the angle between x and y, which is taken as a right angle if x or y is
    0. :math:`E(1 - \hat\lambda)^2` is the same expression with 1 - a in place of a. Both base
    estimators and the weight are independent of each other, as ``draw_bipolar_projection`` draws
    them. The formula then holds for any coupling of the rows of each base estimator.

    Args:
      x: Vectors ``[..., dim]``.
      y: Vectors ``[..., dim]``. The leading shapes of x and y broadcast.
      num_features: Number of rows m of either base estimator.
      num_weights: Number n of random vectors that estimate the weight.
      coupling: Coupling of the rows of each base estimator: ``"iid"``, ``"orthogonal"``,
        ``"simplex"`` or ``"cross_polytope"``.
      kernel: Kernel that is estimated: ``"softmax"`` or ``"gaussian"``.
      log: If true, return the logarithm, which does not overflow.

    Returns:
      float64 array of the broadcast leading shape. At x = y and x = -y the estimate is exact, and
      the result is 0, or -inf if ``log``.

    Raises:
      TypeError: If ``num_features`` or ``num_weights`` is not an integer, x or y is not real, or
        ``log`` is not Boolean.
      ValueError: If a name is unknown, the coupling has no closed form or needs a larger dimension,
        a number is less than 1, or the shapes do not match.

    Example:
      >>> import numpy as np
      >>> x = np.array([1.0, 0.0])
      >>> for angle in (0.1, 1.5, 3.0):
      ...     y = np.array([np.cos(angle), np.sin(angle)])
      ...     print(f"{hybrid_mse(x, y, 16, 8, coupling='orthogonal'):.5f}")
      0.05662
      0.08851
      0.00112

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Theorem 3.1 and Lemma 3.2,
      https://arxiv.org/abs/2110.04367
    """
    num_weights = checks.positive_int("num_weights", num_weights)
    log = checks.boolean("log", log)
    x, y = arguments.vectors(x, y)
    total: Numbers = np.float64(-np.inf)
    bases: tuple[Features, ...] = ("hyperbolic", "trigonometric")
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for share, features in zip(_angular_weights(x, y), bases, strict=True):
            second_moment = share * (share + (1 - share) / num_weights)
            log_mse = kernel_mse(
                x, y, num_features, coupling=coupling, features=features, kernel=kernel, log=True
            )
            total = np.logaddexp(total, np.log(second_moment) + log_mse)
        return total if log else np.exp(total)


def _checked_parameter(
    parameter: ArrayLike, rows: Rows, features: Features
) -> Float64[np.ndarray, "*shape"]:
    checks.one_of("features", features, FEATURES)
    array = arguments.parameter(parameter, rows.norms)
    if features == "trigonometric" and (rows.norms in FIXED_NORMS or np.any(array)):
        raise ValueError(
            "features='trigonometric' has closed forms only for random norms and parameter=0, got "
            f"norms={rows.norms!r} and parameter={array}."
        )
    return array


def checked_kernel(kernel: Kernel | ScaleMixture, features: Features) -> ScaleMixture:
    """Returns the kernel that determines the law of the norms, after checking it."""
    checks.one_of("features", features, FEATURES)
    if not isinstance(kernel, ScaleMixture):
        checks.one_of("kernel", kernel, KERNELS)
        return GAUSSIAN
    if features != "trigonometric" and kernel != GAUSSIAN:
        raise ValueError(
            f"features={features!r} estimate only the Gaussian and the softmax kernel, got kernel="
            f"{kernel}; features='trigonometric' estimate it."
        )
    return kernel


def _is_oscillating(rows: Rows, features: Features, kernel: ScaleMixture) -> bool:
    """Returns whether only ``oscillating`` computes this error."""
    is_plain = kernel == GAUSSIAN and rows.norms == "chi"
    return features == "trigonometric" and not is_plain


def _is_plain(rows: Rows, parameter: Float64[np.ndarray, "*shape"]) -> bool:
    """Returns whether ``series`` computes the ratio of this error to that of iid rows."""
    return rows.norms not in FIXED_NORMS and not np.any(parameter)


def _ratio_to_iid(
    t: Float64[np.ndarray, "*shape"], rows: Rows, features: Features, kernel: ScaleMixture
) -> Float64[np.ndarray, "*shape"]:
    of_all_kernels = functools.partial(oscillating.trigonometric_ratio, kernel=kernel)

    def ratio(t: Vector) -> Vector:
        if _is_oscillating(rows, features, kernel):
            return of_all_kernels(t, rows)
        if features == "trigonometric":
            return np.piecewise(t, [t > _FAR], [of_all_kernels, trigonometric_ratio], rows)
        return positive_series(t, rows, even=features == "hyperbolic")

    # Without coupled pairs the ratio is exactly 1.
    is_coupled = rows.pairs or rows.norms == "stratified"
    return np.piecewise(t, [~np.isnan(t)], [ratio if is_coupled else 1.0, np.nan])


def _angular_weights(x: Vectors, y: Vectors) -> tuple[Numbers, Numbers]:
    """Returns a, the angle divided by pi, and 1 - a, each to full relative accuracy."""
    x, y = _unit(x), _unit(y)
    apart, together = np.linalg.norm(x - y, axis=-1), np.linalg.norm(x + y, axis=-1)
    return 2 / np.pi * np.arctan2(apart, together), 2 / np.pi * np.arctan2(together, apart)


def _unit(x: Vectors) -> Vectors:
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(norm == 0, 1, norm)
