"""Mixtures that fit queries and keys: their clusters, their tilt, and the estimates."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax.calibration import draw_mixture_projection, fit_mixture
from tests.standard_errors import assert_mean

DIM = 4
ROOT = DIM**-0.25  # Of the scale of attention.


def clustered(length=200, heads=2, seed=0):
    """Returns queries and keys of two clusters, whose queries attend to keys of their own."""
    rng = np.random.default_rng(seed)
    side = rng.choice([-1.0, 1.0], size=(2, length, heads, 1))
    query, key = 0.3 * rng.normal(size=(2, length, heads, DIM)) + side * [3.0, 0, 0, 0]
    return query.astype(np.float32), key.astype(np.float32)


def one_head(tree, head=0):
    return jax.tree.map(lambda leaf: leaf[head], tree)


@pytest.mark.slow
def test_centers_are_those_of_the_pairs_that_attention_weighs():
    query, key = clustered()
    feature_map, centers = fit_mixture(jax.random.key(0), query, key, 2)
    assert centers.shape == (2, 2, DIM)
    assert feature_map.variances.shape == (2, DIM)
    sums = np.asarray(centers) * np.sqrt(np.asarray(feature_map.variances))[:, None]
    # Pairs of different clusters, whose sums are near zero, have hardly any weight.
    np.testing.assert_allclose(np.sort(sums[..., 0]), [[-6 * ROOT, 6 * ROOT]] * 2, atol=0.2)
    np.testing.assert_allclose(sums[..., 1:], 0, atol=0.2)


def test_the_tilt_is_that_of_the_spread_around_the_centers():
    query, key = clustered(heads=1)
    mixture = one_head(fit_mixture(jax.random.key(0), query, key, 2, keys_per_query=20))
    x, y = np.float64(query[:, 0] * ROOT), np.float64(key[:, 0] * ROOT)
    weights = np.exp(x @ y.T)
    weights /= weights.sum(axis=-1, keepdims=True) * len(x)
    variances = np.float64(mixture.feature_map.variances)
    centers = np.float64(mixture.centers) * np.sqrt(variances)
    offsets = (x[:, None] + y)[:, :, None] - centers
    nearest = np.min(np.sum(offsets**2, axis=-1, keepdims=True), axis=2, keepdims=True)
    own = np.sum(offsets**2, axis=-1, keepdims=True) == nearest
    spread = np.einsum("ts,tscd->d", weights, np.where(own, offsets**2, 0))
    rho = 2 / (np.sqrt((2 * spread + 1) ** 2 + 8 * spread) + 2 * spread + 1)
    np.testing.assert_allclose(variances, (1 + rho) / (2 * rho), rtol=0.02)


def log_bound(v, centers, variances):
    """Returns the log of the bound on the second moment for equal shares."""
    rho = 1 / (2 * variances - 1)
    logs = np.log((1 + rho) / (2 * np.sqrt(rho))) + rho * (v - centers) ** 2
    return np.log(len(centers)) + np.min(np.sum(logs, axis=-1))


@pytest.mark.slow
def test_logs_how_well_each_head_is_fitted(caplog):
    """Of clusters that are six apart, whose pairs are as far from zero."""
    caplog.set_level(logging.INFO, logger="simrf_jax")
    query, key = clustered()
    calibration = simrf_jax.calibrate(query, key)
    mixture = fit_mixture(
        jax.random.key(0), query, key, 2, calibration=calibration, keys_per_query=20
    )
    pattern = (
        r"fit_mixture: key head (\d) of 2: mean log second moment: "
        r"map alone (\S+); mixture at most (\S+)"
    )
    for head, record in enumerate(caplog.records):
        number, alone, at_most = re.fullmatch(pattern, record.getMessage()).groups()
        assert int(number) == head + 1
        c, own = jax.tree.map(np.float64, one_head((calibration, mixture), head))
        x, y = (np.float64(z[:, head] * ROOT) for z in (query, key))
        weights = np.exp(x @ y.T)
        weights /= weights.sum(axis=-1, keepdims=True) * len(x)
        sums = ((x - c.query_mean) @ c.query_matrix.T)[:, None] + (y - c.key_mean) @ c.key_matrix.T
        variances = own.feature_map.variances
        centers = own.centers * np.sqrt(variances)
        one_center = np.zeros((1, DIM))
        expected = [
            np.sum(weights * np.apply_along_axis(log_bound, -1, sums, *law))
            for law in ((one_center, c.variances), (centers, variances))
        ]
        np.testing.assert_allclose([float(alone), float(at_most)], expected, rtol=0.05)
        assert float(at_most) < float(alone)
    assert len(caplog.records) == 2


def test_traced_fits_are_not_logged(caplog):
    caplog.set_level(logging.INFO, logger="simrf_jax")
    query, key = clustered(length=20)
    jax.jit(functools.partial(fit_mixture, num_centers=2))(jax.random.key(0), query, key)
    assert not caplog.records


@pytest.mark.parametrize("v", [-3.0, 0.0, 1.0, 2.5])
def test_bound_of_a_tilted_mixture_by_quadrature(v):
    centers, variances = np.array([[-2.0], [0.5], [2.0]]), np.array([1.7])
    axis = np.arange(-30, 30, 0.005)

    def normal(mean, variance):
        return np.exp(-((axis - mean) ** 2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)

    # In the coordinates of the tilted rows, of which the components have the variance Sigma.
    mixture = np.mean([normal(mean, variances[0]) for mean in centers[:, 0]], axis=0)
    second = np.sum(normal(v, 1) ** 2 / mixture) * 0.005
    assert 0 <= np.log(second) <= log_bound(v, centers, variances)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "cross_polytope"])
def test_tilt_and_mixture_together_are_unbiased(coupling):
    query, key = clustered(heads=1)
    calibration = simrf_jax.calibrate(query, key)
    mixture = one_head(fit_mixture(jax.random.key(0), query, key, 3, calibration=calibration))
    assert np.all(mixture.feature_map.variances > 1.005)
    # Clusters are narrower than all pairs together.
    assert np.all(mixture.feature_map.variances <= calibration.variances[0] + 0.05)
    # Pairs of one cluster, between its center and zero; others have heavy tails.
    x, y = (0.9 * np.abs(z[:6, 0]) * ROOT for z in (query, key))
    options = simrf_jax.DrawOptions(coupling=coupling)

    @jax.jit
    @jax.vmap
    def estimates(prng_key):
        w = draw_mixture_projection(prng_key, mixture.centers, 24, options=options)
        phi_x = mixture.feature_map.features(x, w, side="query")
        phi_y = mixture.feature_map.features(y, w, side="key")
        return jnp.sum(phi_x * phi_y, axis=-1) / jnp.exp(jnp.sum(x * y, axis=-1))

    ratios = np.float64(estimates(jax.random.split(jax.random.key(1), 5000)))
    assert_mean(ratios, 1)
    assert np.all(ratios.std(axis=0) / len(ratios) ** 0.5 < 0.05)


@pytest.mark.slow
def test_a_mixture_lowers_the_error_of_attention_to_clusters():
    query, key = clustered(length=100)
    value = np.random.default_rng(1).normal(size=(100, 2, DIM)).astype(np.float32)
    fit, test = slice(50), slice(50, None)
    calibration = simrf_jax.calibrate(query[fit], key[fit])
    feature_map, centers = fit_mixture(
        jax.random.key(0), query[fit], key[fit], 4, calibration=calibration
    )
    exact = jax.nn.dot_product_attention(query[test], key[test], value[test])

    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def error(prng_key, own_map, own_centers):
        keys = jax.random.split(prng_key, 2)
        draw = functools.partial(simrf_jax.calibration.draw_mixture_projection, num_features=16)
        w = jax.vmap(draw)(keys, own_centers)
        out = simrf_jax.random_feature_attention(
            query[test], key[test], value[test], w, feature_map=own_map
        )
        return jnp.sum((out - exact) ** 2) / jnp.sum(exact**2)

    def mean_error(own_map, own_centers):
        keys = jax.random.split(jax.random.key(1), 100)
        return np.mean(error(keys, own_map, own_centers))

    with_mixture = mean_error(feature_map, centers)
    without = mean_error(calibration, jnp.zeros((2, 1, DIM)))
    assert with_mixture < 0.7 * without


@pytest.mark.slow
def test_what_no_query_sees_does_not_count():
    query, key = clustered(length=40, heads=1)
    padded_query = np.concatenate([query, np.full_like(query[:10], np.nan)])
    padded_key = np.concatenate([key, np.full_like(key[:7], np.nan)])
    mixture = fit_mixture(
        jax.random.key(0),
        padded_query,
        padded_key,
        2,
        query_mask=np.arange(50) < 40,
        key_mask=np.arange(47) < 40,
        keys_per_query=30,
    )
    expected = fit_mixture(jax.random.key(1), query, key, 2, keys_per_query=30)
    np.testing.assert_allclose(
        np.sort(mixture.centers, axis=1), np.sort(expected.centers, axis=1), atol=0.05
    )
    # Later keys are far away, so that a query that drew one would move a center.
    far = np.where(np.arange(40)[:, None, None] == 39, np.float32(50), key)
    causal = fit_mixture(jax.random.key(0), query[:-1], far, 2, is_causal=True)
    assert np.all(np.abs(causal.centers) < 10)


@pytest.mark.slow
def test_pairs_within_an_exact_band_do_not_count():
    query, key = np.eye(2, DIM, dtype=np.float32), 3 * np.eye(2, DIM, dtype=np.float32)
    tokens = query[:, None], key[:, None]
    beyond = fit_mixture(jax.random.key(0), *tokens, 2, keys_per_query=50, exact_bandwidth=0)
    beyond = one_head(beyond)
    sums = np.asarray(beyond.centers) * np.sqrt(np.asarray(beyond.feature_map.variances))
    # Each query and the other's key; its own key is within the band.
    expected = ROOT * np.array([[1, 3, 0, 0], [3, 1, 0, 0]])
    np.testing.assert_allclose(sums[np.argsort(sums[:, 0])], expected, atol=1e-5)
    nothing = fit_mixture(jax.random.key(1), *tokens, 2, exact_bandwidth=1)
    np.testing.assert_array_equal(nothing.centers, 0)


@pytest.mark.slow
def test_groups_of_query_heads_and_transformations():
    query, key = clustered(length=30, heads=4)
    batch = np.stack([query, query]), np.stack([key, key])
    mixture = fit_mixture(jax.random.key(0), batch[0], batch[1][..., :2, :], 3)
    assert mixture.centers.shape == (2, 3, DIM)
    fit_three = functools.partial(fit_mixture, num_centers=3)
    jitted, plain = (fit(jax.random.key(1), query, key) for fit in (jax.jit(fit_three), fit_three))
    np.testing.assert_allclose(jitted.centers, plain.centers, rtol=1e-3, atol=1e-4)
    keys = jax.random.split(jax.random.key(2), 2)
    mapped = jax.vmap(fit_three)(keys, *batch)
    assert mapped.centers.shape == (2, 4, 3, DIM)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": np.ones((4, 2, 8), int)}, TypeError, "query must be a floating type"),
        (
            {"key": np.ones((4, 3, 8), np.float32)},
            ValueError,
            "must have the same head_dim, and the number",
        ),
        ({"num_centers": 17}, ValueError, "pairs of a key head .*, 16, got 17"),
        ({"query_mask": np.zeros(4, bool)}, ValueError, "pairs of a key head .*, 0, got 2"),
        (
            {"query_mask": np.arange(4) == 2, "num_centers": 5},
            ValueError,
            "pairs of a key head without padding, 4, got 5",
        ),
        ({"query": np.full((4, 2, 8), np.nan, np.float32)}, ValueError, "are not finite"),
        ({"num_centers": 0}, ValueError, "num_centers must be at least 1, got 0"),
        ({"keys_per_query": 0}, ValueError, "keys_per_query must be at least 1, got 0"),
        ({"exact_bandwidth": -1}, ValueError, "exact_bandwidth must be at least 0, got -1"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
        ({"calibration": "calibrated"}, TypeError, "calibration must be a Calibrated, got str"),
        (
            {"calibration": simrf_jax.feature_maps.Calibrated.identity(3, 8)},
            ValueError,
            r"for 2 key heads of dim 8, got variances of shape \(3, 8\)",
        ),
        ({"key_mask": np.ones(3, bool)}, ValueError, r"key_mask must be \[batch\.\.\., length\]"),
        ({"prng_key": jnp.zeros(2, jnp.uint32)}, TypeError, "key must be a typed PRNG key"),
    ],
)
def test_refuses(change, error, match):
    arguments = {
        "prng_key": jax.random.key(0),
        "query": np.ones((4, 2, 8), np.float32),
        "key": np.ones((4, 2, 8), np.float32),
        "num_centers": 2,
    }
    with pytest.raises(error, match=match):
        fit_mixture(**(arguments | change))
