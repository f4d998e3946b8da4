"""Softmax attention to virtual tokens is random-feature attention, to the digits of float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import Projection, RandomFeatureMechanism, feature_maps
from tests.attention.inputs import inputs, projection
from tests.attention.modes import calibrated, learned
from tests.attention.reference import relative_error
from tests.tiers import slow_but
from tests.versions import enable_x64

DIM = 8
SHAPE = {"heads": 4, "key_heads": 2, "batch": (2,), "width": 5, "dim": DIM}
# The feature map, and what it takes for W, by name.
MAPS = {
    "positive": ("positive", lambda w: w),
    "hyperbolic": ("hyperbolic", lambda w: w[0]),
    "optimal positive": (feature_maps.OptimalPositive(-0.1), lambda w: w),
    "calibrated": (calibrated(DIM), lambda w: w),
    "learned": (learned(DIM), lambda w: None),
    "pairs": ("positive", lambda w: Projection(w, is_paired=True)),
    "weighted": ("positive", lambda w: Projection(w[0], log_weights=w[0].sum(axis=-1))),
}


def softmax_attention(query, key, value, bias=0.0, scale=DIM**-0.5):
    """Softmax attention of grouped heads in float64; the bias for each head, or key head."""
    groups = query.shape[-2] // key.shape[-2]
    key, value = (np.repeat(x, groups, axis=-2) for x in (key, value))
    bias = np.asarray(bias)
    if bias.ndim and bias.shape[-3] != query.shape[-2]:
        bias = np.repeat(bias, groups, axis=-3)
    logits = scale * np.einsum("...tnh,...snh->...nts", query, key) + bias
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("...nts,...snd->...tnd", weights, value)


def wide(*arrays):
    return tuple(np.asarray(x, np.float64) for x in arrays)


def mechanism_of(name, **options):
    feature_map, of_w = MAPS[name]
    w = of_w(jnp.asarray(projection(12, DIM, heads=2), jnp.float64))
    return RandomFeatureMechanism(w, feature_map=feature_map, **options)


def state_of(mechanism, key, value, **options):
    sizes = {"num_key_heads": 2, "head_dim": DIM, "value_dim": 5}
    empty = mechanism.init(batch=(2,), dtype=key.dtype, **sizes)
    return mechanism.append(empty, key, value, **options)


@functools.cache
def answers(name):
    """Returns a program of all scales: the tokens without queries and with them, and attention."""
    mechanism = mechanism_of(name)

    @jax.jit
    def program(query, key, value, scale):
        state = state_of(mechanism, key, value, scale=scale)
        return (
            mechanism.virtual_tokens(state, scale=scale),
            mechanism.virtual_tokens(state, query, scale=scale),
            mechanism.attend(query, key, value, scale=scale),
        )

    return program


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("scale", slow_but([-0.7], [DIM**-0.5, 2.0, -0.7]))
def test_they_stand_for_all_keys(name, scale):
    with enable_x64(True):
        query, key, value = wide(*inputs(9, **SHAPE))
        *both, expected = answers(name)(query, key, value, scale)
    for key, value, bias in both:
        assert key.dtype == np.float64
        assert relative_error(softmax_attention(query, key, value, bias, scale), expected) < 1e-12


@pytest.mark.slow
def test_token_by_token_at_the_scale_by_default():
    with enable_x64(True):
        query, key, value = wide(*inputs(6, **SHAPE))
        mechanism = mechanism_of("positive")
        state = state_of(mechanism, key[:, :0], value[:, :0])
        step = jax.jit(mechanism.step)
        for t in range(6):
            now = slice(t, t + 1)
            out, state = step(state, query[:, now], key[:, now], value[:, now])
            again = softmax_attention(query[:, now], *mechanism.virtual_tokens(state))
            assert relative_error(again, out) < 1e-12


@pytest.mark.parametrize("name", slow_but(["calibrated"], ["positive", "calibrated", "learned"]))
def test_recent_keys_beside_them_share_the_softmax(name):
    """Exact keys are further tokens, whose bias is zero."""
    exact = 4  # The last of them is the query's own.
    with enable_x64(True):
        query, key, value = wide(*inputs(9, **SHAPE))
        mechanism = mechanism_of(name, exact_bandwidth=exact - 1)

        @jax.jit
        def program(query, key, value):
            far = state_of(mechanism, key[:, :-1], value[:, :-1]).far
            out = mechanism.attend(query, key, value, is_causal=True)
            return mechanism.virtual_tokens(far, query[:, -1:]), out[:, -1:]

        tokens, expected = program(query, key, value)
    out = softmax_attention(
        query[:, -1:],
        np.concatenate([tokens.key, key[:, -exact:]], axis=1),
        np.concatenate([tokens.value, value[:, -exact:]], axis=1),
        np.pad(tokens.bias, [(0, 0)] * 3 + [(0, exact)]),
    )
    assert relative_error(out, expected) < 1e-12


def test_hidden_keys_and_features_without_keys_have_no_part():
    _, key, value = inputs(9, **SHAPE)
    mechanism = RandomFeatureMechanism(projection(12, DIM))
    shown = np.arange(9) < 5
    hidden = state_of(mechanism, key, value, mask=shown[None, None])
    for one, other in zip(
        mechanism.virtual_tokens(hidden),
        mechanism.virtual_tokens(state_of(mechanism, key[:, :5], value[:, :5])),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    empty = mechanism.virtual_tokens(state_of(mechanism, key[:, :0], value[:, :0]))
    assert np.all(empty.bias == -np.inf)
    assert np.all(empty.value == 0)


def test_under_jit_with_gradients():
    query, key, value = inputs(9, **SHAPE)
    query = query[..., ::2, :]  # As many heads as keys, as the bias is for each key head.
    mechanism = RandomFeatureMechanism(projection(12, DIM))

    def loss(attend, value):
        return jnp.sum(jnp.sin(attend(value)))

    def by_tokens(value):
        tokens = mechanism.virtual_tokens(state_of(mechanism, key, value))
        logits = jnp.einsum("btnh,bsnh->bnts", query, tokens.key) / DIM**0.5 + tokens.bias
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits), tokens.value)

    gradient = jax.jit(jax.grad(lambda x: loss(by_tokens, x)))(value)
    expected = jax.jit(jax.grad(lambda x: loss(lambda v: mechanism.attend(query, key, v), x)))(
        value
    )
    assert relative_error(gradient, expected) < 1e-5


W = np.ones((12, DIM), np.float32)
STATE = (np.ones((2, 12, 6), np.float32), np.zeros((2, 12), np.float32))
REFUSED = {
    "map": (
        RandomFeatureMechanism(W, feature_map="relu"),
        {},
        ValueError,
        "features that are exponentials .*, got Relu",
    ),
    "query": (
        RandomFeatureMechanism(W),
        {"query": np.ones((3, 5, DIM), np.float32)},
        ValueError,
        "5 .* 2",
    ),
    "scale": (
        RandomFeatureMechanism(W),
        {"scale": np.nan},
        ValueError,
        "scale must be finite",
    ),
    "scale 0": (RandomFeatureMechanism(W), {"scale": 0.0}, ValueError, "scale must not be 0"),
    "heads": (
        RandomFeatureMechanism(np.stack([W] * 3)),
        {},
        ValueError,
        "one W for each of the 2 key heads",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    mechanism, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        mechanism.virtual_tokens(simrf_jax.AttentionState(*STATE), **options)


@pytest.mark.fast
def test_refuses_another_state():
    mechanism = RandomFeatureMechanism(projection(12, DIM), exact_bandwidth=2)
    state = mechanism.init(num_key_heads=2, head_dim=DIM, value_dim=5)
    with pytest.raises(TypeError, match="state must be of type AttentionState, got ExactBandState"):
        mechanism.virtual_tokens(state)
