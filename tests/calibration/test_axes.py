import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax._src.calibration.fit import turn_rows

HEADS, DIM, ROWS = 3, 8, 16
TILTS = ["log", None]


def tokens(seed, noise=0.02):
    """Queries and keys with pairs of equal variances, whose axes only noise decides."""
    rng = np.random.default_rng(seed)
    spectrum = np.repeat([2, 1, 0.5, 0.25], DIM // 4)[:, None] * np.eye(DIM)
    tokens = np.tile(np.concatenate([spectrum, -spectrum]), (50, 1))[:, None]
    q, k = tokens + noise * rng.normal(size=(2, len(tokens), HEADS, DIM))
    return jnp.asarray(q), jnp.asarray(0.5 * k)


def draw():
    keys = jax.random.split(jax.random.key(1), HEADS)
    return jax.vmap(lambda key: simrf_jax.draw_projection(key, ROWS, DIM))(keys)


@pytest.mark.slow
@pytest.mark.parametrize("tilt", TILTS)
def test_norms_and_angles_stay(tilt):
    before, after = (simrf_jax.calibrate(*tokens(seed), tilt=tilt) for seed in (0, 1))
    w = draw()
    turned = turn_rows(w, before, after)
    assert np.abs(turned - w).max() > 0.1
    gram, expected = (np.asarray(x @ jnp.swapaxes(x, 1, 2)) for x in (turned, w))
    np.testing.assert_allclose(gram, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tilt", TILTS)
def test_another_fit_to_nearly_the_same_data_makes_nearly_the_same_features(tilt):
    before, after = (simrf_jax.calibrate(*tokens(seed), tilt=tilt) for seed in (0, 1))
    w = draw()

    def features(calibration, w):
        one = [jax.tree.map(lambda x: x[1], each) for each in (calibration, w)]
        return one[0].log_features(tokens(0)[0][:, 1], one[1], side="query").exponent

    turned = features(after, turn_rows(w, before, after))
    np.testing.assert_allclose(turned, features(before, w), atol=0.05)
    assert np.abs(features(after, w) - features(before, w)).max() > 0.5


@pytest.mark.slow
def test_axes_of_a_stretch_are_those_of_no_stretch():
    """A symmetric matrix turns nothing."""
    before = simrf_jax.calibrate(*tokens(0), tilt=None, balance=False)
    root = jnp.diag(jnp.linspace(0.1, 3, DIM)) + 0.1
    after = dataclasses.replace(
        before, query_matrix=jnp.broadcast_to(root @ root, (HEADS, DIM, DIM))
    )
    np.testing.assert_allclose(turn_rows(draw(), before, after), draw(), rtol=1e-4, atol=1e-5)
