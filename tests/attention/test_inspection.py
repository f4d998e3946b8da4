import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import (
    attention_matrix,
    attention_report,
    distillation_loss,
    random_feature_attention,
)
from tests import formulas
from tests.attention.all_pairs import estimated, normalized, softmax
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection
from tests.attention.reference import relative_error
from tests.tiers import slow_but
from tests.versions import enable_x64

POSITIVE = {"positive": formulas.positive, "hyperbolic": formulas.hyperbolic}
POSITIVE |= {"relu": formulas.relu, "elu": formulas.elu}
SIGNED = {"trigonometric": formulas.trigonometric, "phase": formulas.phase}
HYBRID = ["angular_hybrid", "gaussian_hybrid"]


def both(q, k, v, w, **options):
    """The weights, and the attention that they should be those of."""

    @jax.jit  # Fewer compilations.
    def call(q, k, v, w):
        out = random_feature_attention(q, k, v, w, **options)
        return attention_matrix(q, k, w, **options), out

    return call(q, k, v, w)


def attend(weights, value):
    """Weights ``[..., N, T, S]`` times values ``[..., S, K, D]``."""
    value = jnp.repeat(value, weights.shape[-3] // value.shape[-2], axis=-2)
    return jnp.einsum("...nts,...snd->...tnd", weights, value, precision="highest")


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("scale", [0.5, 2, 16])
def test_positive_maps_against_float64(name, scale, is_causal):
    q, k, _ = inputs(length=24, dim=16, scale=scale)
    w = projection(40, 16)
    visible = np.tri(24, dtype=bool) if is_causal else True
    expected = normalized(estimated(q, k, w, visible=visible, formula=POSITIVE[name])[0])
    actual = attention_matrix(q, k, w, feature_map=name, is_causal=is_causal)
    assert actual.dtype == jnp.float32
    assert relative_error(actual, expected) < (1e-5 if scale < 16 else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("scale", [0.25, 1])
def test_signed_maps_against_float64(name, scale, is_causal):
    # Wide projections, so that no denominator is near zero and the problem well posed.
    q, k, _ = inputs(length=12, dim=16, scale=scale)
    w = projection(2_000, 16, coupling="orthogonal")
    visible = np.tri(12, dtype=bool) if is_causal else True
    expected = normalized(estimated(q, k, w, visible=visible, formula=SIGNED[name])[0])
    actual = attention_matrix(q, k, w, feature_map=name, is_causal=is_causal)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POSITIVE, *SIGNED, *HYBRID, "features", "pair"])
def test_times_the_values_it_is_the_attention(name):
    q, k, v = inputs(scale=0.5, heads=4, key_heads=2, key_length=7, width=3, batch=(2,))
    w = projection(200, heads=2)
    if name in HYBRID:
        w = simrf_jax.hybrid.draw_bipolar_projection(jax.random.key(0), 100, 100, 8)
    own = {
        "features": lambda x, w: jnp.square(simrf_jax.project(x, w)),
        "pair": simrf_jax.feature_maps.Custom(
            lambda x, w: simrf_jax.relu_features(x, w),
            lambda x, w: jnp.abs(simrf_jax.project(x, w)),
        ),
    }
    feature_map = own.get(name, name)
    weights, out = both(q, k, v, w, feature_map=feature_map)
    chex.assert_shape(weights, (2, 4, 9, 7))
    assert relative_error(attend(weights, v), out) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "key_heads", "per_head"),
    [
        pytest.param((), 1, True, marks=pytest.mark.slow),
        ((2,), 2, True),
        pytest.param((2, 3), 4, False, marks=pytest.mark.slow),
    ],
)
def test_masks_biases_and_lengths(batch, key_heads, per_head):
    q, k, v = inputs(heads=4, key_heads=key_heads, batch=batch)
    w = projection(heads=key_heads if per_head else None)
    rng = np.random.default_rng(0)
    lengths = batch or (1,)
    for options in [
        {"mask": jnp.asarray(rng.random((*batch, 1, 1, 9)) < 0.6)},
        {"mask": np.broadcast_to(rng.random((4, 1, 9)) < 0.6, (4, 9, 9))},
        {"bias": rng.normal(size=(*batch, 4, 1, 9)).astype(np.float32), "scale": 0.7},
        {"query_seq_lengths": rng.integers(0, 10, lengths)},
        {
            "mask": np.arange(9) != 2,
            "key_value_seq_lengths": rng.integers(0, 10, lengths),
            "query_seq_lengths": rng.integers(0, 10, lengths),
        },
    ]:
        weights, out = both(q, k, v, w, **options)
        chex.assert_shape(weights, (*batch, 4, 9, 9))
        np.testing.assert_allclose(attend(weights, v), out, rtol=1e-5, atol=2e-6)
        sums = np.asarray(weights.sum(axis=-1))
        nothing = np.asarray(out == 0).all(axis=-1).swapaxes(-2, -1)
        np.testing.assert_allclose(sums, np.where(nothing, 0, 1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "key_length"), [(9, 9), (5, 8), (8, 5)])
def test_causal_weights_are_those_of_each_prefix(length, key_length):
    q, k, v = inputs(length=length, key_length=key_length, heads=4, key_heads=2)
    w = projection(heads=2)
    causal = jax.jit(lambda q, k: attention_matrix(q, k, w, is_causal=True))
    weights = causal(q, k)
    np.testing.assert_array_equal(weights[:, ~np.tri(length, key_length, dtype=bool)], 0)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    for t in {0, 1, length - 1}:
        prefix = random_feature_attention(q[t : t + 1], k[: t + 1], v[: t + 1], w)
        np.testing.assert_allclose(attend(weights, v)[t], prefix[0], rtol=1e-4, atol=1e-5)
    future_k = k.copy()
    future_k[4:] = np.nan
    future = causal(q, future_k)
    np.testing.assert_array_equal(future[:, :4], weights[:, :4])


@pytest.mark.slow
def test_causal_with_padding():
    q, k, _ = inputs(batch=(2,))
    options = {"key_value_seq_lengths": np.array([0, 6]), "query_seq_lengths": np.array([9, 7])}
    k[1, 6:], q[1, 7:] = np.nan, np.nan
    w = projection()
    weights = attention_matrix(q, k, w, is_causal=True, **options)
    np.testing.assert_array_equal(weights[0], 0)
    np.testing.assert_array_equal(weights[1, :, 7:], 0)
    visible = np.tri(7, 6, dtype=bool)
    expected = normalized(estimated(q[1, :7], k[1, :6], w, visible=visible)[0])
    assert relative_error(weights[1, :, :7, :6], expected) < 1e-5

    def loss(q, k, w):
        return jnp.square(attention_matrix(q, k, w, is_causal=True, **options)).sum()

    chex.assert_tree_all_finite(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, w))


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_causal"), [(0.5, True), (2, False), (16, True)])
def test_gradients_against_float64(scale, is_causal):
    q, k, cotangent = inputs(length=12, heads=1, dim=8, width=12, scale=scale)
    w = projection(18)
    seen = np.tri(12, dtype=bool) if is_causal else np.ones((12, 12), bool)

    def naive(q, k, w):
        q, k = q * 8**-0.25, k * 8**-0.25
        log_k = k @ w.T - jnp.sum(k**2, axis=-1, keepdims=True) / 2
        logits = jax.nn.logsumexp((q @ w.T)[:, None, :] + log_k[None], axis=-1)
        return jax.nn.softmax(logits, axis=-1, where=seen)

    def loss(q, k, w):
        return jnp.sum(attention_matrix(q, k, w, is_causal=is_causal)[0] * cotangent[:, 0])

    actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, w)
    with enable_x64(True):
        wide = [jnp.asarray(np.squeeze(x), jnp.float64) for x in (q, k, w, cotangent)]
        expected = jax.grad(lambda *x: jnp.sum(naive(*x) * wide[3]), argnums=(0, 1, 2))(*wide[:3])
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(np.squeeze(a), e) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIVE)
def test_gradients_are_finite_at_any_scale(name):
    q, k, _ = inputs(scale=1e3)
    w = projection()

    def loss(q, k):
        return jnp.square(attention_matrix(q, k, w, feature_map=name, is_causal=True)).sum()

    chex.assert_tree_all_finite(jax.jit(jax.grad(loss, argnums=(0, 1)))(q, k))


@pytest.mark.slow
def test_jit_vmap_and_abstract_evaluation():
    q, k, _ = inputs(batch=(3,))
    w = projection()

    def call(q, k, w):
        return attention_matrix(q, k, w, is_causal=True)

    eager = call(q, k, w)
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(call, n=1))
    chex.assert_trees_all_close(traced(q, k, w), eager, rtol=1e-5, atol=1e-6)
    traced(2 * q, k, w)
    mapped = jax.vmap(call, in_axes=(0, 0, None))(q, k, w)
    chex.assert_trees_all_close(mapped, eager, rtol=1e-5, atol=1e-6)
    abstract = jax.eval_shape(call, q, k, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, eager)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_other_dtypes(dtype):
    with enable_x64(True):
        q, k = (jnp.asarray(x, dtype) for x in inputs()[:2])
        w = jnp.asarray(projection(), jnp.float64 if dtype == jnp.float64 else jnp.float32)
        actual = attention_matrix(q, k, w)
        expected = normalized(estimated(q, k, w)[0])
        assert actual.dtype == jnp.promote_types(dtype, jnp.float32)
        assert relative_error(actual, expected) < (1e-14 if dtype == jnp.float64 else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "key_length"), [(0, 5), (5, 0), (1, 1)])
def test_empty_lengths(length, key_length):
    q, k = np.ones((length, 2, 8), np.float32), np.ones((key_length, 2, 8), np.float32)
    assert attention_matrix(q, k, projection()).shape == (2, length, key_length)
    np.testing.assert_array_equal(attention_report(q, k, projection()).relative_error, 0)


@pytest.mark.slow
def test_memory_is_not_that_of_the_features_of_all_pairs():
    q, k, _ = inputs(length=128, heads=1, dim=8)
    w = projection(512)

    def loss(q, k):
        return jnp.square(attention_matrix(q, k, w)).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(q, k).compile()
    # 128 x 128 x 512 floats are 32 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**20


def expected_report(q, k, w, *, value=None, visible=True, **options):
    kernel, shift = estimated(q, k, w, visible=visible, **options)
    options.pop("formula", None)
    exact, exact_shift = softmax(q, k, visible=visible, **options)
    seen = np.broadcast_to(visible, exact.shape).any(axis=-1)
    implied, weights = normalized(kernel), normalized(exact)
    outputs = None
    if value is not None:
        value = (
            np.asarray(value, np.float64).swapaxes(0, 1).repeat(len(kernel) // value.shape[1], 0)
        )
        outputs = implied @ value, weights @ value
    report = []
    for n in range(len(kernel)):
        ratio = kernel[n, seen[n]].sum(-1) / exact[n, seen[n]].sum(-1)
        ratio *= np.exp(shift - exact_shift)[n, seen[n], 0]
        row = [relative_error(implied[n], weights[n]), ratio.mean(), abs(ratio - 1).max()]
        for matrix in (implied[n], weights[n]):
            p = np.linalg.svd(matrix)[1]
            p = p[p > 0] / p.sum()
            row.append(np.exp(-np.sum(p * np.log(p))))
        report.append(
            [*row, *([] if outputs is None else [relative_error(*(x[n] for x in outputs))])]
        )
    return np.transpose(report)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_causal"), [(0.5, False), (8, True)])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric"])
def test_report_against_float64(name, scale, is_causal):
    q, k, v = inputs(length=12, heads=4, key_heads=2, scale=scale, width=3)
    w = projection(30, heads=2)
    visible = np.tri(12, dtype=bool) if is_causal else True
    report = attention_report(q, k, w, value=v, feature_map=name, is_causal=is_causal)
    formula = (POSITIVE | SIGNED)[name]
    expected = expected_report(q, k, w, value=v, visible=visible, formula=formula)
    # Signed denominators may be near zero.
    np.testing.assert_allclose(report, expected, rtol=1e-3 if name in SIGNED else 2e-5)


SEGMENTS = np.array([3, 3, 3, 1, 1, 3, 3, 3, 3])
IN_PARTS = {
    "segments": {"segment_ids": SEGMENTS},
    "segments, causal": {"segment_ids": SEGMENTS, "is_causal": True},
    "band": {"exact_bandwidth": 2},
    "band, causal, segments": {"exact_bandwidth": 1, "is_causal": True, "segment_ids": SEGMENTS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["segments", "band, causal, segments"], list(IN_PARTS)))
def test_segments_and_exact_bands(name):
    q, k, v = inputs(length=9, heads=4, key_heads=2, scale=2.0)
    w, options = projection(heads=2), IN_PARTS[name]
    weights, out = both(q, k, v, w, **options)
    assert relative_error(attend(weights, v), out) < 1e-5
    report = attention_report(q, k, w, value=v, **options)
    visible = np.tri(9, dtype=bool) if "is_causal" in options else np.ones((9, 9), bool)
    if "segment_ids" in options:
        numbers = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])  # An id that comes again begins a segment.
        visible = visible & (numbers[:, None] == numbers)
    exact = normalized(softmax(q, k, visible=visible)[0])
    np.testing.assert_allclose(
        report.relative_error,
        np.linalg.norm(weights - exact, axis=(-2, -1)) / np.linalg.norm(exact, axis=(-2, -1)),
        rtol=1e-3,
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_band_of_far_larger_weights_than_the_features():
    """The estimate outside the band and the weights inside it have scales of their own."""
    q, k, v = inputs(length=12, scale=12.0)
    weights, out = both(q, k, v, projection(), exact_bandwidth=3)
    assert relative_error(attend(weights, v), out) < 5e-5


@pytest.mark.fast
@pytest.mark.parametrize("function", [attention_matrix, attention_report])
def test_bands_and_segments_are_checked(function):
    q, k, _ = inputs()
    with pytest.raises(ValueError, match="exact_bandwidth must be at least 0, got -1"):
        function(q, k, projection(), exact_bandwidth=-1)
    with pytest.raises(ValueError, match="segment_ids must be"):
        function(q, k, projection(), segment_ids=np.zeros(3, int))


@pytest.mark.slow
def test_report_of_masked_attention_without_values():
    q, k, _ = inputs(batch=(2,))
    w = projection()
    mask = np.arange(9) != 2
    report = attention_report(q, k, w, mask=mask, scale=0.5, query_seq_lengths=np.array([5, 0]))
    assert report.output_error is None
    visible = mask & (np.arange(9) < 5)[:, None]
    expected = expected_report(q[0], k[0], w, visible=visible, scale=0.5)
    np.testing.assert_allclose([x[0] for x in report[:5]], expected, rtol=2e-5)
    # Nothing to see, nothing wrong.
    np.testing.assert_array_equal(
        [x[1] for x in report[:5]], [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    )


@pytest.mark.slow
def test_report_of_padding_that_is_nan_and_of_nan_that_is_seen():
    q, k, v = inputs(length=6)
    expected = attention_report(q[:, :], k[:4], projection(), value=v[:4])
    k, v = k.copy(), v.copy()
    k[4:], v[4:] = np.nan, np.nan
    report = attention_report(q, k, projection(), value=v, key_value_seq_lengths=4)
    np.testing.assert_allclose(report, expected, rtol=1e-5)
    k = k.copy()
    k[2, 0] = np.nan
    report = attention_report(q, k, projection(), value=v, key_value_seq_lengths=4)
    assert np.isnan(np.array(report)[[0, 1, 2, 3, 4, 5], 0]).all()
    assert np.isfinite(np.array(report)[:, 1]).all()


@pytest.mark.slow
def test_report_at_scales_where_denominators_leave_the_range_of_floats():
    q, k, _ = inputs(length=12, scale=30.0)
    for sign in (1, -1):  # Too small, and too large where all keys oppose the queries.
        report = attention_report(abs(q), sign * abs(k), projection())
        assert not np.isnan(np.array(report[:5])).any()


@pytest.mark.slow
def test_report_of_an_unbiased_estimate():
    q, k, _ = inputs(length=8, heads=1, scale=0.4)
    draws = 500
    w = projection(9, heads=draws)
    q, k = (np.repeat(x, draws, axis=1) for x in (q, k))
    ratios = attention_report(q, k, w).row_sum_mean
    chex.assert_shape(ratios, (draws,))
    assert abs(ratios.mean() - 1) < 5 * ratios.std() / np.sqrt(draws)


@pytest.mark.slow
def test_effective_rank_of_low_and_of_full_rank():
    q, k, _ = inputs(length=20, heads=1, scale=20.0)
    report = attention_report(q, q, projection(3))
    assert report.effective_rank < 3 + 1e-6
    one_hot = attention_report(100 * k, k, projection(3), scale=100.0)
    assert 1 <= one_hot.softmax_effective_rank <= 20 + 1e-6
    zero = attention_report(0 * q, k, projection(3))
    np.testing.assert_allclose([zero.effective_rank, zero.softmax_effective_rank], 1, rtol=1e-4)


F32 = np.float32
BAD = [
    ({"query": np.zeros((8, 2), F32)}, ValueError, r"length, heads, dim\], got query \(8, 2\)"),
    ({"query": np.zeros((9, 2, 8), int)}, TypeError, "query must be a floating type, .* got int"),
    ({"key": np.zeros((9, 2, 8), np.float16)}, TypeError, "one dtype, got float32, float16"),
    ({"query": np.zeros((9, 3, 8), F32)}, ValueError, "multiple of that of key heads, got 3 and 2"),
    ({"projection": np.zeros((3, 11, 8))}, ValueError, "one W for each of the 2 key heads"),
    ({"projection": None}, TypeError, "projection must be an array .* got None"),
    ({"feature_map": "cosine"}, ValueError, "'positive', 'hyperbolic', .* got 'cosine'"),
    ({"scale": jnp.float32(jnp.inf)}, ValueError, "scale must be finite, got inf"),
    ({"mask": jnp.ones((9, 9), bool)}, ValueError, "may differ between queries"),
    ({"bias": jnp.zeros((9, 9))}, ValueError, "bias .* may differ between queries"),
    ({"query_seq_lengths": np.ones(2, int)}, ValueError, r"the batch shape \(1,\), got \(2,\)"),
    ({"key_value_seq_lengths": np.float32(3)}, TypeError, "key_value_seq_lengths must be integers"),
]


@pytest.mark.fast
@pytest.mark.parametrize("function", [attention_matrix, attention_report])
@pytest.mark.parametrize(("changed", "error", "match"), BAD)
def test_refuses_what_the_attention_refuses(function, changed, error, match):
    q, k, _ = inputs()
    arguments = {"query": q, "key": k, "projection": projection()} | changed
    with pytest.raises(error, match=match):
        function(**arguments)


@pytest.mark.parametrize("function", [attention_matrix, attention_report, distillation_loss])
def test_no_explicit_axis_may_shard_the_length(function):
    lengths = jax.NamedSharding(make_mesh(length=2), jax.P("length"))
    q, k = jax.device_put(inputs(8, 8)[:2], lengths)
    with pytest.raises(ValueError, match=r"may shard the length, got \('length',\)"):
        function(q, k, projection(), feature_map="positive")


def test_report_refuses_values_that_do_not_fit_and_tracers():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="key and value must have the same length"):
        attention_report(q, k, projection(), value=v[1:])
    with pytest.raises(TypeError, match="called on traced array"):
        jax.jit(attention_report)(q, k, projection())
