import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import simrf_jax
from experiments.char_lm.model import CharLM
from experiments.swap import swapping
from experiments.swap.encoder import Encoder, EncoderConfig
from experiments.swap.methods import METHODS, NUM_CENTERS, Method, baselines
from simrf_jax.integrations.nnx import RandomFeatureAttention, RandomProjection
from simrf_jax.models import ViT, ViTConfig
from tests.experiments.swap import tiny
from tests.tiers import slow_but


def encoder():
    """Returns a tiny sentence encoder and its input."""
    config = EncoderConfig(
        vocabulary_size=9, max_length=8, width=8, depth=2, num_heads=2, mlp_dim=8
    )
    tokens = jax.random.randint(jax.random.key(0), (3, 7), 0, 9)
    return Encoder(config, rngs=nnx.Rngs(0)), tokens


def vit():
    """Returns a tiny ViT and its input."""
    config = ViTConfig(
        image_size=(8, 8),
        channels=1,
        num_classes=3,
        patch_size=4,
        width=8,
        depth=2,
        num_heads=2,
        mlp_dim=8,
        dropout_rate=0.0,
        pooling="average",
        attention="exact",
        dtype="float32",
    )
    images = jax.random.normal(jax.random.key(0), (3, 8, 8, 1))
    return with_logits(ViT(config, rngs=nnx.Rngs(0))), images


def char_lm():
    """Returns a tiny language model and its input."""
    model = CharLM(
        9,
        attention="softmax",
        width=8,
        depth=2,
        num_heads=2,
        num_features=1,
        coupling="iid",
        bandwidth=0,
        rngs=nnx.Rngs(0),
    )
    return with_logits(model), jax.random.randint(jax.random.key(0), (3, 7), 0, 9)


def with_logits(model):
    """Returns a model whose head is random; heads begin as zeros."""
    shape = model.head.kernel.shape
    model.head.kernel = nnx.Param(jax.random.normal(jax.random.key(0), shape))
    return model


MODELS = {"encoder": encoder, "vit": vit, "char_lm": char_lm}


def call(model, inputs):
    """Calls a model."""
    return model(inputs)


# The others differ in where their attention is. test_training.py swaps that of a ViT, and
# test_swap.py that of an encoder.
@pytest.fixture(params=slow_but(["char_lm"], MODELS))
def case(request):
    return request.param()


@pytest.mark.slow
def test_softmax_in_the_place_of_softmax_changes_nothing(case):
    model, inputs = case
    same = swapping.swapped(model, [nnx.dot_product_attention] * 2)
    np.testing.assert_allclose(same(inputs), model(inputs), atol=1e-6)


@pytest.mark.slow
def test_recorded_inputs_are_those_that_reach_the_new_attention(case):
    model, inputs = case
    layers, output = swapping.record(model, call, inputs)
    np.testing.assert_array_equal(output, model(inputs))
    assert len(layers) == 2
    assert {layer.query.shape[-2:] for layer in layers} == {(2, 4)}
    seen = []

    def remember(query, key, value, *, is_causal=False, **keywords):
        seen.append((query, key, value, is_causal))
        return nnx.dot_product_attention(query, key, value, is_causal=is_causal, **keywords)

    swapping.swapped(model, [remember] * 2)(inputs)
    for layer, expected in zip(layers, seen, strict=True):
        for ours, theirs in zip(layer, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_swapped_model_can_be_recorded_and_swapped_back(case):
    model, inputs = case
    layers, _ = swapping.record(model, call, inputs)
    method = METHODS["positive_simplex"]
    attentions = method.attentions(jax.random.key(1), layers, 5, schedule=tiny.SCHEDULE)
    other = swapping.swapped(model, attentions)
    ours, output = swapping.record(other, call, inputs)
    np.testing.assert_array_equal(output, other(inputs))
    assert float(jnp.max(jnp.abs(output - model(inputs)))) > 1e-6
    np.testing.assert_array_equal(ours[0].query, layers[0].query)  # Nothing is swapped before it.
    assert float(jnp.max(jnp.abs(ours[1].query - layers[1].query))) > 1e-6
    back = swapping.swapped(other, [nnx.dot_product_attention] * 2)
    np.testing.assert_allclose(back(inputs), model(inputs), atol=1e-6)


@pytest.mark.slow
def test_many_features_of_a_fitted_map_come_near_softmax(case):
    model, inputs = case
    layers, exact = swapping.record(model, call, inputs)
    method = Method("scaled", tiny.fit_scaled, "orthogonal")
    assert method.fit(layers[0], None).factor.shape == (4,)
    errors, distances = {}, {}
    for m in (4, 4096):
        attentions = method.attentions(jax.random.key(1), layers, m, schedule=tiny.SCHEDULE)
        errors[m] = swapping.head_errors(layers[1], attentions[1])
        distances[m] = jnp.linalg.norm(swapping.swapped(model, attentions)(inputs) - exact)
    assert errors[4].shape == (2,)
    assert float(jnp.mean(errors[4096])) < 0.1 * float(jnp.mean(errors[4]))
    assert float(distances[4096]) < 0.4 * float(distances[4])


@pytest.mark.slow
def test_arrays_of_maps_and_projections_are_no_parameters(case):
    model, inputs = case
    layers, _ = swapping.record(model, call, inputs)
    method = Method("scaled", tiny.fit_scaled, "simplex")
    attentions = method.attentions(jax.random.key(1), layers, 5, schedule=tiny.SCHEDULE)
    other = swapping.swapped(model, attentions)
    assert jax.tree.map(jnp.shape, nnx.state(other, nnx.Param)) == jax.tree.map(
        jnp.shape, nnx.state(model, nnx.Param)
    )
    assert len(jax.tree.leaves(nnx.state(other, RandomProjection))) == 2
    _, _, rest = nnx.split(other, nnx.Param, ...)
    assert len(jax.tree.leaves(rest)) == 4  # A projection and a factor in each layer.


# One of each kind of fit.
KINDS = ["hyperbolic", "mixture", "learned", "band_calibrated", "band_keys_calibrated"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(KINDS, [*METHODS]))
def test_methods_have_the_asked_number_of_features(name):
    method = METHODS[name]
    [attention] = method.attentions(
        jax.random.key(0), [any_inputs()], 8, schedule=tiny.SCHEDULE, bandwidth=3, exact_keys=4
    )
    assert isinstance(attention, RandomFeatureAttention)
    assert attention.exact_keys == (4 if method.has_keys else None)
    if method.has_keys:  # Decoding has none.
        rows = attention.learned.query_rows if attention.learned else attention.projection
        assert rows.shape[-2] * method.features_per_row == 4
        assert attention(*any_inputs()[:3]).shape == (1, 9, 2, 4)
        [causal] = method.attentions(
            jax.random.key(0),
            [any_inputs()._replace(is_causal=True)],
            8,
            schedule=tiny.SCHEDULE,
            bandwidth=3,
            exact_keys=4,
        )
        assert causal.exact_keys == simrf_jax.ExactKeys(4, by="score")
        assert causal(*any_inputs()[:3], is_causal=True).shape == (1, 9, 2, 4)
        return
    attention.init_cache((1, 8))
    state = attention.cache.get_value()
    assert hasattr(state, "near") == method.has_band
    assert getattr(state, "far", state).sums.shape == (2, 8, 5)


@pytest.mark.slow
def test_the_rows_of_a_mixture_are_around_its_centers():
    inputs, method = any_inputs(), METHODS["mixture"]
    fitted = method.fit(inputs, None)
    assert fitted.centers.shape == (2, NUM_CENTERS, 4)
    [attention] = method.attentions(
        jax.random.key(0), [inputs], 4 * NUM_CENTERS, schedule=tiny.SCHEDULE
    )
    w = attention.projection.get_value()
    assert isinstance(w, simrf_jax.Projection)
    offsets = np.asarray(w.rows).reshape(2, NUM_CENTERS, 4, 4) - fitted.centers[:, :, None]
    # Four rows of a cross-polytope are two pairs in opposite directions.
    first, second = (
        offsets[:, :, i] / np.linalg.norm(offsets[:, :, i], axis=-1, keepdims=True) for i in (0, 1)
    )
    np.testing.assert_allclose(first, -second, atol=1e-3)
    expected = simrf_jax.random_feature_attention(*inputs[:3], w, feature_map=fitted.feature_map)
    np.testing.assert_allclose(attention(*inputs[:3]), expected, rtol=1e-4, atol=1e-5)


def any_inputs():
    """Returns some queries and keys."""
    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 4))
    return swapping.Inputs(x, x, x, is_causal=False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_mean_squared_sum_is_the_mean_over_visible_pairs(is_causal):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 4))
    ours = swapping.mean_squared_sum(swapping.Inputs(q, k, v, is_causal))
    x, y = (np.asarray(z, np.float64) * 4**-0.25 for z in (q, k))
    for head in range(3):
        sums = [
            np.sum((x[b, t, head] + y[b, s, head]) ** 2)
            for b in range(2)
            for t in range(5)
            for s in range(5)
            if s <= t or not is_causal
        ]
        np.testing.assert_allclose(ours[head], np.mean(sums), rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_uniform_attention_is_the_mean_of_visible_values(is_causal):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 4))
    ours = baselines(None)["uniform"](q, k, v, is_causal=is_causal)
    np.testing.assert_allclose(ours[:, -1], v.mean(axis=1), atol=1e-6)
    first = v[:, 0] if is_causal else v.mean(axis=1)
    np.testing.assert_allclose(ours[:, 0], first, atol=1e-6)


def test_the_band_alone_is_banded_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 9, 3, 4))
    ours = baselines(2)["band"](q, k, v, is_causal=True)
    expected = simrf_jax.banded_attention(q, k, v, bandwidth=2, is_causal=True)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
def test_head_errors_are_relative_and_zero_for_softmax():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 3, 4))
    inputs = swapping.Inputs(q, k, v, is_causal=True)
    np.testing.assert_allclose(
        swapping.head_errors(inputs, nnx.dot_product_attention), 0, atol=1e-10
    )

    def twice(*arrays, **keywords):
        return 2 * nnx.dot_product_attention(*arrays, **keywords)

    np.testing.assert_allclose(swapping.head_errors(inputs, twice), 1, rtol=1e-5)
