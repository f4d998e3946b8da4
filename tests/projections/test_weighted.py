"""Weighted projections: their shapes, the maps that honor their weights, and the others."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import Projection, draw_fast_projection, draw_projection, hybrid
from simrf_jax._src.projections import DrawOptions
from tests import conformance, formulas

pytestmark = pytest.mark.fast
HONOUR = ("positive", "hyperbolic")
REFUSE = [name for name in conformance.FEATURE_MAPS if name not in HONOUR]


def weighted(num_features=10, dim=6, draw=draw_projection):
    rows = Projection.of(draw(jax.random.key(0), num_features, dim)).rows
    return Projection(rows, 2 * jax.random.normal(jax.random.key(1), (num_features,)))


def vectors(*shape):
    return 0.3 * jax.random.normal(jax.random.key(2), (*shape, 6))


@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
@pytest.mark.parametrize("name", HONOUR)
def test_either_side_takes_half_of_each_log_weight(name, kernel):
    w, x = weighted(), vectors(4)
    log, _ = getattr(formulas, name)(
        np.asarray(x, np.float64), np.asarray(w.rows, np.float64), kernel
    )
    half = np.tile(np.asarray(w.log_weights, np.float64) / 2, log.shape[-1] // 10)
    found = conformance.feature_map(name, kernel)(x, w)
    np.testing.assert_allclose(found, np.exp(log + half), rtol=2e-6)


@pytest.mark.parametrize("name", HONOUR)
def test_weights_of_zero_change_nothing_and_of_minus_infinity_leave_a_row_out(name):
    plain, x = draw_projection(jax.random.key(0), 10, 6), vectors(4)
    phi = conformance.feature_map(name, "softmax")
    np.testing.assert_array_equal(phi(x, Projection(plain, jnp.zeros(10))), phi(x, plain))
    without = phi(x, Projection(plain, jnp.full(10, -jnp.inf).at[3].set(0.0)))
    assert np.count_nonzero(without.any(axis=0)) == without.shape[-1] // 10
    np.testing.assert_array_equal(without[:, 3], phi(x, plain)[:, 3])


@pytest.mark.parametrize("name", HONOUR)
def test_fast_rows(name):
    fast, x = weighted(draw=draw_fast_projection), vectors(4)
    dense = Projection(simrf_jax.project(jnp.eye(6), Projection(fast.rows)).T, fast.log_weights)
    phi = conformance.feature_map(name, "softmax")
    np.testing.assert_allclose(phi(x, fast), phi(x, dense), rtol=1e-5)


@pytest.mark.parametrize("name", REFUSE)
def test_other_maps_refuse_weights(name):
    with pytest.raises(TypeError, match="rows of equal weight here, got a Projection"):
        conformance.feature_map(name, "softmax")(vectors(4), weighted())


@pytest.mark.parametrize("feature_map", [hybrid.AngularHybrid(), hybrid.GaussianHybrid()])
def test_hybrids_refuse_weights(feature_map):
    parts = hybrid.BipolarProjection(weighted(), weighted(), weighted())
    with pytest.raises(TypeError, match="got a Projection with log weights"):
        feature_map.features(vectors(4), parts, side="query")


def test_shape_and_dtype_are_those_of_the_rows():
    rows = jnp.zeros((3, 2, 10, 6), jnp.bfloat16)
    w = Projection(rows, jnp.zeros((3, 2, 10)))
    assert (w.shape, w.ndim, w.dtype) == ((3, 2, 10, 6), 4, jnp.bfloat16)
    abstract = jax.eval_shape(lambda: w)
    assert (abstract.shape, abstract.dtype) == (w.shape, w.dtype)
    fast = weighted(draw=draw_fast_projection)
    assert (fast.shape, fast.dtype) == ((10, 6), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONOUR)
def test_jit_vmap_and_gradients(name):
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.vmap(lambda key: draw_projection(key, 10, 6))(keys)
    stack = Projection(rows, jax.random.normal(jax.random.key(1), (3, 10)))
    x, phi = vectors(4), conformance.feature_map(name, "softmax")
    mapped = jax.jit(jax.vmap(phi, in_axes=(None, 0)))(x, stack)
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], stack)
        np.testing.assert_allclose(mapped[i], phi(x, one), rtol=1e-5)
    gradient = jax.grad(lambda w: jnp.sum(phi(x, w)))(one)
    # The derivative in a log weight is half of its features.
    halves = 0.5 * phi(x, one).sum(axis=0).reshape(-1, 10).sum(axis=0)
    np.testing.assert_allclose(gradient.log_weights, halves, rtol=1e-5)
    chex.assert_tree_all_finite(gradient)


@pytest.mark.parametrize(
    ("rows", "log_weights", "error", "match"),
    [
        (np.zeros((5, 6)), np.zeros(4), ValueError, r"got \(5, 6\) and \(4,\)"),
        (np.zeros((2, 5, 6)), np.zeros(5), ValueError, r"got \(2, 5, 6\) and \(5,\)"),
        (np.zeros(6), np.zeros(()), ValueError, r"got \(6,\) and \(\)"),
        (np.zeros((5, 6)), np.zeros(5, int), TypeError, "log_weights must be a floating type"),
        (np.zeros((5, 6), int), np.zeros(5), TypeError, "projection must be a floating type"),
        (np.zeros((5, 4)), np.zeros(5), ValueError, r"dim=4, got shape \(4, 6\)"),
        (np.zeros((2, 5, 6)), np.zeros((2, 5)), ValueError, "use jax.vmap for a stack"),
    ],
)
def test_refuses(rows, log_weights, error, match):
    with pytest.raises(error, match=match):
        simrf_jax.positive_features(vectors(4), Projection(rows, log_weights))


@pytest.mark.parametrize("draw", [draw_projection, draw_fast_projection])
def test_weights_that_no_key_can_draw_are_not_redrawn(draw):
    with pytest.raises(TypeError, match="A Projection cannot be redrawn here"):
        simrf_jax.redraw_projections(
            jax.random.key(0), [weighted(draw=draw)], options=DrawOptions()
        )


def test_is_checkpointed_as_its_arrays(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint", reason="needs orbax")
    projection = weighted()
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "projection", projection)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "projection", jax.eval_shape(lambda: projection))
    chex.assert_trees_all_equal(restored, projection)
