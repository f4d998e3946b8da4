"""Calibrated features of all heads at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import Projection, feature_maps
from tests import formulas
from tests.versions import enable_x64

HEADS, DIM, ROWS = 3, 8, 16


def tokens(*shape):
    stretch = np.linspace(0.3, 1.5, HEADS)[:, None]
    rng = np.random.default_rng(0)
    shape = (2, 5, HEADS, *shape, DIM)
    return (rng.normal(size=shape) * stretch.reshape(-1, *([1] * (len(shape) - 3)))).astype("f4")


def draw(key):
    return simrf_jax.draw_projection(key, ROWS, DIM)


def weighted(key):
    return Projection(draw(key), np.linspace(-1, 1, ROWS, dtype="f4"))


def fast(key):
    return simrf_jax.draw_fast_projection(key, ROWS, DIM)


def draw_for_each_head(draw):
    return jax.vmap(draw)(jax.random.split(jax.random.key(0), HEADS))


PROJECTIONS = {
    f"{draw.__name__}{kind}": functools.partial(make, draw)
    for draw in (draw, weighted, fast)
    for kind, make in {
        "": lambda draw: draw(jax.random.key(0)),
        " for each head": draw_for_each_head,
    }.items()
}


def one_head(tree, head):
    return jax.tree.map(lambda leaf: leaf[head], tree)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_each_head_has_the_features_of_itself_alone(name, side):
    projection = PROJECTIONS[name]()
    x = jnp.asarray(tokens(2) if side == "query" else tokens())
    calibration = simrf_jax.calibrate(tokens(), tokens()[:, ::-1] + 0.3)
    together = calibration.log_features_of_heads(x, projection, side=side)
    for head in range(HEADS):
        own, w = one_head(calibration, head), projection
        if "each" in name:
            w = one_head(projection, head)
        alone = own.log_features(x[:, :, head], w, side=side)
        for one, expected in zip(together[:2], alone[:2], strict=True):
            np.testing.assert_allclose(one[:, :, head], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_calibration_may_hold_numpy_arrays():
    q = k = v = tokens()
    w, calibration = draw(jax.random.key(0)), simrf_jax.calibrate(q, k + 0.3)
    held = jax.tree.map(np.asarray, calibration)
    outputs = (
        simrf_jax.random_feature_attention(q, k, v, w, feature_map=each)
        for each in (calibration, held)
    )
    np.testing.assert_array_equal(*outputs)


@pytest.mark.fast
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("name", ["calibrated", "folded", "learned"])
def test_arrays_in_float32_round_nothing_of_float64_vectors(name, side):
    x, w = np.random.default_rng(0).normal(size=(2, 5, DIM))
    calibration = feature_maps.Calibrated(**formulas.calibration(DIM))
    formula = formulas.learned if name == "learned" else formulas.calibrated
    expected, _ = getattr(formula[0], side)(x, w, "softmax")
    with enable_x64(True):
        feature_map, projection = calibration, jnp.asarray(w)
        if name == "learned":
            feature_map = feature_maps.Learned(calibration, **formulas.learning(DIM))
        elif name == "folded":
            feature_map = feature_maps.Folded.of(calibration, projection)
        projection = projection if name == "calibrated" else None
        log = feature_map.log_features(jnp.asarray(x), projection, side=side)
        np.testing.assert_allclose(log.exponent + log.log_scale, expected, atol=1e-12)
