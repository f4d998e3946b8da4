"""What all feature maps share: the kernels they estimate, and their form in log space."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

KERNELS = ("gaussian", "softmax")


class LogFeatures(NamedTuple):
    """A feature map with its scale in log space: phi = values * exp(exponent + log_scale).

    The parts stay apart because attention drops what all the features of a query share: adding a
    large ``log_scale`` to ``exponent`` only to subtract it again would cost digits.

    Attributes:
      exponent: Array ``[..., num_features]``, or ``[..., 1]`` for one that all features share;
        minus infinity where a feature is zero.
      log_scale: Array ``[..., 1]``.
      values: Array ``[..., num_features]`` of either sign and moderate size; None for all ones.
    """

    exponent: jax.Array
    log_scale: jax.Array
    values: jax.Array | None = None

    def evaluate(self, dtype: DTypeLike) -> jax.Array:
        """The features themselves, ``[..., num_features]``."""
        phi = jnp.exp(self.exponent + self.log_scale)
        return (phi if self.values is None else phi * self.values).astype(dtype)


def half_squared_norm(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Half the squared length of ``[..., dim]``, ``[..., 1]`` in a type to compute in."""
    return 0.5 * jnp.sum(jnp.square(jnp.asarray(x, dtype)), axis=-1, keepdims=True)
