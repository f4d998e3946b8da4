"""Attention that is replaced in the calls of a Linen model."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze

from simrf_jax.integrations import linen as adapters
from tests.tiers import slow_but

WIDTH, HEADS, LENGTH = 16, 4, 9


class Layer(nn.Module):
    options: FrozenDict

    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(HEADS, name="attention", **self.options)
        return x + attention(nn.LayerNorm()(x), mask=mask)


class Model(nn.Module):
    """Two layers of attention, made in a call and in ``setup``."""

    options: FrozenDict

    def setup(self):
        self.lower = Layer(self.options)
        self.upper = nn.MultiHeadDotProductAttention(HEADS, **self.options)

    def __call__(self, x, mask=None):
        return self.upper(self.lower(x, mask), mask=mask)


def model_with(**options):
    return Model(freeze(options))


@pytest.fixture(scope="module")
def x():
    return 2 * jax.random.normal(jax.random.key(1), (2, LENGTH, WIDTH))


@pytest.fixture(scope="module")
def params(x):
    return model_with().init(jax.random.key(0), x)["params"]


def variables_of(model, params, x, **options):
    return {**model.init(jax.random.key(2), x, **options), "params": params}


def test_every_layer_gets_a_projection_of_its_own(x, params):
    model = adapters.swap_attention(model_with(), 12)
    variables = model.init(jax.random.key(0), x)
    chex.assert_trees_all_equal(variables["params"], params)
    lower = variables["random_features"]["lower"]["attention"]["attention_fn"]["projection"]
    upper = variables["random_features"]["upper"]["attention_fn"]["projection"]
    assert lower.shape == upper.shape == (HEADS, 12, WIDTH // HEADS)
    assert not np.array_equal(*jax.tree.leaves((lower, upper)))
    assert model.swapped_model == model_with()


@pytest.mark.parametrize("is_causal", slow_but([True], [False, True]))
def test_a_band_of_all_tokens_leaves_the_model_as_it_is(x, params, is_causal):
    mask = nn.make_causal_mask(x[..., 0]) if is_causal else None
    model = adapters.swap_attention(model_with(), 12, exact_bandwidth=LENGTH, is_causal=is_causal)
    variables = variables_of(model, params, x, mask=mask)
    expected = model_with().apply({"params": params}, x, mask)
    chex.assert_trees_all_close(jax.jit(model.apply)(variables, x, mask), expected, atol=1e-5)
    other = variables_of(adapters.swap_attention(model_with(), 12), params, x)
    assert not np.allclose(adapters.swap_attention(model_with(), 12).apply(other, x), expected)


@pytest.mark.slow
def test_where_chooses_layers_and_swaps_compose(x, params):
    inner = adapters.swap_attention(model_with(), 12, where=lambda path, layer: path == "upper")
    variables = variables_of(inner, params, x)
    assert list(variables["random_features"]) == ["upper"]
    outer = adapters.swap_attention(inner, 20)
    variables = variables_of(outer, params, x)["random_features"]
    assert variables["lower"]["attention"]["attention_fn"]["projection"].shape[1] == 20
    assert variables["upper"]["attention_fn"]["projection"].shape[1] == 12


def test_a_swapped_model_is_calibrated_and_reported(x, params):
    expected = model_with().apply({"params": params}, x)
    errors = {}
    for feature_map in ("positive", "calibrated"):
        model = adapters.swap_attention(
            model_with(), 128, feature_map=feature_map, coupling="cross_polytope"
        )
        variables = variables_of(model, params, x)
        if feature_map == "calibrated":
            variables = adapters.calibrate(model, variables, [x])
        errors[feature_map] = np.square(model.apply(variables, x) - expected).mean()
    assert errors["calibrated"] < errors["positive"]
    report = adapters.attention_report(model, variables, x)
    assert list(report) == ["lower.attention.attention_fn", "upper.attention_fn"]


class Around(nn.Module):
    """A layer of attention in the call, and another module in a field."""

    module: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.module(x + nn.MultiHeadDotProductAttention(HEADS, name="inside")(x))


def test_layers_in_fields_have_the_paths_of_their_parameters(x):
    attention = nn.MultiHeadDotProductAttention(HEADS)
    model = nn.Sequential([nn.Dense(WIDTH), Around(Around(attention))])
    swapped = adapters.swap_attention(
        model, 12, where=lambda path, _: path == "layers_1.module.module"
    )
    variables = swapped.init(jax.random.key(0), x)
    expected = model.init(jax.random.key(0), x)["params"]
    chex.assert_trees_all_equal_shapes(variables["params"], expected)
    assert list(variables["random_features"]) == ["layers_1"]
    assert list(variables["random_features"]["layers_1"]) == ["module"]
    assert list(variables["random_features"]["layers_1"]["module"]) == ["module"]
    # The replacement does not take the name of a field of the model.
    adapters.swap_attention(Around(attention), 12).init(jax.random.key(0), x)


def test_a_swapped_model_is_part_of_another(x):
    class Twice(nn.Module):
        part: nn.Module

        def __call__(self, x):
            return self.part(self.part(x))

    inside = {"where": lambda path, _: path == "inside"}
    swapped = adapters.swap_attention(Around(nn.Dense(WIDTH)), 12, **inside)
    variables = swapped.init(jax.random.key(0), x)
    inside = {name: {"part": part} for name, part in variables.items()}
    found = jax.jit(Twice(swapped).apply)(inside, x)
    expected = swapped.apply(variables, swapped.apply(variables, x))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    made = Twice(swapped).init(jax.random.key(0), x)
    chex.assert_trees_all_equal_shapes(made, inside)


JittedLayer = nn.jit(Layer)


class TwoMethods(nn.Module):
    """A model with methods by which others call its parts."""

    def setup(self):
        self.below, self.above = (nn.MultiHeadDotProductAttention(HEADS) for _ in range(2))

    def encode(self, x):
        return self.below(x)

    def double(self, x):
        return 2 * x

    def decode(self, x, *, scale=1.0):
        return scale * self.above(x)

    def __call__(self, x):
        return self.decode(self.encode(x), scale=2.0)


class CallsMethods(nn.Module):
    """A model that calls the methods of a part."""

    part: nn.Module

    def __call__(self, x):
        return self.part.decode(self.part.encode(x), scale=2.0)


def test_other_methods_of_a_model_are_swapped_too(x):
    model = adapters.swap_attention(TwoMethods(), 12)
    variables = model.init(jax.random.key(0), x)
    encoded = model.apply(variables, x, method="encode")
    out = model.apply(variables, encoded, scale=2.0, method="decode")
    np.testing.assert_array_equal(out, model.apply(variables, x))
    exact = TwoMethods().apply({"params": variables["params"]}, x, method="encode")
    assert np.abs(encoded - exact).max() > 0.01
    of_part = model.init(jax.random.key(0), x, method="encode")
    assert [*of_part["random_features"]] == ["below"]
    np.testing.assert_array_equal(model.apply({}, x, method="double"), 2 * x)
    whole = CallsMethods(model)
    inside = whole.init(jax.random.key(0), x)
    inside = jax.tree.map(
        lambda _, new: new, inside, {k: {"part": v} for k, v in variables.items()}
    )
    np.testing.assert_array_equal(whole.apply(inside, x), out)
    with pytest.raises(AttributeError, match='no attribute "translate"'):
        model.apply(variables, x, method="translate")
    assert model.bind(variables).double(1) == 2
    with pytest.raises(ValueError, match="called by init or apply, or after bind"):
        model.encode(x)


class Jitted(nn.Module):
    """A layer that Flax compiles by itself."""

    @nn.compact
    def __call__(self, x):
        return JittedLayer(freeze({}), name="compiled")(x)


class Remat(nn.Module):
    """A model that is made in a call, swapped there, and recomputed for gradients."""

    swaps: bool = True

    @nn.compact
    def __call__(self, x):
        model = Around(nn.Dense(WIDTH), name="model")
        if self.swaps:
            model = adapters.swap_attention(model, 12, exact_bandwidth=LENGTH)
        return nn.remat(lambda model, x: model(x))(model, x)


def test_a_model_is_swapped_where_it_is_made(x):
    params = Remat(swaps=False).init(jax.random.key(0), x)["params"]
    variables = variables_of(Remat(), params, x)
    assert list(variables["random_features"]["model"]) == ["inside"]

    def loss(params, model):
        return jnp.mean(model.apply({**variables, "params": params}, x) ** 2)

    found, expected = (jax.grad(loss)(params, Remat(swaps=swaps)) for swaps in (True, False))
    chex.assert_trees_all_close(found, expected, atol=1e-4)


@pytest.mark.slow
def test_layers_in_nn_jit_are_those_of_the_swap(x):
    original = Jitted()
    params = original.init(jax.random.key(0), x)["params"]
    exact = original.apply({"params": params}, x)
    model = adapters.swap_attention(original, 12)
    variables = variables_of(model, params, x)
    found = model.apply(variables, x)
    assert not np.allclose(found, exact)
    np.testing.assert_array_equal(model.apply(variables, x), found)
    wide = adapters.swap_attention(original, 12, exact_bandwidth=LENGTH)
    np.testing.assert_allclose(wide.apply(variables, x), exact, atol=1e-5)
    np.testing.assert_array_equal(original.apply(variables, x), exact)


def test_a_part_keeps_its_own_swap(x):
    part = adapters.swap_attention(Around(nn.Dense(WIDTH)), 12)
    variables = adapters.swap_attention(Around(part), 20).init(jax.random.key(0), x)
    of_parts = variables["random_features"]
    assert of_parts["inside"]["attention_fn"]["projection"].shape[1] == 20
    assert of_parts["module"]["inside"]["attention_fn"]["projection"].shape[1] == 12


class Scanned(nn.Module):
    """Two layers in a scan, which recompute what they need for gradients."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(lambda layer, x: (layer(x), None)),
            variable_axes={"params": 0, "random_features": 0},
            split_rngs={"params": True},
            length=2,
        )
        return layers(Layer(freeze({})), x)[0]


@pytest.mark.slow
def test_layers_in_a_scan(x):
    params = Scanned().init(jax.random.key(0), x)["params"]
    model = adapters.swap_attention(Scanned(), 12, exact_bandwidth=LENGTH)
    variables = variables_of(model, params, x)
    (w,) = jax.tree.leaves(variables["random_features"])
    assert w.shape == (2, HEADS, 12, WIDTH // HEADS)
    assert not np.array_equal(*w)

    def loss(model, params, variables):
        return jnp.mean(model.apply({**variables, "params": params}, x) ** 2)

    found = jax.jit(jax.grad(functools.partial(loss, model)))(params, variables)
    expected = jax.grad(functools.partial(loss, Scanned()))(params, {})
    chex.assert_trees_all_close(found, expected, atol=1e-4)


def test_refuses(x):
    swap = functools.partial(adapters.swap_attention, num_features=12)
    with pytest.raises(TypeError, match="argument 'bandwidth'; did you mean exact_bandwidth"):
        swap(model_with(), bandwidth=3)

    def call(model):
        return jax.eval_shape(lambda: model.init(jax.random.key(0), x))

    rotated = functools.partial(nn.dot_product_attention, broadcast_dropout=False)
    with pytest.raises(ValueError, match=r"layer lower\.attention must attend by nn\.dot"):
        call(swap(model_with(**{"attention_fn": rotated})))
    with pytest.raises(ValueError, match=r"layer lower\.attention must have decode=False"):
        call(swap(model_with(**{"decode": True})))
    with pytest.raises(ValueError, match=r"must call an nn\.MultiHeadDotProduct.*, got none"):
        call(swap(nn.Dense(3)))
    with pytest.raises(TypeError, match=r"must be a flax\.linen\.Module, got Linear; for NNX"):
        swap(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"where is None or returns True, got none"):
        call(swap(model_with(), where=lambda path, layer: False))
    with pytest.raises(TypeError, match=r"where must be a function .*, got 'lower'"):
        swap(model_with(), where="lower")
    for option, value in {
        "feature_map": "calbrated",
        "coupling": "simplx",
        "norms": "radua",
        "implementation": "palas",
        "exact_bandwidth": -1,
        "masks": "all",
    }.items():
        with pytest.raises(ValueError, match=f"{option} must be"):
            swap(model_with(), **{option: value})
    with pytest.raises(ValueError, match="num_features must be at least 1, got -3"):
        swap(model_with(), num_features=-3)
    by_hand = adapters.RandomFeatureAttention(12, parent=None)
    for layer in (
        nn.MultiHeadDotProductAttention(num_heads=4),
        nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=by_hand),
        nn.SelfAttention(num_heads=4),
    ):
        with pytest.raises(ValueError, match=r"sow_weights=True: .* none to sow"):
            swap(layer).init(jax.random.key(0), x, sow_weights=True)
    for name in ("parent", "name"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            swap(model_with(), **{name: None})
    with pytest.raises(ValueError, match=r"num_weights is for .*, got 4 for 'calibrated'\.$"):
        swap(model_with(), feature_map="calibrated", num_weights=4)


def test_variables_that_lost_their_boxes_are_refused(x):
    model = adapters.swap_attention(model_with(), 12)
    variables = model.init(jax.random.key(0), x)
    boxes, structure = jax.tree.flatten(
        variables["random_features"], is_leaf=lambda node: hasattr(node, "draw_options")
    )
    dictionaries = jax.tree.unflatten(structure, [{"value": box.value} for box in boxes])
    plain = {**variables, "random_features": dictionaries}
    with pytest.raises(ValueError, match=r"projection must be the entry .* got a dictionary"):
        model.apply(plain, x)
    model = adapters.swap_attention(model_with(), 12, feature_map="calibrated")
    variables = model.init(jax.random.key(0), x)
    maps, structure = jax.tree.flatten(
        variables["calibration"], is_leaf=lambda node: hasattr(node, "variances")
    )
    plain = {**variables, "calibration": jax.tree.unflatten(structure, [vars(one) for one in maps])}
    for call in (model.apply, lambda variables, x: adapters.calibrate(model, variables, [x])):
        with pytest.raises(ValueError, match=r"feature_map must be the entry .* got a dictionary"):
            call(plain, x)
