"""Errors of trigonometric features for all kernels, against integrals of another form."""

import itertools

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special

from simrf_jax import theory
from simrf_jax._src.theory import oscillating, series
from simrf_jax._src.theory.pairs import Pairs, Rows, coupled_rows
from simrf_jax.kernels import Gaussian, Matern, PoweredExponential, RationalQuadratic

pytestmark = pytest.mark.fast
V = np.array([0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "cross_polytope"])
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_the_gaussian_kernel_has_its_closed_form(coupling, dim):
    rows = coupled_rows(2 * dim + 1, dim, coupling)
    found = oscillating.trigonometric_ratio(V**2, rows, Gaussian())
    expected = theory.mse_ratio(V, 2 * dim + 1, dim, coupling=coupling, features="trigonometric")
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "cross_polytope"])
def test_smooth_kernels_approach_the_gaussian_one(coupling):
    options = {"coupling": coupling, "features": "trigonometric"}
    expected = theory.mse_ratio(V[1:], 9, 4, **options)
    off = [
        np.max(np.abs(theory.mse_ratio(V[1:], 9, 4, kernel=Matern(nu), **options) - expected))
        for nu in (20, 40)
    ]
    assert off[1] < 0.6 * off[0] < 0.06


def mean_cosine(kernel, x):
    """Returns E cos(w_1 x) given the direction, in three dimensions, where 1F1 is elementary."""
    q = x**2 / 2
    if isinstance(kernel, RationalQuadratic):
        value = np.exp(-kernel.alpha * np.log1p(q / kernel.alpha))
        return value * (1 - 2 * q / (1 + q / kernel.alpha))
    root = np.sqrt(2 * q)  # The Laplace kernel.
    return (1 - root) * np.exp(-root)


LAPLACE = (Matern(0.5), PoweredExponential(1.0))


@pytest.mark.parametrize("v", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("kernel", [*map(RationalQuadratic, (0.3, 1.0)), *LAPLACE], ids=str)
def test_orthogonal_rows_against_an_integral_over_the_sphere(kernel, v):
    def integrand(angle, third):
        radius = v * np.sqrt(1 - third**2)
        first, second = radius * np.cos(angle), radius * np.sin(angle)
        return mean_cosine(kernel, first) * mean_cosine(kernel, second)

    joint = scipy.integrate.dblquad(integrand, 0, 1, 0, np.pi / 2, epsabs=1e-11)[0] * 2 / np.pi
    single = np.exp(-v) if kernel in LAPLACE else (1 + v**2 / 2 / kernel.alpha) ** -kernel.alpha
    gap = theory.orthogonality_gap(v, 3, 3, features="trigonometric", kernel=kernel)
    np.testing.assert_allclose(gap, (single**2 - joint) * 2 / 3, atol=1e-11)


@pytest.mark.parametrize("v", [0.1, 1.0, 5.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize(
    "kernel", [RationalQuadratic(0.3), RationalQuadratic(1e4), *LAPLACE], ids=str
)
def test_parallel_rows_against_an_integral_over_the_sphere(kernel, v):
    # The pairs of a cross-polytope, in three dimensions, whose series falls like a power.
    edges = np.append(0.0, np.geomspace(min(0.1, v), v, 40)) / v
    square = sum(
        scipy.integrate.quad(lambda u: mean_cosine(kernel, u * v) ** 2, *panel, epsabs=1e-14)[0]
        for panel in itertools.pairwise(edges)
    )
    single = np.exp(-v)
    if kernel not in LAPLACE:
        single = np.exp(-kernel.alpha * np.log1p(v**2 / 2 / kernel.alpha))
    x = np.array([v, 0.0, 0.0])
    options = {"features": "trigonometric", "kernel": kernel}
    pair = theory.kernel_mse(x, 0 * x, 2, coupling="cross_polytope", **options)
    iid = theory.kernel_mse(x, 0 * x, 2, coupling="iid", **options)
    np.testing.assert_allclose(pair - iid, (square - single**2) / 2, rtol=1e-8)


@pytest.mark.parametrize(
    "kernel",
    [
        *(Gaussian(), Matern(2.5), Matern(0.5)),
        pytest.param(RationalQuadratic(1e4), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [8, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 512))])
def test_far_away_covariances_of_parallel_rows_fall_like_the_distance(kernel, dim):
    # Rows are correlated for directions at a right angle to x - y, up to an angle of 1 / z.
    z = np.array([1e4, 1e5])
    options = {"coupling": "cross_polytope", "features": "trigonometric", "kernel": kernel}
    excess = theory.mse_ratio(z, 2 * dim, dim, **options) - 1
    assert excess[0] > 0
    np.testing.assert_allclose(excess[1] / excess[0], 0.1, rtol=1e-5)
    assert theory.mse_ratio(np.inf, 2 * dim, dim, **options) == 1


@pytest.mark.parametrize("dim", [2, 3, 64])
def test_far_away_the_series_of_all_kernels_continues_that_of_the_gaussian_one(dim):
    rows, t = Rows(2 * dim, dim, "chi", (Pairs(1.0, -1.0),)), np.array([1e3, 1e4, 1e5])
    expected = series.trigonometric_ratio(t, rows) - 1
    found = oscillating.trigonometric_ratio(t, rows, Gaussian()) - 1
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize("dim", [2, 5, 64])
def test_coefficients_against_mpmath(dim):
    q = np.array([1e-6, 0.3, 20.0, 3e3, 1e9])
    degrees = (1, 2, 30, 1000)
    found = oscillating._coefficients(q, dim, np.array(degrees, float))
    for row, n in zip(found, degrees, strict=True):
        multiplicity = scipy.special.comb(2 * n + dim - 1, dim - 1, exact=True)
        multiplicity -= scipy.special.comb(2 * n + dim - 3, dim - 1, exact=True)
        for i, x in enumerate(q):
            with mpmath.workdps(40):
                z, half = mpmath.mpf(float(x)), mpmath.mpf(dim) / 2
                expected = z**n * mpmath.gamma(n + half) / mpmath.gamma(2 * n + half)
                expected *= mpmath.hyp1f1(n + half, 2 * n + half, -z) * mpmath.sqrt(multiplicity)
            np.testing.assert_allclose(row[i], float(expected), rtol=1e-10, atol=1e-40)


@pytest.mark.parametrize("dim", [1, 2, 7, 200])
def test_characteristic_functions_of_directions_against_mpmath(dim):
    r = np.array([1e-5, 0.1, 3.0, 5.5, 40.0])
    with mpmath.workdps(40):
        half, x = mpmath.mpf(dim) / 2, [mpmath.mpf(float(each)) for each in r]
        expected = [float(1 - mpmath.hyp0f1(half, -(each**2) / 4)) for each in x]
    np.testing.assert_allclose(oscillating._one_minus_lambda(r, dim), expected, rtol=1e-8)


@pytest.mark.parametrize("kernel", [Gaussian(), Matern(1.5), RationalQuadratic(0.5)], ids=str)
def test_shared_norms_have_kernels_at_other_distances(kernel):
    x = np.array([[0.8, 0.3, 0.0, 0.1]])
    v, m = np.linalg.norm(x), 4

    def k(distance):
        return float(kernel(np.zeros((1, 1), np.float32), np.array([[distance]], np.float32))[0, 0])

    own = (1 + k(2 * v)) / 2 - k(v) ** 2
    others = k(2**0.5 * v) - k(v) ** 2
    found = theory.kernel_mse(
        x, 0 * x, m, coupling="orthogonal", features="trigonometric", norms="shared", kernel=kernel
    )
    np.testing.assert_allclose(found, (own + (m - 1) * others) / m, rtol=1e-5)


@pytest.mark.parametrize("norms", ["chi", "antithetic", "shared", "stratified"])
def test_limits_at_zero_and_far_away(norms):
    options = {"coupling": "orthogonal", "features": "trigonometric", "norms": norms}
    for kernel in (Gaussian(), Matern(2.5), RationalQuadratic(1.0)):
        ratio = theory.mse_ratio([0.0, 1e-3, 1e6, np.inf, np.nan], 8, 8, kernel=kernel, **options)
        assert ratio[0] == pytest.approx(ratio[1], rel=0.05)
        np.testing.assert_allclose(ratio[2:4], 1, atol=0.02)
        assert np.isnan(ratio[4])
        x = np.zeros((2, 8))
        assert np.all(theory.kernel_mse(x, x, 8, kernel=kernel, **options) == 0)
    # Where the fourth moment of the rows is infinite, no angle helps at small distances.
    if norms == "chi":
        laplace = theory.mse_ratio([0.0, 1e-3], 8, 8, kernel=Matern(0.5), **options)
        np.testing.assert_allclose(laplace, 1, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "power"),
    [
        ({"norms": "antithetic"}, 4),
        ({"norms": "stratified"}, 4),
        ({"norms": "shared"}, 4),
        ({"kernel": Matern(0.5)}, 1),
        ({"kernel": Matern(1.5)}, 3),
        ({"kernel": RationalQuadratic(0.3)}, 4),
    ],
    ids=str,
)
def test_errors_are_powers_of_small_distances(options, power):
    options |= {"coupling": "orthogonal", "features": "trigonometric", "log": True}
    far, near, nearer = (
        theory.kernel_mse([z, 0.0], [0.0, 0.0], 2, **options) for z in (1e-3, 1e-9, 1e-12)
    )
    np.testing.assert_allclose((far - near) / np.log(1e6), power, rtol=1e-3)
    np.testing.assert_allclose((near - nearer) / np.log(1e3), power, rtol=1e-4)


def test_the_gap_is_the_difference_of_the_errors():
    x = np.array([1.2, 0.0, 0.0, 0.0, 0.0])
    for kernel in (Gaussian(), Matern(0.5), RationalQuadratic(2.0)):
        options = {"features": "trigonometric", "kernel": kernel}
        iid, orthogonal = (
            theory.kernel_mse(x, 0 * x, 7, coupling=c, **options) for c in ("iid", "orthogonal")
        )
        gap = theory.orthogonality_gap(1.2, 7, 5, **options)
        np.testing.assert_allclose(gap, iid - orthogonal, rtol=1e-9)
    assert theory.orthogonality_gap(1.0, 1, 5, features="trigonometric", kernel=Matern()) == 0
    with pytest.raises(ValueError, match="estimate only the Gaussian and the softmax kernel"):
        theory.orthogonality_gap(1.0, 5, 5, kernel=Matern())


def law_in_two_dimensions(kernel):
    """Returns a quadrature rule for the law of s, and the parameter of the explicit law of norms.

    Rows for the Matern kernel have the t-distribution: P(|w| > a) = (1 + a^2 / (2 nu))^-nu, which
    for the Gaussian kernel is exp(-a^2 / 2).
    """
    if kernel == Gaussian():
        return np.ones(1), np.ones(1), np.inf
    log_gamma = np.arange(-40 / kernel.nu, 7, 0.1)
    weights = np.exp(kernel.nu * log_gamma - np.exp(log_gamma) - scipy.special.gammaln(kernel.nu))
    return kernel.nu * np.exp(-log_gamma), 0.1 * weights, kernel.nu


def mean_cosines(kernel, num_strata, omega):
    """Returns E cos(a omega) for norms a in each stratum; the last is the rest of all norms."""
    scales, weights, nu = law_in_two_dimensions(kernel)
    y = np.sqrt(scales / 2) * omega[:, None]
    everywhere = (1 - 2 * y * scipy.special.dawsn(y)) @ weights
    log_above = np.log1p(-np.arange(num_strata) / num_strata)
    edges = np.sqrt(-2 * log_above if np.isinf(nu) else 2 * nu * np.expm1(-log_above / nu))
    roots, weights = np.polynomial.legendre.leggauss(int(100 + np.max(omega) * edges[-1]))
    half = np.diff(edges)[:, None] / 2
    a = edges[:-1, None] + half * (1 + roots)
    density = a * (np.exp(-(a**2) / 2) if np.isinf(nu) else (1 + a**2 / (2 * nu)) ** (-nu - 1))
    means = [
        np.cos(omega[:, None] * x) @ w for x, w in zip(a, half * weights * density, strict=True)
    ]
    return num_strata * np.stack([*means, everywhere - sum(means)])


def stratified_mse(kernel, num_rows, z, coupling):
    """Returns the mean squared error in two dimensions by integrals over the angle of a row.

    The number of rows is even, or a multiple of four for a cross-polytope.
    """
    # The tanh-sinh rule for the angle resolves small cosines and sines.
    t, step = np.linspace(-3.8, 3.8, int(500 + 8 * z), retstep=True)
    u = np.pi * np.sinh(t)
    weights = step * np.pi * np.cosh(t) * scipy.special.expit(u) * scipy.special.expit(-u)
    x, y = (
        mean_cosines(kernel, num_rows, z * np.sin(np.pi / 2 * scipy.special.expit(sign * u)))
        for sign in (-1, 1)
    )

    def mean_of_pairs(x, y):  # Any two rows have different strata.
        pairs = num_rows * (num_rows - 1)
        return (x.sum(axis=0) * y.sum(axis=0) - (x * y).sum(axis=0)) / pairs

    alone = mean_of_pairs(x @ weights, x @ weights)
    across, along = mean_of_pairs(x, y) @ weights, mean_of_pairs(x, x) @ weights
    partners = across if coupling == "orthogonal" else along + 2 * across
    others = num_rows - (2 if coupling == "orthogonal" else 4)
    scales, weights, _ = law_in_two_dimensions(kernel)
    k, k2 = (np.exp(-scales * (factor * z) ** 2 / 2) @ weights for factor in (1, 2))
    return ((1 + k2) / 2 + partners + others * alone) / num_rows - k**2


STRATIFIED = [
    ("orthogonal", Matern(0.2), 2, 1.0),
    ("orthogonal", Matern(0.2), 4, 0.01),
    ("orthogonal", Matern(0.2), 16, 0.01),
    ("orthogonal", Matern(0.5), 4, 10.0),
    ("orthogonal", Gaussian(), 2, 50.0),
    ("orthogonal", Gaussian(), 2, 100.0),
    pytest.param("orthogonal", Gaussian(), 2, 300.0, marks=pytest.mark.slow),
    ("cross_polytope", Matern(0.2), 4, 1.0),
    ("cross_polytope", Gaussian(), 4, 10.0),
    ("cross_polytope", Gaussian(), 4, 30.0),
]


@pytest.mark.parametrize(("coupling", "kernel", "num_rows", "z"), STRATIFIED)
def test_stratified_norms_against_integrals_over_the_angle(coupling, kernel, num_rows, z):
    options = {"coupling": coupling, "norms": "stratified", "features": "trigonometric"}
    got = theory.kernel_mse([0.0, 0.0], [z, 0.0], num_rows, kernel=kernel, **options)
    np.testing.assert_allclose(got, stratified_mse(kernel, num_rows, z, coupling), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("z", [150.0, 300.0])
def test_a_stratified_cross_polytope_far_away(z):
    options = {"coupling": "cross_polytope", "norms": "stratified", "features": "trigonometric"}
    got = theory.kernel_mse([0.0, 0.0], [z, 0.0], 4, **options)
    expected = stratified_mse(Gaussian(), 4, z, "cross_polytope")
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_far_away_the_cosines_of_a_stratified_cross_polytope_are_uncorrelated():
    far = np.zeros((2, 64))
    far[:, 0] = 300, 1000
    options = {"coupling": "cross_polytope", "norms": "stratified", "features": "trigonometric"}
    errors = theory.kernel_mse(np.zeros(64), far, 2, **options)
    np.testing.assert_allclose(errors, 1 / 4, rtol=1e-3)


@pytest.mark.parametrize("z", [1.0, 100.0, 1000.0, 3000.0, 1e5])
def test_antithetic_norms_against_a_dense_rule(z):
    normal, step = np.linspace(-9, 9, 800_001, retstep=True)
    weights = step * np.exp(-(normal**2) / 2) / np.sqrt(2 * np.pi)
    sums = -2 * (scipy.special.log_ndtr(normal) + scipy.special.log_ndtr(-normal))
    product, k2 = scipy.special.j0(z * np.sqrt(sums)) @ weights, np.exp(-(z**2))
    expected = 1 + (product - k2) / ((1 - k2) ** 2 / 2)
    options = {"coupling": "orthogonal", "norms": "antithetic", "features": "trigonometric"}
    np.testing.assert_allclose(theory.mse_ratio(z, 2, 2, **options), expected, rtol=1e-10)
    np.testing.assert_allclose(theory.mse_ratio(np.inf, 5, 2, **options), 1, rtol=1e-7)
