"""Features in log space, and the names of the kernels that feature maps estimate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

KERNELS = ("gaussian", "softmax")


class LogFeatures(NamedTuple):
    """Features with their scale in log space: phi = values * exp(exponent + log_scale).

    Attention drops the factor that all features of a query share. Adding a large ``log_scale`` to
    ``exponent`` and then subtracting it again would lose digits, so the two are kept apart.

    Attributes:
      exponent: Array ``[..., num_features]``, or ``[..., 1]`` if all features share one exponent.
        It is minus infinity where a feature is zero.
      log_scale: Array ``[..., 1]``, the logarithm of a factor that all features of a vector share.
      values: Array ``[..., num_features]`` of either sign and moderate size; None means all ones.
    """

    exponent: jax.Array
    log_scale: jax.Array
    values: jax.Array | None = None

    def evaluate(self, dtype: DTypeLike) -> jax.Array:
        """Returns the features phi themselves, ``[..., num_features]``, in the given dtype."""
        phi = jnp.exp(self.exponent + self.log_scale)
        return (phi if self.values is None else phi * self.values).astype(dtype)


def half_squared_norm(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Returns half the squared length of each vector of x, ``[..., 1]`` in the given dtype."""
    return 0.5 * jnp.sum(jnp.square(jnp.asarray(x, dtype)), axis=-1, keepdims=True)
