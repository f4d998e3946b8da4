"""Trained models whose attention is replaced in one call, judged on held-out batches."""

import functools
import logging
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import simrf_jax
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.integrations.linearization import layer_choice
from simrf_jax._src.integrations.linearization.layer_choice import (
    Candidate,
    LayerChoice,
    Option,
    exact_operations,
    operations,
    share_out,
)
from simrf_jax.integrations import nnx as adapters
from simrf_jax.models import ViT, ViTConfig
from tests.tiers import slow_but

WIDTH, HEADS, LENGTH = 16, 2, 12
DIM = WIDTH // HEADS
KERNEL_INIT = nnx.initializers.normal(0.35)  # One function, so that models share programs.
SMALL = {"num_features": (4,), "exact_bandwidth": (1,), "exact_keys": (2,)}


class Model(nnx.Module):
    """Two layers of attention whose weights are far from uniform."""

    def __init__(self, is_causal=False, takes_mask=False):
        rngs = nnx.Rngs(0)
        options = {"kernel_init": KERNEL_INIT, "decode": False, "rngs": rngs}
        self.lower, self.upper = (nnx.MultiHeadAttention(HEADS, WIDTH, **options) for _ in range(2))
        self.is_causal, self.takes_mask = is_causal, takes_mask

    def __call__(self, x):
        options = {"is_causal": self.is_causal}
        if self.takes_mask:
            options = {"mask": nnx.make_causal_mask(x[..., 0])}
        x = x + self.lower(x, **options)
        return x + self.upper(x / 2, **options)


def batches(seed=1):
    return list(jax.random.normal(jax.random.key(seed), (2, 3, LENGTH, WIDTH)))


def linearize(model, held_out=None, *, seed=0, **options):
    held_out = batches(2) if held_out is None else held_out
    options = {"relative_error": 10.0} | SMALL | options
    return adapters.linearize(model, batches(), held_out, rngs=nnx.Rngs(seed), **options)


def weights(logits):
    w = np.exp(logits - logits.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def heads_of(layer, x):
    """Returns queries, keys and values [batch, heads, length, dim] in float64."""
    for name in ("query", "key", "value"):
        one = getattr(layer, name)
        kernel, bias = (np.asarray(p[...], np.float64) for p in (one.kernel, one.bias))
        yield np.einsum("btw,whd->bhtd", x, kernel) + bias[:, None]


def key_scores(calibration, key):
    """Returns the scores of scaled keys, [batch, heads, length]."""
    of_head = type(calibration).key_scores
    return jax.vmap(of_head, in_axes=(calibration.head_axes(), 2), out_axes=1)(
        calibration, key / DIM**0.25
    )


def judged(layer, adapter, x, is_causal):
    """Returns error, standard error and both far shares of a layer from all pairs in float64."""
    q, k, v = heads_of(layer, x)
    logits = q @ k.swapaxes(-1, -2) / DIM**0.5
    past = np.tri(LENGTH, dtype=bool) if is_causal else np.ones((LENGTH, LENGTH), bool)
    exact = weights(np.where(past, logits, -np.inf))
    mechanism = adapter.mechanism(HEADS)
    keys = mechanism.exact_keys
    call = [jnp.asarray(np.moveaxis(one, 1, 2), jnp.float32) for one in (q, k)]
    implied = np.asarray(
        simrf_jax.attention_matrix(
            *call,
            mechanism.projection,
            feature_map=mechanism.feature_map,
            exact_bandwidth=mechanism.exact_bandwidth,
            exact_keys=keys,
            is_causal=is_causal,
        ),
        np.float64,
    )
    out, expected = implied @ v, exact @ v
    ratio = ((out - expected) ** 2).sum((-2, -1)) / (expected**2).sum((-2, -1))
    errors = ratio.mean(-1)
    near = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
    far = np.broadcast_to(near > mechanism.exact_bandwidth, implied.shape).copy()
    if is_causal:
        scores = np.asarray(key_scores(mechanism.feature_map, call[1]))
        for batch, head, t in np.ndindex(far.shape[:3]):
            before = scores[batch, head, : max(0, t - mechanism.exact_bandwidth)]
            far[batch, head, t, np.argsort(-before)[: keys.count]] = False
    else:
        features = simrf_jax.attention_matrix(
            *call, mechanism.projection, feature_map=mechanism.feature_map
        )
        chosen = np.argsort(-np.asarray(features).sum(-2), axis=-1)[..., : keys.count]
        for batch, head in np.ndindex(chosen.shape[:2]):
            far[batch, head][:, chosen[batch, head]] = False
    shares = [np.where(far, w, 0).sum(-1).mean((0, 2)) for w in (implied, exact)]
    return errors.mean(), errors.std(ddof=1) / len(errors) ** 0.5, *shares


@pytest.mark.parametrize("is_causal", slow_but([False], [False, True]))
def test_the_report_says_what_all_pairs_in_float64_say(is_causal):
    model = Model(is_causal)
    x = np.concatenate(batches(2)).astype(np.float64)
    report = linearize(model)
    assert list(report.layers) == ["lower", "upper"]
    choice = report.layers["lower"]
    assert choice.exact_keys == (simrf_jax.ExactKeys(2, by="score") if is_causal else 2)
    assert (" 2 by score " in str(report)) == is_causal
    error, spread, share, softmax_share = judged(
        model.lower, model.lower.attention_fn, x, is_causal
    )
    np.testing.assert_allclose(choice.relative_error, error, rtol=1e-4)
    np.testing.assert_allclose(choice.standard_error, spread, rtol=1e-4)
    np.testing.assert_allclose(choice.far_share, share, rtol=1e-4)
    np.testing.assert_allclose(choice.softmax_far_share, softmax_share, rtol=1e-4)
    after = np.concatenate([model(one) for one in batches(2)]).astype(np.float64)
    before = np.concatenate([Model(is_causal)(one) for one in batches(2)]).astype(np.float64)
    lengths = np.linalg.norm(after, axis=-1) * np.linalg.norm(before, axis=-1)
    cosine = ((after * before).sum(-1) / lengths).mean()
    np.testing.assert_allclose(report.output_cosine, cosine, rtol=1e-5)
    expected = ((after - before) ** 2).sum() / (before**2).sum()
    np.testing.assert_allclose(report.output_error, expected, rtol=1e-4)


@pytest.mark.slow
def test_queries_and_keys_are_fitted_as_calibrate_does():
    model = Model()
    shown = []

    def progress(paths):
        for path in paths:
            shown.append(path)
            yield path

    linearize(model, where=lambda path, layer: path == "lower", progress=progress)
    assert shown == ["lower"]
    alone = Model()
    alone.lower.attention_fn = nnx.data(
        adapters.RandomFeatureAttention(HEADS, DIM, 4, feature_map="calibrated", rngs=nnx.Rngs(0))
    )
    adapters.calibrate(alone, batches())
    fitted, expected = (nnx.state(one, adapters.FeatureMapState) for one in (model, alone))
    chex.assert_trees_all_close(fitted, expected, rtol=1e-4)


@pytest.mark.slow
def test_the_cheapest_option_that_reaches_the_error_is_chosen():
    options = {"num_features": (4, 32), "exact_keys": (None, 2)}
    errors = {}
    for features, keys in ((4, None), (4, 2), (32, None), (32, 2)):
        one = linearize(Model(), num_features=(features,), exact_keys=(keys,))
        errors[features, keys] = one.layers["lower"]
    costs = [one.operations for one in errors.values()]
    assert costs == sorted(costs)
    bounds = {k: one.relative_error + one.standard_error for k, one in errors.items()}
    assert bounds[4, 2] < bounds[4, None]
    # Any two draws of W differ by less than this margin.
    wish = (bounds[4, 2] + bounds[4, None]) / 2
    choice = linearize(Model(), relative_error=wish, **options).layers["lower"]
    assert (choice.num_features, choice.exact_keys) == (4, 2)
    assert choice.is_reached
    assert choice.relative_error + choice.standard_error <= wish
    # Without a wish, the best option within the budget.
    choice = linearize(Model(), relative_error=None, budget=1e3, **options).layers["lower"]
    assert (choice.num_features, choice.exact_keys) == (32, 2)


@pytest.mark.slow
def test_causal_calls_are_ranked_once_for_all_options(monkeypatch):
    scored = []
    ranks = layer_choice._ranks
    monkeypatch.setattr(layer_choice, "_ranks", lambda *args: scored.append(0) or ranks(*args))
    options = {"exact_keys": (1, 2), "num_steps": 3, "optimizer": optax.sgd(0.1)}
    with pytest.warns(UserWarning, match="do not reach"):
        linearize(Model(is_causal=True), relative_error=1e-6, **options)
    assert len(scored) == 2 * (len(batches()) + len(batches(2)))  # Two layers.


def test_layers_share_the_budget():
    options = {"num_features": (4, 32), "exact_bandwidth": (None,), "exact_keys": (None,)}
    free = linearize(Model(), relative_error=None, budget=1e3, **options)
    assert [one.num_features for one in free.layers.values()] == [32, 32]
    fixed = linearize(Model(), **options | {"num_features": (4,)})
    falls = {path: one.bound() - free.layers[path].bound() for path, one in fixed.layers.items()}
    first, second = sorted(falls, key=falls.get, reverse=True)
    half = (fixed.operations + free.operations) / 2  # Only one layer can have 32 features.
    for budget, most in ((half - 1e-3, 4), (half + 1e-3, 32)):
        report = linearize(Model(), relative_error=None, budget=budget, **options)
        sizes = {path: one.num_features for path, one in report.layers.items()}
        assert sizes == {first: most, second: 4}
        mean = np.mean([one.operations for one in report.layers.values()])
        np.testing.assert_allclose(report.operations, mean, rtol=1e-12)
        assert report.operations <= budget
        assert f"Attention takes {mean:.3g} times the operations" in str(report)


def candidate(cost, error):
    nothing = np.zeros(1)
    return Candidate(
        None, None, LayerChoice(1, None, None, False, cost, error, 0.0, True, nothing, nothing)
    )


def test_the_layer_that_gains_most_for_an_operation_comes_first():
    def errors(budget):
        taken = share_out(judged, {"small": 1.0, "large": 3.0}, budget)
        return tuple(taken[path].choice.relative_error for path in judged)

    judged = {
        # The second option gains less for an operation than the third, and is passed over.
        "small": [candidate(0.1, 0.9), candidate(0.3, 0.8), candidate(0.5, 0.3)],
        # Learned features cost nothing more.
        "large": [candidate(0.1, 0.6), candidate(0.1, 0.5), candidate(0.4, 0.1)],
    }
    operations = (0.1 + 3 * 0.1) / 4
    assert errors(operations) == (0.9, 0.5)
    assert errors(operations + 0.06) == (0.8, 0.5)
    assert errors(operations + 0.11) == (0.3, 0.5)
    assert errors(operations + 0.23) == (0.3, 0.5)
    assert errors(operations + 0.33) == (0.3, 0.1)
    assert errors(np.inf) == (0.3, 0.1)


@pytest.mark.slow
def test_a_wish_that_nothing_reaches_is_reported():
    model = Model()
    sentence = (
        "2 of 2 layers do not reach the relative error 1e-06 with any option that was tried: "
        "lower, upper"
    )
    with pytest.warns(UserWarning, match=sentence) as warned:
        report = linearize(model, relative_error=1e-6, num_features=(16,))
    cost = f"Attention takes {report.operations:.3g} times the operations of exact attention."
    assert report.operations > 1
    assert str(warned[0].message).endswith(f"lower, upper. {cost}")
    assert not report.layers["lower"].is_reached
    assert sentence in str(report)
    assert isinstance(model.lower.attention_fn, adapters.RandomFeatureAttention)


@pytest.mark.slow
def test_learned_features_come_nearer_than_calibrated_ones():
    few = {"where": lambda path, layer: path == "lower", "relative_error": 1e-9}
    few |= {"held_out": batches()}  # Twelve tokens are too few to learn from for others.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        calibrated = linearize(Model(), **few).layers["lower"]
        model = Model()
        steps = {"num_steps": 30, "optimizer": optax.adamw(0.05)}
        learned = linearize(model, **steps, **few).layers["lower"]
    assert learned.is_learned
    assert model.lower.attention_fn.learned is not None
    assert learned.relative_error < 0.9 * calibrated.relative_error
    assert learned.operations == calibrated.operations


def test_undo_restores_the_model_and_equal_keys_give_equal_results():
    model, x = Model(), batches()[0]
    before = model(x)
    first = linearize(model)
    after = model(x)
    first.swap.undo()
    chex.assert_trees_all_equal(model(x), before)
    again = linearize(model)
    chex.assert_trees_all_equal(model(x), after)
    assert repr(again) == str(first)


class Doubled(nnx.Module):
    """Attention with other keys than the layer computes."""

    def __init__(self, attend):
        self.attend = attend

    def __call__(self, query, key, value, **keywords):
        return self.attend(query, 2 * key, value, **keywords)


@pytest.mark.slow
def test_what_wraps_attention_is_fitted_and_kept():
    model, doubled = Model(), Model()
    for layer in (model.lower, model.upper):
        layer.attention_fn = nnx.data(Doubled(nnx.dot_product_attention))
    for layer in (doubled.lower, doubled.upper):
        layer.key.kernel[...] *= 2
        layer.key.bias[...] *= 2
    found, expected = linearize(model, wrap=Doubled), linearize(doubled)
    assert isinstance(model.lower.attention_fn, Doubled)
    errors = [one.layers["lower"].relative_error for one in (found, expected)]
    np.testing.assert_allclose(*errors, rtol=1e-3)
    np.testing.assert_allclose(found.output_error, expected.output_error, rtol=1e-3)


@pytest.mark.slow
def test_masks_of_causal_models_are_understood():
    reports = [
        linearize(Model(is_causal=True)),
        linearize(Model(takes_mask=True), is_causal=True),
    ]
    errors = [report.layers["lower"].relative_error for report in reports]
    np.testing.assert_allclose(*errors, rtol=1e-4)
    learned = linearize(
        Model(takes_mask=True),
        is_causal=True,
        num_steps=1,
        optimizer=optax.sgd(0.1),
        relative_error=None,
        budget=1e3,
    )
    assert learned.layers["lower"].exact_keys == simrf_jax.ExactKeys(2, by="score")


@pytest.mark.slow
def test_padding_does_not_count():
    def call(model, batch):
        x, mask = batch
        return model.lower(x, mask=mask[:, None, None])

    x, mask = batches(2)[0], np.broadcast_to(np.arange(LENGTH) < 8, (3, LENGTH))
    padded = [(x.at[:, 8:].set(10.0), mask)]
    short = [(x[:, :8], mask[:, :8])]
    found = []
    for held_out in (padded, short):
        model = Model()
        report = adapters.linearize(
            model,
            padded,
            held_out,
            relative_error=10.0,
            call=call,
            where=lambda path, layer: path == "lower",
            rngs=nnx.Rngs(0),
            **SMALL,
        )
        found.append(report.layers["lower"])
    for name in ("relative_error", "standard_error", "far_share", "softmax_far_share"):
        np.testing.assert_allclose(*(getattr(one, name) for one in found), rtol=1e-3)


@pytest.mark.slow
def test_a_vit():
    config = ViTConfig(
        image_size=(8, 8),
        patch_size=2,
        channels=1,
        num_classes=3,
        width=16,
        depth=2,
        num_heads=2,
        mlp_dim=16,
        attention="exact",
        dtype="float32",
    )
    model = ViT(config, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jax.random.normal(jax.random.key(0), model.head.kernel.shape)
    images = list(jax.random.normal(jax.random.key(1), (2, 3, 8, 8, 1)))
    report = adapters.linearize(
        model,
        images[:1],
        images[1:],
        relative_error=1e-4,
        num_features=(2,),
        exact_keys=(16,),  # All patches.
        rngs=nnx.Rngs(0),
    )
    assert list(report.layers) == ["blocks.0.attention", "blocks.1.attention"]
    assert report.output_error < 1e-4
    np.testing.assert_allclose(report.output_cosine, 1, atol=1e-4)


def test_operations_are_those_of_the_pairs():
    x = jnp.zeros((1, 10, 1, 4))
    bidirectional, causal = Call.of(x, x, x), Call.of(x, x, x, is_causal=True)
    assert operations(Option(10, None, None), bidirectional) == 2 * 10 * 10 * 6 / (100 * 8)
    distance = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    in_band = (distance <= 3).sum()
    expected = (in_band + 20 * 0.75 * 8 + 10 * 5) / 100
    assert operations(Option(8, 3, 5), bidirectional) == pytest.approx(expected)
    past = ((distance <= 3) & np.tri(10, dtype=bool)).sum()
    expected = (past + 20 * 0.75 * 8 + 19) / 55  # The first query sees one of both keys.
    assert operations(Option(8, 3, (0, 1)), causal) == pytest.approx(expected)
    by_score = simrf_jax.ExactKeys(4, by="score")  # Of 0, 0, 0, 0, 1, 2, 3, 4, 5 and 6 keys.
    expected = (past + 20 * 0.75 * 8 + 18) / 55
    assert operations(Option(8, 3, by_score), causal) == pytest.approx(expected)
    assert operations(Option(0, None, by_score), causal) == pytest.approx(34 / 55)
    assert operations(Option(0, None, 99), bidirectional) == 1
    assert exact_operations(bidirectional) == 100 * 8
    assert exact_operations(causal) == 55 * 8
    two = Call.of(*(jnp.zeros((3, 10, 2, 4)),) * 3)
    assert exact_operations(two) == 3 * 2 * 100 * 8
    cross = Call.of(x, x[:, :6], x[:, :6])
    assert exact_operations(cross) == 60 * 8
    assert operations(Option(8, None, 2), cross) == pytest.approx((16 * 0.75 * 8 + 20) / 60)


def test_progress_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="simrf_jax"):
        linearize(Model())
    assert "linearize: layer 2 of 2, upper: best of 1 judged: 4, 1, 2, calibrated" in caplog.text


class Interrupt(BaseException):
    """The exception that ends a run, as a signal does."""


def interrupted_after_one(paths):
    yield paths[0]
    raise Interrupt


def test_an_interrupted_call_continues_from_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "first"
    options = {"num_steps": 2, "optimizer": optax.adam(0.1), "relative_error": 1e-6}
    options["held_out"] = batches(2)

    def run(**others):
        model = Model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # The error is not reached.
            return linearize(model, **options | others), nnx.state(model)

    expected = run()
    with pytest.raises(Interrupt):
        run(folder=folder, progress=interrupted_after_one)
    # The first layer's errors with calibrated and with learned features, and the learned features.
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 3
    resumed = run(folder=str(folder))
    chex.assert_trees_all_equal(resumed[1], expected[1])
    assert repr(resumed[0]) == repr(expected[0])
    assert len(list(folder.iterdir())) == 6

    def new_files(**others):
        before = len(list(folder.iterdir()))
        kept, alone = run(folder=folder, **others), run(**others)
        assert repr(kept[0]) == repr(alone[0])
        return len(list(folder.iterdir())) - before

    assert new_files() == 0
    assert new_files(held_out=batches(3)) == 4  # Other errors of the same features.
    assert new_files(exact_bandwidth=(2,)) == 6
    assert new_files(num_steps=3) == 4
    # Rates are in no array, or in one that only an inner jit sees.
    rates = jnp.array([0.3, 0.4])
    assert new_files(optimizer=optax.adam(0.2)) == 4
    assert new_files(optimizer=optax.adam(jax.jit(lambda count: rates[0]))) == 4
    assert new_files(optimizer=optax.adam(jax.jit(lambda count, rate=rates[1]: rate))) == 4
    for name in ("_measure", "_step"):
        monkeypatch.setattr(layer_choice, name, lambda *args, **options: pytest.fail("Called."))
    chex.assert_trees_all_equal(run(folder=folder)[1], expected[1])

    (folder / min(names)).write_bytes(b"")
    model = Model()
    with pytest.raises(ValueError, match="is damaged; delete it to compute it again"):
        linearize(model, **options, folder=folder)
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(Model()))


@pytest.mark.slow
@pytest.mark.parametrize("num_queries", [5, LENGTH])
def test_layers_may_have_other_numbers_of_keys_than_of_queries(num_queries):
    model = Model()

    def attend(model, x):
        return model.lower(x[:, :num_queries], x[:, ::-2])

    held_out = batches(2)
    exact = [attend(model, x) for x in held_out]
    report = linearize(
        model,
        call=attend,
        where=lambda path, _: path == "lower",
        num_features=(32,),
        exact_bandwidth=(None, 1),
        exact_keys=(2,),
    )
    choice = report.layers["lower"]
    assert (choice.exact_bandwidth, choice.exact_keys) == (None, 2)
    errors = [jnp.sum((attend(model, x) - y) ** 2) for x, y in zip(held_out, exact, strict=True)]
    error = float(sum(errors) / sum(jnp.sum(y**2) for y in exact))
    assert error == pytest.approx(report.output_error, rel=1e-4)
    assert 0.5 < error / choice.relative_error < 2  # Outputs mix the heads.


def test_refusals_leave_the_model_as_it_was():
    model = Model()
    refused = functools.partial(linearize, model)
    with pytest.raises(ValueError, match="needs a relative_error to reach, or a budget"):
        refused(relative_error=None)
    with pytest.raises(ValueError, match="relative_error must be positive"):
        refused(relative_error=0.0)
    with pytest.raises(ValueError, match="num_steps must be at least 0"):
        refused(num_steps=-1)
    with pytest.raises(
        ValueError, match="num_steps and optimizer belong together, got num_steps=2"
    ):
        refused(num_steps=2)
    with pytest.raises(TypeError, match="linearize chooses feature_map itself, got 'elu'"):
        refused(feature_map="elu")
    with pytest.raises(ValueError, match="must have a value each"):
        refused(num_features=())
    with pytest.raises(TypeError, match="num_features must be a sequence of values to try, got 32"):
        refused(num_features=32)
    with pytest.raises(ValueError, match=r"num_features must be even, .* got 3"):
        refused(num_features=(4, 3))
    with pytest.raises(TypeError, match="num_features must be an integer, got '4'"):
        refused(num_features=("4",))
    with pytest.raises(ValueError, match="exact_bandwidth must be at least 0, got -1"):
        refused(exact_bandwidth=(-1,))
    with pytest.raises(ValueError, match="exact_keys must be at least 1, got 0"):
        refused(exact_keys=(0,))
    with pytest.raises(TypeError, match=r"exact_keys, .* must be an integer, got \[0, 1\]"):
        refused(exact_keys=([0, 1],))
    with pytest.raises(TypeError, match=r"must be an optax\.GradientTransformation, got 0\.1"):
        refused(num_steps=2, optimizer=0.1)
    with pytest.raises(ValueError, match=r"progress must yield all paths it is given, got \[\]"):
        refused(progress=lambda paths: [])
    with pytest.raises(TypeError, match=r"rngs must be an nnx.Rngs, such as nnx.Rngs\(0\), got 0"):
        adapters.RandomFeatureAttention(HEADS, DIM, 4, rngs=0)
    with pytest.raises(TypeError, match=r"must have numbers, .* got ExactKeys\(count=2, by='mass'"):
        refused(exact_keys=(simrf_jax.ExactKeys(2),))
    with pytest.raises(TypeError, match="held_out must be an iterable of batches"):
        refused(jnp.zeros((2, LENGTH, WIDTH)))
    with pytest.raises(ValueError, match=r"held_out must have two sequences .* zeros, .* got 1"):
        refused([batches()[0][:1]])
    with pytest.raises(ValueError, match="held_out must have two sequences or more, got none"):
        refused([])
    with pytest.raises(ValueError, match="more, got none with tokens"):
        refused([batches()[0][:0]])
    with pytest.raises(ValueError, match=r"outputs are not all zeros, .* got 0"):
        refused([0 * batches()[0]])
    with pytest.raises(ValueError, match="does not call the layer 'upper'; where excludes it"):
        refused(call=lambda model, x: model.lower(x))
    with pytest.raises(ValueError, match=r"'lower' has other numbers of keys .* got \(1,\)"):
        refused(
            call=lambda model, x: model.lower(x, x[:, :5]), where=lambda path, _: path == "lower"
        )
    with pytest.raises(ValueError, match=r"take 0\.\d+ times the operations .* got 0\.01"):
        refused(budget=0.01)
    with pytest.raises(ValueError, match="held_out must be finite"):
        refused([jnp.full((2, LENGTH, WIDTH), jnp.nan)])

    def both(model, x):
        return model(x), model.lower(x, is_causal=True)

    with pytest.raises(ValueError, match=r"'lower' is causal in some calls .* or None, got 2; whe"):
        refused(call=both)
    assert model.lower.attention_fn is nnx.dot_product_attention
