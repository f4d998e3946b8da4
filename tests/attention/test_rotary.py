"""Rotary embeddings before the feature map: what is estimated depends on relative positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import draw_projection, positive_features, random_feature_attention, theory
from tests.attention import steps
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, relative_error
from tests.standard_errors import assert_mean

DIM = 8


def apply_rotary(x, positions):
    """Turns the pairs (i, i + dim / 2) of ``[length, ..., dim]`` by position * 100^(-2i / dim)."""
    half = x.shape[-1] // 2
    positions = np.reshape(positions, (-1,) + (1,) * (x.ndim - 1))
    angles = positions * 100.0 ** -(np.arange(half) / half).reshape((1,) * (x.ndim - 1) + (half,))
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype)


def vectors():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 1, DIM)).astype(np.float32)
    return x / np.linalg.norm(x), 0.5 * y / np.linalg.norm(y)


def pairs(offset):
    """One query and one key ``offset`` positions apart, at four places: ``[4, DIM]`` each."""
    x, y = vectors()
    places = np.array([0, 1, 7, 40])
    query, key = (np.repeat(z, 4, axis=0) for z in (x, y))
    return apply_rotary(query, places + offset), apply_rotary(key, places)


@jax.jit
def estimates(keys, query, key):
    """Of the softmax kernel, for each draw and place."""

    def one(draw):
        w = draw_projection(draw, DIM + 1, DIM, coupling="simplex")
        features = (positive_features(x, w, kernel="softmax") for x in (query, key))
        return jnp.sum(jnp.prod(jnp.stack(list(features)), axis=0), axis=-1)

    return jax.vmap(one)(keys)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 3])
def test_the_estimated_kernel_depends_on_the_relative_position(offset):
    query, key = pairs(offset)
    samples = np.asarray(estimates(jax.random.split(jax.random.key(0), 20_000), query, key))
    x, y = vectors()
    kernel = np.exp(np.sum(apply_rotary(x, [offset]) * y))
    assert_mean(samples, kernel)
    # One W sees absolute positions, all W together do not: the variance is the same everywhere.
    assert np.ptp(samples, axis=1).min() > 1e-3
    mse = theory.kernel_mse(query[0], key[0], DIM + 1, coupling="simplex", kernel="softmax")
    assert_mean((samples - kernel) ** 2, mse)


def test_the_variance_differs_between_relative_positions():
    mse = [
        theory.kernel_mse(
            *(x[0] for x in pairs(offset)), DIM + 1, coupling="simplex", kernel="softmax"
        )
        for offset in (0, 3)
    ]
    assert max(mse) > 1.5 * min(mse)


@pytest.mark.slow
def test_causal_attention_and_decoding_with_rotary_positions():
    q, k, v = inputs(20, dim=DIM)
    w, positions = projection(dim=DIM), np.arange(20)
    turned = [apply_rotary(x, positions) for x in (q, k)]
    expected = attention(*turned, v, w, visible=np.tri(20, dtype=bool))
    out = random_feature_attention(*turned, v, w, is_causal=True, chunk_size=8)
    assert relative_error(out, expected) < 1e-5
    state = steps.init_state(w, num_key_heads=2, value_dim=DIM)
    step, outs = jax.jit(steps.step), []
    for t in positions:
        token = [apply_rotary(x[t : t + 1], [t]) for x in (q, k)]
        out, state = step(state, *token, v[t : t + 1], w)
        outs.append(out)
    assert relative_error(np.concatenate(outs), expected) < 1e-5
