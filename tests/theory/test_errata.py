"""Checks of ERRATA.md, line by line: the printed and the corrected formula against the true value.

The true value is an integral over the rows' norms in arbitrary precision, or Monte Carlo. The
library is used only where a test is about its numbers.
"""

import itertools

import numpy as np
import pytest
from mpmath import mp, mpf

from simrf_jax.theory import (
    hybrid_mse,
    kernel_mse,
    mse_ratio,
    orthogonality_gap,
    resultant_norm_pdf,
    small_distance_prefactor,
)
from tests.standard_errors import assert_mean
from tests.theory import oracle

pytestmark = pytest.mark.fast


def chi_pdf(w, freedom):
    return (
        w ** (freedom - 1)
        * mp.exp(-w * w / 2)
        / (2 ** (mpf(freedom) / 2 - 1))
        / mp.gamma(mpf(freedom) / 2)
    )


def orthogonal_correlation(dim, t):
    """Returns E e^{(w_i + w_j) . u} of orthogonal rows with t = |u|^2 or -|u|^2.

    The integral is over the length of w_i + w_j, which has the distribution chi_2d.
    """
    return mp.quad(
        lambda w: chi_pdf(w, 2 * dim) * mp.hyp0f1(mpf(dim) / 2, t * w * w / 4), [0, 2, 4, 8, 20]
    )


def gamma_series(dim, ratio):
    """Returns Gamma(d/2) / Gamma(d) sum_k Gamma(k + d) / Gamma(k + d/2) ratio^k / k!."""
    half = mpf(dim) / 2
    terms = [mp.gamma(k + dim) / mp.gamma(k + half) * ratio**k / mp.factorial(k) for k in range(60)]
    return mp.gamma(half) / mp.gamma(dim) * mp.fsum(terms)


def test_equation_25():
    d, m, v = 4, 4, mpf("0.7")
    iid = mp.exp(v**2)
    truth = (iid - orthogonal_correlation(d, v**2)) * (m - 1) / m
    printed = (iid - gamma_series(d, v**2)) * (m - 1) / m
    corrected = (iid - gamma_series(d, v**2 / 2)) * (m - 1) / m
    np.testing.assert_allclose([float(truth), float(printed)], [0.02167, -0.6489], atol=5.1e-5)
    assert mp.almosteq(corrected, truth, mpf(10) ** -12)


def test_equation_77():
    d, m, z = 10, 5, mpf("1.1")
    kernel = mp.exp(-(z**2))
    gap = orthogonal_correlation(d, -(z**2)) - kernel
    square = mp.quad(lambda w: mp.npdf(w) * mp.cos(w * z) ** 2, [-12, -4, 0, 4, 12])
    variance = square - kernel
    truth = 1 + (m - 1) * gap / variance
    printed = 1 + 2 * (m - 1) / (1 + kernel) ** 2 * gap
    corrected = 1 + 2 * (m - 1) / (1 - kernel) ** 2 * gap
    np.testing.assert_allclose([float(truth), float(printed)], [0.6521, 0.8983], atol=5.1e-5)
    assert mp.almosteq(corrected, truth, mpf(10) ** -12)


def test_definition_of_a_below_equation_77():
    # E a_1 a_2 with a = cos(w.z) and with a = e^{-i w.z} are equal for orthogonal rows, and differ
    # for simplex rows.
    t = mpf("-1.44")
    for d, cosine, equal in [(3, (0, 1), True), (3, (-1, 2), False)]:
        exponential = oracle.conformity(d, cosine, t)
        cosines = (exponential + oracle.conformity(d, (-cosine[0], cosine[1]), t)) / 2
        assert mp.almosteq(exponential, cosines, mpf(10) ** -10) == equal
    np.testing.assert_allclose([float(exponential), float(cosines)], [0.4017, 0.2168], atol=5.1e-5)


def test_equation_56():
    d, w, c = 6, mpf(3), mpf(-1) / 5

    def line_1(prefactor, last):
        def density(phi):
            s = 1 + c * mp.sin(2 * phi)
            arguments = w * mp.cos(phi) / mp.sqrt(s), w * mp.sin(phi) / s**last
            return w / s**prefactor * chi_pdf(arguments[0], d) * chi_pdf(arguments[1], d)

        return float(mp.quad(density, [0, mp.pi / 4, mp.pi / 2]))

    def line_2(phi):
        s = 1 + c * mp.sin(2 * phi)
        return (mp.sin(phi) * mp.cos(phi)) ** (d - 1) * mp.exp(-w * w / (2 * s)) / s**d

    second = mp.quad(line_2, [0, mp.pi / 4, mp.pi / 2]) * w ** (2 * d - 1)
    second /= 2 ** (d - 2) * mp.gamma(mpf(d) / 2) ** 2
    # The true value is an integral over |w_i| = a alone; |w_j| = b follows from |w_i + w_j| = w.
    scale = w / mp.sqrt(1 - c * c)

    def over_one_norm(t):
        a, b = scale * mp.sin(t), w * mp.cos(t) - c * scale * mp.sin(t)
        return scale * chi_pdf(a, d) * chi_pdf(b, d)

    truth = float(mp.quad(over_one_norm, [0, 1, mp.acot(c / mp.sqrt(1 - c * c)) + mp.pi]))
    np.testing.assert_allclose([line_1(1, 0.5), float(second)], truth, rtol=1e-12)
    np.testing.assert_allclose([truth, line_1(0.5, 1)], [0.6285, 0.5157], atol=5.1e-5)
    np.testing.assert_allclose(resultant_norm_pdf(3.0, 6, cosine=-0.2), truth, rtol=1e-12)


def test_prefactor_of_section_5_1():
    d = 64

    def prefactor(denominator):
        top = mp.sqrt(mp.pi) * mp.gamma(d + 1) * mp.gamma(mpf(d + 1) / 2)
        return float(1 - top / (mp.gamma(mpf(d) / 2) * denominator))

    g = mp.gamma(mpf(d) / 2 + 1)
    np.testing.assert_allclose(prefactor(g**2 * mpf(2) ** d), 0.00778175, atol=5e-9)
    assert prefactor(g * mpf(2) ** (2 * d)) < -1e15
    np.testing.assert_allclose(small_distance_prefactor(d), 0.00778175, atol=5e-9)
    # The prefactor holds for m = d only, and multiplies v^2 e^{-2x^2-2y^2} / m.
    np.testing.assert_allclose(small_distance_prefactor(32, d, block="square"), 0.5118, atol=5.1e-5)
    x = np.eye(d)[0] * 0.5
    y = -x + 1e-6 * np.eye(d)[1]
    mse = kernel_mse(x, y, d, coupling="simplex") / 1e-12
    np.testing.assert_allclose(mse, 0.00778175 * np.exp(-1) / d, rtol=1e-5)


def test_equations_20_21_23_24_and_26_are_right_as_printed():
    # Eq. 20 is the second line of Eq. 56.
    d, v = 5, mpf("0.9")
    half, prefactor = mpf(d) / 2, 1 / (2 ** (mpf(d) - 1) * mp.gamma(mpf(d) / 2))
    for cosine in [(0, 1), (-1, d - 1), (3, 5)]:
        c = mpf(cosine[0]) / cosine[1]

        def equation_21(phi, c=c):
            s = v**2 * (1 + c * mp.sin(phi)) / 2
            gammas = ((s**k / mp.factorial(k), mp.rgamma(k + half)) for k in range(40))
            terms = [a * b * mp.gamma(k + d) for k, (a, b) in enumerate(gammas)]
            return mp.sin(phi) ** (d - 1) * mp.fsum(terms)

        rho = prefactor * mp.quad(equation_21, [0, mp.pi])
        assert mp.almosteq(rho, oracle.conformity(d, cosine, v**2), mpf(10) ** -12)
    orthogonal = orthogonal_correlation(d, v**2)
    assert mp.almosteq(gamma_series(d, v**2 / 2), orthogonal, mpf(10) ** -12)  # Eq. 23.
    orthogonal = orthogonal_correlation(d, -(v**2))
    assert mp.almosteq(gamma_series(d, -(v**2) / 2), orthogonal, mpf(10) ** -12)  # Eq. 26.
    equation_24 = mpf(0)
    for k in range(40):
        inner = mp.fsum(
            mpf(-1) ** p
            / (d - 1) ** p
            * mp.gamma(mpf(d + p) / 2)
            / mp.gamma(mpf(d + p + 1) / 2)
            / mp.factorial(k - p)
            / mp.factorial(p)
            for p in range(k + 1)
        )
        equation_24 += mp.gamma(k + d) / mp.gamma(k + half) * v ** (2 * k) / 2**k * inner
    equation_24 *= mp.sqrt(mp.pi) * prefactor
    assert mp.almosteq(equation_24, oracle.conformity(d, (-1, d - 1), v**2), mpf(10) ** -12)


def test_equation_46():
    # For rows at a right angle, the outer sides are the square of the middle term.
    a, b = 3.0, 4.0
    outer, middle = a * a + b * b + 2 * a * b * 0.0, np.hypot(a, b)
    assert (outer, middle, middle**2) == (25, 5, 25)


def test_equation_80():
    def exact(k, d):
        half = mpf(d) / 2
        return mp.gamma(k + d) * mp.gamma(half) / (mp.gamma(k + half) * mp.gamma(d)) / 2**k

    def stirling(k, d, exponent):
        half = mpf(d) / 2
        root = mp.sqrt((k + d - 1) * (half - 1) / ((k + half - 1) * (d - 1)))
        top = mpf(k + d - 1) ** exponent * (half - 1) ** (half - 1)
        return root * top / ((k + half - 1) ** (k + half - 1) * mpf(d - 1) ** (d - 1)) / 2**k

    k, d, m = 3, 1000, 4
    np.testing.assert_allclose(float(stirling(k, d, k + d - 1) / exact(k, d)), 1, atol=1e-5)
    np.testing.assert_allclose(float(stirling(k, d, m + d - 1) / exact(k, d)), 1002, atol=0.1)
    np.testing.assert_allclose(float(exact(k, d)), 1 - k * (k - 1) / (2 * d), atol=1e-4)  # Eq. 84.


def test_equation_90():
    h = np.ones((1, 1))
    for i in range(2, 7):
        h = np.block([[h, h], [h, -h]]) / np.sqrt(2)
        assert len(h) == 2 ** (i - 1)
        np.testing.assert_allclose(h @ h.T, np.eye(len(h)), atol=1e-15)


def test_corollaries_3_3_and_4_4_need_two_rows_and_a_distance():
    assert orthogonality_gap(0.0, 8, 8) == 0
    assert orthogonality_gap(1.0, 1, 8) == 0
    assert orthogonality_gap(1e-3, 2, 8) > 0
    assert mse_ratio(1.0, 1, 8, coupling="simplex", baseline="orthogonal") == 1
    x = np.ones(8)
    for coupling in ["orthogonal", "simplex"]:
        assert kernel_mse(x, -x, 8, coupling=coupling) == 0


def test_theorem_3_4_is_about_d_rows():
    printed = mse_ratio(0.5, 8, 64, coupling="simplex", block="square")
    better = mse_ratio(0.5, 8, 64, coupling="simplex", block="regular")
    np.testing.assert_allclose([printed, better], [0.892, 0.134], atol=5.1e-4)
    # Monte Carlo compares the first 8 rows of Eq. 9 with 8 rows at arccos(-1/7).
    rng, v = np.random.default_rng(0), 0.5
    norms = np.sqrt(rng.chisquare(64, (40_000, 8)))
    estimates = []
    for c in (-1 / 63, -1 / 7):
        gram = (1 - c) * np.eye(8) + c
        values, vectors = np.linalg.eigh(gram)
        directions = vectors * np.sqrt(np.maximum(values, 0))
        u = rng.normal(size=(40_000, 64))
        u = v * u[:, :8] / np.linalg.norm(u, axis=1, keepdims=True)
        estimates.append(np.exp(norms * (u @ directions.T)).mean(axis=1))
    iid = (np.exp(2 * v**2) - np.exp(v**2)) / 8
    for estimate, ratio in zip(estimates, [printed, better], strict=True):
        assert_mean((estimate - np.exp(v**2 / 2)) ** 2, ratio * iid)


def test_equation_16_is_not_sufficient():
    # On a line with norms 1, 1 and 1.5, each vector is opposed to the sum of the others.
    rows = np.array([1.0, 1.0, -1.5])
    for w in rows:
        rest = rows.sum() - w
        assert w == -abs(w) * np.sign(rest)
    objective = sum((a + b) ** 2 for a, b in itertools.permutations(rows, 2))
    angle = np.arccos((1.5**2 - 2) / 2)  # The vectors form a closed triangle.
    triangle = np.array([1, np.exp(1j * angle), 0])
    triangle[2] = -triangle.sum()
    np.testing.assert_allclose(np.abs(triangle), np.abs(rows), rtol=1e-12)
    closed = sum(abs(a + b) ** 2 for a, b in itertools.permutations(triangle, 2))
    np.testing.assert_allclose([objective, closed], [9.0, 8.5], rtol=1e-12)


@pytest.mark.parametrize(
    ("dim", "roots"),
    [(2, []), (3, [3.311]), (4, [3.081]), (6, [2.955, 4.283]), (8, [2.960, 4.014, 5.277])],
)
def test_threshold_of_section_4_1(dim, roots):
    def gap(z):
        return mp.exp(-(z**2)) - mp.hyp1f1(dim, mpf(dim) / 2, -(z**2) / 2)

    with mp.workdps(40):
        z = [mpf(number) / 20 for number in range(10, 160)]
        signs = [mp.sign(gap(a)) for a in z]
        assert signs[0] == 1
        brackets = [
            pair
            for pair, s in zip(itertools.pairwise(z), itertools.pairwise(signs), strict=True)
            if s[0] != s[1]
        ]
        found = [float(mp.findroot(gap, pair, solver="anderson")) for pair in brackets]
    np.testing.assert_allclose(found, roots, atol=5e-4)


@pytest.mark.slow
def test_norm_of_section_5_2():
    # The sum over entries, as in the text, is divided by d^2. The axis of Fig. 7 has 1e-3 and 1e-2.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 64, 64)) * 0.1
    expected = {"iid": 0.0151, "orthogonal": 0.0110, "simplex": 0.0051}
    for coupling, value in expected.items():
        mse = kernel_mse(x[:, :, None], x[:, None], 64, coupling=coupling, block="square")
        sums = mse.sum(axis=(1, 2))
        spread = sums.std() / len(sums) ** 0.5 / 64**2
        assert abs(sums.mean() / 64**2 - value) < 5e-5 + 3 * spread
        assert spread < 2e-4
        assert np.sqrt(sums).max() / 64**2 < 0.002  # The norm itself never comes near 1e-2.


def test_constant_of_equation_9():
    for d, off in [(2, 0.9), (3, 0.23), (4, 0.1), (64, 2.5e-4)]:
        for constant, tolerance in [(np.sqrt(d) + 1, 1e-14), (np.sqrt(d + 1), None)]:
            s = np.sqrt(d / (d - 1)) * np.eye(d)[0] - constant / (d - 1) ** 1.5 * (
                np.arange(d) < d - 1
            )
            error = abs(s @ s - 1)
            if tolerance:
                assert error < tolerance
            else:
                np.testing.assert_allclose(error, off, rtol=0.1)


def test_limit_of_theorem_3_5_of_hybrid_random_features():
    # At an angle of pi - delta, the printed formula takes the root of -delta.
    m, n, r, delta = 16, 8, 1.2, 1e-6
    x, y = np.array([r, 0.0]), r * np.array([np.cos(np.pi - delta), np.sin(np.pi - delta)])
    relative = np.sqrt(hybrid_mse(x, y, m, n, coupling="iid")) / np.exp(x @ y)
    limit = np.exp(2 * r**2) * (1 - np.exp(-4 * r**2)) / np.sqrt(2 * np.pi * m * n)
    np.testing.assert_allclose(relative / np.sqrt(delta), limit, rtol=1e-5)
