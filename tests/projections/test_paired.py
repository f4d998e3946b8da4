"""Paired projections: the rows of W and their negatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import DrawOptions, Projection, feature_maps
from tests.attention.inputs import inputs

pytestmark = pytest.mark.fast
DIM = 8


def half(num_pairs=5, **options):
    return simrf_jax.draw_projection(
        jax.random.key(0), num_pairs, DIM, coupling="orthogonal", **options
    )


def dense(rows):
    return jnp.concatenate([rows, -rows])


def paired(rows):
    return Projection(rows, is_paired=True)


MAPS = {
    "positive": feature_maps.Positive(),
    "hyperbolic": feature_maps.Hyperbolic(),
    "optimal": feature_maps.OptimalPositive(-0.1),
    "trigonometric": feature_maps.Trigonometric(),
    "relu": feature_maps.Relu(),
    "calibrated": None,  # It is fitted to the queries and keys.
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPS)
def test_every_map_has_the_features_of_an_array(name):
    q, k, v = inputs(12, dim=DIM, scale=0.25)  # No denominator of a signed map is near zero.
    feature_map = MAPS[name] or simrf_jax.calibrate(q, k)
    found, expected = (
        simrf_jax.random_feature_attention(q, k, v, w, feature_map=feature_map)
        for w in (paired(half()), dense(half()))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_fast_rows_have_negatives():
    fast = simrf_jax.draw_fast_projection(jax.random.key(0), 5, DIM, coupling="orthogonal")
    x = np.ones(DIM, np.float32)
    u = simrf_jax.project(x, fast)
    found = simrf_jax.project(x, fast.with_negatives())
    np.testing.assert_array_equal(found, np.concatenate([u, -u]))


def test_pairs_have_the_weights_of_their_rows():
    weights = jnp.linspace(-1, 1, 5)
    w = Projection(half(), weights).with_negatives()
    assert w.shape == (10, DIM)
    np.testing.assert_array_equal(w.log_weights, jnp.concatenate([weights, weights]))


def test_the_shape_and_type_are_those_of_both_halves():
    stack = jax.vmap(paired)(jnp.zeros((3, 5, DIM), jnp.bfloat16))
    assert (stack.shape, stack.ndim, stack.dtype) == ((3, 10, DIM), 3, jnp.bfloat16)
    assert "is_paired=True" in repr(stack)


def test_a_redraw_draws_one_row_of_each_pair():
    options = DrawOptions(coupling="orthogonal")
    stack = paired(jnp.zeros((2, 5, DIM)))
    key = jax.random.key(3)
    found = simrf_jax.redraw_projections(key, stack, options=options)
    assert found.is_paired
    expected = simrf_jax.redraw_projections(key, stack.rows, options=options)
    np.testing.assert_array_equal(found.rows, expected)


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["pair", "shared", "sqrt_dim"])
def test_options_say_that_they_draw_pairs(norms):
    options = DrawOptions(coupling="cross_polytope", norms=norms)
    w = options.draw(jax.random.key(0), 20, DIM)
    assert options.draws_pairs
    np.testing.assert_array_equal(w[1::2], -w[::2])


@pytest.mark.parametrize(
    "options", [{"coupling": "orthogonal"}, {"coupling": "cross_polytope", "norms": "antithetic"}]
)
def test_options_say_that_they_draw_no_pairs(options):
    assert not DrawOptions(**options).draws_pairs


def test_refuses_what_has_no_rows():
    with pytest.raises(ValueError, match=r"must be \[..., num_pairs, dim\], got shape \(4,\)"):
        _ = paired(np.zeros(4)).shape
    with pytest.raises(TypeError, match="must be a floating type"):
        simrf_jax.project(np.ones(DIM), paired(np.ones((5, DIM), int)))
    weighted = Projection(half(), jnp.zeros(5))
    with pytest.raises(TypeError, match="rows of equal weight"):
        simrf_jax.project(np.ones(DIM), weighted.with_negatives())


def test_fixed_norms_are_seen():
    options = DrawOptions(coupling="orthogonal", norms="sqrt_dim")
    known = Projection(half(norms="sqrt_dim"), is_paired=True, draw_options=options)
    with pytest.raises(ValueError, match="norms='sqrt_dim'"):
        known.check_chi_norms()


def test_no_redraw_of_fast_or_weighted_rows():
    fast = simrf_jax.draw_fast_projection(jax.random.key(0), 5, DIM, coupling="orthogonal")
    options = DrawOptions(coupling="orthogonal")
    with pytest.raises(TypeError, match="cannot be redrawn"):
        paired(fast.rows).redraw(jax.random.key(0), options)
    with pytest.raises(TypeError, match="cannot be redrawn"):
        paired(half()).redraw(jax.random.key(0), DrawOptions(norms="radau"))
