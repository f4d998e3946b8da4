import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import gaussian_kernel, softmax_kernel

pytestmark = pytest.mark.fast


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


@pytest.mark.parametrize("kernel", [gaussian_kernel, softmax_kernel])
def test_dtype_and_transformations(kernel):
    x = 0.3 * jax.random.normal(jax.random.key(0), (3, 2, 4))
    assert kernel(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    chex.assert_trees_all_close(jax.jit(kernel)(x, x), kernel(x, x), rtol=1e-6)
    chex.assert_trees_all_close(jax.vmap(kernel)(x, x), kernel(x, x), rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda x: kernel(x, x).sum())(x)).all()


@pytest.mark.parametrize("kernel", [gaussian_kernel, softmax_kernel])
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
