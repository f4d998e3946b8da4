"""Attention that jax.export exports for every length."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from simrf_jax import ExactKeys, banded_attention, random_feature_attention
from tests.attention.inputs import inputs, projection
from tests.tiers import slow_but

CALLS = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "packed": {"segment_ids": True},
    "exact band": {"exact_bandwidth": 4},
    "exact band, causal": {"exact_bandwidth": 4, "is_causal": True},
    "exact keys": {"exact_keys": 4},
    "exact keys by score": {"exact_keys": ExactKeys(4, by="score"), "is_causal": True},
    "band": {"bandwidth": 3},
}


def attend(q, k, v, options):
    if "segment_ids" in options:
        options = {"segment_ids": jnp.arange(q.shape[0]) // 7}
    if "bandwidth" in options:
        return banded_attention(q, k, v, **options)
    return random_feature_attention(q, k, v, projection(), **options)


SOME_CALLS = ["causal", "packed", "exact band", "exact keys"]


@pytest.mark.parametrize("name", slow_but(SOME_CALLS, list(CALLS)))
def test_one_program_takes_every_length(name):
    own = functools.partial(attend, options=CALLS[name])
    (length,) = jax.export.symbolic_shape("T")
    shape = jax.ShapeDtypeStruct((length, 2, 8), jnp.float32)
    exported = jax.export.export(jax.jit(own))(*[shape] * 3)
    for length in (1, 3, 70):
        tokens = inputs(length)
        chex.assert_trees_all_close(exported.call(*tokens), own(*tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_take_every_length():
    def loss(q, k, v):
        return jnp.sum(jnp.square(attend(q, k, v, CALLS["causal"])))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    (length,) = jax.export.symbolic_shape("T")
    exported = jax.export.export(gradient)(*[jax.ShapeDtypeStruct((length, 2, 8), jnp.float32)] * 3)
    for length in (1, 70):
        tokens = inputs(length)
        chex.assert_trees_all_close(exported.call(*tokens), gradient(*tokens), rtol=1e-4, atol=1e-5)
