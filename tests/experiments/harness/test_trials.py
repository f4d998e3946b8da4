import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from experiments.harness import trials
from tests.standard_errors import assert_mean


@pytest.mark.parametrize("features", ["positive", "trigonometric"])
def test_errors_are_those_of_the_features(features):
    dim, distances, key = 8, (0.3, 1.7), jax.random.key(3)
    found = trials.draw_errors(3, 2, distances, dim=dim, coupling="iid", features=features)
    feature_map = getattr(simrf_jax, f"{features}_features")
    sign = 1 if features == "positive" else -1
    with jax.enable_x64(True):
        for number, draw in enumerate(jax.random.split(key, 2)):
            w = simrf_jax.draw_projection(draw, dim, dim, coupling="iid", dtype=jnp.float64)
            for column, distance in enumerate(distances):
                # Any x and y will do whose sum, or difference, is this long and lies along an axis.
                x = np.random.default_rng(0).normal(size=(dim, dim)) * 0.3
                y = sign * (distance * np.eye(dim) - x)
                phi_x, phi_y = (feature_map(z, w, kernel="gaussian") for z in (x, y))
                estimate = np.sum(np.asarray(phi_x * phi_y), axis=1)
                exact = np.exp(-np.sum((x - y) ** 2, axis=1) / 2)
                scale = exact if features == "positive" else 1.0
                expected = np.mean(((estimate - exact) / scale) ** 2)
                assert found[number, column] == pytest.approx(expected, rel=1e-9)


@pytest.mark.fast
def test_a_ratio_is_off_by_its_standard_error():
    # The samples are paired and correlated, in 4,000 experiments at once.
    rng = np.random.default_rng(0)
    common = rng.gamma(2.0, size=(400, 4000))
    baseline = common + rng.gamma(2.0, size=common.shape)
    samples = 0.3 * common + 0.1 * rng.gamma(1.0, size=common.shape)
    ratio = trials.ratio(samples, baseline)
    assert_mean(ratio.z_score(np.array(0.7 / 4)) ** 2, 1.0)
    np.testing.assert_allclose(ratio.value, samples.sum(axis=0) / baseline.sum(axis=0))


@pytest.mark.fast
def test_mean_has_the_usual_standard_error():
    samples = np.array([[1.0, 4.0], [3.0, 4.0], [5.0, 7.0]])
    found = trials.mean(samples)
    np.testing.assert_allclose(found.value, [3, 5])
    np.testing.assert_allclose(found.standard_error, [2 / 3**0.5, 1.0])
    np.testing.assert_allclose(found.z_score(np.array([3.0, 3.0])), [0, 2])
