"""Bidirectional attention by chunks, as CPUs compute it, against all tokens at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import feature_maps
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.random_features import xla
from tests import platforms
from tests.tiers import slow_but

DIM, NUM_FEATURES, KEY_HEADS = 8, 6, 2

MAPS = {
    "positive": feature_maps.Positive(),
    "trigonometric": feature_maps.Trigonometric(),
    "relu": feature_maps.Relu(),
    "calibrated": feature_maps.Calibrated.identity(KEY_HEADS, DIM),
}


def arguments(scale, *, value=None):
    """Returns 37 queries of 4 heads and 29 keys of 2, of which a mask and a length hide some."""
    keys = jax.random.split(jax.random.key(0), 3)
    query = scale * jax.random.normal(keys[0], (2, 37, 4, DIM))
    key = scale * jax.random.normal(keys[1], (2, 29, KEY_HEADS, DIM))
    value = jax.random.normal(keys[2], (2, 29, KEY_HEADS, 5)) if value is None else value
    mask = np.ones((2, 1, 1, 29), bool)
    mask[0, ..., 3] = False
    return Call.of(
        query,
        key,
        value,
        mask=mask,
        bias=None,
        scale=None,
        query_seq_lengths=None,
        key_value_seq_lengths=np.array([29, 20]),
    )


def rows(shared):
    keys = jax.random.split(jax.random.key(1), KEY_HEADS)
    w = jax.vmap(lambda key: simrf_jax.draw_projection(key, NUM_FEATURES, DIM))(keys)
    return w[0] if shared else w


def attend(function, given, w, feature_map):
    @jax.jit
    def outputs(given, w, feature_map):
        inputs, features = simrf_jax.RandomFeatureMechanism(w, feature_map).lay_out(given)
        return inputs.outputs(function(inputs, features, None))

    return outputs(given, w, feature_map)


@pytest.fixture(params=[3, 100], ids="{} tokens at a time".format)
def chunked(request, monkeypatch):
    monkeypatch.setattr(xla, "LEAST_CHUNK", request.param)
    monkeypatch.setattr(xla, "CHUNK_ROWS", request.param)
    return xla._attend_by_chunks


@pytest.mark.parametrize("shared", [True, False], ids=["one W", "a W for each head"])
@pytest.mark.parametrize("name", slow_but(["positive"], list(MAPS)))
def test_chunks_give_what_all_tokens_at_once_give(name, shared, chunked):
    # At a larger scale a denominator of the signed features comes near zero, and digits are lost.
    given, w = arguments(0.3 if name == "trigonometric" else 2.0), rows(shared)
    expected = attend(xla._attend_at_once, given, w, MAPS[name])
    np.testing.assert_allclose(
        attend(chunked, given, w, MAPS[name]), expected, rtol=2e-5, atol=2e-5
    )


@pytest.mark.slow
def test_gradients_through_chunks(chunked):
    def gradients(function):
        def loss(given, w):
            return jnp.sum(jnp.sin(attend(function, given, w, feature_maps.Positive())))

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))
        return gradient(arguments(1.0), rows(False))

    ours, expected = gradients(chunked), gradients(xla._attend_at_once)
    for name in ("query", "key", "value"):
        pair = getattr(ours[0], name), getattr(expected[0], name)
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_second_derivatives_through_chunks(chunked):
    def curvature(function):
        def loss(scale):
            out = attend(function, arguments(scale), rows(False), feature_maps.Positive())
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(jax.grad(loss)))(1.0)

    expected = curvature(xla._attend_at_once)
    np.testing.assert_allclose(curvature(chunked), expected, rtol=1e-4)


@dataclasses.dataclass(frozen=True)
class OnTheUnitSphere(simrf_jax.FeatureMap):
    """Features without a value at zero, nor a derivative."""

    def log_features(self, x, projection, *, side):
        unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return feature_maps.Positive().log_features(unit, projection, side=side)


@pytest.mark.slow
def test_padding_is_no_vector_of_zeros(chunked):
    def gradient(function):
        def loss(w):
            return jnp.sum(attend(function, arguments(1.0), w, OnTheUnitSphere()) ** 2)

        return jax.jit(jax.grad(loss))(rows(True))

    np.testing.assert_allclose(
        gradient(chunked), gradient(xla._attend_at_once), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_first_chunks_without_a_visible_key(chunked):
    bias = np.zeros((2, 1, 1, 29), np.float32)
    bias[1, ..., :7] = -np.inf
    given = dataclasses.replace(arguments(2.0), bias=bias)
    expected = attend(xla._attend_at_once, given, rows(False), MAPS["positive"])
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(
        attend(chunked, given, rows(False), MAPS["positive"]), expected, rtol=2e-5, atol=2e-5
    )


@pytest.mark.slow
def test_bfloat16_is_contracted_in_bfloat16_with_sums_in_float32(chunked):
    given = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arguments(1.0)
    )
    out = attend(chunked, given, rows(False), MAPS["positive"])
    assert out.dtype == jnp.bfloat16
    expected = attend(xla._attend_at_once, given, rows(False), MAPS["positive"])
    # Features are rounded in units of other keys, so outputs differ by their own rounding.
    np.testing.assert_allclose(out.astype("f4"), expected.astype("f4"), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_chunks_poison_the_queries_that_see_a_key_that_is_not_finite(chunked):
    value = np.ones((2, 29, KEY_HEADS, 5), np.float32)
    value[1, 7, 1, 2] = np.nan
    out = attend(chunked, arguments(1.0, value=value), rows(True), feature_maps.Positive())
    poisoned = np.zeros(out.shape, bool)
    poisoned[1, :, 2:] = True  # The queries of the second key head.
    np.testing.assert_array_equal(np.isnan(out), poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_number_of_features(backward):
    platforms.require_cpu()
    length = 32_768

    def temporary(num_features):
        def loss(x, w):
            return jnp.sum(simrf_jax.random_feature_attention(x, x, x, w) ** 2)

        function = jax.grad(loss) if backward else loss
        x = jax.ShapeDtypeStruct((length, 1, DIM), jnp.float32)
        w = jax.ShapeDtypeStruct((num_features, DIM), jnp.float32)
        return jax.jit(function).lower(x, w).compile().memory_analysis().temp_size_in_bytes

    # 96 more features of a fourth of the tokens, at most three arrays of them at a time.
    assert temporary(128) - temporary(32) < 4 * 96 * length
