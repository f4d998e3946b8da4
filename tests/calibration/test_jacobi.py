import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax._src.calibration.jacobi import left_singular_vectors
from tests.versions import enable_x64

pytestmark = pytest.mark.fast


def matrices(dim, count=3):
    """Returns matrices whose columns differ in length, as float32."""
    lengths = np.geomspace(0.05, 3, dim)
    return (np.random.default_rng(dim).normal(size=(count, dim, dim)) * lengths).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 33, 64])
def test_agrees_with_lapack(dim):
    vectors, values = jax.jit(jax.vmap(left_singular_vectors))(matrices(dim))
    expected_vectors, expected, _ = np.linalg.svd(matrices(dim).astype(np.float64))
    order = np.argsort(-values, axis=-1)
    np.testing.assert_allclose(np.take_along_axis(values, order, -1), expected, rtol=2e-3)
    vectors = np.take_along_axis(np.asarray(vectors), order[:, None], -1)
    np.testing.assert_allclose(np.abs(np.sum(vectors * expected_vectors, axis=1)), 1, atol=1e-4)
    np.testing.assert_allclose(vectors.mT @ vectors, [np.eye(dim)] * 3, atol=2e-6)


def test_float64_is_as_precise():
    matrix = matrices(16, count=1)[0].astype(np.float64)
    with enable_x64(True):
        vectors, values = left_singular_vectors(jnp.asarray(matrix))
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(16), atol=1e-14)
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(np.sort(values)[::-1], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "matrix", [np.eye(4), np.ones((4, 4)), np.zeros((4, 4)), np.diag([1, 2.0, 0, 3])]
)
def test_degenerate_matrices_have_their_values(matrix):
    vectors, values = left_singular_vectors(jnp.asarray(matrix, jnp.float32))
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(np.sort(values)[::-1], expected, atol=1e-6)
    kept = np.asarray(vectors)[:, np.asarray(values) > 1e-6]
    np.testing.assert_allclose(kept.T @ kept, np.eye(kept.shape[1]), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_ends_where_numbers_are_not_finite(bad):
    vectors, _ = left_singular_vectors(jnp.full((4, 4), bad, jnp.float32))
    assert vectors.shape == (4, 4)


@pytest.mark.slow
def test_many_in_one_program_do_not_hang():
    @jax.jit
    def layers(stack):
        return [left_singular_vectors(matrix)[1] for matrix in stack]

    values = layers([jnp.asarray(matrix) for matrix in matrices(16, count=6)])
    expected = np.linalg.svd(matrices(16, count=6), compute_uv=False)
    np.testing.assert_allclose(-np.sort(-np.stack(values), axis=-1), expected, rtol=1e-4)
