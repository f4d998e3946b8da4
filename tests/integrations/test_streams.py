"""Tests of the keys that adapters draw W from, of lost collections, and of representations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from tests.integrations.adapters import FEATURES, HEADS, WIDTH, linen_attention, tokens

pytestmark = pytest.mark.fast


def drawn_from(**streams):
    adapter = nnx_adapter.RandomFeatureAttention(1, 2, 3, coupling="iid", rngs=nnx.Rngs(**streams))
    return get_value(adapter.projection)


@pytest.mark.slow
def test_nnx_draws_from_features_or_the_default_stream_or_params():
    assert (drawn_from(params=0, dropout=1) == drawn_from(features=0)).all()
    assert (drawn_from(params=0, default=1) == drawn_from(features=1)).all()
    assert (drawn_from(params=0, default=1, features=2) == drawn_from(features=2)).all()
    rngs = nnx.Rngs(params=0, dropout=1)
    one = nnx_adapter.FMMAttention(1, 2, 3, 1, rngs=rngs)
    assert get_value(one.projections)[0].shape == (1, 3, 2)


def test_nnx_refuses_streams_without_a_key_to_draw_from():
    with pytest.raises(ValueError, match="features, a default stream or params, got dropout"):
        drawn_from(dropout=0)
    with pytest.raises(ValueError, match="got none"):
        drawn_from()
    nnx_adapter.RandomFeatureAttention(1, 2, None, feature_map="elu", rngs=nnx.Rngs(dropout=0))


LOST = (
    "{}: the variables lack the collection random_features, which holds W. A trainer that keeps "
    r"only init\(...\)\['params'\] loses it: keep the collection next to the parameters"
)


@pytest.mark.slow
def test_linen_says_where_the_projections_of_a_trainer_are_lost():
    module = linen_attention()
    variables = module.init(jax.random.key(0), tokens(2, 3))
    with pytest.raises(ValueError, match=LOST.format("attention_fn")):
        module.apply({"params": variables["params"]}, tokens(2, 3))
    with pytest.raises(ValueError, match=LOST.format("RandomFeatureAttention")):
        linen_adapter.RandomFeatureAttention(FEATURES).apply({}, *[jnp.ones((3, 2, 4))] * 3)
    with pytest.raises(ValueError, match=LOST.format("FMMAttention")):
        linen_adapter.FMMAttention(FEATURES, 2).apply({"params": {}}, *[jnp.ones((3, 2, 4))] * 3)


def test_linen_draws_where_the_collection_may_change():
    module = linen_attention()
    x = tokens(2, 3)
    variables = module.init(jax.random.key(0), x)
    _, drawn = module.apply(
        {"params": variables["params"]},
        x,
        mutable=["random_features"],
        rngs={"features": jax.random.key(1)},
    )
    [w] = jax.tree.leaves(drawn["random_features"])
    assert w.shape == (HEADS, FEATURES, WIDTH // HEADS)


def test_linen_says_that_a_scan_must_know_the_projections():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return linen_attention(parent=None)(x), None

    model = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    match = r'nn.scan does with variable_axes=\{"params": 0, "random_features": 0\}'
    with pytest.raises(ValueError, match=match):
        model.init(jax.random.key(0), tokens(2, 3), None)


DRAWN = "coupling='simplex', block='regular', rotation='haar', norms='chi'"
FAR = "coupling=['simplex', 'orthogonal'], block='regular', rotation='haar', norms='chi'"


def own_map(x, w):
    return x @ w.T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "features", "drawn"),
    [
        ({}, "feature_map='positive'", DRAWN),
        (
            {"feature_map": own_map, "is_causal": True, "rotation": "hadamard"},
            "feature_map='own_map'",
            DRAWN.replace("haar", "hadamard") + ", is_causal=True",
        ),
        (
            {"feature_map": "hyperbolic", "block": "square", "exact_bandwidth": 3},
            "feature_map='hyperbolic'",
            "coupling='orthogonal', block='square', rotation='haar', norms='chi', "
            "exact_bandwidth=3",
        ),
        ({"feature_map": "calibrated"}, "feature_map='calibrated'", DRAWN),
    ],
)
def test_representations_say_how_w_is_drawn(options, features, drawn):
    linen = linen_adapter.RandomFeatureAttention(6, **options)
    assert repr(linen) == f"RandomFeatureAttention(num_features=6, {features}, {drawn})"
    one = nnx_adapter.RandomFeatureAttention(2, 4, 6, rngs=nnx.Rngs(0), **options)
    sizes = "num_heads=2, head_dim=4, num_features=6"
    assert repr(one) == f"RandomFeatureAttention({sizes}, {features}, {drawn})"
    assert repr(linen) in repr(nn.MultiHeadDotProductAttention(2, attention_fn=linen))
    module = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=one, rngs=nnx.Rngs(0))
    assert repr(one) in repr(module)


@pytest.mark.slow
def test_representations_of_other_adapters():
    maps = ("positive", "trigonometric")
    linen = linen_adapter.FMMAttention(6, 2, feature_maps=maps, masks="packed")
    shown = f"bandwidth=2, feature_maps=['positive', 'trigonometric'], {FAR}"
    assert repr(linen) == f"FMMAttention(num_features=6, {shown}, masks='packed')"
    one = nnx_adapter.FMMAttention(2, 4, 6, 2, feature_maps=maps, masks="packed", rngs=nnx.Rngs(0))
    sizes = "num_heads=2, head_dim=4, num_features=[6, 6]"
    assert repr(one) == f"FMMAttention({sizes}, {shown}, masks='packed')"
    learned = nnx_adapter.RandomFeatureAttention(2, 4, 6, feature_map="learned", rngs=nnx.Rngs(0))
    assert repr(learned).endswith("num_features=6, feature_map='learned')")
    elu = nnx_adapter.RandomFeatureAttention(2, 4, None, feature_map="elu", rngs=nnx.Rngs(0))
    assert repr(elu) == "RandomFeatureAttention(num_heads=2, head_dim=4, feature_map='elu')"
    unknown = linen_adapter.RandomFeatureAttention(6, feature_map="cosine")
    assert "feature_map='cosine', coupling=None" in repr(unknown)


def call_nnx(*x, **options):
    return nnx_adapter.RandomFeatureAttention(2, 4, 6, rngs=nnx.Rngs(0))(*x, **options)


def call_linen(*x, **options):
    return linen_adapter.RandomFeatureAttention(6).init(jax.random.key(0), *x, **options)


@pytest.mark.parametrize("call", [call_nnx, call_linen])
def test_refused_dropout_names_what_to_use(call):
    x = np.ones((3, 2, 4))
    with pytest.raises(ValueError, match=r"drop out what it returns: y = nn.Dropout\(0.1\)\(y, "):
        call(x, x, x, dropout_rate=0.1, deterministic=False)
