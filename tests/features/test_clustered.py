import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import hybrid
from tests.attention.reference import kernel_attention, relative_error
from tests.features.vectors import KERNELS, vectors
from tests.standard_errors import assert_less, assert_mean


def clustered(spread=0.0, num_features=9, seed=0):
    w = simrf_jax.draw_projection(jax.random.key(seed), num_features, 4, coupling="orthogonal")
    q, r = vectors(n=3, seed=5), vectors(n=2, seed=6)
    return hybrid.ClusteredProjection(w, q, r, spread)


def features(x, p, *, side, kernel="softmax"):
    return hybrid.ClusteredHybrid(kernel).features(x, p, side=side)


def clustered_estimate(x, y, p, kernel="softmax"):
    psi_1 = features(x, p, side="query", kernel=kernel)
    psi_2 = features(y, p, side="key", kernel=kernel)
    return jnp.dot(psi_1, psi_2.T)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_clustered_hybrid_has_no_variance_at_the_centers(kernel):
    for seed in range(5):
        p = clustered(seed=seed)
        actual = clustered_estimate(p.query_centers, p.key_centers, p, kernel)
        expected = KERNELS[kernel](p.query_centers, p.key_centers)
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_clustered_estimate_is_its_definition(spread):
    p = clustered(spread)
    x, y = vectors(), vectors(seed=1)
    expected = clustered_by_definition(x, y, p)
    np.testing.assert_allclose(clustered_estimate(x, y, p), expected, rtol=1e-3, atol=1e-3)


def clustered_by_definition(x, y, p):
    """Returns the mean of complex exponentials tuned to the nearest centers, in float64."""
    w, q, r = (np.asarray(a, np.float64) for a in (p.projection, p.query_centers, p.key_centers))
    expected = np.zeros((len(x), len(y)))
    for i, j in np.ndindex(len(x), len(y)):
        center_x = q[np.argmin(np.linalg.norm(q - x[i], axis=1))]
        center_y = r[np.argmin(np.linalg.norm(r - y[j], axis=1))]
        modulus = ((center_y**2 + p.spread**2) / (center_x**2 + p.spread**2)) ** 0.25
        a = modulus * np.where(center_x * center_y < 0, 1, 1j)
        u, v = a * np.float64(x[i]), np.float64(y[j]) / a
        terms = np.exp(w @ (u + v) - u @ u / 2 - v @ v / 2)
        expected[i, j] = terms.real.mean()
    return expected


@pytest.mark.slow
def test_a_center_on_an_axis_does_not_cost_the_others_their_digits():
    w = simrf_jax.draw_projection(jax.random.key(0), 64, 3)
    q, r = np.float32([[0, 1, 0.5], [1, 1, 0.5]]), np.float32([[1, 1, -0.5]])
    p = hybrid.ClusteredProjection(w, q, r)
    np.testing.assert_allclose(clustered_estimate(q[1:], r, p), np.exp(q[1:] @ r.T), rtol=1e-5)


@pytest.mark.slow
def test_an_empty_cluster_does_not_silence_the_others():
    w = simrf_jax.draw_projection(jax.random.key(0), 64, 3)
    q, r = np.full((1, 3), 6.0, np.float32), np.float32([[-6, -6, -6], [6, 6, 6]])
    keys, value = np.full((4, 1, 3), -6.0, np.float32), np.ones((4, 1, 1), np.float32)
    p = hybrid.ClusteredProjection(w, q, r, 0.05)
    out = simrf_jax.random_feature_attention(
        q[None], keys, value, p, feature_map="clustered_hybrid", scale=1.0
    )
    np.testing.assert_allclose(out, 1, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_clustered_hybrid_is_unbiased(spread, kernel):
    x, y = vectors(n=2)[:, None]

    def one(key):
        w = simrf_jax.draw_projection(key, 9, 4, coupling="orthogonal")
        p = clustered()
        p = hybrid.ClusteredProjection(w, p.query_centers, p.key_centers, spread)
        return clustered_estimate(x, y, p, kernel)[0, 0]

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000))
    assert_mean(samples, KERNELS[kernel](x, y)[0, 0])


@pytest.mark.slow
def test_tuning_to_the_spread_pays_around_centers_with_a_small_coordinate():
    q, r = np.float32([[1.0, 0.02, -0.5, 0.3]]), np.float32([[0.8, 0.5, 0.4, -0.02]])
    x, y = q + 0.3 * vectors(n=20, scale=1), r + 0.3 * vectors(n=20, scale=1, seed=1)
    exact = np.exp(np.sum(x * y, axis=1))

    def errors(spread):
        def one(key):
            w = simrf_jax.draw_projection(key, 9, 4, coupling="orthogonal")
            p = hybrid.ClusteredProjection(w, q, r, spread)
            return jnp.mean(jnp.square(jnp.diagonal(clustered_estimate(x, y, p)) / exact - 1))

        return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 2_000))

    assert_less(errors(0.3), np.minimum(errors(0.0), 1e3))  # Without tuning, some errors are huge.


@pytest.mark.slow
def test_attention_by_clusters():
    rng = np.random.default_rng(0)
    q, k, v = (0.5 * rng.normal(size=(3, 6, 1, 4))).astype(np.float32)
    p = clustered(0.5, num_features=200)
    actual = simrf_jax.random_feature_attention(q, k, v, p, feature_map="clustered_hybrid")
    root = 4**-0.25
    kernel = clustered_by_definition(q[:, 0] * root, k[:, 0] * root, p)
    expected = kernel_attention(kernel, np.asarray(v[:, 0], np.float64))
    assert relative_error(actual[:, 0], expected) < 1e-4


@pytest.mark.slow
def test_half_precision_inputs_are_widened_before_distances_are_computed():
    centers = np.float16([[300] * 4, [-300] * 4])
    far = hybrid.ClusteredProjection(clustered().projection, centers, centers[:1], 1.0)
    x = np.full(4, -2, np.float16)
    phi = features(x, far, side="query", kernel="gaussian")
    np.testing.assert_array_equal(phi[:10], 0)  # Nearest to the second center.


@pytest.mark.slow
def test_gradients_far_from_all_centers_are_no_nan():
    # Features of other clusters overflow at this size.
    far = 8 * vectors()
    gradient = jax.grad(
        lambda x: features(x, clustered(0.5), side="query", kernel="softmax").sum()
    )(far)
    assert not jnp.isnan(gradient).any()


@pytest.mark.slow
def test_nan_stays_nan():
    nan = np.full(4, np.nan, np.float32)
    phi = features(nan, clustered(), side="key")
    assert jnp.isnan(phi).any()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda x, p: features(
                x, hybrid.ClusteredProjection(p.projection, x, x, -1.0), side="key"
            ),
            ValueError,
            "spread must be at least 0, got -1.0",
        ),
        (
            lambda x, p: features(x[0, 0], clustered(), side="key"),
            ValueError,
            r"x must be \[\.\.\., dim\], got shape \(\)",
        ),
        (
            lambda x, p: simrf_jax.random_feature_attention(
                *x[None, :, None].repeat(3, 0),
                hybrid.ClusteredProjection(p.projection[None], x, x),
                feature_map="clustered_hybrid",
            ),
            ValueError,
            r"key_centers \[\.\.\., clusters, dim\], got \(1, 9, 4\), \(7, 4\)",
        ),
        (
            lambda x, p: features(x, p.projection, side="key"),
            TypeError,
            "must be a ClusteredProjection, got an array",
        ),
        (
            lambda x, p: features(
                x, hybrid.ClusteredProjection(p.projection, x[:0], x), side="key"
            ),
            ValueError,
            r"query_centers must be \[clusters, 4\], at least one, got \(0, 4\)",
        ),
        (
            lambda x, p: features(
                x, hybrid.ClusteredProjection(p.projection, x, x[:, :3]), side="key"
            ),
            ValueError,
            r"key_centers must be \[clusters, 4\], at least one, got \(7, 3\)",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call(jnp.asarray(vectors()), clustered())


@pytest.fixture(scope="module")
def heads():
    """Returns queries, keys and values of 2 heads, and W, centers and spreads of each."""
    keys = jax.random.split(jax.random.key(3), 2)
    w = jax.vmap(lambda key: simrf_jax.draw_projection(key, 8, 4))(keys)
    centers = (np.stack([vectors(n, seed=n), vectors(n, seed=5 + n)]) for n in (3, 2))
    q, k, v = 0.3 * jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
    return (q, k, v), (w, *centers, jnp.array([0.2, 0.4]))


def attend(tokens, projection):
    return simrf_jax.random_feature_attention(*tokens, projection, feature_map="clustered_hybrid")


@pytest.mark.slow
@pytest.mark.parametrize("built", ["stacked", "under vmap"])
def test_each_head_has_a_projection_of_its_own(heads, built):
    tokens, parts = heads
    make = hybrid.ClusteredProjection
    out = attend(tokens, make(*parts) if built == "stacked" else jax.vmap(make)(*parts))
    for n in range(2):
        one = [x[:, :, n : n + 1] for x in tokens]
        expected = attend(one, make(*(part[n] for part in parts)))
        np.testing.assert_allclose(out[:, :, n : n + 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_one_spread_serves_a_stack(heads):
    tokens, (*parts, _) = heads
    one = hybrid.ClusteredProjection(*parts, 0.3)
    many = hybrid.ClusteredProjection(*parts, jnp.full(2, 0.3))
    np.testing.assert_array_equal(attend(tokens, one), attend(tokens, many))
    gradient = jax.jit(jax.grad(lambda p: attend(tokens, p).sum()))(one)
    assert (jnp.abs(gradient.spread) > 0).all()  # Of either sign: no constructor checks it.
    with pytest.raises(ValueError, match=r"spread must be one number or have the leading axes"):
        hybrid.ClusteredProjection(*parts, jnp.full(3, 0.3))


@pytest.mark.slow
@pytest.mark.fast
def test_the_spread_has_a_gradient_in_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 1, 4))
    w = simrf_jax.draw_projection(jax.random.key(1), 8, 4)
    query_centers, key_centers = vectors(n=3, seed=5), vectors(n=2, seed=6)

    def attend(spread):
        p = hybrid.ClusteredProjection(w, query_centers, key_centers, spread)
        out = simrf_jax.random_feature_attention(q, k, v, p, feature_map="clustered_hybrid")
        return jnp.sum(jnp.square(out))

    difference = (attend(0.305) - attend(0.295)) / 0.01
    assert jnp.abs(difference) > 1
    np.testing.assert_allclose(jax.grad(attend)(0.3), difference, rtol=0.01)
