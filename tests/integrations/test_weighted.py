"""Laws of norms, weighted rows and optimal positive features in both Flax adapters."""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import simrf_jax
from simrf_jax import DrawOptions, Projection, feature_maps, redraw_projections
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomProjection
from tests.attention.inputs import inputs

HEADS, DIM, FEATURES = 2, 4, 9
FIELDS = {"coupling": "cross_polytope", "norms": "radau"}
OPTIONS = DrawOptions(**FIELDS)


def qkv():
    return tuple(map(jnp.asarray, inputs(5, heads=HEADS, dim=DIM, batch=(1,))))


def nnx_attention(**fields):
    return nnx_adapter.RandomFeatureAttention(HEADS, DIM, FEATURES, rngs=nnx.Rngs(0), **fields)


@functools.cache
def linen_variables():
    adapter = linen_adapter.RandomFeatureAttention(FEATURES, **FIELDS)
    return adapter.init(jax.random.key(0), *qkv())


COLLECTIONS = {
    "nnx": lambda: nnx.state(nnx_attention(**FIELDS), RandomProjection),
    "linen": lambda: linen_variables()["random_features"],
}


def assert_redrawn(collection):
    drawn = redraw_projections(jax.random.key(9), collection)
    chex.assert_trees_all_equal_shapes_and_dtypes(drawn, collection)
    rows, log_weights = jax.tree.leaves(drawn)
    head = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 0), 1)
    expected = OPTIONS.draw(head, FEATURES, DIM)
    np.testing.assert_allclose(rows[1], expected.rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_weights[1], expected.log_weights)
    with pytest.raises(ValueError, match=r"drawn by DrawOptions\(.* got options=DrawOptions\("):
        redraw_projections(jax.random.key(9), collection, options=DrawOptions())


CARRIAGES = {
    "as it is": lambda x: x,
    "jit": jax.jit(lambda x: x),
    "eval_shape": lambda x: jax.eval_shape(lambda: x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("carriage", CARRIAGES)
@pytest.mark.parametrize("api", COLLECTIONS)
def test_weighted_rows_are_redrawn(api, carriage):
    assert_redrawn(CARRIAGES[carriage](COLLECTIONS[api]()))


@pytest.mark.slow
@pytest.mark.parametrize("api", COLLECTIONS)
def test_weighted_rows_survive_an_orbax_checkpoint(api, tmp_path):
    collection = COLLECTIONS[api]()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "w", collection)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "w", jax.eval_shape(lambda: collection))
    chex.assert_trees_all_equal(restored, collection)
    assert_redrawn(restored)


@pytest.mark.slow
def test_weighted_rows_survive_the_bytes_of_flax():
    variables = linen_variables()
    saved = serialization.to_bytes(jax.tree.map(jnp.copy, variables))
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), saved)
    chex.assert_trees_all_equal(restored, variables)
    assert_redrawn(restored["random_features"])


def test_both_adapters_attend_with_weighted_rows():
    adapter = nnx_attention(**FIELDS)
    w = get_value(adapter.projection)
    assert isinstance(w, Projection)
    assert w.shape == (HEADS, FEATURES, DIM)
    assert not jax.tree.leaves(nnx.state(adapter, nnx.Param))
    expected = simrf_jax.random_feature_attention(*qkv(), w)
    np.testing.assert_allclose(adapter(*qkv()), expected, rtol=1e-5, atol=1e-6)
    variables = linen_variables()
    box = variables["random_features"]["projection"]
    assert (box.shape, box.ndim, box.dtype) == (w.shape, 3, jnp.float32)
    unboxed = nn.meta.unbox(variables)["random_features"]["projection"]
    linen = linen_adapter.RandomFeatureAttention(FEATURES, **FIELDS)
    expected = simrf_jax.random_feature_attention(*qkv(), unboxed)
    np.testing.assert_allclose(linen.apply(variables, *qkv()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [-0.1, (-0.1, -0.3)])
def test_both_adapters_attend_with_optimal_positive_features(parameter):
    own = feature_maps.OptimalPositive(np.float32(parameter))
    adapter = nnx_attention(feature_map=own)
    w = get_value(adapter.projection)
    expected = simrf_jax.random_feature_attention(*qkv(), w, feature_map=own)
    np.testing.assert_allclose(adapter(*qkv()), expected, rtol=1e-5, atol=1e-6)
    compiled = nnx.jit(lambda adapter, *x: adapter(*x))(adapter, *qkv())
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-6)
    linen = linen_adapter.RandomFeatureAttention(FEATURES, feature_map=own)
    out = linen.apply({"random_features": {"projection": w}}, *qkv())
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["chi", "sqrt_dim", "antithetic", "shared"])
def test_the_norms_are_those_asked_for(norms):
    adapter = nnx_attention(norms=norms)
    assert adapter.projection.draw_options == DrawOptions(norms=norms)
    linen = linen_adapter.RandomFeatureAttention(FEATURES, norms=norms)
    box = linen.init(jax.random.key(0), *qkv())["random_features"]["projection"]
    assert box.draw_options == DrawOptions(norms=norms)
    for w in (get_value(adapter.projection), box.value):
        fixed = np.allclose(np.linalg.norm(w, axis=-1), DIM**0.5, rtol=1e-4)
        assert fixed == (norms == "sqrt_dim")


@pytest.mark.slow
def test_a_blend_with_weighted_rows():
    options = {"feature_maps": ("positive", "hyperbolic"), **FIELDS}
    adapter = nnx_adapter.FMMAttention(HEADS, DIM, FEATURES, 2, rngs=nnx.Rngs(0), **options)
    linen = linen_adapter.FMMAttention(FEATURES, 2, **options)
    variables = linen.init(jax.random.key(0), *qkv())
    projections = {"projections": get_value(adapter.projections)}
    out = linen.apply({**variables, "random_features": projections}, *qkv())
    np.testing.assert_allclose(adapter(*qkv()), out, rtol=1e-5, atol=1e-6)
    for collection in (variables["random_features"], nnx.state(adapter, RandomProjection)):
        drawn = redraw_projections(jax.random.key(1), collection)
        chex.assert_trees_all_equal_shapes_and_dtypes(drawn, collection)


ADAPTERS = {
    "nnx": nnx_attention,
    "linen": lambda **fields: linen_adapter.RandomFeatureAttention(FEATURES, **fields).init(
        jax.random.key(0), *qkv()
    ),
}


@pytest.mark.parametrize("norms", ["sqrt_dim", "radau"])
@pytest.mark.parametrize("api", ADAPTERS)
def test_optimal_positive_features_refuse_fixed_norms(api, norms):
    with pytest.raises(ValueError, match=f"norms='{norms}' .* OptimalPositive estimates another"):
        ADAPTERS[api](feature_map=feature_maps.OptimalPositive(-0.1), norms=norms)


@pytest.mark.parametrize("api", ADAPTERS)
def test_hybrids_refuse_weighted_rows(api):
    with pytest.raises(ValueError, match="a bipolar hybrid takes any other law of norms"):
        ADAPTERS[api](feature_map="angular_hybrid", norms="radau")


@pytest.mark.parametrize("name", ["trigonometric", "relu"])
def test_maps_that_cannot_honor_weights_refuse_them(name):
    with pytest.raises(TypeError, match="got a Projection with log weights"):
        nnx_attention(feature_map=name, norms="radau")(*qkv())


@pytest.mark.slow
def test_an_array_is_not_redrawn_as_weighted_rows():
    with pytest.raises(ValueError, match="norms='radau' draws a Projection with weights"):
        redraw_projections(jax.random.key(0), [jnp.zeros((5, 4))], options=OPTIONS)
