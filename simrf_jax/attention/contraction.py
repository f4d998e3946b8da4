"""Products of what is computed in float32 with values that may be narrower."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contract(spec: str, features: jax.Array, values: jax.Array) -> jax.Array:
    """Contracts in the type of ``values``, accumulates in the type of ``features``."""
    wide, narrow = features.dtype, values.dtype
    if wide == narrow:
        return jnp.einsum(spec, features, values, precision=jax.lax.Precision.HIGHEST)
    features = features.astype(narrow)

    def mixed(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=wide)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a.astype(wide), b.astype(wide))

    # Inside jit, XLA's CPU backend (jaxlib 0.10.2) has no bfloat16 x bfloat16 = float32 product.
    return jax.lax.platform_dependent(features, values, cpu=widened, default=mixed)
