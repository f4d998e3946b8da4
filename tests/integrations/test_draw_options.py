"""Draw options travel with W in both Flax APIs, and the defaults of adapters follow the map."""

import copy
import dataclasses
import functools
import inspect
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import simrf_jax
from simrf_jax import DrawOptions, redraw_projections
from simrf_jax._src.features import FEATURE_MAPS
from simrf_jax._src.integrations import flax_drawing
from simrf_jax._src.integrations.flax_versions import get_value, set_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomProjection
from tests.integrations.adapters import FEATURES, HEADS, WIDTH, linen_attention, nnx_attention
from tests.integrations.adapters import tokens as draw_tokens
from tests.tiers import slow_but

DIM = WIDTH // HEADS
FIELDS = {"coupling": "simplex", "block": "square", "rotation": "hadamard"}
OPTIONS = DrawOptions(**FIELDS)
ORTHOGONAL = (
    "hyperbolic",
    "trigonometric",
    "phase",
    "angular_hybrid",
    "gaussian_hybrid",
    "clustered_hybrid",
)
MAPS = dict(FEATURE_MAPS)  # Those of the library; doctests and users add their own.
NAMES = [name for name in MAPS if name != "clustered_hybrid"]


def tokens():
    return draw_tokens(2, 5)


def qkv():
    return jax.random.normal(jax.random.key(0), (3, 1, 5, HEADS, DIM))


def assert_redrawn(collection, *, number=0, options=OPTIONS):
    """Asserts that a redraw repeats the draw of the projections of one layer."""
    drawn = redraw_projections(jax.random.key(9), collection)
    assert jax.tree.structure(drawn) == jax.tree.structure(collection)
    w = jax.tree.leaves(drawn)[number]
    head = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), number), 1)
    expected = options.draw(head, *w.shape[-2:])
    one = w.reshape(-1, *w.shape[-2:])[1]
    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
    contrary = DrawOptions("simplex_plus")
    with pytest.raises(ValueError, match=r"drawn by DrawOptions\(.* got options=DrawOptions\("):
        redraw_projections(jax.random.key(9), collection, options=contrary)


@functools.cache
def nnx_collection():
    return nnx.state(nnx_attention(**FIELDS), RandomProjection)


@functools.cache
def linen_variables():
    return jax.jit(linen_attention(**FIELDS).init)(jax.random.key(0), tokens())


def linen_collection():
    return linen_variables()["random_features"]


COLLECTIONS = {"nnx": nnx_collection, "linen": linen_collection}


def through_state_dict(collection):
    blank = jax.tree.map(jnp.zeros_like, collection)
    return serialization.from_state_dict(blank, serialization.to_state_dict(collection))


CARRIAGES = {
    "as it is": lambda x: x,
    "jit": jax.jit(lambda x: x),
    "eval_shape": lambda x: jax.eval_shape(lambda: x),
    "tree.map": functools.partial(jax.tree.map, jnp.zeros_like),
    "vmap": lambda x: jax.vmap(lambda _: x)(jnp.arange(3)),
    "scan": lambda x: jax.lax.scan(lambda carry, _: (carry, carry), x, None, length=3)[1],
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("carriage", CARRIAGES)
@pytest.mark.parametrize("api", COLLECTIONS)
def test_options_travel_with_the_projections(api, carriage):
    assert_redrawn(CARRIAGES[carriage](COLLECTIONS[api]()))


@pytest.mark.slow
@pytest.mark.parametrize("api", COLLECTIONS)
def test_options_survive_an_orbax_checkpoint(api, tmp_path):
    collection = COLLECTIONS[api]()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "w", collection)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "w", jax.eval_shape(lambda: collection))
    chex.assert_trees_all_equal(restored, collection)
    assert_redrawn(restored)


@pytest.mark.slow
def test_nnx_split_merge_update_and_vmap():
    graphdef, rest, projections = nnx.split(nnx_attention(**FIELDS), nnx.Param, RandomProjection)
    model = nnx.merge(graphdef, rest, projections)
    nnx.update(model, redraw_projections(jax.random.key(1), projections))
    assert model.attention_fn.projection.draw_options == OPTIONS
    for same in (nnx.clone(model), copy.deepcopy(model)):
        assert_redrawn(nnx.state(same, RandomProjection))

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        rngs = nnx.Rngs(key)
        return nnx_adapter.RandomFeatureAttention(HEADS, DIM, FEATURES, rngs=rngs, **FIELDS)

    stack = make(jax.random.split(jax.random.key(0), 3))
    assert get_value(stack.projection).shape == (3, HEADS, FEATURES, DIM)
    assert_redrawn(nnx.state(stack, RandomProjection))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        adapter = linen_adapter.RandomFeatureAttention(FEATURES, parent=None, **FIELDS)
        return x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)(x), None


LIFTED = {
    "scan": lambda: nn.scan(
        Layer,
        variable_axes={"params": 0, "random_features": 0},
        split_rngs={"params": True, "features": True},
        length=3,
    )(),
    "shared scan": lambda: nn.scan(
        Layer,
        variable_broadcast=("params", "random_features"),
        split_rngs={"params": False, "features": False},
        length=3,
    )(),
    "vmap": lambda: nn.vmap(
        Layer,
        in_axes=(0, None),
        variable_axes={"params": 0, "random_features": 0},
        split_rngs={"params": True, "features": True},
    )(),
    "remat": lambda: nn.remat(Layer)(),
    "jit": lambda: nn.jit(Layer)(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIFTED)
def test_linen_transformations(name):
    model, x = LIFTED[name](), tokens()
    rngs = {"params": jax.random.key(0), "features": jax.random.key(1)}
    variables = jax.jit(model.init)(rngs, x, None)
    assert_redrawn(variables["random_features"])
    apply = jax.jit(lambda variables: model.apply(variables, x, None, mutable=["random_features"]))
    (out, _), updates = apply(variables)
    chex.assert_trees_all_equal(updates["random_features"], variables["random_features"])
    redrawn = redraw_projections(jax.random.key(9), variables["random_features"])
    (other, _), _ = apply({**variables, "random_features": redrawn})
    assert not np.allclose(out, other)


@pytest.mark.slow
def test_linen_variables_are_used_as_arrays():
    variables = linen_variables()
    box = variables["random_features"]["attention_fn"]["projection"]
    [w] = jax.tree.leaves(variables["random_features"])
    assert (box.shape, box.ndim, box.dtype) == (w.shape, w.ndim, w.dtype)
    np.testing.assert_array_equal(box, w)
    np.testing.assert_array_equal(jnp.sum(box, axis=0), jnp.sum(w, axis=0))
    np.testing.assert_array_equal(box[1], w[1])
    np.testing.assert_array_equal(simrf_jax.project(w[0, 0], box[1]), jnp.dot(box[1], w[0, 0]))
    unboxed = nn.meta.unbox(variables)
    assert unboxed["random_features"] == {"attention_fn": {"projection": w}}
    out = linen_attention(**FIELDS).apply(unboxed, tokens())
    np.testing.assert_array_equal(out, linen_attention(**FIELDS).apply(variables, tokens()))
    with pytest.raises(ValueError, match="does not record how it was drawn"):
        redraw_projections(jax.random.key(9), unboxed["random_features"])


@pytest.mark.slow
def test_a_box_has_the_items_of_its_array():
    [box] = jax.tree.leaves(linen_collection(), is_leaf=lambda x: hasattr(x, "draw_options"))
    assert len(box) == len(box.value) == len(list(box))
    np.testing.assert_array_equal(list(box)[1], box.value[1])


@pytest.mark.slow
def test_linen_models_cross_the_bridge_to_nnx():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            adapter = linen_adapter.RandomFeatureAttention(FEATURES, parent=None, **FIELDS)
            return nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)(x)

    model = nnx.bridge.ToNNX(Model(), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(model, tokens())
    assert np.isfinite(model(tokens())).all()
    assert_redrawn(nnx.state(model, lambda _, x: hasattr(x, "draw_options")))


def test_nnx_models_cross_the_bridge_to_linen():
    class Model(nnx.Module):
        def __init__(self, rngs):
            adapter = nnx_adapter.RandomFeatureAttention(HEADS, DIM, FEATURES, rngs=rngs, **FIELDS)
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs
            )

        def __call__(self, x):
            return self.attention(x)

    streams = {"params": jax.random.key(0), "features": jax.random.key(1)}
    variables = nnx.bridge.to_linen(Model).init(streams, tokens())
    assert_redrawn(variables["RandomProjection"])


@pytest.mark.slow
def test_a_hybrid_that_was_drawn_by_other_options_than_its_variable_says_is_refused():
    adapter = nnx_adapter.RandomFeatureAttention(
        HEADS, DIM, FEATURES, feature_map="angular_hybrid", rngs=nnx.Rngs(0)
    )

    def draw(key):
        return simrf_jax.hybrid.draw_bipolar_projection(key, FEATURES, 8, DIM, coupling="iid")

    set_value(adapter.projection, jax.vmap(draw)(jax.random.split(jax.random.key(1), HEADS)))
    state = nnx.state(adapter, RandomProjection)
    with pytest.raises(ValueError, match=r"must have the same draw options, got .*iid.*orthogonal"):
        redraw_projections(jax.random.key(2), state)


MAPS_WITH_ARRAYS = {
    "phases": lambda: simrf_jax.feature_maps.Phase(jnp.linspace(0, 6, FEATURES)),
    "bandwidth": lambda: simrf_jax.hybrid.GaussianHybrid(jnp.array(0.5)),
    "number": lambda: simrf_jax.hybrid.GaussianHybrid(0.5),
}


@pytest.mark.parametrize("name", slow_but(["phases"], [*MAPS_WITH_ARRAYS]))
def test_nnx_adapters_hold_the_arrays_of_feature_maps(name):
    def make():
        return nnx_adapter.RandomFeatureAttention(
            HEADS, DIM, FEATURES, feature_map=MAPS_WITH_ARRAYS[name](), rngs=nnx.Rngs(0)
        )

    adapter = make()
    expected = simrf_jax.random_feature_attention(
        *qkv(), get_value(adapter.projection), feature_map=MAPS_WITH_ARRAYS[name]()
    )
    np.testing.assert_allclose(adapter(*qkv()), expected, rtol=1e-5, atol=1e-6)
    compiled = nnx.jit(lambda adapter, *x: adapter(*x))(adapter, *qkv())
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-6)
    graph, state = nnx.split(adapter)
    # A checkpoint is restored into the structure of an abstract model.
    for one in (graph, nnx.graphdef(nnx.eval_shape(make))):
        np.testing.assert_array_equal(nnx.merge(one, state)(*qkv()), adapter(*qkv()))
    blend = nnx_adapter.FMMAttention(
        HEADS,
        DIM,
        (FEATURES, None),
        4,
        feature_maps=(MAPS_WITH_ARRAYS[name](), "elu"),
        rngs=nnx.Rngs(0),
    )
    assert np.isfinite(nnx.jit(lambda blend, *x: blend(*x))(blend, *qkv())).all()


def test_linen_bytes_are_those_of_the_arrays_alone():
    variables = linen_variables()
    saved = serialization.to_bytes(jax.tree.map(jnp.copy, variables))  # Its keys are sorted.
    assert saved == serialization.to_bytes(nn.meta.unbox(variables))
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), saved)
    chex.assert_trees_all_equal(restored, variables)
    assert_redrawn(restored["random_features"])
    chex.assert_trees_all_equal(through_state_dict(variables), variables)


def fmm_collection(api, **fields):
    maps = ("positive", "elu", "angular_hybrid", "phase")
    sizes, options = ((5, None, 3, 4), 2), {"feature_maps": maps, "num_weights": 2, **fields}
    if api == "nnx":
        adapter = nnx_adapter.FMMAttention(HEADS, DIM, *sizes, rngs=nnx.Rngs(0), **options)
        return nnx.state(adapter, RandomProjection)
    adapter = linen_adapter.FMMAttention(*sizes, **options)
    return adapter.init(jax.random.key(0), *qkv())["random_features"]


@pytest.mark.slow
@pytest.mark.parametrize("api", COLLECTIONS)
def test_each_map_of_a_blend_has_options_of_its_own(api):
    collection = fmm_collection(api)
    simplex, orthogonal = DrawOptions("simplex"), DrawOptions("orthogonal")
    assert_redrawn(collection, number=0, options=simplex)
    drawn = jax.tree.leaves(redraw_projections(jax.random.key(9), collection))
    # The projections of positive, angular_hybrid (three arrays) and phase are leaves 0, 1 and 2.
    last = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 2), 1)
    np.testing.assert_allclose(drawn[4][1], orthogonal.draw(last, 4, DIM), rtol=1e-5, atol=1e-6)
    middle = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 1), 1)
    hybrid = simrf_jax.hybrid.draw_bipolar_projection(middle, 3, 2, DIM)
    np.testing.assert_allclose(drawn[1][1], hybrid.hyperbolic, rtol=1e-5, atol=1e-6)
    assert_redrawn(fmm_collection(api, coupling="iid"), options=DrawOptions("iid"))


def carried(api, **options):
    """Returns how an adapter draws its W."""
    if api == "nnx":
        rngs = nnx.Rngs(0)
        adapter = nnx_adapter.RandomFeatureAttention(HEADS, DIM, 5, rngs=rngs, **options)
        return adapter.projection.draw_options
    adapter = linen_adapter.RandomFeatureAttention(5, **options)
    return adapter.init(jax.random.key(0), *qkv())["random_features"]["projection"].draw_options


def test_the_coupling_of_each_map():
    for name, feature_map in MAPS.items():
        assert feature_map.coupling == ("orthogonal" if name in ORTHOGONAL else "simplex"), name
    assert simrf_jax.feature_maps.Custom(simrf_jax.project).coupling == "simplex"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("api", COLLECTIONS)
def test_the_default_coupling_is_the_maps(api, name):
    expected = "orthogonal" if name in ORTHOGONAL else "simplex"
    assert carried(api, feature_map=name) == DrawOptions(expected)
    assert carried(api, feature_map=name, coupling="iid") == DrawOptions("iid")
    assert carried(api, feature_map=MAPS[name]) == DrawOptions(expected)


def test_a_function_and_its_map_have_one_kernel_by_default():
    functions = [getattr(simrf_jax, f"{name}_features", None) for name in MAPS]
    signatures = [inspect.signature(one).parameters for one in functions if one is not None]
    kernels = [one["kernel"].default for one in signatures if "kernel" in one]
    assert kernels == ["softmax"] * 4
    maps = [getattr(one, "kernel", "softmax") for one in MAPS.values()]
    assert maps == ["softmax"] * 9


PAIRS = [
    (getattr(nnx_adapter, name), getattr(linen_adapter, name))
    for name in ("RandomFeatureAttention", "FMMAttention")
]
OF_NNX = ("num_heads", "head_dim", "rngs")  # Linen learns the first two from its inputs.
OF_LINEN = ("parent", "name")


def arguments(adapter, leave_out):
    # NNX's metaclass hides the signature of the class.
    _, *parameters = inspect.signature(adapter.__init__).parameters.values()
    return [(one.name, one.default) for one in parameters if one.name not in leave_out]


def descriptions(adapter, leave_out):
    """Returns the entries of the section that describes the arguments of an adapter."""
    section = re.search(r"\n\n(?:Args|Attributes):\n(.*?)\n\n", inspect.getdoc(adapter), re.S)
    entries = re.split(r"\n(?=  \w)", section.group(1))
    split = (entry.strip().split(": ", 1) for entry in entries)
    return [(name, text) for name, text in split if name not in leave_out]


@pytest.mark.fast
@pytest.mark.parametrize(("of_nnx", "of_linen"), PAIRS)
def test_both_apis_take_the_same_arguments(of_nnx, of_linen):
    found = arguments(of_nnx, OF_NNX)
    assert found == arguments(of_linen, OF_LINEN)
    described = descriptions(of_nnx, OF_NNX)
    assert described == descriptions(of_linen, OF_LINEN)
    assert [name for name, _ in described] == [name for name, _ in found]
    fields = [one.name for one in dataclasses.fields(of_linen) if one.name not in OF_LINEN]
    assert fields == [name for name, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", ["positive", "calibrated"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_pairs_of_rows_give_the_attention_of_all_rows(api, feature_map, monkeypatch):
    options = {"feature_map": feature_map, "coupling": "cross_polytope", "norms": "pair"}
    x, seen = draw_tokens(2, 9), []
    of_pairs = flax_drawing.in_pairs

    def attend():
        if api == "nnx":
            return nnx_attention(**options)(x)
        module = linen_attention(**options)
        return module.apply(module.init(jax.random.key(0), x), x)

    def record(*arguments):
        seen.append(of_pairs(*arguments))
        return seen[-1]

    monkeypatch.setattr(flax_drawing, "in_pairs", record)
    found = attend()
    assert all(w.is_paired for w in seen)
    assert seen
    monkeypatch.setattr(flax_drawing, "in_pairs", lambda w, *_: w)
    np.testing.assert_allclose(found, attend(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_set_by_hand_are_all_read():
    adapter = nnx_attention(coupling="cross_polytope", norms="pair").attention_fn
    w = jax.random.normal(jax.random.key(5), get_value(adapter.projection).shape)
    adapter.projection = nnx_adapter.RandomProjection(w)
    q = draw_tokens(1, 5).reshape(1, 5, HEADS, WIDTH // HEADS)
    expected = simrf_jax.random_feature_attention(q, q, q, w)
    np.testing.assert_allclose(adapter(q, q, q), expected, rtol=1e-5, atol=1e-6)
