import functools
import logging
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import linen as nn
from flax import nnx

import simrf_jax
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.calibration.fit import turn_rows
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_attention import Request
from simrf_jax._src.integrations.flax_versions import get_value, view
from simrf_jax.integrations import linen as linen_adapters
from simrf_jax.integrations import nnx as nnx_adapters
from tests.tiers import slow_but

HEADS, DIM, WIDTH = 2, 4, 8


def inputs(batch=2, length=30, seed=0):
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, WIDTH + 1) ** -0.7
    return (rng.normal(size=(batch, length, WIDTH)) * spectrum * 4 + 0.5).astype(np.float32)


BATCHES = [inputs(seed=seed) for seed in range(3)]


def nnx_attention(**options):
    rngs = nnx.Rngs(0)
    options = {"feature_map": "calibrated"} | options
    adapter = nnx_adapters.RandomFeatureAttention(HEADS, DIM, 16, rngs=rngs, **options)
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs)


def linen_attention(**options):
    options = {"feature_map": "calibrated"} | options
    adapter = linen_adapters.RandomFeatureAttention(16, **options)
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=adapter)


def assert_trees_close(actual, expected, **tolerance):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 1e-3, "atol": 1e-4} | tolerance))


def fitted_nnx(model):
    return get_value(model.attention_fn.feature_map)


def queries_and_keys(model, batches):
    return [
        jnp.concatenate([np.asarray(project(batch)) for batch in batches])
        for project in (model.query, model.key)
    ]


@pytest.mark.slow
def test_nnx_fits_the_queries_and_keys_of_all_batches():
    model = nnx_attention()
    expected = simrf_jax.calibrate(*queries_and_keys(model, BATCHES))
    nnx_adapters.calibrate(model, iter(BATCHES))
    assert_trees_close(fitted_nnx(model), expected)
    assert model.attention_fn.observer is None


@pytest.mark.slow
def test_linen_fits_the_queries_and_keys_of_all_batches():
    model = linen_attention()
    variables = model.init(jax.random.key(0), BATCHES[0])
    calibrated = linen_adapters.calibrate(model, variables, iter(BATCHES))
    params = variables["params"]

    def project(name, x):
        return (
            jnp.einsum("btw,wkh->btkh", x, params[name]["kernel"])
            + params[name]["bias"][None, None]
        )

    tokens = [jnp.concatenate([project(name, x) for x in BATCHES]) for name in ("query", "key")]
    actual = calibrated["calibration"]["attention_fn"]["feature_map"]
    assert_trees_close(actual, simrf_jax.calibrate(*tokens))
    assert set(calibrated) == set(variables)
    assert calibrated["params"] is variables["params"]
    w, turned = (
        each["random_features"]["attention_fn"]["projection"] for each in (variables, calibrated)
    )
    identity = Calibrated.identity(HEADS, DIM)
    np.testing.assert_allclose(turned.value, turn_rows(w.value, identity, actual), rtol=1e-5)
    assert turned.draw_options == w.draw_options


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tilt": "isotropic"}, {"center": False, "balance": False}])
def test_options_are_those_of_calibrate(options):
    model = nnx_attention()
    nnx_adapters.calibrate(model, BATCHES, **options)
    expected = simrf_jax.calibrate(*queries_and_keys(model, BATCHES), **options)
    assert_trees_close(fitted_nnx(model), expected)


@pytest.mark.slow
def test_before_a_calibration_the_map_is_positive():
    calibrated, positive = nnx_attention(), nnx_attention(feature_map="positive")
    np.testing.assert_allclose(calibrated(BATCHES[0]), positive(BATCHES[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_calibrated_model_is_nearer_to_the_exact_one():
    def error(model, exact):
        x = inputs(batch=4, seed=9)  # Other tokens than those of the fit.
        return float(np.square(model(x) - exact(x)).sum())

    ratios = []
    for seed in range(8):
        rngs = nnx.Rngs(seed)
        exact = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        model = nnx_attention()
        model.attention_fn = nnx_adapters.RandomFeatureAttention(
            HEADS, DIM, 64, feature_map="calibrated", rngs=rngs
        )
        for name in ("query", "key", "value", "out"):
            dense = getattr(exact, name)
            dense.kernel[...] *= 3 if name in ("query", "key") else 1  # As trained models have it.
            setattr(model, name, dense)
        before = error(model, exact)
        nnx_adapters.calibrate(model, BATCHES)
        ratios.append(error(model, exact) / before)
    assert np.mean(ratios) + 2 * np.std(ratios) / np.sqrt(len(ratios)) < 0.8


@pytest.mark.slow
def test_padding_does_not_count():
    model, expected = nnx_attention(), nnx_attention()
    nnx_adapters.calibrate(expected, [x[:, :20] for x in BATCHES])
    mask = (np.arange(30) < 20)[None, None, None]

    def padded(model, x):
        return model(x.at[:, 20:].set(100.0), mask=mask)

    nnx_adapters.calibrate(model, map(jnp.asarray, BATCHES), call=padded)
    assert_trees_close(fitted_nnx(model), fitted_nnx(expected))


@pytest.mark.slow
def test_factored_masks_say_which_queries_are_padding():
    model, expected = nnx_attention(masks="factored"), nnx_attention()
    nnx_adapters.calibrate(expected, [x[:, :20] for x in BATCHES])
    real = np.broadcast_to(np.arange(30) < 20, (2, 30))

    def padded(model, x):
        return model(x.at[:, 20:].set(100.0), mask=nn.make_attention_mask(real, real))

    nnx_adapters.calibrate(model, map(jnp.asarray, BATCHES), call=padded)
    assert_trees_close(fitted_nnx(model), fitted_nnx(expected))


@pytest.mark.slow
def test_is_state_without_gradient():
    model = nnx_attention()
    nnx_adapters.calibrate(model, BATCHES)
    before = jax.tree.map(np.array, nnx.state(model, nnx_adapters.FeatureMapState))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.sum(model(BATCHES[0]) ** 2))(model)
    optimizer.update(model, grads)
    after = nnx.state(model, nnx_adapters.FeatureMapState)
    assert len(jax.tree.leaves(after)) == 5
    assert_trees_close(after, before, rtol=0, atol=0)


@pytest.mark.slow
def test_linen_gives_the_calibration_no_gradient():
    model = linen_attention()
    variables = linen_adapters.calibrate(model, model.init(jax.random.key(0), BATCHES[0]), BATCHES)
    grads = jax.grad(lambda v: jnp.sum(model.apply(v, BATCHES[0]) ** 2))(variables)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads["calibration"]))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(grads["params"]))


@pytest.mark.slow
def test_redraws_leave_the_calibration():
    model = nnx_attention()
    nnx_adapters.calibrate(model, BATCHES)
    before = jax.tree.map(np.array, fitted_nnx(model))
    w = nnx.state(model, nnx_adapters.RandomProjection)
    nnx.update(model, simrf_jax.redraw_projections(jax.random.key(1), w))
    assert_trees_close(fitted_nnx(model), before, rtol=0, atol=0)


def test_is_saved_and_restored_with_the_state():
    model, other = nnx_attention(), nnx_attention()
    nnx_adapters.calibrate(model, BATCHES)
    pure = nnx.to_pure_dict(nnx.state(model))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, jax.tree.map(np.array, pure))
    nnx.update(other, state)
    np.testing.assert_array_equal(other(BATCHES[0]), model(BATCHES[0]))


def test_linen_variables_are_saved_and_restored():
    model = linen_attention()
    fresh = model.init(jax.random.key(0), BATCHES[0])
    variables = linen_adapters.calibrate(model, fresh, BATCHES)
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(variables))
    np.testing.assert_array_equal(
        model.apply(restored, BATCHES[0]), model.apply(variables, BATCHES[0])
    )


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_orbax_saves_and_restores_it(api, tmp_path):
    if api == "nnx":
        model, fresh = nnx_attention(), nnx.state(nnx_attention())
        nnx_adapters.calibrate(model, BATCHES)
        calibrated = nnx.state(model)
    else:
        model = linen_attention()
        fresh = model.init(jax.random.key(0), BATCHES[0])
        calibrated = linen_adapters.calibrate(model, fresh, BATCHES)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", calibrated)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", fresh)
    assert_trees_close(restored, calibrated, rtol=0, atol=0)


def test_labels_may_stand_in_the_place_of_arrays():
    variables = linen_attention().init(jax.random.key(0), BATCHES[0])
    assert set(jax.tree.leaves(jax.tree.map(lambda _: "frozen", variables))) == {"frozen"}


@pytest.mark.slow
def test_groups_of_query_heads_scales_and_lengths_count_as_in_attention():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 20, 3 * HEADS, DIM)).astype(np.float32) + np.arange(3 * HEADS)[:, None]
    k = rng.normal(size=(2, 20, HEADS, DIM)).astype(np.float32) - 1
    lengths = {"query_seq_lengths": np.array([20, 7]), "key_value_seq_lengths": np.array([3, 20])}
    adapter = nnx_attention().attention_fn
    nnx_adapters.calibrate(
        adapter,
        [(q, k)],
        call=lambda adapter, batch: adapter(*batch, batch[1], scale=-0.5, **lengths),
    )
    positions = np.arange(20)
    expected = simrf_jax.calibrate(
        q,
        k,
        scale=-0.5,
        query_mask=positions < lengths["query_seq_lengths"][:, None],
        key_mask=positions < lengths["key_value_seq_lengths"][:, None],
    )
    assert_trees_close(get_value(adapter.feature_map), expected)
    # Neighbors share a key head.
    first = q[0, :, :3].sum((0, 1)) + q[1, :7, :3].sum((0, 1))
    np.testing.assert_allclose(expected.query_mean[0], -(0.5**0.5) * first / 81, rtol=1e-4)


@pytest.mark.parametrize(
    "hidden", slow_but([-1e9], [-np.inf, np.finfo(np.float32).min, -1e9, -1e4])
)
def test_a_bias_hides_padding(hidden):
    model, expected = nnx_attention(), nnx_attention()
    nnx_adapters.calibrate(expected, [x[:, :20] for x in BATCHES])
    bias = np.where(np.arange(30) < 20, 0.0, hidden).astype(np.float32)[None, None, None]

    def padded(adapter, tokens):
        q, k, v = (x.at[:, 20:].set(100.0) for x in tokens)
        return adapter(q, k, v, bias=bias)

    tokens = [[jnp.asarray(p(x)) for p in (model.query, model.key, model.value)] for x in BATCHES]
    nnx_adapters.calibrate(model.attention_fn, tokens, call=padded)
    assert_trees_close(fitted_nnx(model), fitted_nnx(expected))


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_decodes_with_and_without_a_band(bandwidth):
    model = nnx_attention(is_causal=True, exact_bandwidth=bandwidth)
    nnx_adapters.calibrate(model, BATCHES)
    x = inputs(length=6)
    whole = model(x)
    decoder = view(model, only=nnx_adapters.RandomFeatureAttention, decode=True, batch_size=2)
    tokens = [decoder(x[:, :3]), *(decoder(x[:, t : t + 1]) for t in range(3, 6))]
    np.testing.assert_allclose(jnp.concatenate(tokens, axis=1), whole, rtol=1e-4, atol=1e-5)


def test_a_second_calibration_compiles_nothing():
    model, count = nnx_attention(), 0

    def call(model, x):
        nonlocal count
        count += 1
        return model(x)

    for _ in range(3):
        nnx_adapters.calibrate(model, BATCHES, call=call)
    assert count == 1


def test_a_second_calibration_in_linen_compiles_nothing():
    model, count = linen_attention(), 0
    variables = model.init(jax.random.key(0), BATCHES[0])

    def call(model, variables, x, *, mutable):
        nonlocal count
        count += 1
        return model.apply(variables, x, mutable=mutable)

    for _ in range(3):
        variables = linen_adapters.calibrate(model, variables, BATCHES, call=call)
    assert count == 1


def test_a_linen_model_with_a_list_of_layers_is_calibrated():
    layers, fitted = [nn.Dense(WIDTH), linen_attention()], []
    for model in (nn.Sequential(layers), nn.Sequential(tuple(layers))):  # Only tuples have a hash.
        variables = model.init(jax.random.key(1), BATCHES[0])
        fitted.append(linen_adapters.calibrate(model, variables, BATCHES)["calibration"])
    assert_trees_close(*fitted)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_each_head_is_computed_with_its_own_calibration(api):
    rng = np.random.default_rng(0)
    stretch = np.linspace(0.3, 2, HEADS)[:, None]
    q, k, v = (rng.normal(stretch, stretch, (2, 20, HEADS, DIM)).astype(np.float32) for _ in "qkv")
    options = {"feature_map": "calibrated"}
    if api == "nnx":
        adapter = nnx_adapters.RandomFeatureAttention(HEADS, DIM, 16, rngs=nnx.Rngs(0), **options)
        nnx_adapters.calibrate(adapter, [(q, k)], call=lambda call, batch: call(*batch, batch[1]))
        w, out = get_value(adapter.projection), adapter(q, k, v)
    else:
        adapter = linen_adapters.RandomFeatureAttention(16, **options)
        variables = adapter.init(jax.random.key(0), q, k, v)
        variables = linen_adapters.calibrate(
            adapter,
            variables,
            [(q, k)],
            call=lambda model, given, batch, mutable: model.apply(
                given, *batch, batch[1], mutable=mutable
            ),
        )
        w, out = variables["random_features"]["projection"].value, adapter.apply(variables, q, k, v)
    for head in range(HEADS):
        one = [x[:, :, head : head + 1] for x in (q, k, v)]
        expected = simrf_jax.random_feature_attention(
            *one, w[head], feature_map=simrf_jax.calibrate(*one[:2])
        )
        np.testing.assert_allclose(out[:, :, head : head + 1], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", ["calibrated", "learned"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_second_calibration_turns_rows_with_its_axes(api, feature_map):
    """Rows that stay where they are would be other rows, as after a redraw."""
    x, others = inputs(4, 100, seed=0), inputs(4, 100, seed=1)
    if api == "nnx":
        model = nnx_attention(feature_map=feature_map)
        nnx_adapters.calibrate(model, [x])
        rows = nnx.state(model, (nnx_adapters.RandomProjection, nnx.Param))
        first, rows = model(x), jax.tree.map(jnp.copy, rows)
        nnx_adapters.calibrate(model, [others])
        second = model(x)
        nnx.update(model, rows)
        as_redrawn = model(x)
    else:
        model = linen_attention(feature_map=feature_map)
        variables = model.init(jax.random.key(0), x)
        variables = linen_adapters.calibrate(model, variables, [x])
        turned = linen_adapters.calibrate(model, variables, [others])
        unturned = variables | {"calibration": turned["calibration"]}
        first, second, as_redrawn = (model.apply(each, x) for each in (variables, turned, unturned))
    assert np.abs(second - first).mean() < 0.6 * np.abs(as_redrawn - first).mean()


@pytest.mark.slow
def test_a_shared_projection_stays_as_it_was():
    model = nnx_attention(shared=True)
    w = np.array(model.attention_fn.projection[...])
    nnx_adapters.calibrate(model, BATCHES)
    np.testing.assert_array_equal(model.attention_fn.projection[...], w)


@pytest.mark.slow
def test_layers_that_are_stacked_are_calibrated_one_by_one():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        rngs = nnx.Rngs(key)
        adapter = nnx_adapters.RandomFeatureAttention(
            HEADS, DIM, 16, feature_map="calibrated", rngs=rngs
        )
        return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return x + layer(x)

    stack = make(jax.random.split(jax.random.key(0), 3))
    layers = [nnx.clone(jax.tree.map(lambda leaf, i=i: leaf[i], stack)) for i in range(3)]
    nnx_adapters.calibrate(stack, BATCHES, call=lambda model, x: forward(model, x))
    hidden = BATCHES
    for i, layer in enumerate(layers):
        expected = simrf_jax.calibrate(*queries_and_keys(layer, hidden))
        actual = jax.tree.map(lambda leaf, i=i: leaf[i], fitted_nnx(stack))
        assert_trees_close(actual.variances.sum(), expected.variances.sum())
        np.testing.assert_allclose(actual.query_mean, expected.query_mean, rtol=1e-3, atol=1e-4)
        hidden = [x + layer(x) for x in hidden]


class Scanned(nn.Module):
    collections: tuple = ("params", "random_features", "calibration", "calibration_moments")

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + linen_attention()(x), None

        axes = dict.fromkeys(self.collections, 0)
        split = {"params": True, "features": True}
        return nn.scan(Layer, variable_axes=axes, split_rngs=split, length=3)()(x, None)[0]


def test_a_scan_without_the_calibration_is_told_to_pass_it():
    model = Scanned(("params", "random_features"))
    with pytest.raises(ValueError, match=r'variable_axes=\{"params": 0, "calibration": 0\}'):
        jax.eval_shape(model.init, jax.random.key(0), BATCHES[0])


@pytest.mark.slow
def test_linen_layers_that_are_scanned_are_calibrated_one_by_one():
    model = Scanned()
    variables = model.init(jax.random.key(0), BATCHES[0])
    calibrated = linen_adapters.calibrate(model, variables, BATCHES)
    [fitted] = jax.tree.leaves(
        calibrated["calibration"], is_leaf=lambda node: isinstance(node, Calibrated)
    )
    assert fitted.query_mean.shape == (3, HEADS, DIM)
    assert len({float(leaf) for leaf in fitted.query_mean[:, 0, 0]}) == 3


def nnx_calibrate(model, batches, **options):
    nnx_adapters.calibrate(model, batches, **options)


def linen_calibrate(model, batches, **options):
    variables = model.init(jax.random.key(0), BATCHES[0])
    linen_adapters.calibrate(model, variables, batches, **options)


NNX, LINEN = (nnx_calibrate, nnx_attention), (linen_calibrate, linen_attention)


def mean_log_second_moment(calibrated, query, key):
    """Returns the mean over all pairs of the log of E (K^ / K)^2 for one row of W, in float64."""
    c = jax.tree.map(np.float64, calibrated)
    x, y = (np.float64(z.reshape(-1, HEADS, DIM)) * DIM**-0.25 for z in (query, key))
    rho = 1 / (2 * c.variances - 1)
    nats = []
    for head in range(HEADS):
        of_queries = (x[:, head] - c.query_mean[head]) @ c.query_matrix[head].T
        of_keys = (y[:, head] - c.key_mean[head]) @ c.key_matrix[head].T
        squares = np.square(of_queries[:, None] + of_keys).mean(axis=(0, 1))
        logs = np.log((1 + rho[head]) / (2 * np.sqrt(rho[head]))) + rho[head] * squares
        nats.append(logs.sum())
    return nats


def logged_fits(caplog):
    """Returns the names of the adapters, and the numbers before and after, that were logged."""
    pattern = r"calibrate: (\S+): mean log second moment by key head: before (.*); after (.*)"
    found = [re.fullmatch(pattern, record.getMessage()) for record in caplog.records]
    return [
        (match[1], *([float(number) for number in match[i].split()] for i in (2, 3)))
        for match in found
        if match
    ]


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_logs_how_well_each_head_is_fitted(api, caplog):
    caplog.set_level(logging.INFO, logger="simrf_jax")
    if api == "nnx":
        model = nnx_attention()
        nnx_adapters.calibrate(model, BATCHES)
        fitted, (query, key) = fitted_nnx(model), queries_and_keys(model, BATCHES)
    else:
        model = linen_attention()
        variables = model.init(jax.random.key(0), BATCHES[0])
        fitted = linen_adapters.calibrate(model, variables, BATCHES)["calibration"]
        [fitted] = jax.tree.leaves(fitted, is_leaf=lambda node: isinstance(node, Calibrated))
        params = variables["params"]
        query, key = (
            np.einsum("btw,wkh->btkh", np.concatenate(BATCHES), params[name]["kernel"])
            for name in ("query", "key")
        )
    [(name, before, after)] = logged_fits(caplog)
    assert name.endswith("attention_fn")
    identity = Calibrated.identity(HEADS, DIM)
    np.testing.assert_allclose(before, mean_log_second_moment(identity, query, key), rtol=0.01)
    np.testing.assert_allclose(after, mean_log_second_moment(fitted, query, key), rtol=0.01)
    assert np.all(np.array(after) < 0.8 * np.array(before))


@pytest.mark.slow
def test_layers_of_a_stack_are_logged_one_by_one(caplog):
    caplog.set_level(logging.INFO, logger="simrf_jax")
    linen_calibrate(Scanned(), BATCHES)
    fits = logged_fits(caplog)
    assert [name for name, _, _ in fits] == [
        f"ScanLayer_0.RandomFeatureAttention_0[{layer}]" for layer in range(3)
    ]
    assert len({tuple(after) for _, _, after in fits}) == 3


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
def test_batches_are_logged_as_time_passes(calibrate, make, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="simrf_jax")
    calibrate(make(), BATCHES)
    assert not any("batches" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(flax_calibration, "SECONDS_BETWEEN_LOGS", 0)
    calibrate(make(), BATCHES)
    counts = [r.getMessage() for r in caplog.records if "batches" in r.getMessage()]
    assert counts == [f"calibrate: {number} batches" for number in (1, 2, 3)]


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
def test_nothing_is_computed_for_a_log_that_is_not_kept(calibrate, make, monkeypatch):
    monkeypatch.delattr(flax_calibration, "mean_log_second_moment")
    calibrate(make(), BATCHES)


def test_traced_values_are_not_logged(caplog):
    caplog.set_level(logging.INFO, logger="simrf_jax")
    model = linen_attention()
    variables = model.init(jax.random.key(0), BATCHES[0])
    jax.jit(functools.partial(linen_adapters.calibrate, model))(variables, BATCHES)
    assert not logged_fits(caplog)


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
@pytest.mark.parametrize(
    ("options", "batches", "arguments", "error", "match"),
    [
        ({"feature_map": "positive"}, BATCHES, {}, ValueError, 'feature_map="calibrated"'),
        ({}, [], {}, ValueError, "batches must have a batch, got none"),
        ({}, [BATCHES[0][:, :0]], {}, ValueError, "has seen no tokens"),
        ({"decode": True}, BATCHES, {}, ValueError, "decode=True"),
        ({}, [np.full_like(BATCHES[0], np.nan)], {}, ValueError, "are not finite"),
        (
            {},
            BATCHES[0],
            {},
            TypeError,
            r"an iterable of batches, such as \[batch\], got one ndarr",
        ),
        ({}, {"x": BATCHES[0]}, {}, TypeError, r"such as \[batch\], got one dict"),
        ({}, BATCHES, {"tilt": "OPRF"}, ValueError, "tilt must be one of 'log'"),
        ({}, BATCHES, {"center": "yes"}, TypeError, "center must be True or False"),
    ],
)
def test_refuses(calibrate, make, options, batches, arguments, error, match):
    with pytest.raises(error, match=match):
        calibrate(make(**options), batches, **arguments)


def real_keys(**options):
    q = jnp.ones((1, 6, HEADS, DIM))
    call = Call.of(q, q, q, **options)
    _, keys = flax_calibration.real_tokens(Request(call, None, ()))
    return [*np.flatnonzero(keys[0])]


def test_a_bias_is_compared_with_those_of_keys_that_queries_see():
    rising = np.float32(1e4) * np.arange(6)[None, None]
    assert real_keys(bias=rising) == [5]
    assert real_keys(bias=rising, is_causal=True) == [0, 1, 2, 3, 4, 5]
    assert real_keys(bias=-rising, is_causal=True) == [0]
    assert real_keys(bias=rising, mask=np.arange(6)[None, None] < 4) == [3]
    assert real_keys(bias=rising, key_value_seq_lengths=[2]) == [1]
    assert real_keys(bias=np.full((1, 1, 1), -1e9, np.float32)) == [0, 1, 2, 3, 4, 5]
    spoiled = np.array([[[0, np.nan, 0, -np.inf, 0, 0]]], np.float32)
    assert real_keys(bias=spoiled) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
def test_refuses_masks_that_attention_cannot_honor(calibrate, make):
    mask = np.abs(np.subtract.outer(np.arange(30), np.arange(30))) < 2

    def call(*model_and_batch, **options):
        *model, (x, mask) = model_and_batch
        if calibrate is NNX[0]:
            return model[0](x, mask=mask)
        return model[0].apply(model[1], x, mask=mask, **options)

    with pytest.raises(ValueError, match="the mask of an adapter cannot be honored"):
        calibrate(make(masks="factored"), [(BATCHES[0], mask)], call=call)


def test_fast_projections_of_each_head_stay_as_they_were():
    model = nnx_attention()
    keys = jax.random.split(jax.random.key(0), HEADS)
    w = jax.vmap(lambda key: simrf_jax.draw_fast_projection(key, 16, DIM))(keys)
    model.attention_fn.projection = nnx_adapters.RandomProjection(w)
    nnx_adapters.calibrate(model, BATCHES)
    assert_trees_close(get_value(model.attention_fn.projection), w, rtol=0, atol=0)
    expected = nnx_attention()
    nnx_adapters.calibrate(expected, BATCHES)
    assert_trees_close(fitted_nnx(model), fitted_nnx(expected))


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
@pytest.mark.parametrize("batch", [(BATCHES[0], 0), {"x": BATCHES[0]}], ids=["tuple", "dict"])
def test_errors_about_batches_of_several_parts_name_a_call(calibrate, make, batch):
    parts = r"\*\*batch" if isinstance(batch, dict) else r"\*batch"
    with pytest.raises(AttributeError, match=rf"use call=lambda model, .*[( ]{parts}[,)]"):
        calibrate(make(), [batch])


@pytest.mark.parametrize(("calibrate", "make"), [NNX, LINEN], ids=["nnx", "linen"])
def test_too_few_tokens_make_a_warning(calibrate, make):
    with pytest.warns(UserWarning, match="covariances of as few as 3 tokens, fewer than the 4 dim"):
        calibrate(make(), [BATCHES[0][:1, :3]])


def test_an_error_leaves_the_model_as_it_was():
    model = nnx_attention()
    structure = jax.tree.structure(nnx.state(model))
    with pytest.raises(ValueError, match="input dimension"):
        nnx_adapters.calibrate(model, [np.ones((2, 3, WIDTH + 1), np.float32)])
    assert jax.tree.structure(nnx.state(model)) == structure


def test_linen_variables_without_a_calibration_are_refused():
    model = linen_attention()
    variables = dict(model.init(jax.random.key(0), BATCHES[0]))
    del variables["calibration"]
    with pytest.raises(ValueError, match="lack the collection calibration"):
        model.apply(variables, BATCHES[0])


def test_attention_takes_no_calibrated_map_by_name():
    q = jnp.ones((4, 1, 4))
    call = functools.partial(simrf_jax.random_feature_attention, q, q, q, jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=r"calibrate"):
        call(feature_map="calibrated")
