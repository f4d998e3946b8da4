"""Positive random features: the exponential of a projection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features.log_space import KERNELS, LogFeatures
from simrf_jax.projections import project


def positive_log_features(x: ArrayLike, projection: ArrayLike, *, kernel: str) -> LogFeatures:
    """Positive features of ``x`` in log space; arguments as ``positive_features``."""
    checks.one_of("kernel", kernel, KERNELS)
    exponent = project(x, projection)
    squared_norm = jnp.sum(jnp.square(jnp.asarray(x, exponent.dtype)), axis=-1, keepdims=True)
    shrink = 1.0 if kernel == "gaussian" else 0.5
    return LogFeatures(exponent, -shrink * squared_norm - 0.5 * jnp.log(exponent.shape[-1]))


def positive_features(
    x: ArrayLike, projection: ArrayLike, *, kernel: str = "gaussian"
) -> jax.Array:
    r"""Positive random features of the Gaussian or the softmax kernel.

    .. math::
        \phi(x)_i = \tfrac{1}{\sqrt m} \exp(w_i \cdot x - |x|^2) \;\text{(gaussian)}, \qquad
        \phi(x)_i = \tfrac{1}{\sqrt m} \exp(w_i \cdot x - \tfrac12 |x|^2) \;\text{(softmax)}.

    Then :math:`\phi(x) \cdot \phi(y)` is an unbiased estimate of the kernel, and never negative.
    Of the couplings, simplex serves this map best.

    Args:
      x: Vectors ``[..., dim]`` in units of the kernel's length scale.
      projection: W, ``[num_features, dim]``, the same for both sides of the product.
      kernel: ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or ``"softmax"``, :math:`\exp(x \cdot y)`.

    Returns:
      Array ``[..., num_features]`` of x's dtype, computed in float32 at least. Features of long
      vectors leave the range of floats; attention, which can cancel their scale, does not need
      them and works in log space.

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
      Reid et al., Simplex Random Features (ICML 2023), Eq. 7; Choromanski et al., Rethinking
      Attention with Performers (ICLR 2021).
    """
    features = positive_log_features(x, projection, kernel=kernel)
    return jnp.exp(features.exponent + features.log_scale).astype(jnp.asarray(x).dtype)
