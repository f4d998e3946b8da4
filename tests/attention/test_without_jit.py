"""Calls outside jit compile what they need once, and nothing compiled goes out of date."""

import contextlib
import functools
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax import banded_attention, random_feature_attention
from simrf_jax._src.integrations.flax_versions import view
from simrf_jax.fmm import fmm_attention
from simrf_jax.integrations.nnx import RandomFeatureAttention
from tests.attention import steps as decoding_steps
from tests.attention.inputs import inputs, projection
from tests.versions import unregister_event_duration_listener

LENGTH, DIM = 11, 8
COMPILATION = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """Yields a list that gets the seconds of each compilation."""
    seconds = []

    def listen(event, duration, **_):
        if event == COMPILATION:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        unregister_event_duration_listener(listen)


def qkv(dtype=jnp.float32):
    return tuple(jnp.asarray(x, dtype) for x in inputs(LENGTH, heads=2, dim=DIM))


def exponentials(x, w):
    return jnp.exp(x @ w.T)


IDS = np.repeat([0, 1], [5, 6])
CALLS = {
    "bidirectional": random_feature_attention,
    "causal": functools.partial(random_feature_attention, is_causal=True),
    "packed": functools.partial(random_feature_attention, segment_ids=IDS),
    "causal, a map of the user": functools.partial(
        random_feature_attention, is_causal=True, feature_map=exponentials
    ),
    "causal, a new lambda each time": lambda *arrays: random_feature_attention(
        *arrays, is_causal=True, feature_map=lambda x, w: exponentials(x, w)
    ),
    "band": lambda q, k, v, w: banded_attention(q, k, v, bandwidth=2, is_causal=True),
    "both": lambda q, k, v, w: fmm_attention(q, k, v, (w,), bandwidth=2, is_causal=True),
    "gradient": jax.grad(
        lambda *arrays: jnp.sum(random_feature_attention(*arrays, is_causal=True)), (0, 1, 2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_a_second_call_compiles_nothing(call, dtype):
    arrays, w = qkv(dtype), projection()
    for _ in range(2):
        CALLS[call](*arrays, w)
    others = *(x + 1 for x in arrays), 2 * w
    with compilations() as seconds:
        CALLS[call](*others)
    assert not seconds


def test_the_listener_hears_compilations():
    with compilations() as seconds:
        jax.jit(lambda x: x * 3)(1.0)
    assert len(seconds) == 1


def steps(count):
    """Decodes tokens one by one without jit."""
    w = projection()
    state = decoding_steps.init_state(w, num_key_heads=2, value_dim=DIM)
    tokens = tuple(x[:1] for x in qkv())
    for _ in range(count):
        _, state = decoding_steps.step(state, *tokens, w)
    return state


@pytest.mark.slow
def test_steps_of_decoding_compile_once():
    steps(2)
    with compilations() as seconds:
        steps(3)
    assert not seconds


@pytest.mark.slow
def test_the_decoder_of_the_readme_compiles_once():
    rngs = nnx.Rngs(0)
    attention = nnx.MultiHeadAttention(
        2,
        16,
        attention_fn=RandomFeatureAttention(2, DIM, num_features=9, rngs=rngs),
        decode=False,
        rngs=rngs,
    )
    decoder = view(attention, only=RandomFeatureAttention, decode=True, batch_size=2)
    decoder(jnp.ones((2, 5, 16)))
    for _ in range(2):
        decoder(jnp.ones((2, 1, 16)))
    with compilations() as seconds:
        decoder(jnp.ones((2, 1, 16)))
    assert not seconds


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_steps_of_milliseconds():
    steps(100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    steps(1000)
    assert (time.monotonic() - start) / 1000 < 0.1  # Seconds; a compilation takes more.
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 10_000  # KiB, of which compiling each time takes 2,000 for every step.


@pytest.mark.slow
def test_a_users_map_may_change_between_calls():
    """What is compiled depends on no array that a user's function closes over."""
    q, k, v = qkv()
    scale = jnp.ones(())

    def attend():
        return random_feature_attention(
            q, k, v, projection(), is_causal=True, feature_map=feature_map
        )

    def feature_map(x, w):
        return jnp.exp(scale * (x @ w.T))

    first = attend()
    scale = jnp.zeros(())
    second = attend()
    np.testing.assert_allclose(
        second, jnp.cumsum(v, 0) / jnp.arange(1, LENGTH + 1)[:, None, None], rtol=1e-5
    )
    assert not np.allclose(first, second)


@pytest.mark.slow
def test_a_users_map_may_hold_what_is_differentiated():
    q, k, v = qkv()
    w = projection()

    def loss(scale):
        out = random_feature_attention(
            q, k, v, w, is_causal=True, feature_map=lambda x, w: jnp.exp(scale * (x @ w.T))
        )
        return jnp.sum(out**2)

    step = 1e-2
    slope = (loss(1.0 + step) - loss(1.0 - step)) / (2 * step)
    for gradient in (jax.grad(loss)(1.0), jax.jit(jax.grad(loss))(1.0)):
        np.testing.assert_allclose(gradient, slope, rtol=1e-2)
