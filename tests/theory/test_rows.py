import functools

import jax
import numpy as np
import pytest
from mpmath import mp, mpf

import simrf_jax
from simrf_jax._src.projections.row_blocks import simplex_vertices
from simrf_jax.theory import log_conformity, log_conformity_of_rows
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("v", [1e-5, 0.3, 1.0, 8.0, 300.0])
def test_against_a_loop_over_pairs(v):
    rows = np.random.default_rng(0).normal(size=(4, 5))
    with mp.workdps(40):
        total = mpf(0)
        for i in range(4):
            for j in range(4):
                if i != j:
                    square = sum(mpf(float(a)) ** 2 for a in rows[i] + rows[j])
                    total += mp.hyp0f1(2.5, mpf(v) ** 2 * square / 4)
        expected = float(mp.log(total / 12))
    np.testing.assert_allclose(log_conformity_of_rows(v, rows), expected, rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("v", [0.5, 1.0])
def test_its_mean_over_draws_is_the_closed_form(coupling, v):
    draw = functools.partial(simrf_jax.draw_projection, num_features=6, dim=6, coupling=coupling)
    rows = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 4000)))
    conformity = np.exp(log_conformity_of_rows(v, rows))
    assert_mean(conformity, np.exp(log_conformity(v, 6, coupling=coupling)))


@pytest.mark.parametrize(("dim", "coordinates"), [(3, 3), (7, 3)])
def test_is_the_mean_over_rotations(dim, coordinates):
    # Rotating u is equivalent to rotating the rows, which lie in a subspace.
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(3, coordinates))
    u = rng.normal(size=(100_000, dim))
    u *= 0.9 / np.linalg.norm(u, axis=1, keepdims=True)
    exponents = u[:, :coordinates] @ rows.T
    pairs = [exponents[:, i] + exponents[:, j] for i, j in [(0, 1), (0, 2), (1, 2)]]
    expected = np.exp(log_conformity_of_rows(0.9, rows, dim=dim))
    assert_mean(np.mean(np.exp(pairs), axis=0), expected)


def test_equal_norms_on_a_simplex_are_one_length():
    rows = 2 * simplex_vertices(4)
    expected = log_conformity_of_rows(1.0, [[np.sqrt(8 / 3), 0], [np.sqrt(8 / 3), 0]], dim=9)
    half = log_conformity_of_rows(0.5, rows, dim=9)  # |w_i + w_j|^2 = 8 (1 - 1/3) = 16/3.
    np.testing.assert_allclose(half, log_conformity_of_rows(0.5 / np.sqrt(2), rows * 2**0.5, dim=9))
    np.testing.assert_allclose(
        expected, log_conformity_of_rows(np.sqrt(2), rows, dim=9), rtol=1e-14
    )


def test_leading_shapes_limits_and_nan():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5, 1, 3, 4))
    v = np.array([0.0, 0.5, np.nan, 1e4])
    got = log_conformity_of_rows(v, rows)
    assert got.shape == (5, 4)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got[:, 0], 0)
    assert np.all(np.isnan(got[:, 2]))
    assert np.all(np.isfinite(got[:, 3]))
    one = log_conformity_of_rows(0.5, rows[2, 0])
    assert isinstance(one, np.float64)
    np.testing.assert_allclose(one, got[2, 1], rtol=1e-15)
    assert log_conformity_of_rows(1e200, rows[0, 0]) == np.inf
    rows[0, 0, 0, 0] = np.nan
    assert np.isnan(log_conformity_of_rows(0.5, rows[0, 0]))


@pytest.mark.parametrize(
    ("v", "shape", "dim", "error", "match"),
    [
        (1.0, (3,), None, ValueError, r"rows must be \[..., m, coordinates\].*got \(3,\)"),
        (1.0, (1, 3), None, ValueError, r"m at least 2 .*got \(1, 3\)"),
        (1.0, (2, 0), None, ValueError, r"coordinates at least 1, got \(2, 0\)"),
        (1.0, (2, 3), 2, ValueError, "dim must be at least 3, the number of coordinates, got 2"),
        (1.0, (2, 3), 3.0, TypeError, "dim must be an integer"),
        (-1.0, (2, 3), None, ValueError, "v is a norm"),
        ([1.0, 2.0], (3, 2, 3), None, ValueError, r"v must broadcast.*got \(2,\) and \(3, 2, 3\)"),
    ],
)
def test_refuses(v, shape, dim, error, match):
    with pytest.raises(error, match=match):
        log_conformity_of_rows(v, np.ones(shape), dim=dim)


def test_rows_that_nearly_cancel():
    for offset in (1e-6, 1e-9):
        rows = np.array([[1000.0, 0.0], [-1000.0 + offset, 0.0]])
        square = float(rows[:, 0].sum()) ** 2  # log 0F1(; 1; x) is x up to x^2 / 4.
        np.testing.assert_allclose(log_conformity_of_rows(1.0, rows), square / 4, rtol=1e-12)
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]])
    np.testing.assert_array_equal(
        log_conformity_of_rows([1.0, np.inf, np.nan], opposite), [0, 0, np.nan]
    )
