"""Checks that jitted decoders of both Flax APIs need no more memory after their first tokens."""

import functools

import jax
import pytest
from flax import linen as nn
from flax import nnx

from simrf_jax._src.integrations.flax_versions import view
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from tests.integrations.adapters import HEADS, WIDTH, tokens
from tests.memory import assert_flat

SIZES = {
    "RandomFeatureAttention": {"num_features": 5},
    "FMMAttention": {"num_features": 5, "bandwidth": 3},
}
adapters = pytest.mark.parametrize("name", SIZES)
counts = pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])


@pytest.mark.slow
@adapters
@counts
def test_memory_of_an_nnx_decoder_is_flat(name, count):
    rngs = nnx.Rngs(0)
    kind = getattr(nnx_adapter, name)
    adapter = kind(HEADS, WIDTH // HEADS, **SIZES[name], coupling="iid", rngs=rngs)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs)
    decoder = view(module, only=kind, decode=True, batch_size=2)
    x = tokens(2, 1)
    step = nnx.jit(lambda decoder, x: decoder(x))
    assert_flat(lambda: step(decoder, x), count=count)


@pytest.mark.slow
@adapters
@counts
def test_memory_of_a_linen_decoder_is_flat(name, count):
    adapter = getattr(linen_adapter, name)(**SIZES[name], coupling="iid", decode=True)
    module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)
    x = tokens(2, 1)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    step = jax.jit(functools.partial(module.apply, mutable=["cache"]))

    def decode():
        out, updates = step(variables, x)
        variables.update(updates)
        return out

    assert_flat(decode, count=count)
