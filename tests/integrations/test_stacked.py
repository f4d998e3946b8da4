"""Tests of NNX layers that ``nnx.vmap`` stacks and ``nnx.scan`` calls: they decode."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx

from simrf_jax._src.integrations.flax_versions import view
from simrf_jax.feature_maps import OptimalPositive
from simrf_jax.integrations.nnx import FMMAttention, RandomFeatureAttention
from tests.attention.reference import relative_error
from tests.integrations.adapters import FEATURES, HEADS, WIDTH, tokens


class Layer(nnx.Module):
    def __init__(self, rngs, kind=RandomFeatureAttention, size=(), **options):
        options = {"coupling": "iid", "is_causal": True, **options}
        adapter = kind(HEADS, WIDTH // HEADS, FEATURES, *size, rngs=rngs, **options)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs
        )

    def __call__(self, x):
        return x + self.attention(x)


def stack(**options):
    """Returns three layers in one, whose arrays have a leading axis."""
    make = nnx.vmap(functools.partial(Layer, **options), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))


def whole_view(layers):
    return view(layers, only=type(layers.attention.attention_fn), decode=True, batch_size=2)


def mapped_view(layers):
    return nnx.vmap(whole_view, in_axes=0, out_axes=0)(layers)


def set_in_place(layers):
    layers = nnx.clone(layers)
    layers.attention.attention_fn.set_view(decode=True, batch_size=2)
    return layers


CASES = {
    "whole view": (whole_view, {}),
    "view of each": (mapped_view, {}),
    "in place": (set_in_place, {}),
    "one W": (whole_view, {"shared": True}),
    "calibrated": (whole_view, {"feature_map": "calibrated"}),
    "learned": (whole_view, {"feature_map": "learned"}),
    "tilt, a number": (whole_view, {"feature_map": OptimalPositive(-0.1)}),
    "tilt, an array": (whole_view, {"feature_map": OptimalPositive(jnp.array(-0.1))}),
    "weighted": (whole_view, {"norms": "radau", "coupling": "simplex"}),
    "near and far": (whole_view, {"kind": FMMAttention, "size": (2,)}),
    "no W": (mapped_view, {"feature_map": "elu"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stacked_layers_decode(name):
    start, options = CASES[name]
    layers = stack(**options)
    call = nnx.jit(nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    x = tokens(2, 5)
    expected = call(layers, x)
    decoder = start(layers)
    outs = [call(decoder, piece) for piece in (x[:, :3], x[:, 3:4], x[:, 4:])]
    assert relative_error(jnp.concatenate(outs, axis=1), expected) < 1e-5


@pytest.mark.slow
def test_adapters_know_their_stack():
    assert stack().attention.attention_fn.stack_shape() == (3,)
    adapter = RandomFeatureAttention(HEADS, WIDTH // HEADS, FEATURES, rngs=nnx.Rngs(0))
    assert adapter.stack_shape() == ()
