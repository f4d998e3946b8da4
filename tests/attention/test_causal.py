import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import (
    Projection,
    RandomFeatureMechanism,
    feature_maps,
    random_feature_attention,
)
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.random_features.causal import causal_attention
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    join_length,
    split_length,
)
from tests import formulas
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, relative_error
from tests.versions import enable_x64

attend = jax.jit(
    random_feature_attention, static_argnames=("feature_map", "is_causal", "chunk_size")
)


def triangle(length, key_length=None):
    return np.tri(length, key_length or length, dtype=bool)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("length", "chunks"),
    [(0, (0, 1)), (1, (1, 1)), (37, (1, 37)), (64, (1, 64)), (65, (2, 40)), (197, (4, 56))],
)
def test_chunks_of_equal_size_need_little_padding(length, chunks):
    positions = jnp.arange(length, dtype=jnp.float32)[None]
    split = split_length(positions, 64, -1)
    assert (split.shape[0], split.shape[2]) == chunks
    np.testing.assert_array_equal(join_length(split, length), positions)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 70])
@pytest.mark.parametrize("chunk_size", [1, 2, 8, 64])
def test_any_length_and_chunk(length, chunk_size):
    q, k, v = inputs(length, width=5)
    actual = attend(q, k, v, projection(), is_causal=True, chunk_size=chunk_size)
    expected = attention(q, k, v, projection(), visible=triangle(length))
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.slow
def test_an_explicit_axis_shards_the_batch_at_a_length_of_no_whole_chunks():
    q, k, v = inputs(7, batch=(4,))
    expected = attend(q, k, v, projection(), is_causal=True, chunk_size=4)
    sharding = jax.NamedSharding(make_mesh(data=2), jax.P("data"))
    tokens = jax.device_put((q, k, v), sharding)
    actual = attend(*tokens, projection(), is_causal=True, chunk_size=4)
    assert actual.sharding.spec[0] == "data"
    assert relative_error(actual, expected) < 1e-6


def causal(q, k, v):
    return random_feature_attention(q, k, v, projection(), is_causal=True)


@pytest.mark.fast
def test_vmap_computes_pairs_only_where_a_key_is_large():
    q, k, v = inputs(5, batch=(2, 1))
    alone, mapped = (str(jax.make_jaxpr(f)(q, k, v)) for f in (causal, jax.vmap(causal)))
    assert alone.count(" cond[") == mapped.count(" cond[")


def test_vmap_over_sequences_of_which_one_has_large_keys():
    q, k, v = inputs(5, batch=(2, 1))
    k[1, :, 3:] *= 1e3
    actual = jax.jit(jax.vmap(causal))(q, k, v)
    for i in range(2):
        expected = attend(q[i], k[i], v[i], projection(), is_causal=True)
        assert relative_error(actual[i], expected) < 1e-6


@pytest.mark.slow
def test_vmap_over_sequences_whose_heads_an_explicit_axis_shards():
    q, k, v = inputs(5, heads=2, batch=(2, 1))

    def with_gradients(q, k, v):
        return jax.value_and_grad(lambda *x: jnp.sum(causal(*x) ** 2), argnums=(0, 1, 2))(q, k, v)

    mapped = jax.jit(jax.vmap(with_gradients))
    sharding = jax.NamedSharding(make_mesh(heads=2), jax.P(None, None, None, "heads"))
    actual = mapped(*jax.device_put((q, k, v), sharding))
    assert actual[1][0].sharding.spec[3] == "heads"
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(mapped(q, k, v)), strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9, 14), (14, 9), (9, 1), (1, 9)])
def test_queries_and_keys_of_other_lengths_are_aligned_at_the_start(lengths):
    q, k, v = inputs(*lengths)
    actual = attend(q, k, v, projection(), is_causal=True, chunk_size=4)
    expected = attention(q, k, v, projection(), visible=triangle(*lengths))
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.slow
def test_grouped_queries_masks_biases_lengths_and_batches():
    q, k, v = inputs(13, heads=4, key_heads=2, width=3, batch=(2, 3))
    w = projection(heads=2)
    rng = np.random.default_rng(1)
    mask = rng.random((2, 3, 1, 1, 13)) < 0.7
    bias = rng.normal(size=(3, 4, 1, 13)).astype(np.float32)
    lengths = np.array([[13, 4, 9], [1, 12, 6]])
    out = attend(
        q,
        k,
        v,
        w,
        mask=mask,
        bias=bias,
        is_causal=True,
        chunk_size=4,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths - 1,
    )
    for i in np.ndindex(2, 3):
        shown = mask[i][0, 0] & (np.arange(13) < lengths[i] - 1)
        weights = np.where(shown, bias[i[1], :, 0], -np.inf)
        expected = attention(q[i], k[i], v[i], w, log_weights=weights, visible=triangle(13))
        expected[lengths[i] :] = 0
        np.testing.assert_allclose(out[i], expected, atol=1e-5)


# W and the feature map, by name.
MAPS = {
    "positive": lambda w: (w, feature_maps.Positive()),
    "trigonometric": lambda w: (w, feature_maps.Trigonometric()),
    "optimal positive": lambda w: (w, feature_maps.OptimalPositive(-0.1)),
    "a parameter for each head": lambda w: (w, feature_maps.OptimalPositive(np.float32([0, -0.2]))),
    "weighted rows": lambda w: (
        Projection(w, formulas.log_weights(w)),
        feature_maps.Hyperbolic(),
    ),
}


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", MAPS)
def test_nothing_of_the_future_reaches_the_past(scale, name):
    q, k, v = inputs(40, scale=scale)
    w, feature_map = MAPS[name](projection())

    @jax.jit
    def attend(q, k, v):
        options = {"feature_map": feature_map, "is_causal": True, "chunk_size": 16}
        return random_feature_attention(q, k, v, w, **options)

    out = attend(q, k, v)
    for t in (0, 1, 15, 16, 23, 39):
        changed = [x.copy() for x in (q, k, v)]
        for x, by in zip(changed, (-3, 7, 1e6), strict=True):
            x[t] *= by
        other = attend(*changed)
        np.testing.assert_array_equal(other[:t], out[:t])
        if scale == 1.0:  # Otherwise the query may have found the same single key before.
            assert (other[t] != out[t]).any()


@pytest.mark.slow
@pytest.mark.parametrize("segments", [None, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
@pytest.mark.parametrize("size", [1.0, 1e12])
def test_a_key_far_larger_than_those_before_it_in_its_chunk(segments, size):
    q, k, v = inputs(13)
    k[:5] *= 9  # Their exponents are far below that of the next key.
    v[5:8] *= size  # Beside large values, sums overflow sooner.
    ids = None if segments is None else np.array(segments)
    out = attend(q, k, v, projection(), is_causal=True, chunk_size=16, segment_ids=ids)
    visible = triangle(13)
    if segments is not None:
        visible &= np.equal.outer(segments, segments)
    expected = attention(q, k, v, projection(), visible=visible)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_large_keys_change_the_gradient_of_what_sees_them_alone():
    q, k, v = inputs(16)
    w = projection()

    @jax.jit
    def gradient(k):
        def loss(q, k, v):
            out = random_feature_attention(q, k, v, w, is_causal=True, chunk_size=8)
            return jnp.sum(jnp.square(out[:5]))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    k[:5] *= 9
    other = k.copy()
    other[5:] *= 9  # Exponents like those before it.
    for x, y in zip(gradient(k), gradient(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("pallas_tpu", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_keys_that_are_large_in_the_units_of_the_first(is_causal, implementation):
    """The last query sees all keys, so it is that of bidirectional attention."""
    options = {"is_causal": True} if is_causal else {"segment_ids": jnp.zeros(5, int)}

    def gradients(**options):
        def loss(*arguments):
            *qkv, bias = arguments
            out = random_feature_attention(*qkv, projection(), bias=bias[None, None], **options)
            return jnp.sum(out[-1] ** 2)

        bias = np.array([0.0, 48, 48, 48, 48])  # The square of e^48 is above the largest number.
        arguments = [jnp.asarray(x, float) for x in (*inputs(5), bias)]
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arguments)

    with enable_x64(True):
        expected = gradients(implementation="xla")
    actual = gradients(implementation=implementation, **options)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.slow
def test_gradients_of_large_keys_do_not_vanish_beside_small_values():
    q, k, v = inputs(16)
    k[:5] *= 9
    w, small = projection(), 2.0**-80

    @jax.jit
    def gradient(v):
        def loss(k):
            return jnp.sum(random_feature_attention(q, k, v, w, is_causal=True, chunk_size=8))

        return jax.grad(loss)(k)

    np.testing.assert_allclose(gradient(small * v) / small, gradient(v), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 1, 7), (13,), (1,) * 13, (4, 4, 4, 1)])
def test_packed_sequences_attend_to_themselves(sizes, is_causal):
    q, k, v = inputs(13, heads=4, key_heads=2)
    w = projection(heads=2)
    ids = np.repeat(np.arange(len(sizes)) % 2, sizes)  # Runs, whose ids come again.
    out = attend(q, k, v, w, segment_ids=ids, is_causal=is_causal, chunk_size=4)
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        part = slice(start, end)
        visible = triangle(end - start) if is_causal else None
        expected = attention(q[part], k[part], v[part], w, visible=visible)
        assert relative_error(out[part], expected) < 1e-5


@pytest.mark.slow
def test_the_last_state_is_that_of_the_last_segment():
    q, k, v = inputs(13)
    ids = np.repeat([3, 0], [5, 8])

    @jax.jit
    def last_state(*qkv, **options):
        arguments = Call(*map(jnp.asarray, qkv), **options)
        estimator = RandomFeatureMechanism(projection(), feature_maps.Positive())
        given, features = estimator.lay_out(arguments)
        empty = AttentionState.empty(given, features)
        return causal_attention(given, features, empty, chunk_size=4)[1]

    alone = last_state(*(x[5:] for x in (q, k, v)))
    chex.assert_trees_all_close(last_state(q, k, v, segment_ids=ids), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_memory_does_not_hold_the_features():
    length, heads, dim, num_features = 16_384, 4, 64, 130
    x = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.float32)
    w = jax.ShapeDtypeStruct((num_features, dim), jnp.float32)

    def loss(q, k, v, w):
        return jnp.sum(random_feature_attention(q, k, v, w, is_causal=True) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, w).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 10 * 4 * length * heads * dim  # Ten arrays of the size of the queries.


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"chunk_size": 3, "is_causal": True}, ValueError, "a power of two, got 3"),
        ({"chunk_size": 0, "is_causal": True}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 8}, ValueError, "chunk_size is for causal or packed attention, got 8"),
        ({"segment_ids": np.zeros(8, int)}, ValueError, r"= \(1, 9\), got shape \(1, 8\)"),
        ({"segment_ids": np.zeros(9)}, TypeError, "segment_ids must be integers, got float"),
    ],
)
def test_refuses(options, error, match):
    with pytest.raises(error, match=match):
        random_feature_attention(*inputs(), projection(), **options)
