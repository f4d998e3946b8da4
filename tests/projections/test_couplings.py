import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from simrf_jax import draw_projection
from simrf_jax._src.projections.couplings import minimize_resultant
from simrf_jax._src.projections.row_blocks import simplex_vertices
from tests.standard_errors import assert_less


def sweeps_in_numpy(directions, norms, num_sweeps):
    """Computes Eqs. 16 and 17 to the letter in float64, and sums every resultant anew."""
    s = np.array(directions, np.float64)
    for _ in range(num_sweeps):
        for i in range(len(s)):
            rest = sum(norms[j] * s[j] for j in range(len(s)) if j != i)
            s[i] = -rest / np.linalg.norm(rest)
    return s


@pytest.mark.fast
@pytest.mark.parametrize(("num_rows", "dim"), [(2, 2), (3, 2), (6, 6), (7, 6), (5, 64), (65, 64)])
@pytest.mark.parametrize("num_sweeps", [1, 3])
def test_sweeps_agree_with_a_float64_loop(num_rows, dim, num_sweeps):
    vertices = simplex_vertices(num_rows)
    norms = scipy.stats.chi.rvs(dim, size=num_rows, random_state=num_rows)
    expected = sweeps_in_numpy(vertices, norms, num_sweeps)
    actual = minimize_resultant(
        jnp.asarray(vertices, jnp.float32), jnp.asarray(norms, jnp.float32), num_sweeps=num_sweeps
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_the_loop_closes_in_every_block():
    options = {"coupling": "simplex_plus"}
    w = draw_projection(jax.random.key(0), 130, 64, **options)
    assert jnp.linalg.norm(w[:65].sum(axis=0)) < 1e-4
    assert jnp.linalg.norm(w[65:].sum(axis=0)) < 1e-4
    simplex = draw_projection(jax.random.key(0), 130, 64, coupling="simplex")
    assert jnp.linalg.norm(simplex[:65].sum(axis=0)) > 1
    np.testing.assert_allclose(
        jnp.linalg.norm(w, axis=1), jnp.linalg.norm(simplex, axis=1), rtol=1e-5
    )


@pytest.mark.slow
def test_more_sweeps_close_it_further():
    def resultants(num_sweeps):
        def draw(key):
            options = {"coupling": "simplex_plus", "num_sweeps": num_sweeps}
            return jnp.linalg.norm(draw_projection(key, 4, 4, **options).sum(axis=0))

        return jax.vmap(draw)(jax.random.split(jax.random.key(3), 500))

    # Logarithms keep the few loops that cannot close from dominating the means.
    one, two, four = (np.log10(resultants(n) + 1e-8) for n in (1, 2, 4))
    assert_less(two + 1, one)
    assert_less(four + 1, two)


@pytest.mark.fast
@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_a_norm_above_the_sum_of_the_others_ends_antialigned(num_rows):
    norms = jnp.asarray([10.0] + [1.0] * (num_rows - 1))
    vertices = jnp.asarray(simplex_vertices(num_rows), jnp.float32)
    s = minimize_resultant(vertices, norms, num_sweeps=30)
    np.testing.assert_allclose(s[1:] @ s[0], -1, atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(s, axis=1), 1, rtol=1e-5)


@pytest.mark.fast
def test_equal_norms_leave_the_simplex_and_zero_norms_do_no_harm():
    vertices = jnp.asarray(simplex_vertices(5), jnp.float32)
    np.testing.assert_allclose(minimize_resultant(vertices, jnp.ones(5)), vertices, atol=1e-6)
    s = minimize_resultant(vertices, jnp.asarray([1.0, 0.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(jnp.linalg.norm(s, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(minimize_resultant(vertices, jnp.zeros(5)), vertices)


def conformity(directions, norms, v):
    """Returns the mean of e^{(w_i + w_j).(x + y)} over pairs and rotations (Eq. 14)."""
    w = norms[:, None] * directions
    i, j = np.triu_indices(len(w), 1)
    lengths = np.sum((w[i] + w[j]) ** 2, axis=1)
    return scipy.special.hyp0f1(w.shape[1] / 2, v**2 * lengths / 4).mean()


def numerical_optimum(norms, v, start):
    def objective(flat):
        s = flat.reshape(start.shape)
        return conformity(s / np.linalg.norm(s, axis=1, keepdims=True), norms, v)

    return scipy.optimize.minimize(objective, start.ravel(), method="BFGS").fun


@pytest.mark.slow
def test_conformity_lies_between_simplex_and_the_numerical_optimum():
    # As in Fig. 4, d = 6 and v = 1. Each draw of norms is the same for all couplings.
    dim, v, num_draws = 6, 1.0, 100
    vertices = np.pad(simplex_vertices(dim), ((0, 0), (0, 1)))
    norms = scipy.stats.chi.rvs(dim, size=(num_draws, dim), random_state=0)
    arrange = jax.jit(jax.vmap(minimize_resultant, in_axes=(None, 0)))
    arranged = np.asarray(
        arrange(jnp.asarray(vertices, jnp.float32), jnp.asarray(norms, jnp.float32)), np.float64
    )
    simplex = np.array([conformity(vertices, a, v) for a in norms])
    plus = np.array([conformity(s, a, v) for s, a in zip(arranged, norms, strict=True)])
    optimum = np.array([numerical_optimum(a, v, s) for s, a in zip(arranged, norms, strict=True)])
    assert_less(plus, simplex)
    assert_less(optimum, plus)
    assert (optimum <= plus + 1e-9).all()
    # For one draw of norms, another program computed simplex, simplex_plus and the optimum.
    norms = np.array([2.3989, 2.7767, 1.9412, 3.2903, 1.8301, 1.8830])
    arranged = sweeps_in_numpy(vertices, norms, 10)
    assert conformity(vertices, norms, v) == pytest.approx(2.0950, abs=2e-4)
    assert conformity(arranged, norms, v) == pytest.approx(2.0638, abs=2e-4)
    assert numerical_optimum(norms, v, arranged) == pytest.approx(2.0512, abs=2e-4)
