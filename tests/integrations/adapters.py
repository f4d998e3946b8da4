"""The same attention in both Flax APIs."""

import jax
from flax import linen as nn
from flax import nnx

from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter

HEADS, WIDTH, FEATURES = 4, 32, 18


def nnx_attention(*, seed=0, attention=None, **options):
    rngs = nnx.Rngs(seed)
    adapter = nnx_adapter.RandomFeatureAttention(
        HEADS, WIDTH // HEADS, FEATURES, rngs=rngs, **options
    )
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs, **(attention or {})
    )


def linen_attention(*, attention=None, **options):
    adapter = linen_adapter.RandomFeatureAttention(FEATURES, **options)
    return nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter, **(attention or {}))


def tokens(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), (*shape, WIDTH))


def copy_to_linen(module):
    """The variables of the Linen attention that computes what the NNX one does."""
    params = {
        name: {"kernel": layer.kernel[...], "bias": layer.bias[...]}
        for name in ("query", "key", "value", "out")
        for layer in [getattr(module, name)]
    }
    projection = module.attention_fn.projection.get_value()
    return {"params": params, "random_features": {"attention_fn": {"projection": projection}}}
