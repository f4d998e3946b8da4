import jax
import numpy as np
import pytest

import simrf_jax
from experiments.swap import predicted as predicted_heads
from experiments.swap import swap
from experiments.swap.methods import METHODS, draw_heads
from experiments.swap.predicted import PREDICTED
from experiments.swap.swapping import Inputs
from simrf_jax.selection import attention_error
from tests.experiments.swap import tiny
from tests.tiers import slow_but


def layers(scale):
    """Returns short queries and keys of a layer, to fit on and to test on."""
    arrays = jax.random.normal(jax.random.key(0), (2, 3, 5, 12, 2, 4))
    for query, key, value in arrays:
        yield Inputs(scale * query, scale * key, value, is_causal=False)


def test_some_queries_are_those_of_one_text():
    layer, _ = layers(1)
    some = predicted_heads.some_queries(layer, 3)
    np.testing.assert_array_equal(some.query, layer.query[:1, [0, 6, 11]])
    np.testing.assert_array_equal(some.key, layer.key[:1])
    np.testing.assert_array_equal(some.value, layer.value[:1])


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_but(["calibrated_iid"], [*PREDICTED]))
def test_short_vectors_are_predicted_well(method):
    fit, test = layers(0.3)
    some = predicted_heads.some_queries(test, 3)
    predicted, measured = predicted_heads.compare(
        jax.random.key(1), method, fit, some, num_features=16, num_draws=2000
    )
    np.testing.assert_allclose(measured, predicted, rtol=0.15)


@pytest.mark.slow
def test_predictions_are_those_of_the_fitted_map():
    fit, test = layers(0.3)
    calibrated = simrf_jax.calibrate(fit.query, fit.key)
    some = predicted_heads.some_queries(test, 12)
    predicted, _ = predicted_heads.compare(
        jax.random.key(1), "calibrated_iid", fit, some, num_features=16, num_draws=1
    )
    arrays = (np.asarray(x[0], np.float64) for x in test[:3])
    expected = attention_error(*arrays, 16, coupling="iid", features=calibrated)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)


@pytest.mark.slow
def test_measured_errors_are_means_over_draws():
    _, test = layers(2)
    keys = jax.random.split(jax.random.key(0), 3)
    ours = predicted_heads.mean_errors(
        keys,
        *test[:3],
        simrf_jax.feature_maps.Positive(),
        coupling="simplex",
        num_features=5,
    )
    q, k, v = (np.asarray(x, np.float64) for x in test[:3])
    logits = np.einsum("btnh,bsnh->bnts", q, k) / 2
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    exact = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    errors = []
    for key in keys:
        w = draw_heads(key, 2, 5, 4, "simplex")
        out = simrf_jax.random_feature_attention(q, k, v, w, feature_map="positive")
        errors.append(((out - exact) ** 2).sum((0, 1, 3)) / (exact**2).sum((0, 1, 3)))
    np.testing.assert_allclose(ours, np.mean(errors, axis=0), rtol=1e-4)


@pytest.mark.parametrize("method", PREDICTED)
def test_every_method_has_one_feature_for_a_row_and_no_band(method):
    assert METHODS[method].features_per_row == 1
    assert not METHODS[method].has_band


@pytest.mark.slow
@pytest.mark.usefixtures("toy_encoder")
def test_a_run_has_the_errors_of_all_heads(tmp_path):
    results = swap.run(tiny.get_config(parts=("predicted_heads",)), tmp_path)
    section = results["predicted_heads"]
    assert [*section["methods"]] == [*PREDICTED]
    errors = section["methods"]["calibrated_iid"]["8"]
    assert [len(errors[one]) for one in ("predicted", "measured")] == [8, 8]  # 2 x 2 x 2 seeds.
    assert (tmp_path / "predicted_heads.png").stat().st_size > 10_000
    middle = np.median(errors["predicted"])
    assert f"| calibrated, iid | 8 | {middle:.2g} (" in swap.report(results)
