import numpy as np
import pytest
from mpmath import mp, mpf

from simrf_jax._src.theory.limits import mean_norm_deficit
from simrf_jax.theory import asymptotic_ratio, mse_ratio, small_distance_prefactor
from tests.theory import oracle

pytestmark = pytest.mark.fast
FEATURES = ["positive", "hyperbolic", "trigonometric"]


@pytest.mark.parametrize("dim", [1, 2, 3, 38, 39, 40, 41, 64, 1023, 10**6])
def test_deficit_of_the_mean_norm(dim):
    with mp.workdps(60):
        ratio = mp.exp(mp.loggamma(mpf(dim + 1) / 2) - mp.loggamma(mpf(dim) / 2)) ** 2 * 2 / dim
        exact = float(1 - ratio)
    np.testing.assert_allclose(mean_norm_deficit(dim), exact, rtol=1e-14)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_is_the_ratio_at_zero(dim, features):
    for coupling in ["iid", "orthogonal", "simplex"]:
        for block in ["regular", "square"]:
            for m in [1, 2, dim, dim + 2, 130]:
                options = {"coupling": coupling, "features": features, "block": block}
                got = small_distance_prefactor(m, dim, **options)
                assert isinstance(got, np.float64)
                np.testing.assert_allclose(got, mse_ratio(0, m, dim, **options), atol=2e-15)


@pytest.mark.parametrize("features", FEATURES)
def test_is_the_ratio_at_small_distances(features):
    # The oracle at v = 1e-9 is independent of mse_ratio.
    for block in ["regular", "square"]:
        got = small_distance_prefactor(13, 5, features=features, block=block)
        expected = oracle.ratio(1e-9, 13, 5, "simplex", features, block)
        np.testing.assert_allclose(got, float(expected), rtol=1e-14)


def test_prefactor_of_section_5():
    np.testing.assert_allclose(small_distance_prefactor(64), 0.0077817, atol=5.1e-8)
    assert small_distance_prefactor(64, coupling="orthogonal") == 1
    assert small_distance_prefactor(64) == small_distance_prefactor(64, 64)


@pytest.mark.parametrize(
    ("dim", "m", "options", "error", "match"),
    [
        (0, 4, {}, ValueError, "dim must be at least 1, got 0"),
        (4, 0, {}, ValueError, "num_features must be at least 1, got 0"),
        (4, 4.0, {}, TypeError, "num_features must be an integer, got 4.0"),
        (None, 1, {}, ValueError, "'simplex' needs dim of at least 2, got dim=1"),
        (4, 4, {"coupling": "simplex_plus"}, ValueError, "no closed form"),
        (4, 4, {"features": "relu"}, ValueError, "features must be one of"),
        (4, 4, {"block": "full"}, ValueError, "block must be one of"),
    ],
)
def test_prefactor_refuses(dim, m, options, error, match):
    with pytest.raises(error, match=match):
        small_distance_prefactor(m, dim, **options)


@pytest.mark.parametrize("z", [0.0, 0.3, 1.0, 2.0])
def test_error_of_the_asymptotic_ratio_falls_as_one_over_d(z):
    # With m = d / 2 rows both ratios have a limit, and their difference is O(1/d).
    gaps = []
    for dim in [64, 256, 1024]:
        exact = mse_ratio(z, dim // 2, dim, coupling="orthogonal", features="trigonometric")
        gaps.append(exact - asymptotic_ratio(z, dim // 2, dim))
    assert abs(gaps[0]) < 0.03
    np.testing.assert_allclose(np.divide(gaps[1:], gaps[:-1]), 0.25, rtol=0.15)


def test_asymptotic_ratio_is_equation_27():
    z, dim, m = np.array([0.2, 1.1, 3.0]), 10, 5
    e = np.exp(-(z**2))
    printed = 1 - (m - 1) * e * z**4 / (dim * (1 - e) ** 2)
    np.testing.assert_allclose(asymptotic_ratio(z, m, dim), printed, rtol=1e-13)
    # Beyond m = d there are several row blocks, here two of 10 rows and one of 5.
    weight = (2 * 90 + 20) / 25
    np.testing.assert_allclose(
        1 - asymptotic_ratio(z, 25, dim), (1 - printed) * weight / 4, rtol=1e-12
    )


def test_asymptotic_ratio_at_the_ends():
    got = asymptotic_ratio([[0.0, np.nan], [1e200, np.inf]], 5, 8)
    np.testing.assert_array_equal(got, [[0.5, np.nan], [1, 1]])
    assert isinstance(asymptotic_ratio(1, 1, 8), np.float64)
    assert asymptotic_ratio(1, 1, 8) == 1


@pytest.mark.parametrize(
    ("z", "dim", "m", "error", "match"),
    [
        (-1.0, 4, 4, ValueError, "z is a norm"),
        ("a", 4, 4, TypeError, "z must hold real numbers"),
        (1.0, 0, 4, ValueError, "dim must be at least 1"),
        (1.0, 4, 0, ValueError, "num_features must be at least 1"),
    ],
)
def test_asymptotic_ratio_refuses(z, dim, m, error, match):
    with pytest.raises(error, match=match):
        asymptotic_ratio(z, m, dim)
