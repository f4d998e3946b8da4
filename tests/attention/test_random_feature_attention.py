import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import draw_projection, random_feature_attention
from tests.attention.reference import attention, relative_error
from tests.standard_errors import assert_mean


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()


def inputs(
    length=9,
    key_length=None,
    heads=2,
    key_heads=None,
    dim=8,
    width=None,
    scale=1.0,
    seed=0,
    batch=(),
):
    rng = np.random.default_rng(seed)
    key_length, key_heads = key_length or length, key_heads or heads
    query = scale * rng.normal(size=(*batch, length, heads, dim))
    key = scale * rng.normal(size=(*batch, key_length, key_heads, dim))
    value = rng.normal(size=(*batch, key_length, key_heads, width or dim))
    return tuple(x.astype(np.float32) for x in (query, key, value))


def projection(num_features=11, dim=8, heads=None, coupling="simplex"):
    keys = jax.random.split(jax.random.key(1), heads or 1)
    w = jax.vmap(lambda key: draw_projection(key, num_features, dim, coupling=coupling))(keys)
    return w if heads else w[0]


@pytest.mark.parametrize(
    ("scale", "tolerance"), [(0.5, 1e-5), (1, 1e-5), (2, 1e-5), (4, 1e-5), (8, 1e-5), (16, 5e-5)]
)
def test_float32_against_float64(scale, tolerance):
    q, k, v = inputs(length=256, dim=64, scale=scale)
    w = projection(130, 64)
    actual = random_feature_attention(q, k, v, w)
    assert actual.dtype == jnp.float32
    assert relative_error(actual, attention(q, k, v, w)) < tolerance


@pytest.mark.parametrize("scale", [0.5, 1, 2, 4, 8, 16])
def test_bfloat16_against_float32(scale):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(length=256, dim=64, scale=scale))
    w = projection(130, 64)
    actual = random_feature_attention(q, k, v, w)
    assert actual.dtype == jnp.bfloat16
    same_inputs = (x.astype(jnp.float32) for x in (q, k, v))
    assert relative_error(actual, random_feature_attention(*same_inputs, w)) < 2e-2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64])
def test_other_dtypes(dtype):
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(x, dtype) for x in inputs())
        w = jnp.asarray(projection(), jnp.float64 if dtype == jnp.float64 else jnp.float32)
        actual = random_feature_attention(q, k, v, w)
        assert actual.dtype == dtype
        tolerance = 1e-14 if dtype == jnp.float64 else 2e-3
        assert relative_error(actual, attention(q, k, v, w)) < tolerance


def naive(query, key, value, projection, dim):
    """The estimator for one head in whatever type it is given, for autodiff in float64."""
    query, key = query * dim**-0.25, key * dim**-0.25
    log_q = query @ projection.T
    log_k = key @ projection.T - jnp.sum(key**2, axis=-1, keepdims=True) / 2
    logits = jax.nn.logsumexp(log_q[:, None, :] + log_k[None, :, :], axis=-1)
    return jax.nn.softmax(logits, axis=-1) @ value


@pytest.mark.parametrize("scale", [0.5, 1, 2, 4, 8, 16])
def test_gradients_against_float64(scale):
    q, k, v = inputs(length=32, heads=1, dim=16, scale=scale)
    w, cotangent = projection(34, 16), inputs(length=32, heads=1, dim=16, seed=1)[0]

    def loss(q, k, v, w):
        return jnp.sum(random_feature_attention(q, k, v, w) * cotangent)

    actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, w)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.squeeze(x), jnp.float64) for x in (q, k, v, w, cotangent)]
        expected = jax.grad(lambda *x: jnp.sum(naive(*x, 16) * wide[4]), argnums=(0, 1, 2, 3))(
            *wide[:4]
        )
    for a, e in zip(actual, expected, strict=True):
        assert np.isfinite(a).all()
        assert relative_error(np.squeeze(a), e) < 1e-4


@pytest.mark.parametrize("scale", [1e2, 1e3])
def test_huge_inputs_stay_finite(scale):
    q, k, v = inputs(scale=scale)
    w = projection()
    out, pullback = jax.vjp(lambda *x: random_feature_attention(*x, w), q, k, v)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in pullback(jnp.ones_like(out)))


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("heads", [None, 2])
def test_shared_and_per_head_projections(coupling, heads):
    q, k, v = inputs()
    w = projection(heads=heads, coupling=coupling)
    assert relative_error(random_feature_attention(q, k, v, w), attention(q, k, v, w)) < 1e-5


@pytest.mark.fast
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("per_head", [True, False])
def test_grouped_queries(key_heads, per_head):
    q, k, v = inputs(heads=6, key_heads=key_heads)
    w = projection(heads=key_heads if per_head else None)
    assert relative_error(random_feature_attention(q, k, v, w), attention(q, k, v, w)) < 1e-5


@pytest.mark.fast
def test_cross_attention_with_wider_values_and_a_scale():
    q, k, v = inputs(length=5, key_length=13, width=3)
    w = projection()
    actual = random_feature_attention(q, k, v, w, scale=0.7)
    assert relative_error(actual, attention(q, k, v, w, scale=0.7)) < 1e-5


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_any_leading_batch(batch):
    q, k, v = inputs(batch=batch)
    w = projection(heads=2)
    actual = random_feature_attention(q, k, v, w)
    chex.assert_shape(actual, (*batch, 9, 2, 8))
    for index in np.ndindex(batch):
        expected = attention(q[index], k[index], v[index], w)
        assert relative_error(actual[index], expected) < 1e-5


@pytest.mark.fast
def test_length_one_and_no_keys_at_all():
    q, k, v = inputs(length=4, key_length=1)
    np.testing.assert_allclose(
        random_feature_attention(q, k, v, projection()), np.broadcast_to(v, q.shape), rtol=1e-5
    )
    out = random_feature_attention(q, k[:0], v[:0], projection())
    np.testing.assert_array_equal(out, 0)


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


@pytest.mark.fast
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


@pytest.mark.fast
def test_a_numpy_mask_that_is_constant_along_the_queries_is_known_to_be():
    q, k, v = inputs()
    w = projection()
    row = np.arange(9) < 5
    square = np.broadcast_to(row, (1, 9, 9))
    expected = random_feature_attention(q, k, v, w, mask=row)
    chex.assert_trees_all_close(random_feature_attention(q, k, v, w, mask=square), expected)
    traced = jax.jit(lambda q: random_feature_attention(q, k, v, w, mask=square))(q)
    chex.assert_trees_all_close(traced, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_hidden_keys_do_not_matter_whatever_they_hold():
    q, k, v = inputs()
    w = projection()
    visible = np.arange(9) < 6
    expected = random_feature_attention(q, k[:6], v[:6], w)
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
    expected = random_feature_attention(q, k, v, w, query_seq_lengths=lengths)
    q[0, 5:] = np.nan
    actual, pullback = jax.vjp(
        lambda *x: random_feature_attention(*x, w, query_seq_lengths=lengths), q, k, v
    )
    np.testing.assert_array_equal(actual, expected)
    for gradient in pullback(jnp.ones_like(actual)):
        assert np.isfinite(gradient).all()


@pytest.mark.fast
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
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, w)]
        expected = jax.grad(reference, argnums=(0, 1, 2, 3))(*wide)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-4


@pytest.mark.fast
def test_no_queries():
    q, k, v = inputs()
    mask = np.ones((1, 0, 9), bool)
    out = random_feature_attention(q[:0], k, v, projection(), mask=mask)
    assert out.shape == (0, 2, 8)


@pytest.mark.fast
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


@pytest.mark.fast
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


@pytest.mark.fast
def test_lengths_mean_what_they_mean_to_exact_attention():
    q, k, v = inputs(batch=(2,))
    query_lengths, key_lengths = jnp.array([5, 9]), jnp.array([9, 3])
    lengths = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    actual = random_feature_attention(q, k, v, projection(), **lengths)
    exact = jax.nn.dot_product_attention(q, k, v, **lengths)
    np.testing.assert_array_equal(actual == 0, exact == 0)
    cut = random_feature_attention(q[1:], k[1:, :3], v[1:, :3], projection())
    chex.assert_trees_all_close(actual[1:], cut, rtol=1e-5, atol=1e-6)


@pytest.mark.fast
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


@pytest.mark.fast
def test_nan_in_a_visible_key_is_not_hidden():
    q, k, v = inputs()
    k[2, 0] = np.nan
    out = random_feature_attention(q, k, v, projection())
    assert np.isnan(out[:, 0]).all()
    assert np.isfinite(out[:, 1]).all()


@pytest.mark.fast
def test_jit_vmap_one_trace_and_abstract_evaluation():
    q, k, v = inputs(batch=(3,))
    w = projection()
    eager = random_feature_attention(q, k, v, w)
    traced = jax.jit(chex.assert_max_traces(random_feature_attention, n=1))
    chex.assert_trees_all_close(traced(q, k, v, w), eager, rtol=1e-5, atol=1e-6)
    traced(2 * q, k, v, w)
    mapped = jax.vmap(random_feature_attention, in_axes=(0, 0, 0, None))(q, k, v, w)
    chex.assert_trees_all_close(mapped, eager, rtol=1e-5, atol=1e-6)
    abstract = jax.eval_shape(random_feature_attention, q, k, v, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, eager)


@pytest.mark.fast
def test_sharding_of_the_batch_is_kept():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    q, k, v = jax.device_put(inputs(batch=(8,)), sharding)
    compiled = jax.jit(random_feature_attention).lower(q, k, v, projection()).compile()
    assert "all-" not in compiled.as_text()
    out = compiled(q, k, v, projection())
    assert out.sharding.is_equivalent_to(sharding, 4)


def test_squared_error_to_softmax_attention_falls_as_one_over_the_features():
    q, k, v = inputs(length=16, dim=8, scale=0.25)
    exact = jax.nn.dot_product_attention(q, k, v)

    def errors(num_features):
        @jax.jit
        @jax.vmap
        def error(key):
            w = draw_projection(key, num_features, 8)
            return jnp.mean(jnp.square(random_feature_attention(q, k, v, w) - exact))

        return np.asarray(error(jax.random.split(jax.random.key(0), 400)))

    # Whole simplices of 9 points in both.
    assert_mean(16 * errors(16 * 18) - errors(18), 0)


F32 = np.float32
BAD = [
    (
        {"query": np.zeros((8, 2), F32)},
        ValueError,
        r"length, heads, dim\], got query \(8, 2\)",
    ),
    ({"query": np.zeros((9, 2, 8), int)}, TypeError, "query must be a floating type, .* got int"),
    ({"key": np.zeros((9, 2, 8), np.float16)}, TypeError, "one dtype, got float32, float16"),
    ({"value": np.zeros((8, 2, 8), F32)}, ValueError, "key and value must have the same length"),
    ({"key": np.zeros((1, 9, 2, 8), F32)}, ValueError, "the same batch shape"),
    ({"query": np.zeros((9, 2, 4), F32)}, ValueError, "query and key must have the same head_dim"),
    ({"query": np.zeros((9, 3, 8), F32)}, ValueError, "multiple of that of key heads, got 3 and 2"),
    ({"projection": np.zeros((11, 4))}, ValueError, r"for heads of dim 8, got shape \(11, 4\)"),
    ({"projection": np.zeros((3, 11, 8))}, ValueError, "one W for each of the 2 key heads"),
    ({"projection": np.zeros(8)}, ValueError, r"got shape \(8,\)"),
    ({"feature_map": "cosine"}, ValueError, "'positive', 'hyperbolic', .* got 'cosine'"),
    ({"implementation": "cudnn"}, ValueError, "must be one of 'xla', None, got 'cudnn'"),
    ({"is_causal": True}, ValueError, "is_causal=True is not supported"),
    ({"scale": -1.0}, ValueError, "scale must be at least 0, got -1.0"),
    ({"scale": jnp.float32(-1)}, ValueError, "scale must be at least 0, got -1.0"),
    ({"scale": float("nan")}, ValueError, "scale must be at least 0, got nan"),
    ({"scale": np.ones(8)}, TypeError, "scale must be one real number"),
    ({"scale": True}, TypeError, "scale must be one real number, got True"),
    ({"projection": np.zeros((0, 8), F32)}, ValueError, "at least one feature"),
    ({"mask": jnp.ones((9, 9), bool)}, ValueError, "may differ between queries"),
    ({"mask": np.tri(9, dtype=bool)}, ValueError, "may differ between queries"),
    ({"mask": np.ones((1, 8), bool)}, ValueError, r"broadcastable to .* 2, 9, 9\), got"),
    ({"mask": np.ones((2, 1, 1, 9), bool)}, ValueError, r"broadcastable to .* 2, 9, 9\), got"),
    ({"mask": np.ones(9)}, TypeError, "mask must be boolean .* got float"),
    ({"bias": jnp.zeros((9, 9))}, ValueError, "bias .* may differ between queries"),
    ({"bias": np.zeros(9, int)}, TypeError, "bias must be floating, got int"),
    ({"query_seq_lengths": np.ones(2, int)}, ValueError, r"the batch shape \(1,\), got \(2,\)"),
    ({"key_value_seq_lengths": np.float32(3)}, TypeError, "key_value_seq_lengths must be integers"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("changed", "error", "match"), BAD)
def test_refuses(changed, error, match):
    q, k, v = inputs()
    arguments = {"query": q, "key": k, "value": v, "projection": projection()} | changed
    with pytest.raises(error, match=match):
        random_feature_attention(**arguments)
