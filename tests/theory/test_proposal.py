"""The parameter of optimal positive features, and the couplings that no other directions beat."""

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import optimize

from simrf_jax._src.theory.harmonics import gegenbauer, mean_coefficients
from simrf_jax.theory import kernel_mse, optimal_parameter

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("dim", [1, 2, 64, 1024])
@pytest.mark.parametrize("v", [1e-6, 1e-3, 0.1, 1.0, 5.0, 5.7, 100.0, 1e80, 9e153])
def test_closed_form_in_arbitrary_precision(v, dim):
    with mp.workdps(60):
        phi = mpf(v) ** 2 / dim
        expected = (1 - 2 * phi - mp.sqrt((2 * phi + 1) ** 2 + 8 * phi)) / 16
    np.testing.assert_allclose(optimal_parameter(v**2, dim), float(expected), rtol=4e-15)


def test_it_is_negative_except_without_a_distance():
    assert optimal_parameter(0, 8) == 0
    assert np.all(optimal_parameter([1e-300, 1e-9, 1.0, 1e9], 8) < 0)
    assert np.isnan(optimal_parameter(np.nan, 8))
    assert isinstance(optimal_parameter(1.0, 8), np.float64)


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", "cross_polytope"])
@pytest.mark.parametrize("v", [0.1, 0.9, 1.5, 4.0, 20.0])
def test_it_is_the_best_for_every_coupling(v, coupling):
    x, y = np.zeros(8), v * np.eye(8)[0]

    def log_error(parameter):
        return kernel_mse(x, y, 16, coupling=coupling, parameter=parameter, log=True)

    best = optimal_parameter(v**2, 8)
    found = optimize.minimize_scalar(
        log_error, bounds=(4 * best, 0.1), method="bounded", options={"xatol": 1e-12}
    )
    np.testing.assert_allclose(best, found.x, rtol=1e-4)
    assert log_error(best) <= found.fun + 1e-12


def mean_product(cosines, v, dim):
    """Returns the mean of E f f' over pairs, which alone depends on the directions."""
    polynomials = gegenbauer(np.clip(cosines, -1, 1), dim, 40)
    shares = mean_coefficients(np.array([v]), dim, 40)[:, 0] ** 2
    return shares @ np.mean(polynomials, axis=1)


def random_cosines(rng, num_rows, dim):
    s = rng.normal(size=(num_rows, dim))
    s /= np.linalg.norm(s, axis=1, keepdims=True)
    return (s @ s.T)[np.triu_indices(num_rows, 1)]


@pytest.mark.parametrize("v", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(("num_rows", "dim"), [(3, 2), (3, 4), (4, 4), (5, 4)])
def test_no_random_directions_beat_the_simplex(num_rows, dim, v):
    simplex = mean_product(np.array([-1 / (num_rows - 1)]), v, dim)
    rng = np.random.default_rng(num_rows)
    others = [mean_product(random_cosines(rng, num_rows, dim), v, dim) for _ in range(200)]
    assert np.all(others > simplex)


@pytest.mark.parametrize("v", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_no_random_directions_beat_the_cross_polytope(dim, v):
    cosines = np.zeros(dim * (2 * dim - 1))
    cosines[:dim] = -1
    cross_polytope = mean_product(cosines, v, dim)
    rng = np.random.default_rng(dim)
    others = [mean_product(random_cosines(rng, 2 * dim, dim), v, dim) for _ in range(200)]
    assert np.all(others > cross_polytope)


@pytest.mark.parametrize("v", [0.5, 1.5])
@pytest.mark.parametrize("coupling", ["simplex", "cross_polytope"])
def test_no_small_turn_of_rows_lowers_the_error(coupling, v):
    # At m = d + 1 = 4 and m = 2d = 6 the minimum is strict up to rotations.
    if coupling == "simplex":
        s = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / 3**0.5
    else:
        s = np.concatenate([np.eye(3), -np.eye(3)])
    pairs = np.triu_indices(len(s), 1)
    best = mean_product((s @ s.T)[pairs], v, 3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        turned = s + 0.05 * rng.normal(size=s.shape)
        turned /= np.linalg.norm(turned, axis=1, keepdims=True)
        assert mean_product((turned @ turned.T)[pairs], v, 3) > best


@pytest.mark.parametrize("v", [0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("parameter", [0.0, -0.02])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_the_best_coupling_at_an_equal_number_of_features(dim, parameter, v):
    x, y = np.zeros(dim), v * np.eye(dim)[0]

    def log_error(num_features, coupling):
        options = {"coupling": coupling, "parameter": parameter, "log": True}
        return kernel_mse(x, y, num_features, **options)

    others = ["iid", "orthogonal", "simplex"]
    at_twice_the_dim = [log_error(2 * dim, coupling) for coupling in others]
    assert log_error(2 * dim, "cross_polytope") <= min(at_twice_the_dim) + 1e-13
    up_to_the_dim = [log_error(dim, coupling) for coupling in ("iid", "orthogonal")]
    assert log_error(dim, "simplex") <= min(up_to_the_dim) + 1e-13


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((-1.0, 4), ValueError, "mean_squared_distance is a norm and must be at least 0, got -1"),
        ((1j, 4), TypeError, "mean_squared_distance must hold real numbers"),
        ((1.0, 0), ValueError, "dim must be at least 1, got 0"),
        ((1.0, 4.5), TypeError, "dim must be an integer, got 4.5"),
    ],
)
def test_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        optimal_parameter(*arguments)
