"""Tests of the adapters inside Flax's own attention modules, in NNX and in Linen."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from simrf_jax import (
    ExactKeys,
    draw_projection,
    project,
    random_feature_attention,
    redraw_projections,
)
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomProjection
from tests.integrations.adapters import (
    FEATURES,
    HEADS,
    WIDTH,
    copy_to_linen,
    linen_attention,
    nnx_attention,
    random_features,
    tokens,
)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, "padding"])
@pytest.mark.parametrize("shared", [False, True])
def test_both_flax_apis_compute_the_same(mask, shared):
    x = tokens(2, 9)
    if mask:
        mask = jnp.arange(9)[None, None, None] < jnp.array([9, 4])[:, None, None, None]
    module = nnx_attention(shared=shared)
    variables = copy_to_linen(module)
    linen = linen_attention(shared=shared).apply(variables, x, mask=mask)
    np.testing.assert_allclose(module(x, mask=mask), linen, rtol=1e-5, atol=1e-6)


def squares(x, w):
    return jnp.square(project(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", ["hyperbolic", "relu", squares])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex_plus"])
def test_both_apis_take_any_map_coupling_and_rotation(feature_map, coupling):
    x = tokens(2, 9)
    options = {"feature_map": feature_map, "coupling": coupling, "rotation": "hadamard"}
    module = nnx_attention(**options)
    linen = linen_attention(**options).apply(copy_to_linen(module), x)
    np.testing.assert_allclose(module(x), linen, rtol=1e-4, atol=1e-5)
    variables = linen_attention(**options).init(jax.random.key(0), x)
    [w] = jax.tree.leaves(variables["random_features"])
    assert w.shape == (HEADS, FEATURES, WIDTH // HEADS)


def test_nnx_computes_the_attention_of_its_projections():
    x = tokens(2, 9)
    module = nnx_attention()
    q, k, v = module.query(x), module.key(x), module.value(x)
    w = module.attention_fn.projection[...]
    assert w.shape == (HEADS, FEATURES, WIDTH // HEADS)
    expected = module.out(random_feature_attention(q, k, v, w))
    np.testing.assert_allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def test_an_existing_model_takes_an_adapter_as_data():
    x = tokens(2, 9)
    made, adapter = nnx_attention(), nnx_attention(seed=1).attention_fn
    other = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    other.attention_fn = nnx.data(adapter)
    made.attention_fn = adapter  # Data already: the plain line works.
    nnx.update(made, nnx.state(other))
    expected = made(x)
    graph, state = nnx.split(other)
    assert "attention_fn" in state
    for out in (other(x), nnx.merge(graph, state)(x), nnx.jit(lambda model: model(x))(other)):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_float_masks_of_flax_are_read_as_masks():
    x = tokens(2, 9)
    visible = jnp.arange(9)[None] < jnp.array([9, 4])[:, None]
    mask = nnx.make_attention_mask(jnp.ones((2, 1)), visible)
    assert mask.dtype == jnp.float32
    module = nnx_attention()
    np.testing.assert_array_equal(module(x, mask=mask), module(x, mask=mask.astype(bool)))
    assert not np.allclose(module(x, mask=mask)[1], module(x)[1])


@pytest.mark.slow
def test_grouped_queries_and_cross_attention_in_nnx():
    adapter = nnx_adapter.RandomFeatureAttention(2, 8, FEATURES, rngs=nnx.Rngs(0))
    module = nnx.MultiHeadAttention(
        HEADS, WIDTH, num_kv_heads=2, decode=False, attention_fn=adapter, rngs=nnx.Rngs(1)
    )
    assert module(tokens(3, 5), tokens(3, 9)).shape == (3, 5, WIDTH)


def test_bfloat16_compute_keeps_the_projection_in_float32():
    module = nnx_attention(attention={"dtype": jnp.bfloat16})
    assert module(tokens(2, 9)).dtype == jnp.bfloat16
    assert module.attention_fn.projection[...].dtype == jnp.float32


@pytest.mark.slow
def test_nnx_projection_is_state_but_no_parameter():
    module = nnx_attention()
    state = nnx.state(module, nnx.Param)
    assert "attention_fn" not in state
    [leaf] = jax.tree.leaves(nnx.state(module, RandomProjection))
    assert leaf.shape == (HEADS, FEATURES, WIDTH // HEADS)
    gradient = nnx.grad(lambda m: m(tokens(1, 5)).sum())(module)
    assert jax.tree.structure(gradient) == jax.tree.structure(state)


def test_nnx_projection_survives_split_and_merge_and_is_no_constant():
    module = nnx_attention()
    x = tokens(1, 5)
    graphdef, params, projections = nnx.split(module, nnx.Param, RandomProjection)
    apply = jax.jit(lambda p, r, x: nnx.merge(graphdef, p, r)(x))
    before = apply(params, projections, x)
    np.testing.assert_allclose(before, module(x), rtol=1e-5, atol=1e-6)
    after = apply(params, redraw_projections(jax.random.key(9), projections), x)
    assert not np.allclose(before, after, rtol=1e-3)


def test_nnx_model_is_redrawn_in_place():
    module = nnx_attention()
    before = module.attention_fn.projection[...]
    state = nnx.state(module, RandomProjection)
    nnx.update(module, redraw_projections(jax.random.key(9), state))
    after = module.attention_fn.projection[...]
    assert after.shape == before.shape
    assert float(jnp.abs(after - before).min()) > 0
    # Head 1 of layer 0.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), 0), 1)
    np.testing.assert_allclose(after[1], draw_projection(key, FEATURES, 8), rtol=1e-5, atol=1e-6)


class Linen(nn.Module):
    """Model of two layers whose adapters are made inline."""

    parentless: bool

    @nn.compact
    def __call__(self, x):
        options = {"parent": None} if self.parentless else {}
        for _ in range(2):
            adapter = linen_adapter.RandomFeatureAttention(FEATURES, **options)
            x = nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("parentless", [True, False])
def test_linen_layers_have_projections_of_their_own(parentless):
    x = tokens(2, 9)
    model = Linen(parentless)
    init = jax.jit(model.init)
    variables = init({"params": jax.random.key(0), "features": jax.random.key(1)}, x)
    collection = variables["random_features"]
    if parentless:
        assert collection.keys() == {
            "MultiHeadDotProductAttention_0",
            "MultiHeadDotProductAttention_1",
        }
    first, second = jax.tree.leaves(collection)
    assert first.shape == (HEADS, FEATURES, WIDTH // HEADS)
    assert float(jnp.abs(first - second).min()) > 0
    assert float(jnp.abs(first[0] - first[1]).min()) > 0
    before = model.apply(variables, x)
    redrawn = redraw_projections(jax.random.key(5), collection)
    assert not np.allclose(before, model.apply({**variables, "random_features": redrawn}, x))


def test_linen_accepts_raw_keys_and_a_single_stream():
    variables = linen_attention().init(jax.random.PRNGKey(0), tokens(2, 9))
    assert jax.tree.leaves(variables["random_features"])[0].shape == (HEADS, FEATURES, 8)


def test_linen_projection_is_no_parameter():
    variables = linen_attention().init(jax.random.key(0), tokens(2, 9))
    assert variables.keys() == {"params", "random_features"}
    assert variables["params"].keys() == {"query", "key", "value", "out"}


def call_nnx(*, call=None, attention=None, **options):
    return nnx_attention(attention=attention, **options)(tokens(2, 9), **(call or {}))


def call_linen(*, call=None, attention=None, **options):
    module = linen_attention(attention=attention, **options)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return module.init(rngs, tokens(2, 9), **(call or {}))


@pytest.mark.parametrize("call", [call_nnx, call_linen])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"call": {"mask": nn.make_causal_mask(jnp.ones((2, 9)))}},
            "What works: is_causal=True for a c",
        ),
        ({"call": {"sow_weights": True}}, "sow_weights=True: .* there are none to sow"),
        (
            {"attention": {"dropout_rate": 0.1}, "call": {"deterministic": False}},
            "dropout_rate=0.1: .* cannot drop them out",
        ),
        ({"coupling": "simplx"}, "coupling must be one of"),
        ({"block": "round"}, "block must be one of"),
        ({"rotation": "qr"}, "rotation must be one of"),
        ({"feature_map": "cosine"}, "feature_map must be one of .*'calibrated', 'learned', got"),
        ({"feature_map": "clustered_hybrid"}, "takes the centers of clusters"),
        ({"num_weights": 4}, "num_weights is for angular_hybrid and gaussian_hybrid, got 4"),
        ({"exact_bandwidth": -1}, "exact_bandwidth must be at least 0, got -1"),
        ({"exact_keys": 0}, "exact_keys must be at least 1, got 0"),
        ({"exact_keys": 2, "feature_map": "relu"}, "exact_keys takes a feature map that estimates"),
        ({"exact_keys": 2, "is_causal": True}, "exact_keys=2 chooses keys by all queries"),
        (
            {"exact_bandwidth": 2, "feature_map": "relu"},
            "exact_bandwidth takes a feature map that estimates",
        ),
    ],
)
def test_refuses(call, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(**arguments)


def test_linen_refuses_einsums_of_ones_own():
    with pytest.raises(ValueError, match=r"qk_attn_weights_einsum_cls .* replace contractions"):
        call_linen(
            attention={
                "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
                "attn_weights_value_einsum_cls": lambda: jnp.einsum,
            }
        )


@pytest.mark.slow
def test_linen_layers_under_remat_and_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            adapter = linen_adapter.RandomFeatureAttention(FEATURES, parent=None)
            return x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)(x), None

    axes = {"params": 0, "random_features": 0}
    rngs = {"params": True, "features": True}
    model = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs=rngs, length=3)()
    x = tokens(2, 9)
    variables = model.init({"params": jax.random.key(0), "features": jax.random.key(1)}, x, None)
    [w] = jax.tree.leaves(variables["random_features"])
    assert w.shape == (3, HEADS, FEATURES, WIDTH // HEADS)
    assert float(jnp.abs(w[0] - w[1]).min()) > 0
    gradient = jax.grad(lambda x: model.apply(variables, x, None)[0].sum())(x)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_both_apis_are_causal():
    x = tokens(2, 9)
    module = nnx_attention()
    variables = copy_to_linen(module)
    linen = linen_attention(is_causal=True)
    out = linen.apply(variables, x)
    np.testing.assert_allclose(module(x, is_causal=True), out, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(nnx_attention(is_causal=True)(x), module(x, is_causal=True))
    changed = linen.apply(variables, x.at[:, 6:].set(7.0))
    np.testing.assert_array_equal(changed[:, :6], out[:, :6])
    assert (changed[:, 6:] != out[:, 6:]).any()


@pytest.mark.parametrize("call", [call_nnx, call_linen])
def test_dropout_that_is_off_is_no_dropout(call):
    call(attention={"dropout_rate": 0.1}, call={"deterministic": True})


@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize(
    "options",
    [
        {"exact_keys": 3},
        {"exact_keys": (0, -1), "is_causal": True},
        {"exact_keys": ExactKeys(3, by="score"), "is_causal": True},
    ],
)
def test_exact_keys_are_those_of_the_function(api, options):
    both = random_features(4, 8, **options)
    q, k, v = jax.random.normal(jax.random.key(3), (3, 2, 9, 4, 8))
    expected = both.function(q, k, v, **options)
    chex.assert_trees_all_close(both.calls()[api](q, k, v), expected, atol=1e-6)


def test_a_bandwidth_may_be_any_integer():
    adapter = nnx_adapter.RandomFeatureAttention(
        2, 8, 5, exact_bandwidth=np.array(2), rngs=nnx.Rngs(0)
    )
    x = jnp.ones((3, 2, 8))
    np.testing.assert_allclose(nnx.jit(lambda adapter: adapter(x, x, x))(adapter), x, rtol=1e-6)
