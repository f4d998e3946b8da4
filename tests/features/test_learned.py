import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax.feature_maps import Calibrated, Hyperbolic, Learned
from tests import formulas
from tests.versions import enable_x64

pytestmark = pytest.mark.fast
DIM, ROWS = 6, 33


def calibration(heads=None):
    maps = [Calibrated(**formulas.calibration(DIM, head)) for head in range(heads or 1)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves) if heads else jnp.array(*leaves), *maps)


def learned(**changes):
    arrays = formulas.learning(DIM) | changes
    return Learned(calibration(), **jax.tree.map(jnp.asarray, arrays))


def vectors(scale=1.0):
    x = np.random.default_rng(0).normal(size=(5, DIM))
    return (scale * x).astype(np.float32)


def w():
    return simrf_jax.draw_projection(jax.random.key(0), 4, DIM, coupling="orthogonal")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["query", "key"])
def test_features_are_those_of_the_formula(side):
    formula = formulas.of_side(formulas.learned[0], side)
    features = learned().features(vectors(), None, side=side)
    expected = formulas.evaluate(formula, vectors(), np.zeros((1, DIM)))
    assert features.shape == (5, 2 * ROWS)
    np.testing.assert_allclose(features, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["query", "key"])
def test_starts_at_calibrated_features_of_the_rows_and_their_negatives(side):
    start = Learned.start(w(), calibration())
    pairs = simrf_jax.Projection(w(), is_paired=True)
    expected = calibration().features(vectors(), pairs, side=side)
    np.testing.assert_array_equal(start.features(vectors(), None, side=side), expected)


@pytest.mark.slow
def test_starts_at_hyperbolic_features_without_a_calibration():
    start = Learned.start(w(), jax.tree.map(lambda leaf: leaf[0], Calibrated.identity(1, DIM)))
    expected = Hyperbolic().features(vectors(), w())
    np.testing.assert_allclose(start.features(vectors(), None), expected, rtol=1e-5)


def test_refuses_rows_whose_norms_are_fixed():
    options = simrf_jax.DrawOptions(norms="sqrt_dim")
    fixed = simrf_jax.Projection.draw(jax.random.key(0), 4, DIM, options=options)
    with pytest.raises(ValueError, match="must have rows whose norms are chi variables"):
        Learned.start(fixed, calibration())


def test_starts_with_arrays_for_each_head_that_share_no_memory():
    start = Learned.start(w(), calibration(heads=2))
    assert start.query_rows.shape == start.key_rows.shape == (2, 4, DIM)
    assert start.query_offsets.shape == start.key_offsets.shape == start.log_weights.shape == (2, 4)
    own = jax.tree.leaves(dataclasses.replace(start, calibration=None))
    assert len({leaf.unsafe_buffer_pointer() for leaf in own}) == len(own) == 5


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1, 1e3])
def test_parameters_have_finite_gradients_at_any_scale(scale):
    q, k, v = (vectors(scale)[:, None] for _ in "qkv")

    def loss(learned):
        out = simrf_jax.random_feature_attention(q, k, v, None, feature_map=learned)
        return jnp.sum(out**2) / scale**2

    gradients = jax.grad(loss)(learned())
    for name in formulas.learning(DIM):
        gradient = getattr(gradients, name)
        assert np.isfinite(gradient).all(), name
        assert scale > 1 or np.abs(gradient).max() > 0, name
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients.calibration))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_answers_in_the_type_of_the_vectors(dtype):
    features = learned().features(jnp.asarray(vectors(), dtype), None)
    assert features.dtype == dtype
    expected = learned().features(vectors(), None)
    tolerance = 1e-6 if dtype == jnp.float32 else 5e-2
    np.testing.assert_allclose(features.astype(jnp.float32), expected, rtol=tolerance)


@pytest.mark.slow
def test_computes_in_float64():
    with enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), learned())
        x = vectors().astype(np.float64)
        expected = formulas.evaluate(formulas.learned[0].key, x, np.zeros((1, DIM)))
        np.testing.assert_allclose(wide.features(x, None), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "projection", "match"),
    [
        ({}, np.ones((3, DIM), np.float32), "projection must be None, got shape"),
        ({"key_rows": np.ones((2, DIM), np.float32)}, None, r"must be \[m, H\] for one head"),
        ({"log_weights": np.ones(3, np.float32)}, None, r"log_weights \[m\], got shapes"),
        ({"query_rows": np.ones((2, 33, DIM), np.float32)}, None, r"must be \[m, H\] for one head"),
    ],
)
def test_refuses(changes, projection, match):
    with pytest.raises(ValueError, match=match):
        learned(**changes).features(vectors(), projection)


@pytest.mark.parametrize("shape", [(DIM,), (4, DIM + 1), (3, 4, DIM)])
def test_refuses_rows_that_do_not_fit_the_calibration(shape):
    with pytest.raises(ValueError, match=rf"rows must be \[m, {DIM}\]"):
        Learned.start(jnp.ones(shape), calibration(heads=2))


def test_attention_takes_no_learned_map_by_name():
    q = jnp.ones((4, 1, DIM))
    with pytest.raises(ValueError, match="feature_map='learned' holds its own arrays"):
        simrf_jax.random_feature_attention(q, q, q, w(), feature_map="learned")
