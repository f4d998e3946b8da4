"""Trained Linen models whose attention is replaced in one call."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze

from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.linearization import layer_choice
from simrf_jax.integrations import linen
from simrf_jax.integrations import nnx as nnx_adapters

WIDTH, HEADS, LENGTH = 16, 2, 12
SMALL = {"num_features": (4,), "exact_bandwidth": (1,), "exact_keys": (2,)}
KERNEL_INIT = nn.initializers.normal(0.35)


class Model(nn.Module):
    """Two layers of attention whose weights are far from uniform."""

    is_causal: bool = False

    def setup(self):
        options = {"num_heads": HEADS, "kernel_init": KERNEL_INIT}
        self.lower, self.upper = (nn.MultiHeadDotProductAttention(**options) for _ in range(2))

    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0]) if self.is_causal else None
        x = x + self.lower(x, mask=mask)
        return x + self.upper(x / 2, mask=mask)


class OfNNX(nnx.Module):
    """The same model in NNX."""

    def __init__(self, params):
        rngs = nnx.Rngs(0)
        self.lower, self.upper = (
            nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs) for _ in range(2)
        )
        for name in ("lower", "upper"):
            for part in ("query", "key", "value", "out"):
                for array in ("kernel", "bias"):
                    getattr(getattr(getattr(self, name), part), array)[...] = params[name][part][
                        array
                    ]

    def __call__(self, x):
        x = x + self.lower(x)
        return x + self.upper(x / 2)


def batches(seed=1):
    return list(jax.random.normal(jax.random.key(seed), (2, 3, LENGTH, WIDTH)))


def trained(**options):
    model = Model(**options)
    return model, model.init(jax.random.key(0), batches()[0])


def zeros_of(model):
    """Returns variables for calls that are refused, which are not worth a draw."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), batches()[0])
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def linearize(model, variables, held_out=None, **options):
    held_out = batches(2) if held_out is None else held_out
    options = {"relative_error": 10.0, "key": jax.random.key(3)} | SMALL | options
    return linen.linearize(model, variables, batches(), held_out, **options)


def test_the_choice_is_that_of_nnx():
    model, variables = trained()
    of_nnx = OfNNX(variables["params"])
    np.testing.assert_allclose(
        of_nnx(batches()[0]), model.apply(variables, batches()[0]), rtol=1e-4, atol=1e-5
    )
    # All keys exactly: then W, which differs, has no part in the result but for rounding.
    options = {"exact_keys": (LENGTH,), "relative_error": 1e-6}
    expected = nnx_adapters.linearize(
        of_nnx, batches(), batches(2), rngs=nnx.Rngs(0), **SMALL | options
    )
    found = linearize(model, variables, **options)
    assert list(found.layers) == list(expected.layers) == ["lower", "upper"]
    for path in found.layers:
        assert found.layers[path].operations == expected.layers[path].operations
        assert found.layers[path].is_reached
    assert found.operations == expected.operations
    fitted = found.variables["calibration"]["lower"]["attention_fn"]["feature_map"]
    of_layer = get_value(of_nnx.lower.attention_fn.feature_map)
    chex.assert_trees_all_close(fitted, of_layer, rtol=1e-3, atol=1e-4)


class Around(nn.Module):
    """A layer of attention in the call, with the name of an adapter, and another in a field."""

    field: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.field(x + nn.MultiHeadDotProductAttention(HEADS, name="attention_fn")(x))


@pytest.mark.slow
def test_layers_in_fields_are_converted():
    model = Around(nn.MultiHeadDotProductAttention(HEADS))
    variables = model.init(jax.random.key(0), batches()[0])
    found = linearize(model, variables)
    assert list(found.layers) == ["attention_fn", "field"]
    made = jax.eval_shape(found.model.init, jax.random.key(0), batches()[0])
    chex.assert_trees_all_equal_shapes(made, found.variables)


@pytest.mark.parametrize(("is_causal", "num_steps"), [(True, 0), (False, 3)])
def test_the_variables_are_those_of_the_report(is_causal, num_steps):
    model, variables = trained(is_causal=is_causal)
    before = jax.tree.map(np.array, variables)
    options = {"is_causal": True} if is_causal else {}
    if num_steps:
        options |= {"num_steps": num_steps, "optimizer": optax.adam(0.1), "relative_error": 1e-6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # The error is not reached.
        report = linearize(model, variables, **options)
    chex.assert_trees_all_equal(variables, before)
    expected = jax.eval_shape(report.model.init, jax.random.key(0), batches()[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(report.variables, expected)
    assert jax.tree.structure(report.variables) == jax.tree.structure(expected)
    # The error of a layer's outputs, whose inputs are those of softmax attention.
    choice, errors = report.layers["lower"], []
    for x in batches(2):
        updates = report.model.apply(report.variables, x, mutable=["attention_calls"])[1]
        (seen,) = updates["attention_calls"]["lower"]["attention_fn"]["calls"]
        call = seen.request.call
        assert seen.mechanism.exact_bandwidth == choice.exact_bandwidth == 1
        out = np.asarray(
            seen.mechanism.attend(call.query, call.key, call.value, is_causal=is_causal), np.float64
        )
        exact = np.asarray(
            jax.nn.dot_product_attention(call.query, call.key, call.value, is_causal=is_causal),
            np.float64,
        )
        ratio = ((out - exact) ** 2).sum((1, 3)) / (exact**2).sum((1, 3))
        errors += ratio.mean(-1).tolist()
    np.testing.assert_allclose(np.mean(errors), choice.relative_error, rtol=1e-4)
    assert choice.is_learned == bool(num_steps)
    after, exact = (
        np.concatenate([one.apply(own, x) for x in batches(2)]).astype(np.float64)
        for one, own in ((report.model, report.variables), (model, variables))
    )
    error = ((after - exact) ** 2).sum() / (exact**2).sum()
    np.testing.assert_allclose(report.output_error, error, rtol=1e-4)
    assert "lower" in str(report)
    if num_steps:  # Of what is learned, a later call without learning keeps nothing.
        assert "attention_fn" in report.variables["params"]["lower"]
        again = linearize(model, report.variables)
        assert not again.layers["lower"].is_learned
        assert "attention_fn" not in again.variables["params"]["lower"]


@pytest.mark.slow
def test_a_second_call_reads_what_the_first_has_kept(tmp_path, monkeypatch):
    model, variables = trained()
    first = linearize(model, variables, folder=tmp_path)
    files = len(list(tmp_path.iterdir()))
    monkeypatch.setattr(layer_choice, "_measure", lambda *args: pytest.fail("Called."))
    again = linearize(model, freeze(variables), folder=tmp_path)
    assert jax.tree.structure(first.variables) == jax.tree.structure(again.variables)
    assert len(list(tmp_path.iterdir())) == files == 2
    chex.assert_trees_all_equal(first.variables, again.variables)
    assert repr(first) == repr(again)


@pytest.mark.slow
def test_one_layer_with_one_w_for_all_heads():
    model, variables = trained()
    report = linearize(model, variables, shared=True, where=lambda path, layer: path == "upper")
    assert list(report.layers) == ["upper"]
    assert list(report.variables["random_features"]) == ["upper"]
    w = report.variables["random_features"]["upper"]["attention_fn"]["projection"]
    assert w.shape == (4, WIDTH // HEADS)
    out = jax.jit(report.model.apply)(report.variables, batches()[0])
    chex.assert_trees_all_close(out, report.model.apply(report.variables, batches()[0]), rtol=1e-4)


@pytest.mark.slow
def test_layers_that_have_an_adapter_keep_it():
    model, variables = trained()
    swapped = linen.swap_attention(model, 4, where=lambda path, layer: path == "upper")
    variables = {**swapped.init(jax.random.key(1), batches()[0]), **variables}
    report = linearize(swapped, variables)
    assert list(report.layers) == ["lower"]
    upper = report.variables["random_features"]["upper"]
    chex.assert_trees_all_equal(upper, variables["random_features"]["upper"])
    assert report.model.apply(report.variables, batches()[0]).shape == batches()[0].shape


class Scanned(nn.Module):
    """Attention inside nn.scan."""

    has_calls: bool

    @nn.compact
    def __call__(self, x):
        layer = functools.partial(nn.MultiHeadDotProductAttention, HEADS)
        axes = {"params": 0} | ({"recorded_calls": 0} if self.has_calls else {})
        body = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes=axes,
            split_rngs={"params": True},
            length=2,
        )
        return body(layer(name="layer"), x, None)[0]


class Named(nn.Module):
    """Attention of some name, which only long sequences get."""

    name_of_layer: str

    @nn.compact
    def __call__(self, x):
        layer = nn.MultiHeadDotProductAttention(num_heads=HEADS, name=self.name_of_layer)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(x)
        return layer(x) if x.shape[1] == LENGTH else x


def linen_apply(model, variables, batch, options):
    """Returns the output alone, whatever the options."""
    found = model.apply(variables, batch, **options)
    return found[0] if options else found


def test_refusals():
    model = Model()
    refused = functools.partial(linearize, model, zeros_of(model))
    with pytest.raises(ValueError, match="needs a relative_error to reach, or a budget"):
        refused(relative_error=None)
    with pytest.raises(TypeError, match="linearize chooses feature_map itself, got 'elu'"):
        refused(feature_map="elu")
    with pytest.raises(TypeError, match="mask"):
        refused(mask="factored")
    with pytest.raises(TypeError, match="must be an iterable of batches"):
        refused(jnp.zeros((2, LENGTH, WIDTH)))
    with pytest.raises(ValueError, match="where is None or returns True, got none"):
        refused(where=lambda path, layer: False)
    with pytest.raises(ValueError, match="held_out must have two sequences or more, got none"):
        refused([])
    swapped = linen.swap_attention(model, 4)
    with pytest.raises(ValueError, match="that has no adapter and for which where"):
        linearize(swapped, zeros_of(swapped))
    with pytest.raises(TypeError, match=r"for NNX models there is .*nnx\.linearize"):
        linearize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {})
    with pytest.raises(TypeError, match="key"):
        refused(key=3)
    with pytest.raises(ValueError, match="call must return the output and the changed coll"):
        refused(call=lambda model, variables, batch, **o: linen_apply(model, variables, batch, o))
    for name in ("a.b", "itself"):
        named = Named(name)
        with pytest.raises(ValueError, match=f"dot in its name or be called itself, got {name}"):
            linearize(named, zeros_of(named))
    named = Named("last")
    short = [x[:, :-1] for x in batches(2)]
    with pytest.raises(ValueError, match="must call the same layers, got last in some only"):
        linearize(named, zeros_of(named), short)
    with pytest.raises(ValueError, match="call must pass its keyword mutable on"):
        refused(call=lambda model, variables, batch, **_: model.apply(variables, batch))
    for has_calls, reason in ((False, "cannot be recorded"), (True, "got a stack of nn.scan")):
        scanned = Scanned(has_calls)
        with pytest.raises(ValueError, match=reason):
            linearize(scanned, zeros_of(scanned))
