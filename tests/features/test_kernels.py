import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import gaussian_kernel, relu_kernel, softmax_kernel

pytestmark = pytest.mark.fast
KERNELS = [gaussian_kernel, softmax_kernel, relu_kernel]


def test_against_float64():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 4, 3))
    distance = np.sum((x[:, :, None] - y[:, None]) ** 2, axis=-1)
    np.testing.assert_allclose(gaussian_kernel(x, y), np.exp(-distance / 2), rtol=1e-5)
    np.testing.assert_allclose(softmax_kernel(x, y), np.exp(x @ y.mT), rtol=1e-5)


def test_close_pairs_far_from_the_origin_keep_their_digits():
    x = np.array([[1000.0, 0.0]], np.float32)
    y = np.array([[1000.25, 0.0]], np.float32)
    np.testing.assert_allclose(gaussian_kernel(x, y), np.exp([[-(0.25**2) / 2]]), rtol=1e-6)


def test_relu_kernel_by_quadrature_over_the_plane_of_both_vectors():
    x, y = np.array([[1.0, 0.5]]), np.array([[-0.3, 2.0], [-1.0, -0.5], [2.0, 1.0]])
    # E |w|^2 = 2 in the plane. The other factor is a mean over directions.
    angles = 2 * np.pi * (np.arange(200_000) + 0.5) / 200_000
    u = np.stack([np.cos(angles), np.sin(angles)])
    expected = 2 * np.maximum(x @ u, 0) @ np.maximum(y @ u, 0).T / angles.size
    np.testing.assert_allclose(relu_kernel(x, y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_relu_kernel_has_gradients_at_parallel_and_antiparallel_vectors():
    x = jnp.array([[1.0, 0.5]])
    gradient = jax.grad(lambda y: relu_kernel(x, y).sum())
    np.testing.assert_allclose(gradient(2 * x), x / 2, rtol=1e-6)  # K(x, y) = x.y / 2 there.
    np.testing.assert_allclose(gradient(-x), 0, atol=1e-3)


@pytest.mark.slow
def test_relu_kernel_at_zero_and_at_the_ends_of_the_range():
    zero, one = jnp.zeros((1, 4)), jnp.ones((1, 4))
    np.testing.assert_array_equal(relu_kernel(zero, one), 0)
    np.testing.assert_array_equal(jax.grad(lambda x: relu_kernel(x, one).sum())(zero), 0)
    np.testing.assert_allclose(relu_kernel(1e20 * one, 1e-20 * one), 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_dtype_and_transformations(kernel):
    x = 0.3 * jax.random.normal(jax.random.key(0), (3, 2, 4))
    assert kernel(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    chex.assert_trees_all_close(jax.jit(kernel)(x, x), kernel(x, x), rtol=1e-6)
    chex.assert_trees_all_close(jax.vmap(kernel)(x, x), kernel(x, x), rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda x: kernel(x, x).sum())(x)).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("x", "y", "error", "match"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), ValueError, r"got \(2, 3\) and \(2, 4\)"),
        (np.zeros(3), np.zeros((2, 3)), ValueError, r"\[\.\.\., n, dim\]"),
        (np.zeros((5, 2, 3)), np.zeros((4, 2, 3)), ValueError, "same leading shape"),
        (np.zeros((2, 3), int), np.zeros((2, 3)), TypeError, "x must be a floating type"),
    ],
)
def test_refuses(kernel, x, y, error, match):
    with pytest.raises(error, match=match):
        kernel(x, y)
