import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax.calibration import Moments

pytestmark = pytest.mark.fast


def vectors(n=200, heads=2, dim=4):
    rng = np.random.default_rng(n)
    mixing = rng.normal(size=(heads, dim, dim))
    offset = 30 + rng.normal(
        size=(heads, dim)
    )  # Long means would cost a sum of squares its digits.
    return np.einsum("nkh,khj->nkj", rng.normal(size=(n, heads, dim)), mixing) + offset


def assert_close(moments, expected):
    np.testing.assert_allclose(moments.num_vectors, expected.shape[0])
    np.testing.assert_allclose(moments.mean, expected.mean(0), rtol=1e-6)
    offsets = expected - expected.mean(0)
    scatter = np.einsum("nkh,nkj->khj", offsets, offsets)
    np.testing.assert_allclose(moments.scatter, scatter, rtol=1e-3, atol=1e-2)


def test_are_those_of_numpy():
    x = vectors()
    assert_close(Moments.of(jnp.asarray(x.reshape(10, 20, 2, 4), jnp.float32)), x)


@pytest.mark.parametrize("sizes", [(200,), (1, 199), (50, 50, 100), (0, 120, 0, 80)])
def test_merge_to_those_of_all(sizes):
    x = vectors()
    parts = np.split(x, np.cumsum(sizes)[:-1])
    moments = [Moments.of(jnp.asarray(part, jnp.float32)) for part in parts]
    empty = Moments.empty(2, 4, jnp.float32)
    assert_close(functools.reduce(Moments.merge, moments, empty), x)


def test_padding_does_not_count_whatever_it_holds():
    x = vectors()
    padded = np.concatenate([x, np.full((7, 2, 4), np.nan)])[None].astype(np.float32)
    real = (np.arange(207) < 200)[None]
    assert_close(Moments.of(jnp.asarray(padded), jnp.asarray(real)), x)


@pytest.mark.slow
def test_covariance_is_shrunk_where_vectors_are_few():
    def distance_to_sphere(n):
        x = vectors()[:n]
        covariance = np.asarray(Moments.of(jnp.asarray(x, jnp.float32)).covariance()[0])
        sphere = np.eye(4) * np.trace(covariance) / 4
        sample = np.cov(x[:, 0].T, bias=True)
        return np.linalg.norm(covariance - sphere) / np.linalg.norm(
            sample - np.eye(4) * np.trace(sample) / 4
        )

    assert distance_to_sphere(3) < distance_to_sphere(20) < distance_to_sphere(200)
    assert distance_to_sphere(200) > 0.97


@pytest.mark.slow
def test_shrunk_covariance_is_nearer_to_the_truth():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(8, 8)) * np.geomspace(0.3, 1, 8)
    x = rng.normal(size=(500, 10, 1, 8)) @ root  # 500 samples of 10 vectors.
    shrunk = jax.vmap(lambda sample: Moments.of(sample).covariance()[0])(
        jnp.asarray(x, jnp.float32)
    )
    sample = np.einsum("snkh,snkj->shj", x - x.mean(1, keepdims=True), x - x.mean(1, keepdims=True))
    truth = root.T @ root
    error = np.square(np.asarray(shrunk) - truth).sum((1, 2)).mean()
    assert error < 0.9 * np.square(sample / 10 - truth).sum((1, 2)).mean()


@pytest.mark.slow
def test_vectors_that_are_equal_have_a_covariance_that_can_be_inverted():
    covariance = Moments.of(jnp.ones((5, 2, 4))).covariance()
    assert np.linalg.eigvalsh(covariance).min() > 0
