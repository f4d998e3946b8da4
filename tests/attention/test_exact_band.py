"""An exact band beside random features, under one normalizer; other files have all modes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import (
    FeatureMap,
    RandomFeatureMechanism,
    feature_maps,
    hybrid,
    random_feature_attention,
)
from simrf_jax._src.attention import ExactBandState
from tests.attention.inputs import inputs, projection
from tests.attention.reference import beside_band, relative_error
from tests.tiers import slow_but

LENGTH, BANDWIDTH = 30, 4
SIZES = {"num_key_heads": 2, "head_dim": 8, "value_dim": 8}


@pytest.mark.parametrize("scale", [0.5, 4, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_band_of_all_keys_is_softmax_attention(is_causal, scale):
    q, k, v = inputs(LENGTH, heads=4, key_heads=2, scale=scale, batch=(2,))
    attend = jax.jit(random_feature_attention, static_argnames=("is_causal", "exact_bandwidth"))
    out = attend(q, k, v, projection(), is_causal=is_causal, exact_bandwidth=LENGTH - 1)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    assert relative_error(out, expected) < 1e-5


def test_features_are_computed_only_if_the_band_leaves_a_key():
    q, k, v = inputs(LENGTH)
    w = jnp.full_like(projection(), jnp.nan)
    outs = [
        random_feature_attention(q, k, v, w, exact_bandwidth=LENGTH - missing) for missing in (1, 2)
    ]
    chex.assert_tree_all_finite(outs[0])
    assert jnp.isnan(outs[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "chunk_size"),
    [(0, 1), (1, 8), (LENGTH // 2, None), (np.int64(LENGTH - 2), 4)],
)
def test_bandwidths_and_chunks_of_any_size(bandwidth, chunk_size):
    q, k, v = inputs(LENGTH)
    options = {"exact_bandwidth": bandwidth, "chunk_size": chunk_size}
    out = random_feature_attention(q, k, v, projection(), **options)
    assert relative_error(out, beside_band(q, k, v, projection(), bandwidth)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, -0.4])
def test_scales_of_either_sign(scale):
    q, k, v = inputs(LENGTH)
    w = projection()
    out = random_feature_attention(q, k, v, w, scale=scale, exact_bandwidth=BANDWIDTH)
    assert relative_error(out, beside_band(q, k, v, w, BANDWIDTH, scale=scale)) < 1e-5


@pytest.mark.slow
def test_the_far_field_keeps_its_digits_where_the_band_has_nearly_all_weight():
    """Sums over all keys minus those over the band would leave nothing of the far field."""
    q, k, v = inputs(LENGTH, scale=0.5)
    k[15] = 40 * q[15]  # In the bands of its neighbors it outweighs the far field by far.
    w = projection(64)

    def far_part(value):
        return random_feature_attention(q, k, value, w, exact_bandwidth=BANDWIDTH)

    far = np.where(abs(np.arange(LENGTH) - 15) > BANDWIDTH, 1, 0)[:, None, None] * v
    expected = beside_band(q, k, far, w, BANDWIDTH)
    assert 0 < np.abs(expected[15]).max() < 1e-5
    np.testing.assert_allclose(far_part(far)[15], expected[15], rtol=1e-4)


@pytest.mark.slow
def test_a_map_of_the_user_is_in_units_of_the_kernel():
    """A factor of features cancels in the ratio of plain attention, but not beside a band."""
    q, k, v = inputs(LENGTH)
    w = projection()

    def positive(x, w):
        return simrf_jax.positive_features(x, w, kernel="softmax")

    options = {"exact_bandwidth": BANDWIDTH, "is_causal": True}
    expected = random_feature_attention(q, k, v, w, **options)
    out = random_feature_attention(q, k, v, w, feature_map=positive, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    doubled = random_feature_attention(
        q, k, v, w, feature_map=lambda x, w: 2 * positive(x, w), **options
    )
    assert relative_error(doubled, expected) > 0.1


@pytest.mark.slow
def test_features_of_a_query_that_overflow_reach_no_other_output_or_gradient():
    q, k, v = inputs(LENGTH)
    w = projection(64)
    others = np.arange(LENGTH) != 3
    planted = q.copy()
    planted[3] = 1e25  # Its features have the prefactor exp(|x|^2 / 2).

    @jax.jit
    def call(q):
        def attend(*arrays):
            return random_feature_attention(
                q, *arrays, feature_map="trigonometric", exact_bandwidth=BANDWIDTH
            )

        out, pull_back = jax.vjp(attend, k, v, w)
        return out, pull_back(jnp.where(others[:, None, None], out, 0))

    (out, gradients), (planted_out, planted_gradients) = call(q), call(planted)
    assert np.isnan(planted_out[3]).all()
    np.testing.assert_array_equal(planted_out[others], out[others])
    for gradient, planted_gradient in zip(gradients, planted_gradients, strict=True):
        np.testing.assert_array_equal(planted_gradient, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "pieces"),
    [
        pytest.param(4, [1] * LENGTH, marks=pytest.mark.slow),
        (4, [LENGTH]),
        (40, [17, 1, 1, 11]),
        pytest.param(0, [0, 3, 27], marks=pytest.mark.slow),
    ],
)
def test_decoding_in_any_pieces_is_the_parallel_form(pieces, bandwidth):
    q, k, v = inputs(LENGTH, heads=4, key_heads=2, batch=(2,))
    mechanism = RandomFeatureMechanism(projection(), exact_bandwidth=bandwidth)
    step = jax.jit(mechanism.step)
    state, outs, start = mechanism.init(batch=(2,), **SIZES), [], 0
    shapes = jax.tree.map(jnp.shape, state)
    for count in pieces:
        tokens = (x[:, start : start + count] for x in (q, k, v))
        out, state = step(state, *tokens)
        outs.append(out)
        start += count
    expected = mechanism.attend(q, k, v, is_causal=True)
    assert relative_error(np.concatenate(outs, axis=1), expected) < 1e-5
    assert jax.tree.map(jnp.shape, state) == shapes


@pytest.mark.slow
@pytest.mark.parametrize("lengths", slow_but([(3, 4)], [(2, 0), (3, 4), (20, 9)]))
def test_append_gives_the_state_of_steps(lengths):
    q, k, v = inputs(LENGTH, heads=2)
    k[1], v[1] = np.nan, np.inf
    mask = np.ones((1, 1, LENGTH), bool)
    mask[..., 1] = False
    mechanism = RandomFeatureMechanism(projection(), exact_bandwidth=BANDWIDTH)
    stepped = appended = mechanism.init(**SIZES)
    for start, count in zip((0, lengths[0]), lengths, strict=True):
        some = slice(start, start + count)
        _, stepped = mechanism.step(stepped, q[some], k[some], v[some], mask=mask[..., some])
        appended = mechanism.append(appended, k[some], v[some], mask=mask[..., some])
    for one, other in zip(jax.tree.leaves(stepped), jax.tree.leaves(appended), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_flow_through_the_state():
    q, k, v = inputs(12)
    mechanism = RandomFeatureMechanism(projection(), exact_bandwidth=3)

    def loss(k, v):
        _, state = mechanism.step(mechanism.init(**SIZES), q[:7], k[:7], v[:7])
        return jnp.sum(mechanism.step(state, q[7:], k[7:], v[7:])[0] ** 2)

    def expected(k, v):
        return jnp.sum(mechanism.attend(q, k, v, is_causal=True)[7:] ** 2)

    for one, other in zip(
        jax.grad(loss, (0, 1))(k, v), jax.grad(expected, (0, 1))(k, v), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Cosine(FeatureMap):
    estimates_softmax = False

    def log_features(self, x, projection, *, side):
        raise AssertionError("A map of another kernel must be refused before it is called.")


@pytest.mark.fast
@pytest.mark.parametrize(
    "feature_map",
    [
        "relu",
        "elu",
        feature_maps.Positive("gaussian"),
        feature_maps.Trigonometric("gaussian"),
        hybrid.GaussianHybrid(kernel="gaussian"),
        Cosine(),
    ],
    ids=str,
)
def test_refuses_maps_of_other_kernels(feature_map):
    q, k, v = inputs()
    match = r"exact_bandwidth takes a feature map that estimates exp\(x . y\).* got "
    with pytest.raises(ValueError, match=match):
        random_feature_attention(
            q, k, v, projection(), feature_map=feature_map, exact_bandwidth=BANDWIDTH
        )
    with pytest.raises(ValueError, match=match):
        RandomFeatureMechanism(projection(), feature_map, exact_bandwidth=BANDWIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric", "phase"])
def test_accepts_maps_of_the_softmax_kernel(name):
    q, k, v = inputs(scale=0.1)
    out = random_feature_attention(
        q, k, v, projection(), feature_map=name, exact_bandwidth=BANDWIDTH
    )
    assert np.isfinite(out).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "bandwidth", "match"),
    [
        (ValueError, -1, "exact_bandwidth must be at least 0, got -1"),
        (TypeError, 1.5, r"exact_bandwidth must be an integer, got 1\.5"),
        (TypeError, True, "exact_bandwidth must be an integer, got True"),
    ],
)
def test_refuses_bandwidths(error, bandwidth, match):
    q, k, v = inputs()
    with pytest.raises(error, match=match):
        random_feature_attention(q, k, v, projection(), exact_bandwidth=bandwidth)
    with pytest.raises(error, match=match):
        RandomFeatureMechanism(projection(), exact_bandwidth=bandwidth)


def test_refuses_states_of_other_mechanisms():
    q, k, v = inputs()
    w = projection()
    plain, banded = RandomFeatureMechanism(w), RandomFeatureMechanism(w, exact_bandwidth=BANDWIDTH)
    state = banded.init(**SIZES)
    assert isinstance(state, ExactBandState)
    with pytest.raises(TypeError, match="of type AttentionState, got ExactBandState"):
        plain.step(state, q, k, v)
    with pytest.raises(TypeError, match="of type ExactBandState, got AttentionState"):
        banded.step(state.far, q, k, v)
    with pytest.raises(TypeError, match="of type ExactBandState, got AttentionState"):
        banded.append(state.far, k, v)
    with pytest.raises(ValueError, match="state must be of bandwidth=3, got one of bandwidth=4"):
        RandomFeatureMechanism(w, exact_bandwidth=3).step(state, q, k, v)
    with pytest.raises(ValueError, match=r"state must have sums .* got sums"):
        RandomFeatureMechanism(projection(7), exact_bandwidth=BANDWIDTH).step(state, q, k, v)
