"""Tests of hybrid features and all other feature maps in both adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import simrf_jax
from simrf_jax import hybrid
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomProjection
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error
from tests.tiers import slow_but

HEADS, DIM, FEATURES, WEIGHTS = 2, 4, 5, 3
HYBRIDS = {
    "angular_hybrid": "angular_hybrid",
    "gaussian_hybrid": "gaussian_hybrid",
    "object": hybrid.GaussianHybrid(bandwidth=2.0),
}
MAPS = {
    **{name: name for name in ("positive", "hyperbolic", "trigonometric", "phase", "relu", "elu")},
    **HYBRIDS,
}


def pair(feature_map, *, num_features=FEATURES, **options):
    """Returns both adapters, and variables with the NNX adapter's W for the Linen adapter."""
    if feature_map in HYBRIDS.values():
        options["num_weights"] = WEIGHTS
    options = {"feature_map": feature_map, "coupling": "orthogonal", **options}
    one = nnx_adapter.RandomFeatureAttention(HEADS, DIM, num_features, rngs=nnx.Rngs(0), **options)
    other = linen_adapter.RandomFeatureAttention(num_features, **options)
    w = None if one.projection is None else get_value(one.projection)
    return one, other, {} if w is None else {"random_features": {"projection": w}}


CASES = {
    f"{name}, {'shared' if shared else 'a W for each head'}": (name, shared)
    for name in MAPS
    for shared in (False, True)
}
NEEDED = [name for name in CASES if "shared" not in name or name.startswith("angular_hybrid")]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(NEEDED, CASES))
def test_both_apis_and_their_gradients_are_those_of_the_function(case):
    name, shared = case
    x = inputs(6, heads=HEADS, dim=DIM, batch=(2,))
    one, other, variables = pair(MAPS[name], shared=shared)
    graphdef, state = nnx.split(one)

    @jax.jit
    def differences(state, variables, x):
        w = variables["random_features"]["projection"]

        def value_and_gradients(attend):
            def loss(x):
                out = attend(*x)
                return jnp.sum(jnp.sin(out)), out

            return jax.grad(loss, has_aux=True)(x)

        expected = value_and_gradients(
            lambda *x: simrf_jax.random_feature_attention(*x, w, feature_map=MAPS[name])
        )
        calls = [nnx.merge(graphdef, state), functools.partial(other.apply, variables)]
        return expected, [value_and_gradients(call) for call in calls]

    expected, found = differences(state, variables, x)
    for leaves in found:
        for leaf, leaf_expected in zip(
            jax.tree.leaves(leaves), jax.tree.leaves(expected), strict=True
        ):
            assert relative_error(leaf, leaf_expected) < 1e-5


def test_a_map_that_needs_no_projection():
    x = inputs(6, heads=HEADS, dim=DIM, batch=(2,))
    one, other, variables = pair("elu", num_features=None)
    expected = simrf_jax.random_feature_attention(*x, None, feature_map="elu")
    np.testing.assert_allclose(one(*x), expected, atol=1e-6)
    np.testing.assert_allclose(other.apply(variables, *x), expected, atol=1e-6)
    assert other.init(jax.random.key(0), *x) == {}
    assert not jax.tree.leaves(nnx.state(one))


@pytest.mark.slow
def test_each_head_draws_its_own_by_what_the_user_says():
    one, other, _ = pair("angular_hybrid", coupling="simplex", block="square", rotation="givens")
    x = inputs(3, heads=HEADS, dim=DIM)
    drawn = other.init(jax.random.key(0), *x)["random_features"]["projection"]
    for p in (drawn, get_value(one.projection)):
        assert p.hyperbolic.shape == p.trigonometric.shape == (HEADS, FEATURES, DIM)
        assert p.weights.shape == (HEADS, WEIGHTS, DIM)
        assert float(jnp.abs(p.weights[0] - p.weights[1]).min()) > 0
    # The keys of the heads are split from the key that the module makes.
    options = {"coupling": "simplex", "block": "square", "rotation": "givens"}
    rngs = nnx.Rngs(0)
    keys = jax.random.split(rngs.features(), HEADS)
    expected = hybrid.draw_bipolar_projection(keys[1], FEATURES, WEIGHTS, DIM, **options)
    found = jax.tree.leaves(get_value(one.projection))
    for part, part_expected in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(part[1], part_expected, rtol=1e-5, atol=1e-6)
    default = nnx_adapter.RandomFeatureAttention(
        HEADS, DIM, FEATURES, feature_map="gaussian_hybrid", coupling="iid", rngs=nnx.Rngs(0)
    )
    assert get_value(default.projection).weights.shape == (HEADS, 8, DIM)


@pytest.mark.slow
def test_a_redraw_is_the_same_in_both_apis_and_weights_stay_iid():
    key = jax.random.key(9)
    one, _, variables = pair("angular_hybrid", coupling="simplex")
    state = nnx.state(one, RandomProjection)
    nnx.update(one, simrf_jax.redraw_projections(key, state))
    found = get_value(one.projection)
    other = simrf_jax.redraw_projections(key, variables["random_features"])["projection"]
    head = jax.random.fold_in(jax.random.fold_in(key, 0), 1)
    expected = hybrid.draw_bipolar_projection(head, FEATURES, WEIGHTS, DIM, coupling="simplex")
    for part, same, one_head in zip(*map(jax.tree.leaves, (found, other, expected)), strict=True):
        np.testing.assert_array_equal(part, same)
        np.testing.assert_allclose(part[1], one_head, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_projections_are_no_parameters():
    one, _, _ = pair("gaussian_hybrid")
    assert not jax.tree.leaves(nnx.state(one, nnx.Param))
    assert len(jax.tree.leaves(nnx.state(one, RandomProjection))) == 3
