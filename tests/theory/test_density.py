import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from mpmath import mp, mpf

from simrf_jax.theory import resultant_norm_pdf

pytestmark = pytest.mark.fast
COUPLINGS = ["iid", "orthogonal", "simplex"]
COSINE = {"orthogonal": lambda d: 0.0, "simplex": lambda d: -1 / (d - 1)}


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("dim", [2, 3, 4, 7, 64, 127, 1024])
def test_is_normalized_and_has_the_second_moment(dim, coupling):
    center = np.sqrt(2 * dim)
    w = np.linspace(max(0, center - 15), center + 15, 20001)
    p = resultant_norm_pdf(w, dim, coupling=coupling)
    mean_norm = np.sqrt(2) * scipy.special.poch(dim / 2, 0.5)
    cosine = 0 if coupling == "iid" else COSINE[coupling](dim)
    second = 2 * dim * (1 + cosine * mean_norm**2 / dim)
    np.testing.assert_allclose(scipy.integrate.simpson(p, x=w), 1, rtol=1e-11)
    np.testing.assert_allclose(scipy.integrate.simpson(p * w**2, x=w), second, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [3, 8, 65])
def test_of_the_simplex_is_the_integral_over_both_norms(dim):
    # w^2 = a^2 + b^2 + 2 c a b with a, b = r cos(phi / 2), r sin(phi / 2).
    center = np.sqrt(2 * dim)
    for w in [1e-3, 0.3, center - 1, center, center + 4, 30.0]:
        got = resultant_norm_pdf(w, dim, coupling="simplex")
        np.testing.assert_allclose(got, float(_polar_integral(mpf(float(w)), dim)), rtol=1e-11)


def _polar_integral(w, dim):
    with mp.workdps(25):
        c = mpf(-1) / (dim - 1)

        def density(phi):
            s = mp.sin(phi)
            exponent = w**2 / 2 - w**2 / (2 * (1 + c * s))
            return mp.exp(exponent) / (1 + c * s) ** dim * s ** (dim - 1)

        # mp.quad stops at an absolute error, so panels are narrow and e^{w^2/2} is factored out.
        ends = [0, *(mpf(2) ** -j for j in range(10, 3, -1)), *mp.linspace(0.1, mp.pi / 2, 16)]
        norm = mp.gamma(dim) * mpf(2) ** (dim - 1) * mp.beta(mpf(dim) / 2, mpf(1) / 2)
        return 2 * mp.quad(density, ends) * w ** (2 * dim - 1) * mp.exp(-(w**2) / 2) / norm


@pytest.mark.parametrize("w", [0.0, 1e-3, 0.3, 1.0, 2.5, 8.0, 30.0])
def test_of_two_antiparallel_rows_is_that_of_the_difference_of_their_norms(w):
    def density(b):
        a = b + mpf(w)
        return a * b * mp.exp((w**2 - a**2 - b**2) / 2)

    with mp.workdps(25):
        expected = 2 * mp.quad(density, [0, 0.1, 1, 3, 8, mp.inf]) * mp.exp(-(mpf(w) ** 2) / 2)
    got = resultant_norm_pdf(w, 2, coupling="simplex")
    np.testing.assert_allclose(got, float(expected), rtol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 9, 200])
def test_of_iid_and_orthogonal_rows_is_chi(dim):
    w = np.linspace(0, 40, 81)
    iid = scipy.stats.chi.pdf(w, dim, scale=np.sqrt(2))
    np.testing.assert_allclose(resultant_norm_pdf(w, dim, coupling="iid"), iid, rtol=1e-10)
    if dim > 1:
        chi = scipy.stats.chi.pdf(w, 2 * dim)
        np.testing.assert_allclose(
            resultant_norm_pdf(w, dim, coupling="orthogonal"), chi, rtol=1e-10
        )


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("dim", [2, 3])
def test_limits_shapes_and_nan(dim, coupling):
    w = np.array([[0.0, np.nan], [1.0, 1e200]])
    got = resultant_norm_pdf(w, dim, coupling=coupling)
    assert got.dtype == np.float64
    # Two antiparallel rows can cancel, so |a - b| has a density at 0.
    zero = np.sqrt(np.pi) / 2 if dim == 2 and coupling == "simplex" else 0
    np.testing.assert_allclose(got[0, 0], zero, rtol=1e-15)
    assert np.isnan(got[0, 1])
    assert got[1, 1] == 0
    assert resultant_norm_pdf(np.inf, dim, coupling=coupling) == 0
    scalar = resultant_norm_pdf(1, dim, coupling=coupling)
    assert isinstance(scalar, np.float64)
    assert scalar == got[1, 0]


def _integral_over_one_norm(w, dim, c):
    """Returns the density of |w_i + w_j| by an integral over one norm.

    The norms are a = |w_i| = w sin(t) / sqrt(1 - c^2) and |w_j| = w cos(t) - c a.
    """
    with mp.workdps(20):
        w, c = mpf(float(w)), mpf(float(c))
        scale = w / mp.sqrt(1 - c**2)
        log_norm = 2 * ((mpf(dim) / 2 - 1) * mp.log(2) + mp.loggamma(mpf(dim) / 2))

        def density(t):
            a = scale * mp.sin(t)
            b = w * mp.cos(t) - c * a
            log_power = (dim - 1) * (mp.log(a) + mp.log(b)) if b > 0 and a > 0 else mp.ninf
            return mp.exp(log_power - (a * a + b * b) / 2 - log_norm)

        end = mp.acot(c / mp.sqrt(1 - c**2))
        end += mp.pi if end <= 0 else 0
        return float(scale * mp.quad(density, mp.linspace(0, end, 9)))


@pytest.mark.parametrize("cosine", [-0.9999, -0.9, -0.51, -0.49, 0.3, 0.99])
@pytest.mark.parametrize("dim", [2, 5, 32])
def test_at_any_angle_is_the_integral_over_one_norm(dim, cosine):
    for w in [0.2, np.sqrt(2 * dim * (1 + cosine)), np.sqrt(2 * dim), 8.0]:
        expected = _integral_over_one_norm(w, dim, cosine)
        got = resultant_norm_pdf(w, dim, cosine=cosine)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("cosine", [-1, -0.97, 0.5, 1])
@pytest.mark.parametrize("dim", [2, 3, 64, 1024])
def test_at_any_angle_is_normalized_and_has_the_second_moment(dim, cosine):
    center = np.sqrt(2 * dim * (1 + cosine))
    w = np.linspace(max(0, center - 15), center + 15, 2001)
    p = resultant_norm_pdf(w, dim, cosine=cosine)
    mean_norm = np.sqrt(2) * scipy.special.poch(dim / 2, 0.5)
    np.testing.assert_allclose(scipy.integrate.simpson(p, x=w), 1, rtol=1e-6)
    second = 2 * dim + 2 * cosine * mean_norm**2
    np.testing.assert_allclose(scipy.integrate.simpson(p * w**2, x=w), second, rtol=1e-6)


def test_of_antiparallel_rows_at_zero_is_that_of_equal_norms():
    # The density at 0 of |a - b| is 2 E p(a) = 2 G(d - 1/2) / (2^{d-1} G(d/2)^2 2) at any d.
    for dim in [2, 3, 9]:
        gammas = scipy.special.gamma(dim - 0.5) / scipy.special.gamma(dim / 2) ** 2
        for w in [0.0, 1e-12]:
            got = resultant_norm_pdf(w, dim, cosine=-1)
            np.testing.assert_allclose(got, gammas * 2.0 ** (2 - dim), rtol=1e-12)
