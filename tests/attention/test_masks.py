import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import random_feature_attention
from simrf_jax._src.attention.inputs import masks
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, naive, relative_error
from tests.versions import enable_x64


def log_weights(visible):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(visible, np.float64))


@functools.cache
def program():
    """Attention and its gradients, with everything that hides or weighs keys as arrays."""

    def call(q, k, v, mask, bias, query_lengths, key_lengths):
        def attend(q, k, v):
            return random_feature_attention(
                q,
                k,
                v,
                projection(),
                mask=mask,
                bias=bias,
                query_seq_lengths=query_lengths,
                key_value_seq_lengths=key_lengths,
            )

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(jnp.ones_like(out))

    return jax.jit(call)


def run(q, k, v, *, mask=True, bias=0.0, query_lengths=(9, 9), key_lengths=(9, 9)):
    shape = (2, 2, 1, 9)
    return program()(
        q,
        k,
        v,
        np.broadcast_to(mask, shape),
        np.broadcast_to(np.float32(bias), shape),
        np.array(query_lengths),
        np.array(key_lengths),
    )


@pytest.mark.slow
def test_mask_bias_and_lengths_against_float64():
    q, k, v = inputs(batch=(2,))
    rng = np.random.default_rng(5)
    mask, bias = rng.random((2, 1, 1, 9)) < 0.7, rng.normal(size=(1, 2, 1, 9))
    bias[..., 3] = -np.inf
    for options in (
        {"mask": mask},
        {"bias": bias},
        {"key_lengths": (7, 4)},
        {"mask": mask, "bias": bias, "key_lengths": (7, 4)},
    ):
        actual, _ = run(q, k, v, **options)
        for b in range(2):
            visible = np.broadcast_to(options.get("mask", True), mask.shape)[b, 0, 0]
            visible = visible & (np.arange(9) < options.get("key_lengths", (9, 9))[b])
            weights = np.broadcast_to(options.get("bias", 0), bias.shape)[0, :, 0]
            expected = attention(
                q[b], k[b], v[b], projection(), log_weights=weights + log_weights(visible)
            )
            assert relative_error(actual[b], expected) < 1e-5, options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads_axis", "key_heads"), [(4, 2), pytest.param(1, 4, marks=pytest.mark.slow)]
)
def test_masks_of_query_heads_count_in_numerator_and_denominator(heads_axis, key_heads):
    q, k, v = inputs(heads=4, key_heads=key_heads, batch=(3,))
    mask = np.random.default_rng(2).random((3, heads_axis, 1, 9)) < 0.6
    w = projection(heads=key_heads)
    actual = random_feature_attention(q, k, v, w, mask=jnp.asarray(mask))
    for b in range(3):
        weights = log_weights(np.broadcast_to(mask[b, :, 0], (4, 9)))
        expected = attention(q[b], k[b], v[b], w, log_weights=weights)
        assert relative_error(actual[b], expected) < 1e-5


@pytest.mark.fast
@pytest.mark.parametrize(
    "shape", [(9,), (1, 9), (1, 1, 9), (3, 1, 1, 9), (2, 1, 1, 1, 9), (1, 3, 1, 1, 1)]
)
def test_masks_broadcast_over_any_batch_axis(shape):
    mask = np.random.default_rng(3).random(shape) < 0.6
    target = (2, 3, 2, 4, 9)
    row = masks.one_row("mask", mask, target)
    found = np.broadcast_to(masks.per_key(jnp.asarray(row), target), (2, 3, 2, 9))
    np.testing.assert_array_equal(found, np.broadcast_to(mask, (2, 3, 2, 1, 9))[..., 0, :])


def test_a_numpy_mask_that_is_constant_along_the_queries_is_known_to_be():
    q, k, v = inputs()
    w = projection()
    row = np.arange(9) < 5
    square = np.broadcast_to(row, (1, 9, 9))
    expected = random_feature_attention(q, k, v, w, mask=row)
    traced = jax.jit(lambda q: random_feature_attention(q, k, v, w, mask=square))(q)
    chex.assert_trees_all_close(traced, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_hidden_keys_do_not_matter_whatever_they_hold():
    q, k, v = inputs(batch=(2,))
    mask = np.arange(9) < 6
    expected, _ = run(q, k, v, mask=mask)
    k[:, 6:], v[:, 6:] = np.nan, np.inf
    actual, gradients = run(q, k, v, mask=mask)
    np.testing.assert_array_equal(actual, expected)
    chex.assert_tree_all_finite(gradients)
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(gradient[:, 6:], 0)


@pytest.mark.fast
def test_padded_queries_do_not_matter_whatever_they_hold():
    q, k, v = inputs(batch=(2,))
    expected, _ = run(q, k, v, query_lengths=(5, 9))
    q[0, 5:] = np.nan
    actual, gradients = run(q, k, v, query_lengths=(5, 9))
    np.testing.assert_array_equal(actual, expected)
    chex.assert_tree_all_finite(gradients)


@pytest.mark.slow
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


@pytest.mark.slow
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

    actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, w)
    with enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, w)]
        expected = jax.jit(jax.grad(reference, argnums=(0, 1, 2, 3)))(*wide)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-4


@pytest.mark.fast
def test_lengths_mean_what_they_mean_to_exact_attention():
    q, k, v = inputs(batch=(2,))
    actual, _ = run(q, k, v, query_lengths=(5, 9), key_lengths=(9, 3))
    exact = jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=np.array([5, 9]), key_value_seq_lengths=np.array([9, 3])
    )
    np.testing.assert_array_equal(actual == 0, exact == 0)
    cut = attention(q[1], k[1, :3], v[1, :3], projection())
    assert relative_error(actual[1], cut) < 1e-5


@pytest.mark.fast
def test_lengths_beyond_int32_are_not_wrapped():
    q, k, v = inputs(batch=(2,))
    lengths = np.array([2**32 - 1, 3], np.uint32)
    expected, _ = run(q, k, v, key_lengths=(9, 3))
    out = random_feature_attention(q, k, v, projection(), key_value_seq_lengths=lengths)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_queries_that_see_no_key_get_zeros_and_finite_gradients():
    q, k, v = inputs(batch=(2,))
    out, gradients = run(q, k, v, key_lengths=(0, 9))
    np.testing.assert_array_equal(out[0], 0)
    chex.assert_tree_all_finite(gradients)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient[0], 0)


def test_an_additive_mask_hides_as_lengths_do():
    q, k, v = inputs(9, batch=(2,))
    bias = np.where(np.arange(9) < 6, 0, -1e9).astype(np.float32)[None, None, None]
    out = random_feature_attention(q, k, v, projection(), bias=bias)
    expected = random_feature_attention(
        q, k, v, projection(), key_value_seq_lengths=np.array([6, 6])
    )
    np.testing.assert_array_equal(out, expected)
