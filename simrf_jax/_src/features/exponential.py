"""Positive feature maps: one exponential, or a pair, for each row of W, which may be weighted."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.feature_map import FeatureMap, named
from simrf_jax._src.features.log_space import Kernel, LogFeatures, Side
from simrf_jax._src.projections import Projection, ProjectionLike


class ExponentialMap(FeatureMap, static=("kernel",)):
    """Base class of maps with one exponential for each row of a projection derived from W."""

    is_finite = True
    kernel: Kernel

    @abc.abstractmethod
    def rows(self, w: Projection) -> Projection:
        """Returns the projection whose rows the exponentials use."""

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: ProjectionLike, *, side: Side
    ) -> LogFeatures:
        """Returns the same features for queries and keys."""
        exponent = self.rows(Projection.of(projection)).exponents(x)
        squared_norm = jnp.sum(jnp.square(x.astype(exponent.dtype)), axis=-1, keepdims=True)
        shrink = 1 if self.kernel == "gaussian" else 0.5
        log_scale = -shrink * squared_norm - 0.5 * math.log(exponent.shape[-1])
        return LogFeatures(exponent, log_scale)

    def exponential_form(self, projection: ProjectionLike, *, side: Side) -> ExponentialForm | None:
        """Returns the same form for queries and keys; None for the Gaussian kernel."""
        if self.kernel != "softmax":
            return None
        w = self.rows(Projection.of(projection))
        form = ExponentialForm(w.dense_rows(), is_paired=w.is_paired)
        if w.log_weights is None:
            return form
        offsets = w.add_half_log_weights(jnp.zeros(form.num_features, form.rows.dtype))
        return dataclasses.replace(form, offsets=offsets)


@named("positive")
@dataclasses.dataclass(frozen=True)
class Positive(ExponentialMap):
    """The feature map of ``positive_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    kernel: Kernel = "softmax"

    def rows(self, w: Projection) -> Projection:
        """Returns the projection unchanged."""
        return w


@named("hyperbolic")
@dataclasses.dataclass(frozen=True)
class Hyperbolic(ExponentialMap):
    """The feature map of ``hyperbolic_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    coupling = "orthogonal"
    kernel: Kernel = "softmax"

    def rows(self, w: Projection) -> Projection:
        """Returns the rows and their negatives."""
        return w.with_negatives()


@dataclasses.dataclass(frozen=True, eq=False)  # The parameter may be an array.
class OptimalPositive(ExponentialMap):
    r"""Optimal positive random features (FAVOR++, OPRF, generalized exponential features).

    .. math::
        \phi(x)_i = \tfrac{1}{\sqrt m} (1 - 4A)^{d/4}
            \exp\bigl(A |w_i|^2 + \sqrt{1 - 4A}\, w_i \cdot x - c |x|^2\bigr)

    with :math:`c = 1` for the Gaussian kernel and :math:`\tfrac12` for the softmax kernel. These
    are positive features of the rows :math:`\sqrt{1 - 4A}\, w_i`, which are longer than those of W
    if A is negative, with the weights that keep the product :math:`\phi(x) \cdot \phi(y)`
    unbiased. A = 0 gives ``positive_features``. The relative second moment of one row is

    .. math:: S = \Bigl(\frac{1 + \rho}{2 \sqrt\rho}\Bigr)^d e^{\rho v^2}, \qquad
        \rho = \frac{1}{1 - 8A}, \qquad v = |x + y|.

    With :math:`t = v^2 / d` it is least for :math:`A = (1 - 2t - \sqrt{(2t + 1)^2 + 8t}) / 16`,
    whatever the coupling of the rows; see ``theory.optimal_parameter``. The coupling **simplex**
    suits this map as it suits positive features. The rows need norms with the law chi: with fixed
    norms all weights are equal, and the features estimate another kernel. For fast rows, d and the
    norms are those of the padded dimension. A ``Projection`` that was drawn with fixed norms is
    refused; an array does not record how it was drawn, so it is not checked.

    Attributes:
      parameter: A, finite and below 1/8, usually negative, the same for both sides; in attention
        also ``[K]``, one for each key head.
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> x, y = 0.2 * jax.random.normal(jax.random.key(0), (2, 16))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 4096, 16)
      >>> optimal = simrf_jax.feature_maps.OptimalPositive(-0.02)
      >>> estimate = optimal.features(x, w) @ optimal.features(y, w)
      >>> exact = simrf_jax.softmax_kernel(x[None], y[None])[0, 0]
      >>> bool(jnp.abs(estimate / exact - 1) < 0.05)
      True

    References:
      Likhosherstov et al., Chefs' Random Tables: Non-Trigonometric Random Features (NeurIPS 2022),
      https://arxiv.org/abs/2205.15317
    """

    needs_chi_norms = True
    axes_of_one: ClassVar[Mapping[str, int]] = {"parameter": 0}
    parameter: Real[ArrayLike, "*K"]
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the parameter, unless it is traced, and the kernel."""
        super().__post_init__()
        _check_parameter(self.parameter)

    def rows(self, w: Projection) -> Projection:
        """Returns the tilted rows.

        Raises:
          ValueError: If there is more than one parameter.
        """
        if jnp.ndim(self.parameter):
            raise ValueError(
                "parameter must be one number, or in attention [K], one for each key head, got "
                f"shape {jnp.shape(self.parameter)}."
            )
        return w.tilted(self.parameter)


def _check_parameter(parameter: Real[ArrayLike, "*K"]) -> None:
    """Accepts real numbers below 1/8; traced values are not checked."""
    dtype = parameter.dtype if hasattr(parameter, "dtype") else np.asarray(parameter).dtype
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"parameter must be a real number, got {parameter!r}.")
    if isinstance(parameter, jax.core.Tracer):
        return
    largest = np.max(np.asarray(parameter, np.float64), initial=-np.inf)
    if not (np.all(np.isfinite(parameter)) and largest < 0.125):
        raise ValueError(
            "parameter must be finite and below 1/8, from which on the variance is infinite, got "
            f"{parameter}."
        )


def positive_features(
    x: Float[ArrayLike, "*batch dim"], projection: ProjectionLike, *, kernel: Kernel = "softmax"
) -> Float[Array, "*batch num_features"]:
    r"""Returns positive random features of the Gaussian or the softmax kernel.

    .. math::
        \phi(x)_i = \tfrac{1}{\sqrt m} \exp(w_i \cdot x - |x|^2) \;\text{(gaussian)}, \qquad
        \phi(x)_i = \tfrac{1}{\sqrt m} \exp(w_i \cdot x - \tfrac12 |x|^2) \;\text{(softmax)}.

    The product :math:`\phi(x) \cdot \phi(y)` is an unbiased estimate of the kernel and is never
    negative. The coupling **simplex** suits this map; ``simplex_plus`` is better still.

    Args:
      x: Vectors in units of the kernel's length scale.
      projection: W, ``[num_features, dim]``, the same for both sides of the product: an array, a
        ``Projection``, which may have weights.
      kernel: ``"softmax"``, :math:`\exp(x \cdot y)`, or ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`.

    Returns:
      The features in x's dtype, computed in float32 or wider. The features of long vectors overflow
      or underflow. Attention is not affected: it works in log space, where the scale of the
      features cancels.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the kernel is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> x, y = 0.2 * jax.random.normal(jax.random.key(0), (2, 16))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 4096, 16)
      >>> phi = simrf_jax.positive_features
      >>> estimate = phi(x, w) @ phi(y, w)
      >>> exact = simrf_jax.softmax_kernel(x[None], y[None])[0, 0]
      >>> bool(jnp.abs(estimate / exact - 1) < 0.05)
      True

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 7, https://arxiv.org/abs/2301.13856
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Lemma 1,
      https://arxiv.org/abs/2009.14794
    """
    return Positive(kernel).features(x, projection)


def hyperbolic_features(
    x: Float[ArrayLike, "*batch dim"], projection: ProjectionLike, *, kernel: Kernel = "softmax"
) -> Float[Array, "*batch features"]:
    r"""Returns hyperbolic random features (FAVOR+ with pairs): positive features of W and of -W.

    .. math::
        \phi(x) = \tfrac{1}{\sqrt{2m}}\, e^{-c|x|^2} \bigl(e^{w_1 \cdot x}, \dots,
            e^{w_m \cdot x}, e^{-w_1 \cdot x}, \dots, e^{-w_m \cdot x}\bigr)

    with :math:`c = 1` for the Gaussian kernel and :math:`\tfrac12` for the softmax kernel. The
    product :math:`\phi(x) \cdot \phi(y)` is the mean of :math:`\cosh(w_i \cdot (x + y))` times the
    prefactors of x and y. It is an unbiased estimate of the kernel, never negative, and exact at
    y = -x. The coupling **orthogonal** suits this map best: a simplex moves rows toward each
    other's negatives, and the pairs contain these negatives already.

    Args:
      x: Vectors in units of the kernel's length scale.
      projection: W, ``[num_features, dim]``, the same for both sides of the product: an array, a
        ``Projection``, which may have weights.
      kernel: ``"softmax"``, :math:`\exp(x \cdot y)`, or ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`.

    Returns:
      ``2 num_features`` features of x's dtype, computed in float32 or wider.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the kernel is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> x = 0.2 * jax.random.normal(jax.random.key(0), (16,))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 64, 16, coupling="orthogonal")
      >>> phi = simrf_jax.hyperbolic_features
      >>> phi(x, w).shape
      (128,)
      >>> bool(jnp.allclose(phi(x, w) @ phi(-x, w), jnp.exp(-x @ x)))  # exact at y = -x
      True

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Lemma 1,
      https://arxiv.org/abs/2009.14794
      Choromanski et al., Hybrid Random Features (ICLR 2022), the estimator :math:`\text{SM}^{++}`,
      https://arxiv.org/abs/2110.04367
    """
    return Hyperbolic(kernel).features(x, projection)
