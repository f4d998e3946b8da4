"""Features in log space, and the names of kernels and sides."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from simrf_jax._src import one_line

Kernel: TypeAlias = Literal["gaussian", "softmax"]
KERNELS = get_args(Kernel)
Side: TypeAlias = Literal["query", "key"]
SIDES = get_args(Side)


class LogFeatures(NamedTuple):
    """Features with their scale in log space: phi = values * exp(exponent + log_scale).

    Attention drops the factor that all features of a query share. Adding a large ``log_scale`` to
    ``exponent`` and then subtracting it again would lose digits, so the two are kept apart.

    Attributes:
      exponent: Exponent of each feature, or one exponent shared by all features. It is minus
        infinity where a feature is zero.
      log_scale: Logarithm of a factor that all features of a vector share.
      values: Numbers of either sign and moderate size; None means all ones.
    """

    exponent: Float[Array, "*batch #num_features"]
    log_scale: Float[Array, "*batch 1"]
    values: Float[Array, "*batch num_features"] | None = None

    def __repr__(self) -> str:
        return one_line.representation(self)

    def evaluate(self, dtype: DTypeLike) -> Float[Array, "*batch num_features"]:
        """Returns the features phi themselves in the given dtype."""
        phi = jnp.exp(self.exponent + self.log_scale)
        return (phi if self.values is None else phi * self.values).astype(dtype)


def half_squared_norm(x: Float[Array, "*batch dim"], dtype: DTypeLike) -> Float[Array, "*batch 1"]:
    """Returns half the squared length of each vector of x in the given dtype."""
    return 0.5 * jnp.sum(jnp.square(jnp.asarray(x, dtype)), axis=-1, keepdims=True)


def widened(array: ArrayLike, dtype: DTypeLike) -> Array:
    """Returns an array in the wider of its own dtype and ``dtype``."""
    return jnp.asarray(array, np.promote_types(jnp.result_type(array), dtype))
