"""Jitted decoding goes on for thousands of tokens in the memory of the first."""

import chex
import jax
import jax.numpy as jnp
import pytest

from tests.attention import steps
from tests.attention.inputs import projection
from tests.memory import assert_flat

SIZES = {"batch": (2,), "num_key_heads": 2, "head_dim": 8, "value_dim": 8}


def append(state, query, key, value, w):
    return None, steps.append(state, key, value, w)


def window_step(window, query, key, value, w):
    return steps.window_step(window, query, key, value)


def fmm_step(state, query, key, value, w):
    return steps.fmm_step(state, query, key, value, (w,))


def step_beside_band(state, query, key, value, w):
    return steps.step(state, query, key, value, w, exact_bandwidth=3)


# name -> what makes the first state from W, and the output and the next state of a token
MODES = {
    "far": (lambda w: steps.init_state(w, **SIZES), steps.step),
    "append": (lambda w: steps.init_state(w, **SIZES), append),
    "near": (lambda w: steps.init_window(bandwidth=3, **SIZES), window_step),
    "near and far": (lambda w: steps.init_fmm_state((w,), bandwidth=3, **SIZES), fmm_step),
    "exact band": (lambda w: steps.init_state(w, exact_bandwidth=3, **SIZES), step_beside_band),
}


class Decoder:
    """A state and the program that takes it from token to token."""

    def __init__(self, name, **options):
        init, step = MODES[name]
        self.w, self.tokens = projection(), jnp.ones((3, 2, 1, 2, 8))
        # Parts of a new state may share a buffer, which cannot be donated twice.
        self.state = jax.tree.map(jnp.copy, init(self.w))
        # JAX's own count of compiled programs reads 0 once its cache is full.
        chex.clear_trace_counter()
        self.step = jax.jit(chex.assert_max_traces(step, n=1), **options)

    def __call__(self):
        out, self.state = self.step(self.state, *self.tokens, self.w)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODES)
def test_memory_is_flat(name, count, options):
    assert_flat(Decoder(name, **options), count=count)


def test_a_step_of_one_token_copies_the_sums_no_more_than_once():
    sizes = {"batch": (64,), "num_key_heads": 4, "head_dim": 32, "value_dim": 32}
    w = jax.ShapeDtypeStruct((66, 32), jnp.float32)
    state = jax.eval_shape(lambda w: steps.init_state(w, **sizes), w)
    tokens = [jax.ShapeDtypeStruct((64, 1, 4, 32), jnp.float32)] * 3
    compiled = jax.jit(steps.step, donate_argnums=0).lower(state, *tokens, w).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 1.2 * sum(x.size * x.dtype.itemsize for x in state)
