import numpy as np
import pytest
from mpmath import mp, mpf

from simrf_jax._src.theory.quadrature import log_hyp0f1

pytestmark = pytest.mark.fast
# The arguments lie on both sides of the end of the series, about 9e4 for small b.
X = np.array([1e-300, 1e-12, 1e-3, 1.0, 30.0, 1e3, 8.9e4, 9.1e4, 1e5, 3e5, 1e6])


@pytest.mark.parametrize("b", [0.5, 1.0, 1.5, 3.0, 32.0, 64.5, 512.0, 5000.0])
def test_against_arbitrary_precision(b):
    with mp.workdps(40):
        expected = [float(mp.log1p(mp.hyp0f1(b, mpf(x)) - 1)) for x in X[1:]]
    np.testing.assert_allclose(log_hyp0f1(b, X[1:]), expected, rtol=5e-15)
    np.testing.assert_allclose(log_hyp0f1(b, X[:1]), 1e-300 / b, rtol=1e-14)


@pytest.mark.parametrize("x", [1e4, 1e10, 1e100])
def test_is_the_logarithm_of_hyperbolic_functions(x):
    # 0F1(; 1/2; x^2/4) = cosh(x), 0F1(; 3/2; x^2/4) = sinh(x) / x.
    np.testing.assert_allclose(log_hyp0f1(0.5, np.array([x**2 / 4])), x - np.log(2), rtol=1e-15)
    np.testing.assert_allclose(log_hyp0f1(1.5, np.array([x**2 / 4])), x - np.log(2 * x), rtol=1e-15)


def test_ends_and_shapes():
    x = np.array([[0.0, np.nan], [np.inf, 1.0]])
    got = log_hyp0f1(3.0, x)
    np.testing.assert_array_equal(got[:, 0], [0, np.inf])
    assert np.isnan(got[0, 1])
    assert log_hyp0f1(3.0, np.zeros((0, 2))).shape == (0, 2)
