import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from mpmath import mp, mpf

from simrf_jax._src.projections.couplings import minimize_resultant
from simrf_jax._src.projections.row_blocks import simplex_vertices
from simrf_jax._src.theory.optimum import (
    _log_conformity_and_gradient,
    against_the_rest,
    descent,
)
from simrf_jax._src.theory.quadrature import log_hyp0f1
from simrf_jax.theory import log_conformity_of_rows, optimal_directions
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast
FIGURE_4 = np.array([2.3989, 2.7767, 1.9412, 3.2903, 1.8301, 1.8830])  # One draw of norms.


def conformity(norms, directions, v, dim):
    return np.exp(log_conformity_of_rows(v, norms[:, None] * directions, dim=dim))


def chi(seed, dim, shape):
    return np.sqrt(np.random.default_rng(seed).chisquare(dim, shape))


def test_order_of_figure_4():
    with mp.workdps(20):
        means = [mp.hyp0f1(3, mpf(float(a)) ** 2 / 4) for a in FIGURE_4]
    iid = float((sum(means) ** 2 - sum(f**2 for f in means)) / 30)
    simplex = simplex_vertices(6)
    got = [
        iid,
        conformity(FIGURE_4, np.eye(6), 1.0, 6),
        conformity(FIGURE_4, simplex, 1.0, 6),
        conformity(FIGURE_4, against_the_rest(simplex, FIGURE_4), 1.0, 6),
        np.exp(optimal_directions(FIGURE_4, 1.0, 6).log_conformity),
    ]
    # The tolerance allows for the rounding of the norms.
    np.testing.assert_allclose(got, [2.5664, 2.4568, 2.0950, 2.0638, 2.0512], atol=1.1e-4)


@pytest.mark.slow
def test_mean_over_norms():
    # Differences are paired with the simplex, whose mean is 2.181826 in closed form.
    norms, simplex = chi(0, 6, (100, 6)), simplex_vertices(6)
    known = np.array([conformity(a, simplex, 1.0, 6) for a in norms])
    swept = np.array([conformity(a, against_the_rest(simplex, a), 1.0, 6) for a in norms])
    best = np.exp([optimal_directions(a, 1.0, 6).log_conformity for a in norms])
    assert_mean(known - swept, 2.181826 - 2.1369)
    assert_mean(known - best, 2.181826 - 2.1178)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "m", "v"),
    [(2, 2, 1.0), (2, 3, 2.0), (3, 3, 3.0), (6, 4, 1e-3), (8, 9, 0.1), (8, 9, 10.0), (32, 32, 1.0)],
)
def test_is_the_global_optimum(dim, m, v):
    # In the cosines G the problem is convex: minimize f(G) over G >= 0 with diagonal 1. Let S be
    # the gradient minus the multipliers of the diagonal. Then f(G) - f* is at most -m times the
    # least eigenvalue of S.
    norms = chi(m, dim, m)
    s, achieved = optimal_directions(norms, v, dim)
    np.testing.assert_allclose(np.linalg.norm(s, axis=1), 1, rtol=1e-14)
    assert s.shape == (m, dim)
    np.testing.assert_allclose(achieved, log_conformity_of_rows(v, norms[:, None] * s), rtol=1e-14)
    squares = norms[:, None] ** 2 + norms**2 + 2 * np.outer(norms, norms) * (s @ s.T)
    log_slopes = log_hyp0f1(dim / 2 + 1, v**2 * np.maximum(squares, 0) / 4)
    gradient = np.outer(norms, norms) * np.exp(log_slopes - log_slopes.max())
    np.fill_diagonal(gradient, 0)
    multipliers = np.sum(gradient * (s @ s.T), axis=1)
    certificate = np.linalg.eigvalsh(gradient - np.diag(multipliers))
    # With a dominating norm, and at large v, the optimizer's tolerance is visible.
    assert certificate[0] > -2e-3 * certificate[-1]


@pytest.mark.slow
@pytest.mark.parametrize("v", [1e-3, 0.3, 1.0, 3.0])
@pytest.mark.parametrize(("dim", "m"), [(2, 3), (3, 3), (5, 2), (6, 7)])
def test_is_never_worse_than_the_couplings(dim, m, v):
    simplex = simplex_vertices(m)
    for seed in range(4):
        norms = chi(seed, dim, m)
        best = optimal_directions(norms, v, dim).log_conformity
        for directions in (simplex, against_the_rest(simplex, norms)):
            rows = norms[:, None] * directions
            assert best <= log_conformity_of_rows(v, rows, dim=dim) * (1 + 1e-14)


def test_equal_norms_want_the_simplex():
    s, achieved = optimal_directions(np.full(5, 2.0), 1.5, 6)
    np.testing.assert_allclose(s @ s.T, 1.25 * np.eye(5) - 0.25, atol=1e-12)
    np.testing.assert_allclose(
        achieved, log_conformity_of_rows(1.5, 2 * simplex_vertices(5), dim=6), rtol=1e-14
    )


def test_degenerate_norms():
    for norms, v in [([0.0, 0.0, 0.0], 1.0), ([1.0, 2.0, 3.0], 0.0)]:
        s, achieved = optimal_directions(norms, v, 4)
        assert achieved == 0
        np.testing.assert_allclose(np.linalg.norm(s, axis=1), 1, rtol=1e-14)
    s, _ = optimal_directions([0.0, 1.0, 2.0], 1.0, 3)
    np.testing.assert_allclose(s[1] @ s[2], -1, atol=1e-6)
    assert optimal_directions([1.0, 2.0, 3.0], 1e200, 4).log_conformity == np.inf
    s, _ = optimal_directions([1.0, 2.0], 1.0, 1)
    assert s[0, 0] * s[1, 0] == -1


def test_gradient():
    rng = np.random.default_rng(0)
    for v in [0.1, 1.0, 30.0]:
        flat = rng.normal(size=12)

        def value(flat, v=v):
            return _log_conformity_and_gradient(flat.reshape(4, 3), v, 5)[0]

        _, gradient = _log_conformity_and_gradient(flat.reshape(4, 3), v, 5)
        numerical = scipy.optimize.approx_fprime(flat, value, 1e-7)
        np.testing.assert_allclose(gradient.ravel(), numerical, rtol=1e-4, atol=1e-6)


def test_sweeps_are_those_of_the_projection():
    norms = chi(3, 6, 7)
    expected = minimize_resultant(
        jnp.asarray(simplex_vertices(7), jnp.float32), jnp.asarray(norms, jnp.float32)
    )
    got = against_the_rest(simplex_vertices(7), norms)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert np.linalg.norm(norms @ against_the_rest(got, norms)) < 1e-10
    # Two rows that cancel leave the third without a direction to turn to, so it stays.
    canceled = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    got = against_the_rest(canceled, np.array([1.0, 1.0, 0.0]))
    np.testing.assert_array_equal(got, canceled)


@pytest.mark.parametrize(
    ("norms", "v", "dim", "error", "match"),
    [
        ([1.0], 1.0, 3, ValueError, "m from 2 to dim \\+ 1 = 4"),
        (np.ones(5), 1.0, 3, ValueError, "m from 2 to dim \\+ 1 = 4"),
        (np.ones((2, 2)), 1.0, 3, ValueError, r"norms must be \[m\]"),
        ([1.0, np.inf], 1.0, 3, ValueError, "finite"),
        ([1.0, np.nan], 1.0, 3, ValueError, "finite"),
        ([1.0, -2.0], 1.0, 3, ValueError, "norms is a norm.*at least 0, got -2.0"),
        ([1.0, 2.0], -1.0, 3, ValueError, "v is a norm"),
        ([1.0, 2.0], np.inf, 3, ValueError, "v must be one finite number"),
        ([1.0, 2.0], [1.0], 3, ValueError, "v must be one finite number"),
        ([1.0, 2.0], 1.0, 3.0, TypeError, "dim must be an integer"),
    ],
)
def test_refuses(norms, v, dim, error, match):
    with pytest.raises(error, match=match):
        optimal_directions(norms, v, dim)


def test_descent_goes_down_from_its_start():
    norms, start = chi(0, 6, 6), np.random.default_rng(1).normal(size=(6, 6))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    way = descent(start, norms, 1.0, 6)
    np.testing.assert_allclose(way[0], start, rtol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(way, axis=-1), 1, rtol=1e-14)
    fallen = conformity(norms, way, 1.0, 6)
    assert np.all(np.diff(fallen) < 1e-12)
    best = np.exp(optimal_directions(norms, 1.0, 6).log_conformity)
    np.testing.assert_allclose(fallen[-1], best, rtol=1e-5)
