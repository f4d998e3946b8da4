import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import project


@pytest.mark.fast
def test_project_is_the_matrix_product():
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    np.testing.assert_allclose(project(x, w), x @ w.T, rtol=1e-5, atol=1e-6)
    assert project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.fast
@pytest.mark.parametrize(
    ("x", "projection", "error", "match"),
    [
        (np.zeros(4), np.zeros((3, 5)), ValueError, r"dim=5, got shape \(4,\)"),
        (np.zeros(5), np.zeros((2, 3, 5)), ValueError, r"\[num_features, dim\], got shape \(2, 3"),
        (np.zeros(()), np.zeros((3, 5)), ValueError, r"got shape \(\)"),
        (np.zeros(5, int), np.zeros((3, 5)), TypeError, "x must be a floating type, .* got int"),
        (np.zeros(5), np.zeros((3, 5), int), TypeError, "projection must be a floating type"),
        (np.zeros(5), np.zeros((0, 5)), ValueError, r"at least one feature, got \(0, 5\)"),
        (np.zeros(5), None, TypeError, "projection must be an array .* got None .* num_features"),
        (np.zeros(5), 3, TypeError, r"draw_projection\(jax.random.key\(0\), 3, dim\), got 3"),
        (
            np.zeros(5),
            simrf_jax.hybrid.BipolarProjection(*(np.zeros((3, 5)),) * 3),
            TypeError,
            "an array .* or a Projection, got BipolarProjection",
        ),
    ],
)
def test_project_refuses(x, projection, error, match):
    with pytest.raises(error, match=match):
        project(x, projection)
