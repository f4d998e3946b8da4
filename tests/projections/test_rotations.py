import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from simrf_jax._src.projections.hadamard import (
    hadamard_transform,
    padded_dim,
    random_signs,
    rotate,
    rotate_back,
)
from simrf_jax._src.projections.rotations import ROTATIONS, haar_rotation
from tests.standard_errors import assert_mean


def draw_frames(num_draws, dim, num_rows, rotation="haar"):
    keys = jax.random.split(jax.random.key(1), num_draws)
    rotate = ROTATIONS[rotation].rotate
    draw = jax.jit(jax.vmap(lambda key: rotate(key, jnp.eye(num_rows), dim)))
    return np.asarray(draw(keys), np.float64)


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_haar_entries_have_mean_zero_and_variance_one_over_d(dim):
    q = draw_frames(20_000, dim, dim)
    np.testing.assert_allclose(q @ q.mT, np.broadcast_to(np.eye(dim), q.shape), atol=1e-5)
    assert_mean(q, 0)  # LAPACK's Q without the sign fix always has q[0, 0] <= 0.
    if dim > 1:
        assert_mean(q**2, 1 / dim)
        assert_mean(q**4, 3 / (dim * (dim + 2)))
        assert_mean(q[:, 0, 0] * q[:, 1, 1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 5, 16])
def test_haar_trace_has_its_law(dim):
    trace = np.trace(draw_frames(20_000, dim, dim), axis1=1, axis2=2)
    # The first moments are exactly those of a standard normal (Diaconis and Shahshahani, 1994).
    for power, moment in [(1, 0), (2, 1), (3, 0), (4, 3)]:
        assert_mean(trace**power, moment)
    keys = jax.random.key(2)
    library = np.trace(jax.random.orthogonal(keys, dim, (20_000,)), axis1=1, axis2=2)
    assert scipy.stats.ks_2samp(trace.round(4), library.round(4)).pvalue > 1e-4


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("n", "dim"),
    [
        (40, 64),
        *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1, 3), (65, 70), (130, 200))),
    ],
)
def test_reflections_in_blocks_are_those_one_by_one(monkeypatch, n, dim):
    vectors = jax.random.normal(jax.random.key(1), (5, n))
    turned = []
    for largest in (0, dim):
        for name in ("LARGEST_ONE_BY_ONE", "LARGEST_ONE_BY_ONE_ON_TPU"):
            monkeypatch.setattr(f"simrf_jax._src.projections.rotations.{name}", largest)
        turned.append(haar_rotation(jax.random.key(0), vectors, dim))
    np.testing.assert_allclose(*turned, atol=2e-5)


@pytest.mark.parametrize(("dim", "on_tpu"), [(32, False), (33, True), (64, True), (65, True)])
def test_a_tpu_reflects_in_blocks_from_33_dimensions_on(dim, on_tpu):
    def rotate(key):
        return haar_rotation(key, jnp.eye(dim), dim)

    traced = jax.jit(rotate).trace(jax.random.key(0))
    programs = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu"))
    # Blocks have the products of reflectors with each other; a block is 32 x 32.
    found = ["x32x32xf32>" in program for program in programs]
    assert found == [on_tpu, dim > 64]


def test_haar_frame_of_few_vectors_is_uniform_on_the_sphere():
    q = draw_frames(20_000, 5, 2)
    assert_mean(np.einsum("ni,nj->nij", q[:, 1], q[:, 1]), np.eye(5) / 5)
    assert scipy.stats.kstest((q[:, 1, 4] + 1) / 2, "beta", (2, 2)).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 4, 16])
def test_rows_of_a_givens_butterfly_are_uniform_on_the_sphere(dim):
    q = draw_frames(20_000, dim, dim, "givens")
    np.testing.assert_allclose(q @ q.mT, np.broadcast_to(np.eye(dim), q.shape), atol=1e-5)
    assert_mean(q, 0)
    if dim > 1:
        entries = (q[:, [0, -1], :][:, :, [0, -1]] + 1) / 2
        for row, column in np.ndindex(2, 2):
            law = scipy.stats.kstest(entries[:, row, column], "beta", ((dim - 1) / 2,) * 2)
            assert law.pvalue > 1e-4
        # On the sphere, products of two coordinates have mean 0 and mean square 1 / (d (d + 2)).
        assert_mean(q[:, 0, 0] * q[:, 0, -1], 0)
        assert_mean((q[:, 0, 0] * q[:, 0, -1]) ** 2, 1 / (dim * (dim + 2)))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [4, 16])
def test_hadamard_moments(dim):
    q = draw_frames(20_000, dim, dim, "hadamard")
    np.testing.assert_allclose(q @ q.mT, np.broadcast_to(np.eye(dim), q.shape), atol=1e-5)
    np.testing.assert_allclose((q**2).mean(axis=0), 1 / dim, atol=0.02)
    # The fourth moment of a column differs from Haar's 3 / (d + 2) by (-2/d)^3 (1 - 3/(d + 2)).
    haar = 3 / (dim + 2)
    assert_mean((q**4).sum(axis=1)[:, 0], haar + (-2 / dim) ** 3 * (1 - haar))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 8, 128, 256, 2048])
@pytest.mark.parametrize("radix", [2, 16, 128])
def test_hadamard_transform_is_the_matrix_product(dim, radix):
    x = np.random.default_rng(0).normal(size=(3, 2, dim))
    expected = x @ scipy.linalg.hadamard(dim)
    actual = hadamard_transform(jnp.asarray(x, jnp.float32), radix=radix)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * dim**0.5 * np.abs(x).max())


@pytest.mark.fast
def test_rotate_is_the_product_of_its_factors():
    [signs] = random_signs(jax.random.key(0), 1, 8)
    assert signs.dtype == jnp.int8
    r = np.eye(8)
    for flips in np.asarray(signs, np.float64):
        r = scipy.linalg.hadamard(8) @ np.diag(flips) @ r / np.sqrt(8)
    np.testing.assert_allclose(rotate(jnp.eye(8), signs).T, r, atol=1e-6)
    np.testing.assert_allclose(rotate_back(jnp.eye(8), signs), r, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dim", [1, 8])
def test_vectors_are_multiplied_by_the_frame(rotation, dim):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5, max(1, dim - 3))).astype(np.float32)

    def rotated(x):  # The key is the same in each call.
        return ROTATIONS[rotation].rotate(jax.random.key(3), jnp.asarray(x), dim)

    expected = vectors @ rotated(np.eye(vectors.shape[1], dtype=np.float32))
    np.testing.assert_allclose(rotated(vectors), expected, atol=1e-5)


@pytest.mark.fast
def test_padded_dim():
    assert [padded_dim(d) for d in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
