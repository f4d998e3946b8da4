"""Adapters of both Flax APIs that compute the same attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from simrf_jax import random_feature_attention
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.fmm import fmm_attention
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
    """Returns variables with which Linen's attention computes the same as an NNX module."""
    params = {
        name: {"kernel": layer.kernel[...], "bias": layer.bias[...]}
        for name in ("query", "key", "value", "out")
        for layer in [getattr(module, name)]
    }
    projection = get_value(module.attention_fn.projection)
    return {"params": params, "random_features": {"attention_fn": {"projection": projection}}}


BANDWIDTH = 2


class Both(NamedTuple):
    """An adapter of each API with the same W, and the function that both of them call.

    Attributes:
      nnx: The NNX adapter.
      linen: The Linen adapter.
      variables: Variables of the Linen adapter.
      function: Function of queries, keys and values.
    """

    nnx: nnx_adapter.RandomFeatureAttention | nnx_adapter.FMMAttention
    linen: linen_adapter.RandomFeatureAttention | linen_adapter.FMMAttention
    variables: dict
    function: object

    def calls(self):
        """Returns both adapters as functions of queries, keys and values."""
        return {"nnx": self.nnx, "linen": lambda *x, **o: self.linen.apply(self.variables, *x, **o)}

    def step(self, api, state, *x, **options):
        """Returns the output for tokens that follow those of a state."""
        if api == "nnx":
            self.nnx.cache = nnx.Cache(state)
            return self.nnx(*x, **options)
        variables = {**self.variables, "cache": {"state": state}}
        return self.linen.apply(variables, *x, **options, mutable=["cache"])[0]


def random_features(heads, dim, **options):
    options = {"coupling": "iid", **options}
    one = nnx_adapter.RandomFeatureAttention(heads, dim, FEATURES, rngs=nnx.Rngs(0), **options)
    w = get_value(one.projection)
    other = linen_adapter.RandomFeatureAttention(FEATURES, **options)
    variables = {"random_features": {"projection": w}}
    return Both(one, other, variables, lambda *x, **o: random_feature_attention(*x, w, **o))


def fmm(heads, dim, **options):
    """Returns adapters that weight both fields by a half."""
    options = {"coupling": "iid", **options}
    one = nnx_adapter.FMMAttention(heads, dim, FEATURES, BANDWIDTH, rngs=nnx.Rngs(0), **options)
    w = get_value(one.projections)
    other = linen_adapter.FMMAttention(FEATURES, BANDWIDTH, **options)
    weights = {"near_logit": jnp.zeros(heads), "far_logits": jnp.zeros((1, heads))}
    variables = {"random_features": {"projections": w}, "params": weights}
    halves = {"bandwidth": BANDWIDTH, "near_weight": 0.5, "far_weights": 0.5}
    return Both(one, other, variables, lambda *x, **o: fmm_attention(*x, w, **halves, **o))


KINDS = {"random features": random_features, "near and far": fmm}
