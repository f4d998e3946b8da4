import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import random_feature_attention
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, naive, relative_error
from tests.versions import enable_x64


def log_weights(visible):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(visible, np.float64))


@pytest.mark.fast
@pytest.mark.parametrize("heads_axis", [1, 4])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_key_padding_masks_count_in_numerator_and_denominator(heads_axis, key_heads):
    q, k, v = inputs(heads=4, key_heads=key_heads, batch=(3,))
    mask = np.random.default_rng(2).random((3, heads_axis, 1, 9)) < 0.6
    w = projection(heads=key_heads)
    actual = random_feature_attention(q, k, v, w, mask=jnp.asarray(mask))
    for b in range(3):
        weights = log_weights(np.broadcast_to(mask[b, :, 0], (4, 9)))
        expected = attention(q[b], k[b], v[b], w, log_weights=weights)
        assert relative_error(actual[b], expected) < 1e-5


def test_masks_broadcast_over_any_batch_axis():
    q, k, v = inputs(batch=(2, 3))
    w = projection()
    for shape in [(9,), (1, 9), (1, 1, 9), (3, 1, 1, 9), (2, 1, 1, 1, 9), (1, 3, 1, 1, 1)]:
        mask = np.random.default_rng(3).random(shape) < 0.6
        full = jnp.asarray(np.broadcast_to(mask, (2, 3, 2, 1, 9)))
        chex.assert_trees_all_close(
            random_feature_attention(q, k, v, w, mask=jnp.asarray(mask)),
            random_feature_attention(q, k, v, w, mask=full),
        )


def test_a_numpy_mask_that_is_constant_along_the_queries_is_known_to_be():
    q, k, v = inputs()
    w = projection()
    row = np.arange(9) < 5
    square = np.broadcast_to(row, (1, 9, 9))
    expected = random_feature_attention(q, k, v, w, mask=row)
    chex.assert_trees_all_close(random_feature_attention(q, k, v, w, mask=square), expected)
    traced = jax.jit(lambda q: random_feature_attention(q, k, v, w, mask=square))(q)
    chex.assert_trees_all_close(traced, expected, rtol=1e-5, atol=1e-6)


def test_hidden_keys_do_not_matter_whatever_they_hold():
    q, k, v = inputs()
    w = projection()
    visible = np.arange(9) < 6
    expected = random_feature_attention(q, k[:6], v[:6], w)
    k, v = k.copy(), v.copy()
    k[6:], v[6:] = np.nan, np.inf
    actual, pullback = jax.vjp(
        lambda k, v: random_feature_attention(q, k, v, w, mask=visible), k, v
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    for gradient in pullback(jnp.ones_like(actual)):
        np.testing.assert_array_equal(gradient[6:], 0)
        assert np.isfinite(gradient).all()


def test_padded_queries_do_not_matter_whatever_they_hold():
    q, k, v = inputs(batch=(2,))
    w, lengths = projection(), jnp.array([5, 9])

    def attend(q, k, v):
        return random_feature_attention(q, k, v, w, query_seq_lengths=lengths)

    expected, _ = jax.vjp(attend, q, k, v)
    q = q.copy()
    q[0, 5:] = np.nan
    actual, pullback = jax.vjp(attend, q, k, v)
    np.testing.assert_array_equal(actual, expected)
    for gradient in pullback(jnp.ones_like(actual)):
        assert np.isfinite(gradient).all()


def test_without_a_batch_masks_and_lengths_may_have_its_axis():
    q, k, v = inputs()
    w = projection()
    mask = np.arange(9) < 5
    expected = random_feature_attention(q, k, v, w, mask=mask)
    for options in [
        {"mask": jnp.asarray(mask)[None, None, None]},
        {"mask": mask.tolist()},
        {"key_value_seq_lengths": jnp.array([5])},
        {"key_value_seq_lengths": 5},
    ]:
        actual = random_feature_attention(q, k, v, w, **options)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)
    jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([5]))


def test_gradients_with_masks_groups_and_a_projection_for_each_head():
    q, k, v = inputs(heads=4, key_heads=2)
    w = projection(heads=2)
    mask = np.arange(9) < 6

    def one_head(n, q, k, v, w):
        return naive(q[:, n], k[:6, n // 2], v[:6, n // 2], w[n // 2], 8)

    def loss(*x):
        return jnp.sum(random_feature_attention(*x, mask=mask) ** 2)

    def reference(*x):
        return sum(jnp.sum(one_head(n, *x) ** 2) for n in range(4))

    actual = jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, w)
    with enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, w)]
        expected = jax.grad(reference, argnums=(0, 1, 2, 3))(*wide)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-4


def test_a_bias_that_all_queries_share_weighs_the_keys():
    q, k, v = inputs(batch=(2,))
    w = projection()
    bias = np.random.default_rng(4).normal(size=(2, 1, 1, 9)).astype(np.float32)
    bias[:, :, :, 3] = -np.inf
    actual = random_feature_attention(q, k, v, w, bias=jnp.asarray(bias))
    for b in range(2):
        weights = np.broadcast_to(bias[b, 0], (2, 9))
        expected = attention(q[b], k[b], v[b], w, log_weights=weights)
        assert relative_error(actual[b], expected) < 1e-5


def test_mask_bias_and_lengths_together():
    q, k, v = inputs(batch=(2,))
    w = projection()
    mask = np.random.default_rng(5).random((2, 1, 1, 9)) < 0.7
    bias = np.random.default_rng(4).normal(size=(1, 2, 1, 9)).astype(np.float32)
    lengths = np.array([7, 4], np.int32)
    actual = random_feature_attention(
        q, k, v, w, mask=mask, bias=bias, key_value_seq_lengths=lengths
    )
    for b in range(2):
        visible = mask[b, 0, 0] & (np.arange(9) < lengths[b])
        weights = bias[0, :, 0] + log_weights(visible)
        expected = attention(q[b], k[b], v[b], w, log_weights=weights)
        assert relative_error(actual[b], expected) < 1e-5


def test_lengths_mean_what_they_mean_to_exact_attention():
    q, k, v = inputs(batch=(2,))
    query_lengths, key_lengths = jnp.array([5, 9]), jnp.array([9, 3])
    lengths = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    actual = random_feature_attention(q, k, v, projection(), **lengths)
    exact = jax.nn.dot_product_attention(q, k, v, **lengths)
    np.testing.assert_array_equal(actual == 0, exact == 0)
    cut = random_feature_attention(q[1:], k[1:, :3], v[1:, :3], projection())
    chex.assert_trees_all_close(actual[1:], cut, rtol=1e-5, atol=1e-6)


def test_queries_that_see_no_key_get_zeros_and_finite_gradients():
    q, k, v = inputs(batch=(2,))
    lengths = jnp.array([0, 9])
    out, pullback = jax.vjp(
        lambda *x: random_feature_attention(*x, projection(), key_value_seq_lengths=lengths),
        q,
        k,
        v,
    )
    np.testing.assert_array_equal(out[0], 0)
    for gradient in pullback(jnp.ones_like(out)):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[0], 0)
