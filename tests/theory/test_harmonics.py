import itertools

import numpy as np
import pytest
from mpmath import mp
from scipy import special

from simrf_jax._src.theory.harmonics import gegenbauer, mean_coefficients, radial_coefficients
from simrf_jax._src.theory.quadrature import chi_rule
from simrf_jax.theory import estimate_covariance, kernel_mse, mse_ratio, optimal_parameter
from tests.standard_errors import assert_mean
from tests.theory import draws

LAWS = [
    ("iid", "chi"),
    ("orthogonal", "antithetic"),
    ("orthogonal", "shared"),
    ("simplex", "chi"),
    ("simplex", "antithetic"),
    ("simplex", "shared"),
    ("simplex", "sqrt_dim"),
    ("cross_polytope", "chi"),
    ("cross_polytope", "antithetic"),
    ("cross_polytope", "shared"),
    ("cross_polytope", "pair"),
    ("cross_polytope", "radau"),
]


@pytest.mark.fast
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_gegenbauer_polynomials(dim):
    x = np.linspace(-1, 1, 9)
    got = gegenbauer(x, dim, 12)
    if dim == 2:
        expected = [special.eval_chebyt(k, x) for k in range(13)]
    else:
        a = dim / 2 - 1
        expected = [
            special.eval_gegenbauer(k, a, x) / special.eval_gegenbauer(k, a, 1.0) for k in range(13)
        ]
    np.testing.assert_allclose(got, expected, atol=1e-13)


def multiplicity(k, dim):
    """Counts harmonics as homogeneous polynomials of degree k less those of degree k - 2."""
    below = special.comb(k - 2 + dim - 1, dim - 1, exact=True) if k >= 2 else 0
    return special.comb(k + dim - 1, dim - 1, exact=True) - below


@pytest.mark.fast
@pytest.mark.parametrize("v", [0.0, 1e-3, 1.0, 6.0])
@pytest.mark.parametrize("dim", [2, 5, 64])
def test_mean_coefficients_against_arbitrary_precision(dim, v):
    got = mean_coefficients(np.array([v]), dim, 20)[:, 0]
    with mp.workdps(30):
        expected = [
            float(
                mp.sqrt(multiplicity(k, dim))
                * (v / mp.sqrt(2)) ** k
                * mp.gamma(mp.mpf(dim + k) / 2)
                / mp.gamma(k + mp.mpf(dim) / 2)
                * mp.hyp1f1(mp.mpf(dim + k) / 2, k + mp.mpf(dim) / 2, mp.mpf(v) ** 2 / 2)
                * mp.exp(-(mp.mpf(v) ** 2) / 2)
            )
            for k in range(21)
        ]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize("parameter", [0.0, -0.1])
def test_mean_coefficients_do_not_depend_on_the_parameter(parameter):
    v = np.array([0.0, 0.3, 2.0])
    norms, log_weights = chi_rule(7, 7**0.5 + 2)
    values = radial_coefficients(norms, v, 7, parameter, 16)
    means = np.tensordot(np.exp(log_weights), values, axes=(0, 1))
    np.testing.assert_allclose(means, mean_coefficients(v, 7, 16), rtol=1e-10, atol=1e-30)


@pytest.mark.parametrize("parameter", [0.0, -0.05, 0.03])
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
@pytest.mark.parametrize(("dim", "num_features"), [(2, 5), (16, 33)])
def test_the_diagonal_is_the_error_of_the_kernel(dim, num_features, coupling, norms, parameter):
    if norms in ("sqrt_dim", "radau"):
        parameter = 0.0
    v = np.array([0.3, 1.0, 2.5])
    sums = np.random.default_rng(0).normal(size=(3, dim))
    sums *= v[:, None] / np.linalg.norm(sums, axis=1, keepdims=True)
    options = {"coupling": coupling, "norms": norms, "parameter": parameter}
    got = estimate_covariance(sums, num_features, **options)
    expected = mse_ratio(v, num_features, dim, **options) * np.expm1(v**2) / num_features
    np.testing.assert_allclose(np.diag(got), expected, rtol=1e-8)
    np.testing.assert_allclose(got, got.T, rtol=1e-12)


FAR = [
    (3, "chi", 20.0, 0.0),
    (3, "shared", 20.0, 0.0),
    (3, "antithetic", 20.0, 0.0),
    (3, "radau", 20.0, 0.0),
    (8, "shared", 0.5, 0.12),
    (64, "shared", 0.5, 0.11),
    (64, "shared", 1.0, -10.0),
    (64, "antithetic", 1.0, -10.0),
    (2, "shared", 40.0, "optimal"),
    (2, "antithetic", 40.0, "optimal"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("dim", "norms", "v", "parameter"), FAR)
def test_the_diagonal_far_away_and_at_extreme_parameters(dim, norms, v, parameter):
    if parameter == "optimal":
        parameter = float(optimal_parameter(v**2, dim))
    sums = np.zeros((2, dim))
    sums[0, 0], sums[1, 1] = v, v / 2
    options = {"coupling": "simplex", "norms": norms, "parameter": parameter}
    got = estimate_covariance(sums, 2 * dim + 2, **options)
    expected = kernel_mse(sums, 0 * sums, 2 * dim + 2, **options, kernel="softmax", log=True)
    np.testing.assert_allclose(np.log(np.diag(got)), expected, rtol=1e-12, atol=1e-11)
    assert np.all(np.isfinite(got))


@pytest.mark.fast
@pytest.mark.parametrize(("v", "parameter"), [(0.7, 0.12), (12.0, 0.0), (12.0, -10.0)])
def test_shared_norms_in_two_dimensions(v, parameter):
    # All rows are w turned by multiples of 120 degrees, so E f f' is a Gaussian integral over w.
    sums = np.array([[v, 0.0], [0.1, v]])
    with mp.workdps(200):
        a = mp.mpf(parameter)
        rho, tilt = 1 / (1 - 8 * a), 1 - 4 * a
        expected = mp.matrix(2, 2)
        for i, j, turn in itertools.product(range(2), range(2), range(3)):
            cosine, sine = mp.cos(2 * mp.pi * turn / 3), mp.sin(2 * mp.pi * turn / 3)
            (x, y), (p, q) = (map(mp.mpf, map(float, sums[k])) for k in (i, j))
            square = (x + cosine * p + sine * q) ** 2 + (y - sine * p + cosine * q) ** 2
            lengths = x**2 + y**2 + p**2 + q**2
            expected[i, j] += tilt**2 * rho * mp.exp(tilt * rho * square / 2 - lengths / 2) - 1
        expected = np.array((expected / 3).tolist(), float)
    got = estimate_covariance(sums, 3, coupling="simplex", norms="shared", parameter=parameter)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(got / scale, expected / scale, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("coupling", "norms"), LAWS)
def test_against_trials(coupling, norms):
    num_features = 9
    parameter = 0.0 if norms in ("sqrt_dim", "radau") else -0.05
    rng = np.random.default_rng(0)
    sums = np.array([[0.8, 0.0, 0.0], [0.5, 0.5, 0.0], [-0.3, 0.6, 0.2], [0.0, 0.0, 0.0]])
    if coupling == "simplex":
        num_features = 8
    estimates = draws.relative_estimates(
        rng, 20_000, sums, num_features, coupling, norms, parameter, "positive"
    )
    expected = estimate_covariance(
        sums, num_features, coupling=coupling, norms=norms, parameter=parameter
    )
    errors = estimates - 1
    i, j = np.triu_indices(3)  # Without a sum, positive features as such have no error.
    assert_mean(errors[:, i] * errors[:, j], expected[i, j])
    np.testing.assert_allclose(
        np.mean(errors[:, :3] * errors[:, 3:], axis=0), expected[3, :3], atol=2e-3
    )


@pytest.mark.fast
@pytest.mark.parametrize("coupling", ["iid", "simplex", "cross_polytope"])
def test_sums_of_length_zero_have_no_error(coupling):
    sums = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    got = estimate_covariance(sums, 6, coupling=coupling)
    np.testing.assert_allclose(got[0], 0, atol=1e-15)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sums", "options", "error", "match"),
    [
        (np.zeros(3), {}, ValueError, r"sums must be \[n, dim\].*got shape \(3,\)"),
        (np.zeros((2, 1)), {}, ValueError, r"dim of at least 2.*got shape \(2, 1\)"),
        (np.full((2, 3), np.nan), {}, ValueError, "finite"),
        (np.zeros((2, 3)) * 1j, {}, TypeError, "sums must hold real numbers"),
        (np.zeros((2, 3)), {"num_features": 0}, ValueError, "num_features must be at least 1"),
        (np.zeros((2, 3)), {"parameter": [0.0, 0.1]}, ValueError, "must be one number, got shape"),
        (np.zeros((2, 3)), {"coupling": "halton"}, ValueError, "coupling must be one of"),
        (np.zeros((2, 3)), {"norms": "pair"}, ValueError, "only coupling='cross_polytope' has"),
        (np.zeros((2, 3)), {"block": "full"}, ValueError, "block must be one of"),
    ],
)
def test_refuses(sums, options, error, match):
    with pytest.raises(error, match=match):
        estimate_covariance(sums, **{"num_features": 4, "coupling": "simplex", **options})
