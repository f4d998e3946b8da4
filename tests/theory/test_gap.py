import numpy as np
import pytest
from mpmath import mpf

from simrf_jax.theory import kernel_mse, orthogonality_gap
from tests.standard_errors import assert_mean
from tests.theory import oracle

pytestmark = pytest.mark.fast
FEATURES = ["positive", "hyperbolic", "trigonometric"]
DISTANCES = np.array([1e-3, 0.1, 0.7, 1.49, 1.51, 2.5, 5.0, 9.0])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_against_arbitrary_precision(dim, features):
    for m in [2, dim, dim + 1, 2 * dim + 1]:
        got = orthogonality_gap(DISTANCES, m, dim, features=features)
        expected = []
        for distance in DISTANCES:
            t = mpf(float(distance)) ** 2
            iid, orthogonal = (
                oracle.error(t, m, dim, coupling, features, "regular")
                for coupling in ("iid", "orthogonal")
            )
            expected.append(float((iid - orthogonal) / m))
        atol = 1e-15 if features == "trigonometric" else 0
        near = DISTANCES < 1.5
        np.testing.assert_allclose(got[near], np.array(expected)[near], rtol=2e-13)
        np.testing.assert_allclose(got[~near], np.array(expected)[~near], rtol=2e-13, atol=atol)


def test_is_the_gap_of_drawn_rows():
    # There are two rows in 4 dimensions. Rotating u is equivalent to rotating the rows.
    rng, v = np.random.default_rng(0), 0.7
    norms = np.sqrt(rng.chisquare(4, (2, 200_000)))
    u = rng.normal(size=(4, 200_000))
    u *= v / np.linalg.norm(u, axis=0)
    orthogonal = np.exp(norms[0] * u[0] + norms[1] * u[1])
    independent = np.exp(rng.normal(size=(4, 2, 200_000)).sum(axis=1)[0] * v)
    gap = orthogonality_gap(v, 2, 4)
    assert_mean(np.exp(v**2) - orthogonal, 2 * gap)
    assert_mean(independent, np.exp(v**2))


@pytest.mark.parametrize("features", FEATURES)
def test_is_the_difference_of_errors_but_for_the_prefactor(features):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 5, 6)) / 3
    sign = -1 if features == "trigonometric" else 1
    norms = np.sum(x**2 + y**2, axis=-1)
    for kernel, power in [("gaussian", -2), ("softmax", -1)]:
        iid, orthogonal = (
            kernel_mse(x, y, 9, coupling=c, features=features, kernel=kernel)
            for c in ("iid", "orthogonal")
        )
        if features == "trigonometric":
            power += 2
        prefactor = np.exp(power * norms)
        gap = orthogonality_gap(np.linalg.norm(x + sign * y, axis=-1), 9, 6, features=features)
        np.testing.assert_allclose(iid - orthogonal, prefactor * gap, rtol=1e-9)


@pytest.mark.parametrize("dim", [2, 3, 64])
def test_positive_features_always_gain_and_trigonometric_ones_at_first(dim):
    distances = np.array([1e-3, 1.0, 2.9, 26.0])
    assert np.all(orthogonality_gap(distances, dim, dim) > 0)
    assert np.all(orthogonality_gap(distances[:3], dim, dim, features="trigonometric") > 0)


def test_limits_shapes_and_nan():
    distances = np.array([[0.0, np.nan], [26.7, np.inf], [1e200, 1.0]])
    got = orthogonality_gap(distances, 4, 4)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got[:, 0], [0, np.inf, np.inf])
    assert np.isnan(got[0, 1])
    assert got[1, 1] == np.inf
    oscillating = orthogonality_gap(distances, 4, 4, features="trigonometric")
    np.testing.assert_allclose(oscillating[:, 0], [0, 0, 0], atol=1e-17)
    assert isinstance(orthogonality_gap(1, 4, 4), np.float64)
    np.testing.assert_allclose(orthogonality_gap(1, 4, 4), got[2, 1], rtol=1e-14)
    for features in FEATURES:
        assert orthogonality_gap(1.0, 1, 4, features=features) == 0
        assert orthogonality_gap(1.0, 8, 1, features=features) == 0


@pytest.mark.parametrize(
    ("distance", "dim", "m", "features", "error", "match"),
    [
        (1.0, 4, 4, "relu", ValueError, "features must be one of 'positive', 'hyperbolic'"),
        (-1.0, 4, 4, "positive", ValueError, "distance is a norm.*at least 0, got -1.0"),
        (1j, 4, 4, "positive", TypeError, "distance must hold real numbers"),
        (1.0, 0, 4, "positive", ValueError, "dim must be at least 1, got 0"),
        (1.0, 4, 2.0, "positive", TypeError, "num_features must be an integer, got 2.0"),
    ],
)
def test_refuses(distance, dim, m, features, error, match):
    with pytest.raises(error, match=match):
        orthogonality_gap(distance, m, dim, features=features)
