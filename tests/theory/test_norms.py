"""Errors with couplings of norms and with the parameter of optimal positive features."""

import functools

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import integrate, special, stats

from simrf_jax.theory import (
    kernel_mse,
    mse_ratio,
    optimal_parameter,
    relative_bias,
    small_distance_prefactor,
)
from tests.standard_errors import assert_mean
from tests.theory import draws, oracle

LAWS = [
    ("iid", "chi"),
    ("orthogonal", "chi"),
    ("orthogonal", "antithetic"),
    ("orthogonal", "shared"),
    ("simplex", "chi"),
    ("simplex", "antithetic"),
    ("simplex", "shared"),
    ("cross_polytope", "chi"),
    ("cross_polytope", "antithetic"),
    ("cross_polytope", "shared"),
    ("cross_polytope", "pair"),
]
FIXED = [
    (coupling, norms)
    for coupling in ["iid", "orthogonal", "simplex", "cross_polytope"]
    for norms in ["sqrt_dim", "radau"]
]


def ordered_pairs(num_rows, dim, coupling, norms):
    """Counts the ordered pairs of rows by (cosine as a ratio, relation of norms), in a loop."""
    counts = {}
    sizes = [len(block) for block in draws.row_blocks(num_rows, dim, coupling)]
    for size in sizes:
        for i in range(size):
            for j in range(size):
                if i != j:
                    kind = kind_of_pair(i, j, size, coupling, norms)
                    counts[kind] = counts.get(kind, 0) + 1
    return counts


def kind_of_pair(i, j, size, coupling, norms):
    cosine = {"orthogonal": (0, 1), "simplex": (-1, max(size - 1, 1))}.get(coupling)
    step = 1
    if coupling == "cross_polytope":
        step = 2
        cosine = (-1, 1) if i // 2 == j // 2 else (0, 1)
    same = norms == "shared" or (norms in ("pair", "antithetic") and i // step == j // step)
    opposite = norms == "antithetic" and i // step // 2 == j // step // 2
    return cosine, "equal" if same else "antithetic" if opposite else "independent"


@functools.cache
def opposite_norm(a, dim):
    """Returns a' with F(a) + F(a') = 1, for a chi law F."""
    upper = mp.gammainc(mpf(dim) / 2, a**2 / 2, mp.inf, regularized=True)
    if upper < mpf(10) ** -60:
        return mpf(0)

    def excess(log_square):
        return mp.log(mp.gammainc(mpf(dim) / 2, 0, mp.exp(log_square), regularized=True) / upper)

    start = mp.log(upper * mp.gamma(mpf(dim) / 2 + 1)) * 2 / dim
    start = min(start, mp.log(mpf(dim) / 2))
    return mp.sqrt(2 * mp.exp(mp.findroot(excess, start)))


def mean_product(t, parameter, dim, cosine, relation):
    """Returns E f f' for two rows from its definition as a mean over norms."""
    c, s = mpf(cosine[0]) / cosine[1], 1 - 4 * mpf(parameter)
    if relation == "independent":
        return oracle.conformity(dim, cosine, t) * mp.exp(-t)

    def integrand(a):
        other = a if relation == "equal" else opposite_norm(a, dim)
        squares = a**2 + other**2
        resultant = squares + 2 * c * a * other
        log_rest = 2 * mpf(parameter) * squares - a**2 / 2 - t + dim * mp.log(s)
        return a ** (dim - 1) * mp.exp(log_rest) * mp.hyp0f1(mpf(dim) / 2, s * t * resultant / 4)

    norm = mpf(2) ** (mpf(dim) / 2 - 1) * mp.gamma(mpf(dim) / 2)
    if relation == "antithetic":
        median = mp.sqrt(2 * mp.mpf(MEDIANS[dim]))
        ends = [median, median + 1, median + 3, median + 6, median + 12, median + 24]
        return 2 * mp.quad(integrand, ends) / norm
    width = 1 / mp.sqrt(1 - 8 * mpf(parameter))
    peak = width * mp.sqrt(dim) + width**2 * mp.sqrt(s * t * (2 + 2 * c))
    ends = [max(peak + k * width, 0) for k in (-40, -16, -8, -4, 0, 4, 8, 16, 40)]
    return mp.quad(integrand, sorted({mpf(0), *ends})) / norm


def median_of_half_square(dim):
    with mp.workdps(60):
        return mp.findroot(
            lambda x: mp.gammainc(mpf(dim) / 2, 0, x, regularized=True) - mpf(1) / 2,
            mpf(dim) / 2,
        )


MEDIANS = {dim: median_of_half_square(dim) for dim in (3, 16)}


def exact_mse(v, num_features, dim, coupling, norms, parameter):
    """Returns E(K_hat / K - 1)^2 by a loop over kinds of pairs, in arbitrary precision."""
    t = mpf(float(v)) ** 2
    total = mean_product(t, parameter, dim, (1, 1), "equal") - 1
    for (cosine, relation), count in ordered_pairs(num_features, dim, coupling, norms).items():
        moment = mean_product(t, parameter, dim, cosine, relation)
        total += mpf(count) / num_features * (moment - 1)
    return total / num_features


def assert_exact(v, num_features, dim, coupling, norms, parameter):
    if coupling == "simplex":  # Whole simplices only.
        num_features = 2 * (dim + 1)
    if parameter == "optimal":
        parameter = float(optimal_parameter(v**2, dim))
    got = kernel_mse(
        np.zeros(dim),
        v * np.eye(dim)[0],
        num_features,
        coupling=coupling,
        norms=norms,
        parameter=parameter,
        kernel="softmax",
        log=True,
    )
    with mp.workdps(40):
        expected = float(mp.log(exact_mse(v, num_features, dim, coupling, norms, parameter)))
    # Differences of means over antithetic norms lose digits where the error is nearly 0.
    loose = norms == "antithetic" and parameter and v < 0.01
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-8 if loose else 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [0.0, "optimal"])
@pytest.mark.parametrize("v", [1e-3, 1.001])
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
def test_against_arbitrary_precision(coupling, norms, v, parameter):
    assert_exact(v, 10, 3, coupling, norms, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [0.0, -0.03, 0.02, "optimal"])
@pytest.mark.parametrize("v", [1e-3, 0.3, 0.999, 1.001, 3.0])
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
@pytest.mark.parametrize(("dim", "num_features"), [(3, 10), (16, 32)])
def test_more_against_arbitrary_precision(dim, num_features, coupling, norms, v, parameter):
    assert_exact(v, num_features, dim, coupling, norms, parameter)


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [0.0, -0.03, "optimal"])
@pytest.mark.parametrize("v", [10.0, 100.0])
@pytest.mark.parametrize(("coupling", "norms"), [law for law in LAWS if law[1] != "antithetic"])
def test_far_away_against_arbitrary_precision(coupling, norms, v, parameter):
    assert_exact(v, 32, 16, coupling, norms, parameter)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize("parameter", [-0.05])
def test_a_single_row_decides_far_away(features, coupling, norms, parameter):
    rho, dim, v = 1 / (1 - 8 * parameter), 8, 100.0
    got = kernel_mse(
        np.zeros(dim),
        v * np.eye(dim)[0],
        16,
        coupling=coupling,
        norms=norms,
        parameter=parameter,
        features=features,
        kernel="softmax",
        log=True,
    )
    num_entries = 32 if features == "hyperbolic" else 16
    if features == "hyperbolic" and coupling == "cross_polytope" and norms != "chi":
        num_entries = 16  # Each entry occurs twice.
    # At this distance the estimate of one row is not correlated with those of others.
    expected = dim * np.log((1 + rho) / (2 * rho**0.5)) + rho * v**2 - np.log(num_entries)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_ratios_very_far_away(features, coupling, norms):
    options = {"coupling": coupling, "norms": norms, "features": features}
    v, parameter = np.array([60.0, 1e3, 1e5, 1e100, np.inf]), -1e-12
    got = mse_ratio(v, 6, 3, **options, parameter=parameter)
    rho = 1 / (1 - 8 * parameter)
    growth = np.exp(8 * parameter * rho * v**2) * ((1 + rho) / (2 * rho**0.5)) ** 3
    np.testing.assert_allclose(got, mse_ratio(v, 6, 3, **options) * growth, rtol=2e-15)
    both = mse_ratio(np.inf, 6, 3, **options, parameter=[0.1, 0])
    np.testing.assert_array_equal(both, [np.inf, mse_ratio(np.inf, 6, 3, **options)])


@functools.cache
def antithetic_product_by_simpson(t, parameter, dim, cosine):
    """Returns E f f' for rows of antithetic norms by Simpson's rule, for A < 0."""
    tilt = 1 - 4 * parameter
    start = np.sqrt(2 * special.gammaincinv(dim / 2, 0.5))
    end = max(start, np.sqrt((dim + t) / tilt)) + 14 / np.sqrt(tilt)
    a = np.linspace(start, end, 40_001)
    other = stats.chi.isf(stats.chi.cdf(a, dim), dim)
    z = np.sqrt(tilt * t * np.maximum(a**2 + other**2 + 2 * cosine * a * other, 1e-20))
    order = dim / 2 - 1
    log_bessel = np.log(special.ive(order, z)) + z - order * np.log(z / 2)
    log_rest = dim * np.log(tilt) + 2 * parameter * (a**2 + other**2) - t + stats.chi.logpdf(a, dim)
    return 2 * special.gamma(dim / 2) * integrate.simpson(np.exp(log_bessel + log_rest), x=a)


@pytest.mark.parametrize(("norms", "factor"), [("chi", 1.0), ("antithetic", 1.3)])
def test_parallel_rows_of_hyperbolic_features_far_away(norms, factor):
    # Two rows of a simplex are antiparallel, so that features of w and -w' stay correlated.
    dim, t = 3, 1000.0
    parameter = factor * float(optimal_parameter(t, dim))
    row = float(mean_product(t, parameter, dim, (1, 1), "equal"))
    if norms == "chi":
        pair = float(mean_product(t, parameter, dim, (1, 1), "independent"))
    else:
        pair = antithetic_product_by_simpson(t, parameter, dim, 1.0)
    assert pair > 0.01 * row
    options = {"coupling": "simplex", "norms": norms, "features": "hyperbolic"}
    x = np.sqrt(t) * np.eye(dim)[0]
    got = kernel_mse(x, 0 * x, 2, **options, parameter=parameter, kernel="softmax")
    # The products of antiparallel features are e^-500.
    np.testing.assert_allclose(got, (row + pair - 4) / 4, rtol=1e-11)


@pytest.mark.fast
def test_the_logarithm_at_small_distances_and_extreme_parameters():
    x = np.eye(1024)[:1] * 0.5
    parameter, rho = -1000.0, 1 / 8001
    got = kernel_mse(x, 0 * x, 8, coupling="iid", parameter=parameter, kernel="softmax", log=True)
    expected = 1024 * np.log((1 + rho) / (2 * rho**0.5)) + rho / 4 - np.log(8)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.fast
@pytest.mark.parametrize("norms", ["sqrt_dim", "radau"])
def test_ratios_of_fixed_norms_at_zero_and_infinity(norms):
    near, zero, far = mse_ratio([1e-4, 0.0, np.inf], 6, 3, coupling="orthogonal", norms=norms)
    np.testing.assert_allclose([zero, far], [near, 0], rtol=1e-6)


def exact_fixed(v, num_features, dim, coupling, norms):
    """Returns E(K_hat / K - 1)^2 for rows of one norm, by a loop in arbitrary precision."""
    t = mpf(float(v)) ** 2
    square = mpf(dim) if norms == "sqrt_dim" else mpf(dim) + 2
    weight = mpf(1) if norms == "sqrt_dim" else mpf(dim) / (dim + 2)
    num_rows = num_features - (norms == "radau")

    def mean(squared_resultant):
        return mp.hyp0f1(mpf(dim) / 2, t * squared_resultant / 4)

    row = mean(square) * mp.exp(-t / 2)
    variance = mean(4 * square) * mp.exp(-t) - row**2
    for (cosine, _), count in ordered_pairs(num_rows, dim, coupling, norms).items():
        product = mean(square * (2 + 2 * mpf(cosine[0]) / cosine[1])) * mp.exp(-t)
        # Iid rows are row blocks of one, without pairs.
        variance += mpf(count) / num_rows * (product - row**2)
    bias = weight * row + (1 - weight) * mp.exp(-t / 2) - 1
    return weight**2 * variance / num_rows + bias**2, bias


@pytest.mark.parametrize("v", [1e-3, 0.3, 0.999, 1.001, 3.0, 10.0, 100.0])
@pytest.mark.parametrize(("coupling", "norms"), FIXED)
@pytest.mark.parametrize("dim", [2, 16, 64])
def test_fixed_norms_against_arbitrary_precision(dim, coupling, norms, v):
    num_rows = {"simplex": 2 * dim + 2}.get(coupling, 2 * dim)
    num_features = num_rows + (norms == "radau")
    with mp.workdps(60):
        expected, bias = exact_fixed(v, num_features, dim, coupling, norms)
        expected, bias = float(mp.log(expected)), float(bias)
    options = {"coupling": coupling, "norms": norms, "kernel": "softmax", "log": True}
    got = kernel_mse(np.zeros(dim), v * np.eye(dim)[0], num_features, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(relative_bias(v, dim, norms=norms), bias, rtol=1e-11)


@pytest.mark.fast
@pytest.mark.parametrize("v", [0.3, 1.5, 3.0, 8.0, 20.0])
def test_without_a_variance_the_error_is_the_bias(v):
    # In one dimension, w and -w of one norm are all rows that there are.
    options = {"coupling": "iid", "norms": "sqrt_dim", "features": "hyperbolic"}
    got = kernel_mse([v], [0.0], 3, **options, kernel="softmax", log=True)
    expected = 2 * np.log(np.abs(relative_bias(v, 1, norms="sqrt_dim")))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.fast
def test_the_bias_of_the_radau_rule_begins_with_the_sixth_power():
    v = np.array([1e-3, 1e-2])
    expected = -(v**6) / (24 * (64 + 4))
    np.testing.assert_allclose(relative_bias(v, 64, norms="radau"), expected, rtol=1e-3)
    np.testing.assert_array_equal(relative_bias(v, 64, norms="antithetic"), 0)


TRIALS = [
    *(law for law in LAWS if law[0] != "iid" or law[1] == "chi"),
    *FIXED,
]


@pytest.mark.slow
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize(("coupling", "norms"), TRIALS)
def test_against_trials(coupling, norms, features):
    # Four rows and three more, so that a row block is incomplete, and a row of zeros.
    dim, num_features = {"simplex": (3, 8)}.get(coupling, (2, 7))
    num_features += norms == "radau"
    parameter = 0.0 if norms in ("sqrt_dim", "radau") else -0.06
    rng = np.random.default_rng(0)
    v = np.array([0.5, 0.9])
    sums = v[:, None] * np.eye(dim)[:2]
    options = {"coupling": coupling, "norms": norms, "parameter": parameter, "features": features}
    estimates = draws.relative_estimates(rng, 20_000, sums, num_features, **options)
    iid = mse_ratio(v, num_features, dim, **options)
    one = kernel_mse(
        np.zeros((2, dim)), sums, num_features, coupling="iid", features=features, kernel="softmax"
    )
    assert_mean((estimates - 1) ** 2, iid * one)
    assert_mean(estimates - 1, relative_bias(v, dim, norms=norms))


@pytest.mark.fast
@pytest.mark.parametrize("parameter", [0.0, -0.04])
@pytest.mark.parametrize("v", [1e-3, 0.4, 2.0, 30.0])
def test_a_cross_polytope_with_norms_of_pairs_has_hyperbolic_features(v, parameter):
    x, y = np.zeros(5), v * np.eye(5)[0]
    options = {"parameter": parameter, "log": True}
    got = kernel_mse(x, y, 10, coupling="cross_polytope", norms="pair", **options)
    expected = kernel_mse(x, y, 5, coupling="orthogonal", features="hyperbolic", **options)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.fast
@pytest.mark.parametrize("norms", ["pair", "shared", "antithetic", "sqrt_dim", "radau"])
def test_hyperbolic_features_of_a_cross_polytope_hold_each_feature_twice(norms):
    v = np.array([1e-2, 0.5, 2.0, 6.0])
    x, y = np.zeros((4, 3)), v[:, None] * np.eye(3)[0]
    num_features = 6 + (norms == "radau")
    options = {"coupling": "cross_polytope", "norms": norms, "log": True}
    positive = kernel_mse(x, y, num_features, **options)
    hyperbolic = kernel_mse(x, y, num_features, features="hyperbolic", **options)
    np.testing.assert_allclose(hyperbolic, positive, rtol=1e-11)


@pytest.mark.fast
@pytest.mark.parametrize("features", ["positive", "hyperbolic", "trigonometric"])
@pytest.mark.parametrize("num_features", [3, 10, 23])
def test_the_limit_of_small_distances_of_a_cross_polytope(num_features, features):
    options = {"coupling": "cross_polytope", "features": features}
    got = mse_ratio([0.0, 1e-9], num_features, 5, **options)
    np.testing.assert_allclose(
        got, small_distance_prefactor(num_features, 5, **options), rtol=1e-12
    )


@pytest.mark.parametrize("z", [0.7, 1.6])
def test_trigonometric_features_of_a_cross_polytope_against_trials(z):
    rng = np.random.default_rng(0)
    rows = draws.draw_rows(rng, 20_000, 7, 3, "cross_polytope", "chi")
    estimates = np.mean(np.cos(z * rows[..., 0]), axis=1)
    expected = kernel_mse(
        np.zeros(3),
        z * np.eye(3)[0],
        7,
        coupling="cross_polytope",
        features="trigonometric",
    )
    assert_mean((estimates - np.exp(-(z**2) / 2)) ** 2, expected)


DISTANCES = [0.3, 0.5, 1.0, 1.5, 2.0]
FLOORS = [
    ("cross_polytope", 128, "pair", False, [0.0042, 0.0127, 0.0943, 0.369, 0.739]),
    ("simplex", 128, "chi", False, [0.0128, 0.0278, 0.170, 0.496, 0.818]),
    ("simplex", 128, "chi", True, [0.0099, 0.0191, 0.125, 0.350, 0.478]),
    ("simplex", 128, "antithetic", True, [0.00936, 0.01756, 0.1208, 0.3470, 0.4766]),
    ("cross_polytope", 128, "antithetic", False, [0.00291, 0.00948, 0.0861, 0.3618, 0.7360]),
    ("cross_polytope", 128, "antithetic", True, [0.00242, 0.00607, 0.0469, 0.2191, 0.3971]),
    ("cross_polytope", 128, "chi", True, [0.00807, 0.00939, 0.0501, 0.2241, 0.3994]),
    ("cross_polytope", 129, "radau", False, [0.00005, 0.00096, 0.0388, 0.1926, 0.304]),
]


@pytest.mark.fast
@pytest.mark.parametrize(("coupling", "num_features", "norms", "tilted", "floors"), FLOORS)
def test_errors_relative_to_iid_rows_in_64_dimensions(
    coupling, num_features, norms, tilted, floors
):
    v = np.array(DISTANCES)
    parameter = optimal_parameter(v**2, 64) if tilted else 0.0
    got = mse_ratio(v, num_features, 64, coupling=coupling, norms=norms, parameter=parameter)
    # The values are rounded to the digits given.
    np.testing.assert_allclose(got, floors, rtol=0.015, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "num_features", "norms", "tilted", "floors"), FLOORS)
def test_trials_in_64_dimensions(coupling, num_features, norms, tilted, floors):
    del floors
    v = np.array([0.3, 0.5, 1.0])
    sums = v[:, None] * np.eye(64)[:3]
    options = {"coupling": coupling, "norms": norms}
    expected = []
    squares = []
    for distance, one in zip(v, sums, strict=True):
        parameter = float(optimal_parameter(distance**2, 64)) if tilted else 0.0
        rng = np.random.default_rng(0)
        # Draws in groups take less memory.
        estimates = [
            draws.relative_estimates(
                rng,
                500,
                one[None],
                num_features,
                parameter=parameter,
                features="positive",
                **options,
            )
            for _ in range(10)
        ]
        squares.append((np.concatenate(estimates)[:, 0] - 1) ** 2)
        ratio = mse_ratio(distance, num_features, 64, parameter=parameter, **options)
        expected.append(ratio * np.expm1(distance**2) / num_features)
    assert_mean(np.transpose(squares), np.array(expected))


@pytest.mark.fast
@pytest.mark.parametrize("parameter", [0.0, -0.02, 0.01])
def test_the_parameter_does_not_change_the_gain_of_a_coupling(parameter):
    v = np.array([0.2, 0.9, 1.1, 2.0])
    x, y = np.zeros((4, 8)), v[:, None] * np.eye(8)[0]

    def gain(coupling, parameter):
        options = {"parameter": parameter, "kernel": "softmax"}
        iid = kernel_mse(x, y, 16, coupling="iid", **options)
        return iid - kernel_mse(x, y, 16, coupling=coupling, **options)

    for coupling in ("orthogonal", "simplex", "cross_polytope"):
        np.testing.assert_allclose(gain(coupling, parameter), gain(coupling, 0.0), rtol=1e-9)


@pytest.mark.fast
def test_a_parameter_for_each_pair():
    v, parameter = np.array([[0.5], [1.5]]), np.array([0.0, -0.01, -0.05])
    got = mse_ratio(v, 8, 4, coupling="simplex", norms="shared", parameter=parameter)
    assert got.shape == (2, 3)
    one = mse_ratio(1.5, 8, 4, coupling="simplex", norms="shared", parameter=-0.05)
    assert isinstance(one, np.float64)
    np.testing.assert_allclose(got[1, 2], one, rtol=1e-14)


@pytest.mark.fast
@pytest.mark.parametrize(("coupling", "norms"), [*LAWS, *FIXED])
def test_nan_and_no_distance(coupling, norms):
    got = mse_ratio([np.nan, 1.0], 8, 4, coupling=coupling, norms=norms)
    np.testing.assert_array_equal(np.isnan(got), [True, False])
    x = np.array([0.3, -1.0, 2.0])
    assert kernel_mse(x, -x, 7, coupling=coupling, norms=norms) == 0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norms": "gamma"}, "norms must be one of 'chi', 'sqrt_dim', 'antithetic', 'shared'"),
        ({"coupling": "iid", "norms": "shared"}, "coupling='iid' has no row blocks"),
        ({"coupling": "iid", "norms": "antithetic"}, "coupling='iid' has no row blocks"),
        ({"norms": "pair"}, "'pair' .* only coupling='cross_polytope' has, got .*'simplex'"),
        ({"parameter": 0.125}, "parameter must be less than 1/8, .* got 0.125"),
        ({"parameter": np.nan}, "parameter must be less than 1/8, .* got nan"),
        ({"norms": "sqrt_dim", "parameter": -0.1}, "parameter must be 0 with norms='sqrt_dim'"),
        ({"norms": "radau", "parameter": -0.1}, "estimate another kernel"),
        (
            {"norms": "radau", "features": "trigonometric"},
            "'trigonometric' has closed forms only for",
        ),
        ({"norms": "stratified"}, "closed forms only for trigonometric features"),
        (
            {"parameter": -0.1, "features": "trigonometric"},
            "'trigonometric' has closed forms only for",
        ),
    ],
)
def test_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        mse_ratio(1.0, 8, 4, **{"coupling": "simplex", **options})


@pytest.mark.fast
def test_refuses_a_row_of_zeros_alone():
    with pytest.raises(ValueError, match=r"'radau' needs num_features of at least 2.*got 1"):
        mse_ratio(1.0, 1, 4, coupling="cross_polytope", norms="radau")


@pytest.mark.fast
def test_refuses_a_parameter_that_is_no_number():
    with pytest.raises(TypeError, match="parameter must hold real numbers, got complex128"):
        mse_ratio(1.0, 8, 4, coupling="simplex", parameter=1j)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"norms": "gamma"}, ValueError, "norms must be one of"),
        ({"v": -1.0}, ValueError, "v is a norm"),
        ({"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        ({"dim": 1.5}, TypeError, "dim must be an integer"),
    ],
)
def test_bias_refuses(options, error, match):
    with pytest.raises(error, match=match):
        relative_bias(**{"v": 1.0, "dim": 4, "norms": "radau", **options})
