"""Attention that is replaced in a model in memory, and put back."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from simrf_jax import ExactKeys
from simrf_jax.integrations import nnx as adapters

WIDTH, HEADS = 16, 4


class Layer(nnx.Module):
    def __init__(self, rngs, **options):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, **options)

    def __call__(self, x, mask=None):
        return x + self.attention(self.norm(x), mask=mask)


class Model(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.lower, self.upper = Layer(rngs, **options), Layer(rngs, **options)

    def __call__(self, x, mask=None):
        return self.upper(self.lower(x, mask), mask)

    @property
    def attentions(self):
        return [self.lower.attention, self.upper.attention]


@nnx.jit
def call(model, x, mask=None):
    return model(x, mask)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 9, WIDTH))


def test_every_layer_gets_a_projection_of_its_own(x):
    model, original = Model(), Model()
    swap = adapters.swap_attention(model, 12, rngs=nnx.Rngs(0))
    assert list(swap.layers) == ["lower.attention", "upper.attention"]
    kinds = {type(layer.attention_fn) for layer in model.attentions}
    assert kinds == {adapters.RandomFeatureAttention}
    w = jax.tree.leaves(nnx.state(model, adapters.RandomProjection))
    assert [each.shape for each in w] == [(HEADS, 12, 4)] * 2
    assert not np.array_equal(*w)
    chex.assert_trees_all_equal(nnx.state(model, nnx.Param), nnx.state(original, nnx.Param))


def test_a_band_of_all_tokens_leaves_the_model_as_it_is(x):
    model = Model()
    before = call(model, x)
    adapters.swap_attention(model, 12, exact_bandwidth=9, rngs=nnx.Rngs(0))
    chex.assert_trees_all_close(call(model, x), before, atol=1e-5)


def test_undo_gives_the_attention_back(x):
    model = Model()
    before = call(model, x)
    first = adapters.swap_attention(model, 12, rngs=nnx.Rngs(0))
    swapped = call(model, x)
    second = adapters.swap_attention(model, 20, feature_map="hyperbolic", rngs=nnx.Rngs(1))
    assert not np.allclose(call(model, x), swapped)
    with pytest.raises(ValueError, match=r"must still have the attention of the swap, .* undo"):
        first.undo()
    second.undo()
    chex.assert_trees_all_equal(call(model, x), swapped)
    first.undo()
    chex.assert_trees_all_equal(call(model, x), before)
    chex.assert_trees_all_close(call(model, x), before, atol=1e-5)
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(Model()))


def test_where_chooses_layers(x):
    model = Model()
    swap = adapters.swap_attention(
        model, 12, where=lambda path, layer: path.startswith("upper"), rngs=nnx.Rngs(0)
    )
    assert list(swap.layers) == ["upper.attention"]
    line = f"  upper.attention: dot_product_attention -> {model.upper.attention.attention_fn!r}"
    assert repr(swap) == f"Swap of attention:\n{line}"
    assert model.lower.attention.attention_fn is nnx.dot_product_attention


GROUPED = "num_kv_heads" in inspect.signature(nnx.MultiHeadAttention.__init__).parameters


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}] if GROUPED else [{}])
def test_causal_models_and_grouped_queries(x, options):
    model = Model(**options)
    mask = nnx.make_causal_mask(x[..., 0])
    before = call(model, x, mask)
    for exact in ({"exact_bandwidth": 9}, {"exact_keys": ExactKeys(9, by="score")}):
        swap = adapters.swap_attention(model, 12, is_causal=True, rngs=nnx.Rngs(0), **exact)
        chex.assert_trees_all_close(call(model, x, mask), before, atol=1e-5)
        swap.undo()


def test_a_swapped_model_is_calibrated(x):
    model = Model()
    expected = call(model, x)
    errors = []
    for feature_map in ("positive", "calibrated"):
        swap = adapters.swap_attention(
            model, 128, feature_map=feature_map, coupling="cross_polytope", rngs=nnx.Rngs(0)
        )
        if feature_map == "calibrated":
            adapters.calibrate(model, [x])
        errors.append(np.square(call(model, x) - expected).mean())
        swap.undo()
    assert errors[1] < errors[0]


class Reversed(nnx.Module):
    """Attention that changes queries and keys first, as rotary positions do."""

    def __init__(self, attend):
        self.attend = attend

    def __call__(self, query, key, value, **keywords):
        return self.attend(query[..., ::-1], 2 * key, value, **keywords)


@pytest.mark.slow
def test_what_wraps_attention_wraps_the_adapter(x):
    model = Model(attention_fn=Reversed(nnx.dot_product_attention))
    before = call(model, x)
    assert not np.allclose(before, call(Model(), x))
    swap = adapters.swap_attention(
        model, 12, wrap=Reversed, exact_bandwidth=9, feature_map="calibrated", rngs=nnx.Rngs(0)
    )
    assert {type(layer.attention_fn) for layer in model.attentions} == {Reversed}
    adapters.calibrate(model, [x])
    chex.assert_trees_all_close(call(model, x), before, atol=1e-5)
    swap.undo()
    chex.assert_trees_all_equal(call(model, x), before)
    with pytest.raises(TypeError, match=r"wrap must return an nnx\.Module, .* lower\.attention"):
        adapters.swap_attention(model, 12, wrap=lambda adapter: adapter.__call__, rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(call(model, x), before)


def test_refusals_leave_the_model_as_it_was(x):
    rotated = functools.partial(nnx.dot_product_attention, broadcast_dropout=False)
    model = Model()
    model.upper.attention.attention_fn = rotated
    swap = functools.partial(adapters.swap_attention, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layer upper\.attention must attend by nnx\.dot"):
        swap(model, 12)
    with pytest.raises(ValueError, match="where asked, got lower"):
        swap(model, 12, where=lambda path, layer: False)
    with pytest.raises(ValueError, match=r"must have an nnx\.MultiHeadAttention, got none"):
        swap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 12)
    with pytest.raises(TypeError, match=r"must be an nnx\.Module, got .* Dense; for Linen .*linen"):
        swap(nn.Dense(3), 12)
    with pytest.raises(ValueError, match="coupling must be one of"):
        swap(Model(), 12, coupling="simplx")
    with pytest.raises(TypeError, match="argument 'bandwidth'; did you mean exact_bandwidth"):
        swap(Model(), 12, bandwidth=3)
    with pytest.raises(ValueError, match=r"got dropout_rate=0\.1: .* layer\.dropout_rate = 0\."):
        swap(Model(dropout_rate=0.1), 12)
    decoding = Model()
    decoding.lower.attention.decode = True
    with pytest.raises(ValueError, match=r"lower\.attention must have decode=False, got True"):
        swap(decoding, 12)
    with pytest.raises(TypeError, match=r"where must be a function .*, got 'lower'"):
        swap(Model(), 12, where="lower")
    functions = [layer.attention_fn for layer in model.attentions]
    assert functions == [nnx.dot_product_attention, rotated]


def test_a_model_that_drops_nothing_out_is_swapped_and_raises_once_it_does(x):
    model = Model(dropout_rate=0.1)
    model.eval()
    adapters.swap_attention(model, 12, rngs=nnx.Rngs(0))
    assert np.isfinite(model(x)).all()
    model.train()
    with pytest.raises(ValueError, match=r"dropout_rate=0\.1: .* cannot drop them out"):
        model(x)


def test_stacked_layers_are_refused():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return Layer(nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match="attention must be one layer, got a stack with keys"):
        adapters.swap_attention(stack, 12, rngs=nnx.Rngs(0))
    assert jnp.ndim(stack.norm.scale) == 2
