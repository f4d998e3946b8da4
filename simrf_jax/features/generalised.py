"""Feature maps of generalised kernels: any nonlinearity makes linear attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.features.log_space import LogFeatures
from simrf_jax.projections import Projection, project


def relu_log_features(x: ArrayLike, projection: Projection) -> LogFeatures:
    """ReLU features in log space; arguments as ``relu_features``."""
    y = project(x, projection)
    # The inner where keeps the logarithm's gradient finite where its value is not used.
    exponent = jnp.where(y <= 0, -jnp.inf, jnp.log(jnp.where(y <= 0, 1, y)))
    return LogFeatures(exponent, _log_mean(exponent))


def elu_log_features(x: ArrayLike, projection: Projection | None = None) -> LogFeatures:
    """ELU features in log space; arguments as ``elu_features``."""
    if projection is None:
        y = checks.vectors("x", x)
        y = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        log_scale = jnp.zeros_like(y[..., :1])
    else:
        y = project(x, projection)
        log_scale = _log_mean(y)
    # elu(y) + 1 is exp(y) below zero and 1 + y above.
    return LogFeatures(jnp.minimum(y, 0) + jnp.log1p(jnp.maximum(y, 0)), log_scale)


def _log_mean(exponent: jax.Array) -> jax.Array:
    return jnp.full_like(exponent[..., :1], -0.5 * math.log(exponent.shape[-1]))


def relu_features(x: ArrayLike, projection: Projection) -> jax.Array:
    r"""ReLU random features, :math:`\phi(x)_i = \max(w_i \cdot x, 0) / \sqrt m`.

    Then :math:`\phi(x) \cdot \phi(y)` is an unbiased estimate of ``relu_kernel``, and never
    negative. Of the couplings, simplex serves this map best: at m = d = 64 and random vectors it
    had 0.30 of the squared error of iid rows, orthogonal 0.64 (benchmarks/variance.py).

    Args:
      x: Vectors ``[..., dim]``.
      projection: W, ``[num_features, dim]``, the same for both sides of the product.

    Returns:
      Array ``[..., num_features]`` of x's dtype, computed in float32 at least.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> w = jnp.array([[3.0, 0.0], [0.0, 5.0], [-1.0, -1.0], [1.0, 1.0]])
      >>> simrf_jax.relu_features(jnp.array([1.0, 2.0]), w)
      Array([1.5, 5. , 0. , 1.5], dtype=float32)

    References:
      Cho and Saul, Kernel Methods for Deep Learning (NeurIPS 2009); Choromanski et al., Rethinking
      Attention with Performers (ICLR 2021), Performer-ReLU.
    """
    features = relu_log_features(x, projection)
    return features.evaluate(jnp.asarray(x).dtype)


def elu_features(x: ArrayLike, projection: Projection | None = None) -> jax.Array:
    r"""The features of linear transformers, :math:`\phi(x) = \operatorname{elu}(x) + 1`.

    Positive, and of no kernel in particular.

    Args:
      x: Vectors ``[..., dim]``.
      projection: W, ``[num_features, dim]``, to project x onto first, and divide the features by
        :math:`\sqrt m`; None for the features of x itself.

    Returns:
      Array ``[..., dim]``, or ``[..., num_features]`` with a projection, of x's dtype, computed in
      float32 at least.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.elu_features(jnp.array([-1.0, 0.0, 2.0]))
      Array([0.36787945, 1.        , 3.        ], dtype=float32)

    References:
      Katharopoulos et al., Transformers are RNNs (ICML 2020), Eq. 7.
    """
    features = elu_log_features(x, projection)
    return features.evaluate(jnp.asarray(x).dtype)
