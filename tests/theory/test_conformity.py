import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from mpmath import mp, mpf

from simrf_jax._src.projections import couplings
from simrf_jax._src.theory import arguments
from simrf_jax.theory import log_conformity, resultant_norm_pdf
from tests.theory import oracle

COUPLINGS = ["iid", "orthogonal", "simplex"]
V = np.array([1e-3, 0.03, 0.3, 0.99, 1.01, 3.0, 10.0])


def log_rho(v, dim, coupling):
    t = mpf(float(v)) ** 2
    if coupling == "iid":
        return float(t)
    cosine = (0, 1) if coupling == "orthogonal" else (-1, dim - 1)
    with mp.workdps(oracle.DIGITS):
        return float(mp.log(oracle.conformity(dim, cosine, t)))


@pytest.mark.fast
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("dim", [2, 3, 5, 8, 17, 64, 127, 128])
def test_against_arbitrary_precision(dim, coupling):
    expected = [log_rho(v, dim, coupling) for v in V]
    np.testing.assert_allclose(log_conformity(V, dim, coupling=coupling), expected, rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
@pytest.mark.parametrize(("dim", "v"), [(2, 100), (3, 30), (3, 300), (64, 100), (17, 30)])
def test_large_arguments(dim, v, coupling):
    expected = log_rho(v, dim, coupling)
    np.testing.assert_allclose(log_conformity(v, dim, coupling=coupling), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("dim", "cosine", "t"), [(2, (-1, 1), 4), (5, (-1, 4), 30), (8, (1, 1), -9)]
)
def test_the_two_oracles_agree(dim, cosine, t):
    series = oracle.conformity_by_series(dim, cosine, mpf(t))
    assert mp.almosteq(oracle.conformity_by_quadrature(dim, cosine, mpf(t)), series, mpf(10) ** -14)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("dim", [2, 3, 6, 64])
def test_is_the_mean_over_the_density_of_the_resultant(dim, coupling):
    v = 0.8
    # E[0F1(; d/2; v^2 w^2 / 4)], Eq. 10 and its angular average.
    w = np.linspace(0, np.sqrt(2 * dim) + 14, 20001)
    terms = [float(mp.hyp0f1(dim / 2, (v * w_i) ** 2 / 4)) for w_i in w[::20]]
    values = terms * resultant_norm_pdf(w[::20], dim, coupling=coupling)
    expected = np.log(scipy.integrate.simpson(values, x=w[::20]))
    np.testing.assert_allclose(log_conformity(v, dim, coupling=coupling), expected, rtol=1e-7)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_limits_shapes_and_nan(coupling):
    v = np.array([[0.0, np.nan, 1e-160], [1.0, 2.0, 3.0]])
    got = log_conformity(v, 3, coupling=coupling)
    assert got.dtype == np.float64
    assert got[0, 0] == 0
    assert np.isnan(got[0, 1])
    assert 0 < got[0, 2] < 2e-320
    for i in range(3):
        scalar = log_conformity(v[1, i], 3, coupling=coupling)
        assert isinstance(scalar, np.float64)
        np.testing.assert_allclose(scalar, got[1, i], rtol=1e-15)
    assert log_conformity(np.zeros((0, 2)), 3, coupling=coupling).shape == (0, 2)


@pytest.mark.fast
def test_any_real_type():
    assert log_conformity(2, 3, coupling="iid") == 4
    assert log_conformity(jnp.array(1.5, jnp.bfloat16), 3, coupling="iid") == 2.25
    assert log_conformity(1e200, 3, coupling="iid") == np.inf


@pytest.mark.fast
@pytest.mark.parametrize("function", [log_conformity, resultant_norm_pdf])
@pytest.mark.parametrize(
    ("value", "dim", "coupling", "error", "match"),
    [
        (1.0, 3, "simplex_plus", ValueError, "no closed form.*norms drawn.*Monte Carlo"),
        (1.0, 3, "orthogonl", ValueError, "one of 'iid', 'orthogonal', 'simplex', got 'orthogonl'"),
        (1.0, 1, "simplex", ValueError, "'simplex' needs dim of at least 2, got dim=1"),
        (1.0, 1, "orthogonal", ValueError, "orthogonal rows needs dim of at least 2, got 1"),
        (1.0, 0, "iid", ValueError, "dim must be at least 1, got 0"),
        (1.0, 3.0, "iid", TypeError, "dim must be an integer, got 3.0"),
        ([1.0, -0.5], 3, "simplex", ValueError, "[vw] is a norm.*at least 0, got -0.5"),
        (1j, 3, "simplex", TypeError, "[vw] must hold real numbers, got complex128"),
        (True, 3, "simplex", TypeError, "[vw] must hold real numbers, got bool"),
    ],
)
def test_refuses(function, value, dim, coupling, error, match):
    with pytest.raises(error, match=match):
        function(value, dim, coupling=coupling)


@pytest.mark.fast
def test_a_coupling_that_theory_does_not_know_is_refused_without_a_wrong_reason(monkeypatch):
    monkeypatch.setattr(couplings, "COUPLINGS", (*couplings.COUPLINGS, "mine"))
    monkeypatch.setitem(couplings.COUPLED, "mine", couplings.COUPLED["orthogonal"])
    with pytest.raises(
        ValueError, match=r"'mine' has no closed form in simrf_jax\.theory\. Estimate its errors by"
    ):
        arguments.coupling("coupling", "mine", 3)


@pytest.mark.fast
def test_refuses_a_series_without_end():
    with pytest.raises(ValueError, match=r"v must be at most 1000, got 1001\.0"):
        log_conformity([1.0, 1001.0], 3, coupling="simplex")


@pytest.mark.fast
@pytest.mark.parametrize("cosine", [(-1, 1), (-99, 100), (-1, 3), (0, 1), (1, 4), (9, 10), (1, 1)])
@pytest.mark.parametrize("dim", [2, 3, 17, 128])
def test_any_angle_against_arbitrary_precision(dim, cosine):
    got = log_conformity(V, dim, cosine=cosine[0] / cosine[1])
    with mp.workdps(oracle.DIGITS):
        conformities = [oracle.conformity(dim, cosine, mpf(float(v)) ** 2) for v in V]
        expected = [float(mp.log(rho)) for rho in conformities]
    np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "v", "cosine"), [(3, 30, (1, 1)), (17, 60, (9, 10))])
def test_large_arguments_at_acute_angles(dim, v, cosine):
    with mp.workdps(oracle.DIGITS):
        expected = float(mp.log(oracle.conformity(dim, cosine, mpf(v) ** 2)))
    np.testing.assert_allclose(log_conformity(v, dim, cosine=cosine[0] / cosine[1]), expected)


@pytest.mark.fast
@pytest.mark.parametrize("function", [log_conformity, resultant_norm_pdf])
def test_couplings_are_angles(function):
    v = np.array([0.1, 1.0, 5.0])
    for dim in [2, 3, 64]:
        for coupling, cosine in [("orthogonal", 0), ("simplex", -1 / (dim - 1))]:
            named, given = function(v, dim, coupling=coupling), function(v, dim, cosine=cosine)
            np.testing.assert_array_equal(named, given)
    assert np.all(np.diff([log_conformity(v, 5, cosine=c) for c in (-1, -0.5, 0, 0.5, 1)], axis=0))


@pytest.mark.fast
@pytest.mark.parametrize("function", [log_conformity, resultant_norm_pdf])
@pytest.mark.parametrize(
    ("dim", "options", "error", "match"),
    [
        (3, {}, ValueError, "one of coupling and cosine, got coupling=None and cosine=None"),
        (3, {"coupling": "iid", "cosine": 0.1}, ValueError, "one of coupling and cosine, got"),
        (3, {"cosine": 1.01}, ValueError, r"cosine must be one number in \[-1, 1\], got 1.01"),
        (3, {"cosine": float("nan")}, ValueError, "cosine must be one number"),
        (3, {"cosine": [0.1, 0.2]}, ValueError, "cosine must be one number"),
        (3, {"cosine": "0"}, TypeError, "cosine must hold real numbers"),
        (1, {"cosine": -1}, ValueError, "at an angle needs dim of at least 2, got 1"),
    ],
)
def test_refuses_an_angle(function, dim, options, error, match):
    with pytest.raises(error, match=match):
        function(1.0, dim, **options)


@pytest.mark.parametrize("function", [log_conformity, resultant_norm_pdf])
def test_refuses_a_coupling_with_two_angles(function):
    with pytest.raises(
        ValueError, match=r"pairs of rows at two angles. Give cosine=-1 or cosine=0"
    ):
        function(1.0, 3, coupling="cross_polytope")
