import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import banded_attention
from tests.attention.inputs import inputs
from tests.attention.reference import banded, relative_error
from tests.versions import enable_x64

# One computation, which compiles faster than its operations one by one.
banded_jit = jax.jit(banded_attention, static_argnames=("bandwidth", "is_causal", "block_size"))


def hidden(visible):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(visible, np.float64))


def test_bfloat16_without_jit():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(length=100, dim=64))
    actual = banded_attention(q, k, v, bandwidth=7)
    assert actual.dtype == jnp.bfloat16
    assert relative_error(actual, banded(q, k, v, 7)) < 2e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float16, 2e-3), (jnp.float64, 1e-14)])
def test_other_dtypes(dtype, tolerance):
    with enable_x64(True):
        q, k, v = (jnp.asarray(x, dtype) for x in inputs(length=50))
        actual = banded_jit(q, k, v, bandwidth=5)
        assert actual.dtype == dtype
        assert relative_error(actual, banded(q, k, v, 5)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [None, 5])
@pytest.mark.parametrize("bandwidth", [0, 4, 30])
@pytest.mark.parametrize("lengths", [(1, 1), (12, 12), (13, 5), (5, 13), (9, 1)])
def test_any_lengths_bandwidth_and_block(lengths, bandwidth, block_size, is_causal):
    q, k, v = inputs(*lengths, dim=4)
    actual = banded_jit(q, k, v, bandwidth=bandwidth, block_size=block_size, is_causal=is_causal)
    expected = banded(q, k, v, bandwidth, is_causal=is_causal)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_default_block_on_many_blocks():
    q, k, v = inputs(length=300)
    for bandwidth in (0, np.uint8(3), 40):
        actual = banded_jit(q, k, v, bandwidth=bandwidth)
        assert relative_error(actual, banded(q, k, v, int(bandwidth))) < 1e-5
    np.testing.assert_allclose(banded_jit(q, k, v, bandwidth=0), v, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_band_of_everything_is_exact_attention(is_causal):
    q, k, v = inputs(length=50, heads=4, key_heads=2, batch=(2,))
    exact = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    for bandwidth in (49, 10**12):
        for block_size in (None, 16):
            near = banded_jit(
                q, k, v, bandwidth=bandwidth, is_causal=is_causal, block_size=block_size
            )
            np.testing.assert_allclose(near, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(70, 70), (70, 40), (40, 70)])
def test_it_is_the_local_window_of_exact_attention(lengths, is_causal):
    q, k, v = inputs(*lengths, batch=(2,))
    seen = {"query_seq_lengths": jnp.array([30, 40]), "key_value_seq_lengths": jnp.array([36, 9])}
    exact = jax.nn.dot_product_attention(
        q, k, v, local_window_size=8, is_causal=is_causal, scale=0.6, **seen
    )
    near = banded_jit(q, k, v, bandwidth=8, is_causal=is_causal, scale=0.6, **seen)
    # Exact attention spreads over all keys where none is visible.
    some = np.arange(lengths[0]) < np.array([36, 9])[:, None] + 8
    some = some[..., None, None]
    np.testing.assert_allclose(near, np.where(some, exact, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_grouped_queries_wider_values_and_a_scale(key_heads):
    q, k, v = inputs(length=40, heads=6, key_heads=key_heads, width=3)
    actual = banded_jit(q, k, v, bandwidth=4, scale=0.7)
    assert relative_error(actual, banded(q, k, v, 4, scale=0.7)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_any_leading_batch(batch):
    q, k, v = inputs(batch=batch)
    segment_ids = np.sort(np.random.default_rng(1).integers(0, 2, size=(*batch, 9)))
    actual = banded_jit(q, k, v, bandwidth=2, segment_ids=segment_ids)
    chex.assert_shape(actual, (*batch, 9, 2, 8))
    for index in np.ndindex(batch):
        expected = banded(q[index], k[index], v[index], 2, segment_ids=segment_ids[index])
        assert relative_error(actual[index], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("heads_axis", [1, 4])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_masks_biases_lengths_and_segments_together(heads_axis, key_heads):
    q, k, v = inputs(length=20, heads=4, key_heads=key_heads, batch=(3,))
    rng = np.random.default_rng(2)
    mask = rng.random((3, heads_axis, 1, 20)) < 0.6
    bias = rng.normal(size=(1, 1, 1, 20)).astype(np.float32)
    lengths, segment_ids = np.array([20, 7, 11]), np.sort(rng.integers(0, 3, size=(3, 20)))
    actual = banded_jit(
        q,
        k,
        v,
        bandwidth=3,
        mask=jnp.asarray(mask),
        bias=jnp.asarray(bias),
        key_value_seq_lengths=lengths,
        segment_ids=segment_ids,
        block_size=6,
    )
    for b in range(3):
        weights = bias[0, :, 0] + hidden(mask[b, :, 0]) + hidden(np.arange(20) < lengths[b])
        weights = np.broadcast_to(weights, (4, 20))
        expected = banded(q[b], k[b], v[b], 3, log_weights=weights, segment_ids=segment_ids[b])
        np.testing.assert_allclose(actual[b], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_packed_sequences_are_as_if_alone():
    q, k, v = inputs(length=50)
    segment_ids = jnp.repeat(jnp.array([7, 0, -1]), np.array([20, 1, 29]), total_repeat_length=50)
    near = functools.partial(banded_jit, bandwidth=6, is_causal=True)
    packed = near(q, k, v, segment_ids=segment_ids)
    for part in (slice(0, 20), slice(20, 21), slice(21, 50)):
        alone = near(q[part], k[part], v[part])
        np.testing.assert_allclose(packed[part], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(near(q, k, v, segment_ids=segment_ids[None]), packed)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_token_changes_nothing_beyond_the_band_to_the_bit(is_causal):
    q, k, v = inputs(length=80)
    near = functools.partial(banded_jit, bandwidth=5, is_causal=is_causal)
    other_k, other_v = k.copy(), v.copy()
    other_k[33], other_v[33] = 50, -1e6
    changed = np.any(near(q, other_k, other_v) != near(q, k, v), axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(33 if is_causal else 28, 39))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "is_causal"), [(0.5, False), (1, True), (2, False), (4, True), (8, False), (16, True)]
)
def test_gradients_against_float64(scale, is_causal):
    q, k, v = inputs(length=30, heads=4, key_heads=2, scale=scale)
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=q.shape).astype(np.float32)
    bias = rng.normal(size=30).astype(np.float32)
    bias[4], segment_ids = -np.inf, np.arange(30) // 14
    options = {"bandwidth": 5, "is_causal": is_causal, "segment_ids": segment_ids, "block_size": 8}

    def loss(q, k, v, bias):
        return jnp.sum(banded_jit(q, k, v, bias=bias, **options) * cotangent)

    distance = np.arange(30)[:, None] - np.arange(30)
    near = (abs(distance) <= 5) & (distance >= 0 if is_causal else True)
    near &= segment_ids[:, None] == segment_ids

    def reference(q, k, v, bias, cotangent):
        logits = jnp.einsum("tkgh,skh->kgts", q.reshape(30, 2, 2, 8), k) / np.sqrt(8)
        weights = jax.nn.softmax(jnp.where(near, logits + bias.reshape(1, 1, 1, 30), -jnp.inf))
        return jnp.sum(jnp.einsum("kgts,skd->tkgd", weights, v).reshape(q.shape) * cotangent)

    actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)
    with enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, bias, cotangent)]
        expected = jax.grad(reference, argnums=(0, 1, 2, 3))(*wide)
    for a, e in zip(actual, expected, strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, e) < 1e-4


@pytest.mark.parametrize("scale", [1e2, 1e3])
def test_huge_inputs_stay_exact_and_finite(scale):
    q, k, v = inputs(length=20, scale=scale)
    out, pullback = jax.vjp(functools.partial(banded_jit, bandwidth=3), q, k, v)
    np.testing.assert_allclose(out, banded(q, k, v, 3), rtol=1e-4, atol=1e-5)
    chex.assert_tree_all_finite(pullback(jnp.ones_like(out)))


@pytest.mark.parametrize("bias", [-3e38, 1e30])
def test_a_bias_that_all_keys_nearby_share_does_not_matter(bias):
    q, k, v = inputs(length=20)
    q *= 0  # Or float32 would round the logits away.
    far = np.where(np.arange(20) < 10, bias, 0).astype(np.float32)
    actual = banded_jit(q, k, v, bandwidth=2, bias=far)[:8]
    np.testing.assert_allclose(actual, banded(q, k, v, 2)[:8], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [2, 4])
def test_padding_does_not_matter_whatever_it_holds(key_heads):
    q, k, v = inputs(length=40, heads=4, key_heads=key_heads, batch=(2,))
    lengths = jnp.array([33, 40])
    mask = np.ones((1, 4, 1, 40), bool)
    mask[0, 1, 0, 10] = False
    near = functools.partial(
        banded_jit,
        bandwidth=4,
        mask=mask,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        block_size=16,
    )
    expected = near(q, k, v)
    np.testing.assert_array_equal(expected[0, 33:], 0)
    q, k, v = (x.copy() for x in (q, k, v))
    for x in (q, k, v):
        x[0, 33:] = np.nan
    hidden_from_one = key_heads // 4
    k[:, 10, hidden_from_one], v[:, 10, hidden_from_one] = np.nan, np.inf
    actual, pullback = jax.vjp(near, q, k, v)
    # Of head 0, which sees key 10 where heads 0 and 1 share it.
    rest = slice(1, None) if key_heads == 2 else slice(None)
    np.testing.assert_array_equal(actual[:, :, rest], expected[:, :, rest])
    gradients = pullback(jnp.zeros_like(actual).at[:, :, rest].set(1))
    chex.assert_tree_all_finite(gradients if key_heads == 4 else gradients[0][:, :, rest])
    chex.assert_tree_all_finite([x[0, 33:] for x in gradients])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_queries_that_see_no_key_get_zeros_and_finite_gradients(jit):
    q, k, v = inputs(length=40, batch=(2,))
    bias = np.where(np.arange(40) < 11, -np.inf, 0).astype(np.float32)

    def near(q, k, v, bias):
        return banded_attention(q, k, v, bandwidth=3, bias=bias)

    # No NaN on the way either, also in the blocks' padding.
    with jax.debug_nans(True):
        out, pullback = jax.vjp(jit(near), q, k, v, bias)
        gradients = pullback(jnp.ones_like(out))
    np.testing.assert_array_equal(out[:, :8], 0)
    assert (out[:, 8:] != 0).all()
    chex.assert_tree_all_finite(gradients)
    np.testing.assert_array_equal(gradients[0][:, :8], 0)


@pytest.mark.slow
def test_jit_vmap_one_trace_and_abstract_evaluation():
    chex.clear_trace_counter()
    q, k, v = inputs(length=40, batch=(3,))

    def near(q, k, v):
        return banded_attention(q, k, v, bandwidth=4)

    eager = near(q, k, v)
    traced = jax.jit(chex.assert_max_traces(near, n=1))
    chex.assert_trees_all_close(traced(q, k, v), eager, rtol=1e-5, atol=1e-6)
    traced(2 * q, k, v)
    chex.assert_trees_all_close(jax.jit(jax.vmap(near))(q, k, v), eager, rtol=1e-5, atol=1e-6)
    scaled = banded_jit(q, k, v, bandwidth=4, scale=8**-0.5)
    chex.assert_trees_all_close(scaled, eager, rtol=1e-5, atol=1e-6)
    abstract = jax.eval_shape(near, q, k, v)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, eager)


@pytest.mark.devices(8)
def test_sharding_of_the_batch_is_kept():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    q, k, v = jax.device_put(inputs(length=40, batch=(8,)), sharding)
    compiled = banded_jit.lower(q, k, v, bandwidth=4).compile()
    assert "all-" not in compiled.as_text()
    assert compiled(q, k, v).sharding.is_equivalent_to(sharding, 4)


def temporary_bytes(length, *, gradient):
    x = jax.ShapeDtypeStruct((length, 4, 64), jnp.float32)
    near = functools.partial(banded_attention, bandwidth=32)
    if gradient:
        near = jax.grad(lambda *x: banded_attention(*x, bandwidth=32).sum(), argnums=(0, 1, 2))
    return jax.jit(near).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_is_linear_in_the_length(gradient):
    short, long = (temporary_bytes(length, gradient=gradient) for length in (8_192, 65_536))
    assert 6 < long / short < 9
    assert long < 2**30  # A sixteenth of one head's logits, T x T.


BAD = [
    ({"bandwidth": -1}, ValueError, "bandwidth must be at least 0, got -1"),
    ({"bandwidth": 2.5}, TypeError, "bandwidth must be an integer, got 2.5"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 8.0}, TypeError, "block_size must be an integer, got 8.0"),
    ({"query": np.zeros((9, 2, 8), int)}, TypeError, "query must be a floating type, .* got int"),
    ({"query": np.zeros((9, 3, 8), np.float32)}, ValueError, "multiple of that of key heads"),
    ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
    ({"mask": jnp.ones((9, 9), bool)}, ValueError, "may differ between queries"),
    ({"mask": np.ones(9)}, TypeError, "mask must be boolean .* got float"),
    ({"bias": jnp.zeros((9, 9))}, ValueError, "bias .* may differ between queries"),
    ({"query_seq_lengths": np.ones(2, int)}, ValueError, r"the batch shape \(1,\), got \(2,\)"),
    ({"segment_ids": np.zeros(9)}, TypeError, "segment_ids must be integers, got float"),
    ({"segment_ids": np.zeros(8, int)}, ValueError, r"= \(1, 9\), got shape \(1, 8\)"),
    (
        {"segment_ids": np.zeros(5, int), "query": np.zeros((5, 2, 8), np.float32)},
        ValueError,
        "for self-attention, .* got 5 queries and 9 keys",
    ),
]


@pytest.mark.fast
@pytest.mark.parametrize(("changed", "error", "match"), BAD)
def test_refuses(changed, error, match):
    q, k, v = inputs()
    arguments = {"query": q, "key": k, "value": v, "bandwidth": 2} | changed
    with pytest.raises(error, match=match):
        banded_attention(**arguments)
