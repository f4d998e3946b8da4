import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax._src.calibration.fit import fit
from simrf_jax.calibration import Moments
from tests.standard_errors import assert_mean
from tests.versions import enable_x64

DIM = 8
ROOT = DIM**-0.25  # Of the scale of attention.
OPTIONS = [
    {"center": center, "balance": balance, "tilt": tilt}
    for center, balance, tilt in itertools.product(
        (False, True), (False, "diagonal", True), (None, "isotropic", "log", "mean")
    )
]


def tokens(length=400, seed=0, heads=1, dim=DIM):
    """Returns queries and keys of different spectra, bases and means."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, dim + 1) ** -1.0
    query = rng.normal(size=(length, heads, dim)) * spectrum @ rng.normal(size=(dim, dim)) + 0.5
    key = rng.normal(size=(length, heads, dim)) * spectrum[::-1] @ rng.normal(size=(dim, dim)) - 0.3
    return query.astype(np.float32), key.astype(np.float32)


def scaled(query, key):
    return np.float64(query[:, 0] * DIM**-0.25), np.float64(key[:, 0] * DIM**-0.25)


def one_head(calibrated, head=0):
    return jax.tree.map(lambda leaf: leaf[head], calibrated)


def log_second_moment(calibrated, x, y):
    """Returns the log of E (K^ / K)^2 for one row of W, in float64."""
    c = jax.tree.map(np.float64, calibrated)
    v = (x - c.query_mean) @ c.query_matrix.T + (y - c.key_mean) @ c.key_matrix.T
    rho = 1 / (2 * c.variances - 1)
    return np.sum(np.log((1 + rho) / (2 * np.sqrt(rho))) + rho * v**2, axis=-1)


def optimal_rho(mean_square, dim):
    """Returns rho* of FAVOR++ in ``dim`` dimensions for a mean of |x + y|^2."""
    v = 2 * mean_square
    return 2 * dim / (np.sqrt((v + dim) ** 2 + 4 * dim * v) + v + dim)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_is_unbiased_and_has_the_second_moment_of_theory(options):
    query, key = tokens()
    calibrated = one_head(simrf_jax.calibrate(query, key, **options))
    x, y = (0.3 * z[:4] for z in scaled(query, key))  # Short, because long ones have heavy tails.

    @jax.jit
    @jax.vmap
    def estimates(key):
        w = simrf_jax.draw_projection(key, 64, DIM, coupling="iid")
        phi_x = calibrated.features(jnp.float32(x), w, side="query")
        phi_y = calibrated.features(jnp.float32(y), w, side="key")
        return jnp.sum(phi_x * phi_y, axis=-1) / jnp.exp(jnp.sum(x * y, axis=-1))

    ratios = np.float64(estimates(jax.random.split(jax.random.key(0), 4000)))
    assert_mean(ratios, 1)
    variance = (np.exp(log_second_moment(calibrated, x, y)) - 1) / 64
    assert_mean(np.square(ratios - 1), variance)


@pytest.mark.slow
def test_without_centering_the_options_are_known_methods():
    query, key = tokens()
    x, y = scaled(query, key)
    second = {name: z.T @ z / len(z) for name, z in (("x", x), ("y", y))}
    cross = np.outer(x.mean(0), y.mean(0))
    sums = second["x"] + second["y"] + cross + cross.T

    def fitted(**options):
        calibrated = one_head(simrf_jax.calibrate(query, key, center=False, **options))
        return jax.tree.map(np.asarray, calibrated)

    def check_variance(actual, rho):
        np.testing.assert_allclose(actual, (1 + rho) / (2 * rho), rtol=2e-2)

    oprf = fitted(balance=False, tilt="isotropic")
    np.testing.assert_array_equal(oprf.query_matrix, np.eye(DIM))
    check_variance(oprf.variances, optimal_rho(np.trace(sums), DIM))

    saderf = fitted(balance="diagonal", tilt="isotropic")
    psi = (np.diag(second["y"]) / np.diag(second["x"])) ** 0.25
    np.testing.assert_allclose(saderf.query_matrix, np.diag(psi), rtol=2e-2)
    balanced = (x * psi).mean(0), (y / psi).mean(0)
    mean_square = np.sum((x * psi) ** 2 + (y / psi) ** 2, axis=-1).mean() + 2 * np.dot(*balanced)
    check_variance(saderf.variances, optimal_rho(mean_square, DIM))

    sderf = fitted(balance=False, tilt="log")
    np.testing.assert_allclose(sderf.query_matrix, sderf.key_matrix)
    tilted = sderf.query_matrix.T * sderf.variances @ sderf.query_matrix
    squares, axes = np.linalg.eigh(sums)
    rho = optimal_rho(squares, 1)
    np.testing.assert_allclose(tilted, axes * (1 + rho) / (2 * rho) @ axes.T, atol=0.1)

    aderf = fitted(balance=True, tilt="isotropic")
    of_x = aderf.query_matrix @ second["x"] @ aderf.query_matrix.T
    of_y = aderf.key_matrix @ second["y"] @ aderf.key_matrix.T
    singular = np.sqrt(np.abs(np.linalg.eigvals(second["x"] @ second["y"])))
    np.testing.assert_allclose(of_x, np.diag(np.diag(of_x)), atol=0.05)
    np.testing.assert_allclose(np.sort(np.diag(of_x)), np.sort(singular), rtol=5e-2, atol=1e-2)
    np.testing.assert_allclose(of_x, of_y, atol=0.05)
    check_variance(
        aderf.variances, optimal_rho(2 * singular.sum() + 2 * x.mean(0) @ y.mean(0), DIM)
    )


@pytest.mark.slow
def test_no_member_of_the_family_is_better_on_random_covariances():
    rng = np.random.default_rng(0)
    count = 1000

    def random_moments():
        axes = np.linalg.qr(rng.normal(size=(count, DIM, DIM)))[0]
        spectra = rng.uniform(0.2, 2, (count, 1)) * np.arange(1, DIM + 1) ** -rng.uniform(
            0, 2, (count, 1)
        )
        covariances = axes * spectra[:, None] @ axes.mT
        means = rng.normal(size=(count, DIM)) * 0.3
        many = 1e9  # So many vectors that nothing is shrunk.
        moments = Moments(
            jnp.full(count, many), jnp.asarray(means), jnp.asarray(covariances * many)
        )
        return moments, covariances, means

    with enable_x64(True):
        query, cov_x, mean_x = random_moments()
        key, cov_y, mean_y = random_moments()

        def mean_log(**options):
            c = jax.tree.map(np.asarray, fit(query, key, **options))
            # The mean over pairs of independent x and y.
            stretched = c.query_matrix @ cov_x @ c.query_matrix.mT
            stretched += c.key_matrix @ cov_y @ c.key_matrix.mT
            offset = (c.query_matrix @ (mean_x - c.query_mean)[..., None])[..., 0]
            offset += (c.key_matrix @ (mean_y - c.key_mean)[..., None])[..., 0]
            squares = np.diagonal(stretched, axis1=1, axis2=2) + offset**2
            rho = 1 / (2 * c.variances - 1)
            return np.sum(np.log((1 + rho) / (2 * np.sqrt(rho))) + rho * squares, axis=-1)

        best = mean_log(center=True, balance=True, tilt="log")
        sderf = mean_log(center=False, balance=False, tilt="log")
        aderf = mean_log(center=False, balance=True, tilt="isotropic")
        centered_sderf = mean_log(center=True, balance=False, tilt="log")
        centered_aderf = mean_log(center=True, balance=True, tilt="isotropic")
        other_tilt = mean_log(center=True, balance=True, tilt="mean")
    for other in (sderf, aderf, centered_sderf, centered_aderf, other_tilt):
        # The least share of the identity costs a little.
        assert np.all(best <= other + 1e-3)
        assert np.mean(best) < np.mean(other) - 0.005


@pytest.mark.slow
def test_takes_the_query_heads_of_a_key_head_together():
    query, key = tokens(heads=6)
    grouped = simrf_jax.calibrate(query, key[:, :2])
    pooled = np.concatenate([query[:, 3:4], query[:, 4:5], query[:, 5:6]])
    expected = simrf_jax.calibrate(pooled, key[:, 1:2])
    np.testing.assert_allclose(grouped.query_mean[1], expected.query_mean[0], rtol=1e-4)
    np.testing.assert_allclose(grouped.variances.shape, (2, DIM))
    np.testing.assert_allclose(
        np.sort(grouped.variances[1]), np.sort(expected.variances[0]), rtol=1e-3
    )


@pytest.mark.slow
def test_padding_does_not_count():
    query, key = tokens()
    padded = [np.concatenate([z, np.full_like(z[:5], np.nan)]) for z in (query, key)]
    real = np.arange(405) < 400
    actual = simrf_jax.calibrate(*padded, query_mask=real, key_mask=real)
    expected = simrf_jax.calibrate(query, key)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_fits_logits_of_any_scale(scale):
    query, key = tokens()
    c = one_head(simrf_jax.calibrate(query, key, scale=scale))
    root = abs(scale) ** 0.5
    np.testing.assert_allclose(c.query_mean, np.sign(scale) * root * query[:, 0].mean(0), rtol=1e-4)
    np.testing.assert_allclose(c.key_mean, root * key[:, 0].mean(0), rtol=1e-4)


def test_works_under_jit_and_vmap():
    query, key = (np.stack([z, 2 * z]) for z in tokens())
    stacked = jax.jit(jax.vmap(simrf_jax.calibrate))(query, key)
    for i in range(2):
        one = simrf_jax.calibrate(query[i], key[i])
        np.testing.assert_allclose(stacked.query_mean[i], one.query_mean, rtol=1e-4)
        np.testing.assert_allclose(np.sort(stacked.variances[i]), np.sort(one.variances), rtol=1e-3)


def test_no_gradient_flows_to_queries_and_keys():
    query, key = tokens()
    grads = jax.grad(lambda q: jnp.sum(simrf_jax.calibrate(q, key).variances))(query)
    assert not np.any(grads)


@pytest.mark.slow
def test_works_on_a_mesh_and_inside_shard_map():
    query, key = tokens(heads=2)
    expected = simrf_jax.calibrate(query, key)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    for spec in (jax.P("x"), jax.P(None, "x")):  # The length, or the heads.
        on_mesh = jax.device_put((query, key), jax.NamedSharding(mesh, spec))
        assert_close(simrf_jax.calibrate(*on_mesh), expected)
    # Each device fits its own heads.
    mapped = jax.shard_map(simrf_jax.calibrate, mesh=mesh, out_specs=jax.P("x"))
    assert_close(jax.jit(mapped)(*on_mesh), expected)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual.query_mean, expected.query_mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        np.sort(actual.variances), np.sort(expected.variances), rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_float32_is_enough():
    query, key = tokens()
    single = one_head(simrf_jax.calibrate(query, key))
    with enable_x64(True):
        double = one_head(simrf_jax.calibrate(np.float64(query), np.float64(key)))
    x, y = scaled(query, key)
    np.testing.assert_allclose(
        log_second_moment(single, x, y), log_second_moment(double, x, y), rtol=1e-3, atol=1e-3
    )
    # Products of queries and keys are what must not change.
    np.testing.assert_allclose(
        np.float64(single.query_matrix).T @ np.float64(single.key_matrix), np.eye(DIM), atol=3e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"balance": False}, {"tilt": "mean"}, {"center": False}])
@pytest.mark.parametrize("sizes", [(1e10, 1.0), (1e10, 1e-5), (1e17, 1e17), (1e-20, 1e-20)])
def test_fits_vectors_of_any_size(sizes, options):
    single = simrf_jax.calibrate(
        *(size * x for size, x in zip(sizes, tokens(), strict=True)), **options
    )
    with enable_x64(True):
        wide = (size * np.float64(x) for size, x in zip(sizes, tokens(), strict=True))
        double = simrf_jax.calibrate(*wide, **options)
    np.testing.assert_allclose(
        np.sort(single.variances), np.sort(double.variances), rtol=2e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": np.ones((4, 2, 8), int)}, TypeError, "query must be a floating type"),
        (
            {"key": np.ones((4, 8), np.float32)},
            ValueError,
            r"must be \[\.\.\., length, heads, dim\]",
        ),
        (
            {"key": np.ones((4, 2, 7), np.float32)},
            ValueError,
            "must have the same head_dim, and the number",
        ),
        (
            {"key": np.ones((4, 3, 8), np.float32)},
            ValueError,
            "must have the same head_dim, and the number",
        ),
        ({"key": np.ones((0, 2, 8), np.float32)}, ValueError, "There must be tokens, got shapes"),
        ({"key": np.ones((2, 4, 2, 8), np.float32)}, ValueError, "must have the same batch shape"),
        (
            {"query": np.full((4, 2, 8), np.nan, np.float32)},
            ValueError,
            "and its squares must be finite",
        ),
        ({"key_mask": np.zeros(4, bool)}, ValueError, "key must have a token that is not padding"),
        ({"scale": np.ones(2)}, TypeError, "scale must be one real number"),
        ({"center": 1}, TypeError, "center must be True or False, got 1"),
        ({"balance": "full"}, ValueError, "balance must be True, False or 'diagonal', got 'full'"),
        ({"tilt": "OPRF"}, ValueError, "tilt must be one of 'log', 'mean', 'isotropic', None"),
        ({"query_mask": np.ones(4)}, TypeError, "query_mask must be boolean, got float"),
        ({"key_mask": np.ones(3, bool)}, ValueError, r"key_mask must be \[batch\.\.\., length\]"),
    ],
)
def test_refuses(change, error, match):
    arguments = {"query": np.ones((4, 2, 8), np.float32), "key": np.ones((4, 2, 8), np.float32)}
    with pytest.raises(error, match=match):
        simrf_jax.calibrate(**(arguments | change))


def test_refuses_means_whose_squares_overflow():
    query, key = tokens()
    with pytest.raises(ValueError, match="covariances whose products fit in their floating type"):
        simrf_jax.calibrate(np.full_like(query, 1e21), key, center=False)
    assert np.isfinite(simrf_jax.calibrate(np.full_like(query, 1e21), key).variances).all()
