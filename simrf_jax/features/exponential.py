"""Positive feature maps: one exponential for each row of W, or a pair of exponentials."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from simrf_jax import checks
from simrf_jax.features.feature_map import FeatureMap, named
from simrf_jax.features.log_space import KERNELS, Kernel, LogFeatures, Side
from simrf_jax.projections import Projection, add_half_log_weights, product, rows_of


@named("positive")
@dataclasses.dataclass(frozen=True)
class Positive(FeatureMap, static=("kernel",)):
    """The feature map of ``positive_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    is_finite = True
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the kernel."""
        checks.one_of("kernel", self.kernel, KERNELS)

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: Projection, *, side: Side
    ) -> LogFeatures:
        """Returns the same features for queries and keys."""
        del side
        exponent = add_half_log_weights(product(x, rows_of(projection)), projection)
        return LogFeatures(exponent, _log_scale(x, exponent, self.kernel))


@named("hyperbolic")
@dataclasses.dataclass(frozen=True)
class Hyperbolic(FeatureMap, static=("kernel",)):
    """The feature map of ``hyperbolic_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    is_finite = True
    coupling = "orthogonal"
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the kernel."""
        checks.one_of("kernel", self.kernel, KERNELS)

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: Projection, *, side: Side
    ) -> LogFeatures:
        """Returns the same features for queries and keys."""
        del side
        logits = product(x, rows_of(projection))
        exponent = jnp.concatenate(
            [add_half_log_weights(each, projection) for each in (logits, -logits)], axis=-1
        )
        return LogFeatures(exponent, _log_scale(x, exponent, self.kernel))


def _log_scale(
    x: Float[Array, "*batch dim"], exponent: Float[Array, "*batch features"], kernel: Kernel
) -> Float[Array, "*batch 1"]:
    squared_norm = jnp.sum(jnp.square(x.astype(exponent.dtype)), axis=-1, keepdims=True)
    shrink = 1 if kernel == "gaussian" else 0.5
    return -shrink * squared_norm - 0.5 * math.log(exponent.shape[-1])


def positive_features(
    x: Float[ArrayLike, "*batch dim"], projection: Projection, *, kernel: Kernel = "gaussian"
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
        ``FastProjection`` or a ``WeightedProjection``.
      kernel: ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or ``"softmax"``, :math:`\exp(x \cdot y)`.

    Returns:
      The features in x's dtype, computed in float32 or wider. The features of long
      vectors overflow or underflow. Attention is not affected: it works in log space, where the
      scale of the features cancels.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the kernel is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> x, y = 0.2 * jax.random.normal(jax.random.key(0), (2, 16))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 4096, 16)
      >>> phi = simrf_jax.positive_features
      >>> estimate = phi(x, w) @ phi(y, w)
      >>> exact = simrf_jax.gaussian_kernel(x[None], y[None])[0, 0]
      >>> bool(jnp.abs(estimate / exact - 1) < 0.05)
      True

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 7, https://arxiv.org/abs/2301.13856
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Lemma 1,
      https://arxiv.org/abs/2009.14794
    """
    return Positive(kernel).features(x, projection)


def hyperbolic_features(
    x: Float[ArrayLike, "*batch dim"], projection: Projection, *, kernel: Kernel = "gaussian"
) -> Float[Array, "*batch features"]:
    r"""Returns hyperbolic random features (FAVOR+ with pairs): positive features of W and of -W.

    .. math::
        \phi(x) = \tfrac{1}{\sqrt{2m}}\, e^{-c|x|^2} \bigl(e^{w_1 \cdot x}, \dots,
            e^{w_m \cdot x}, e^{-w_1 \cdot x}, \dots, e^{-w_m \cdot x}\bigr)

    with :math:`c = 1` for the Gaussian kernel and :math:`\tfrac12` for the softmax kernel. The
    product :math:`\phi(x) \cdot \phi(y)` is the mean of :math:`\cosh(w_i \cdot (x + y))` times the
    prefactors of x and y. It is an unbiased estimate of the kernel, never negative, and exact at
    y = -x. The coupling **orthogonal** suits this map best: a simplex moves rows towards each
    other's negatives, and the pairs contain these negatives already.

    Args:
      x: Vectors in units of the kernel's length scale.
      projection: W, ``[num_features, dim]``, the same for both sides of the product: an array, a
        ``FastProjection`` or a ``WeightedProjection``.
      kernel: ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or ``"softmax"``, :math:`\exp(x \cdot y)`.

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
      >>> bool(jnp.allclose(phi(x, w) @ phi(-x, w), jnp.exp(-2 * x @ x)))  # exact at y = -x
      True

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021), Lemma 1,
      https://arxiv.org/abs/2009.14794
      Choromanski et al., Hybrid Random Features (ICLR 2022), the estimator :math:`\text{SM}^{++}`,
      https://arxiv.org/abs/2110.04367
    """
    return Hyperbolic(kernel).features(x, projection)
