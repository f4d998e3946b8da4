import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import theory
from tests import formulas
from tests.attention.reference import kernel_attention, relative_error
from tests.standard_errors import assert_less, assert_mean

FEATURES = {
    "angular": simrf_jax.angular_hybrid_features,
    "gaussian": simrf_jax.gaussian_hybrid_features,
}
KERNELS = {"softmax": simrf_jax.softmax_kernel, "gaussian": simrf_jax.gaussian_kernel}


def bipolar(num_features=6, num_weights=5, dim=4, seed=0, coupling="orthogonal"):
    return simrf_jax.draw_bipolar_projection(
        jax.random.key(seed), num_features, num_weights, dim, coupling=coupling
    )


def vectors(n=7, dim=4, scale=0.6, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim), scale=scale).astype(np.float32)


def estimate(name, x, y, p, kernel="softmax", **options):
    """Psi_1(x) . Psi_2(y) for all pairs."""
    psi_1 = FEATURES[name](x, p, side="query", kernel=kernel, **options)
    psi_2 = FEATURES[name](y, p, side="key", kernel=kernel, **options)
    return jnp.dot(psi_1, psi_2.T)


def estimate_by_definition(name, x, y, p, kernel="softmax", bandwidth=1.0):
    """lambda K_hyperbolic + (1 - lambda) K_trigonometric, in float64."""
    x, y, tau = (np.asarray(a, np.float64) for a in (x, y, p.weights))
    base_1, base_2 = (
        formulas.evaluate(formula, x, w, kernel) @ formulas.evaluate(formula, y, w, kernel).T
        for formula, w in (
            (formulas.hyperbolic, p.hyperbolic),
            (formulas.trigonometric, p.trigonometric),
        )
    )
    if name == "angular":
        weight = 0.5 - np.sign(x @ tau.T) @ np.sign(y @ tau.T).T / (2 * len(tau))
    else:
        weight = np.cos((x[:, None] + y[None]) @ tau.T / bandwidth).mean(axis=-1)
    return weight * base_1 + (1 - weight) * base_2


@pytest.mark.fast
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_inner_product_is_the_hybrid_estimate(name, kernel):
    x, y, p = vectors(), vectors(seed=1), bipolar()
    expected = estimate_by_definition(name, x, y, p, kernel)
    np.testing.assert_allclose(estimate(name, x, y, p, kernel), expected, rtol=2e-5, atol=2e-5)
    if name == "gaussian":
        expected = estimate_by_definition(name, x, y, p, kernel, bandwidth=2.0)
        actual = estimate(name, x, y, p, kernel, bandwidth=2.0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_widths_and_dtypes():
    x, p = vectors(), bipolar(num_features=6, num_weights=5)
    assert FEATURES["angular"](x, p, side="query").shape == (7, 4 * 6 * (5 + 1))
    assert FEATURES["gaussian"](x, p, side="key").shape == (7, 2 * 6 * (4 * 5 + 1))
    assert FEATURES["angular"](x.astype(jnp.bfloat16), p, side="key").dtype == jnp.bfloat16
    assert FEATURES["angular"](x[:0], p, side="query").shape[0] == 0
    nan = np.full(4, np.nan, np.float32)
    for features in FEATURES.values():
        assert jnp.isnan(features(nan, p, side="query")).all()
    assert jnp.isnan(simrf_jax.clustered_hybrid_features(nan, clustered(), side="key")).any()


def test_features_cost_the_sum_and_not_the_product_of_all_sizes():
    # O(nd + md + mn): with d = 4,096 no array is as large as m n d.
    p = bipolar(64, 64, 4096)
    compiled = jax.jit(FEATURES["angular"], static_argnames="side").lower(
        np.zeros((8, 4096), np.float32), p, side="query"
    )
    cost = compiled.compile().cost_analysis()
    assert cost["flops"] < 8 * (2 * 3 * 64 * 4096 * 2 + 100 * 64 * 64)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_unbiased(name, coupling, kernel):
    x, y = vectors(n=2)[:, None]

    def one(key):
        p = simrf_jax.draw_bipolar_projection(key, 6, 5, 4, coupling=coupling)
        return estimate(name, x, y, p, kernel)[0, 0]

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000))
    assert_mean(samples, KERNELS[kernel](x, y)[0, 0])


def pair_at(angle, radius, dim=4):
    x, y = np.zeros((2, dim), np.float32)
    x[0], y[:2] = radius, (radius * np.cos(angle), radius * np.sin(angle))
    return x, y


@pytest.mark.fast
@pytest.mark.parametrize("angle", [0, np.pi])
def test_angular_hybrid_has_no_variance_at_either_end(angle):
    x, y = pair_at(angle, 1.5)
    draws = [float(estimate("angular", x[None], y[None], bipolar(seed=s))[0, 0]) for s in range(20)]
    np.testing.assert_allclose(draws, np.exp(x @ y), rtol=2e-4)


@pytest.mark.fast
def test_gaussian_hybrid_has_no_variance_at_antiparallel_vectors():
    x, y = pair_at(np.pi, 1.0)
    draws = [
        float(estimate("gaussian", x[None], y[None], bipolar(seed=s))[0, 0]) for s in range(20)
    ]
    np.testing.assert_allclose(draws, np.exp(x @ y), rtol=2e-4)


@pytest.mark.parametrize("coupling", ["iid", "orthogonal"])
@pytest.mark.parametrize("angle", [0.4, 1.5, 2.6])
def test_angular_mse_is_that_of_theorem_3_1_and_lemma_3_2(coupling, angle):
    m, n, dim = 6, 5, 4
    x, y = pair_at(angle, 0.8, dim)
    a = angle / np.pi
    # Lemma 3.2, and the same for 1 - lambda, whose mean is 1 - a.
    second, other = a * (a - a / n + 1 / n), (1 - a) * ((1 - a) - (1 - a) / n + 1 / n)
    hyperbolic, trigonometric = (
        theory.kernel_mse(x, y, m, coupling=coupling, features=f, kernel="softmax")
        for f in ("hyperbolic", "trigonometric")
    )
    expected = second * hyperbolic + other * trigonometric  # Theorem 3.1

    def one(key):
        p = simrf_jax.draw_bipolar_projection(key, m, n, dim, coupling=coupling)
        signs = jnp.sign(jnp.dot(p.weights, x)) * jnp.sign(jnp.dot(p.weights, y))
        return estimate("angular", x[None], y[None], p)[0, 0], 0.5 - signs.mean() / 2

    samples, weights = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 40_000))
    assert_mean((np.asarray(samples, np.float64) - np.exp(x @ y)) ** 2, expected)
    assert_mean(weights, a)
    assert_mean(np.asarray(weights, np.float64) ** 2, second)


def test_shared_projections_have_the_mse_of_theory_too():
    # For iid rows, the covariance of both bases: 2 E[lambda (1 - lambda)] e^{2 x.y}
    # (cos(|x|^2 - |y|^2) - 1) / m on top of Theorem 3.1.
    m, n, dim, angle = 6, 5, 4, 1.2
    x, y = pair_at(angle, 0.8, dim)
    y = y * np.float32(1.5)
    a = angle / np.pi
    second, other = a**2 + a * (1 - a) / n, (1 - a) ** 2 + a * (1 - a) / n
    cross = a - second  # E[lambda (1 - lambda)]
    hyperbolic, trigonometric = (
        theory.kernel_mse(x, y, m, coupling="iid", features=f, kernel="softmax")
        for f in ("hyperbolic", "trigonometric")
    )
    gap = np.cos(np.sum(x**2) - np.sum(y**2)) - 1
    expected = second * hyperbolic + other * trigonometric
    expected += 2 * cross * np.exp(2 * x @ y) * gap / m

    def one(key):
        p = simrf_jax.draw_bipolar_projection(key, m, n, dim, coupling="iid")
        p = simrf_jax.BipolarProjection(p.hyperbolic, p.hyperbolic, p.weights)
        return estimate("angular", x[None], y[None], p)[0, 0]

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 40_000))
    assert_mean((np.asarray(samples, np.float64) - np.exp(x @ y)) ** 2, expected)


@pytest.mark.fast
def test_the_general_combination_of_three_estimators():
    rng = np.random.default_rng(0)
    widths, offsets = (3, 4, 2), (0.5, 0.0)

    def one_side(n):
        return (
            [rng.normal(size=(n, m)).astype(np.float32) for m in widths],
            [rng.normal(size=(n, r)).astype(np.float32) for r in (2, 3)],
        )

    (phi_1, rho_1), (phi_2, rho_2) = one_side(5), one_side(6)
    bases = [a @ b.T for a, b in zip(phi_1, phi_2, strict=True)]
    weights = [a + r @ s.T for a, r, s in zip(offsets, rho_1, rho_2, strict=True)]
    expected = weights[0] * bases[0] + weights[1] * bases[1]
    expected += (1 - weights[0] - weights[1]) * bases[2]
    psi_1 = simrf_jax.hybrid_features(phi_1, rho_1, offsets, side="query")
    psi_2 = simrf_jax.hybrid_features(phi_2, rho_2, offsets, side="key")
    np.testing.assert_allclose(jnp.dot(psi_1, psi_2.T), expected, rtol=1e-4, atol=1e-5)


def clustered(spread=0.0, num_features=9, seed=0):
    w = simrf_jax.draw_projection(jax.random.key(seed), num_features, 4, coupling="orthogonal")
    q, r = vectors(n=3, seed=5), vectors(n=2, seed=6)
    return simrf_jax.ClusteredProjection(w, q, r, spread)


def clustered_estimate(x, y, p, kernel="softmax"):
    psi_1 = simrf_jax.clustered_hybrid_features(x, p, side="query", kernel=kernel)
    psi_2 = simrf_jax.clustered_hybrid_features(y, p, side="key", kernel=kernel)
    return jnp.dot(psi_1, psi_2.T)


@pytest.mark.parametrize("kernel", KERNELS)
def test_clustered_hybrid_has_no_variance_at_the_centres(kernel):
    for seed in range(5):
        p = clustered(seed=seed)
        actual = clustered_estimate(p.query_centres, p.key_centres, p, kernel)
        expected = KERNELS[kernel](p.query_centres, p.key_centres)
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_clustered_estimate_is_its_definition(spread):
    p = clustered(spread)
    x, y = vectors(), vectors(seed=1)
    expected = clustered_by_definition(x, y, p)
    np.testing.assert_allclose(clustered_estimate(x, y, p), expected, rtol=1e-3, atol=1e-3)


def clustered_by_definition(x, y, p):
    """The mean of complex exponentials tuned to the nearest centres, in float64."""
    w, q, r = (np.asarray(a, np.float64) for a in (p.projection, p.query_centres, p.key_centres))
    expected = np.zeros((len(x), len(y)))
    for i, j in np.ndindex(len(x), len(y)):
        centre_x = q[np.argmin(np.linalg.norm(q - x[i], axis=1))]
        centre_y = r[np.argmin(np.linalg.norm(r - y[j], axis=1))]
        modulus = ((centre_y**2 + p.spread**2) / (centre_x**2 + p.spread**2)) ** 0.25
        a = modulus * np.where(centre_x * centre_y < 0, 1, 1j)
        u, v = a * np.float64(x[i]), np.float64(y[j]) / a
        terms = np.exp(w @ (u + v) - u @ u / 2 - v @ v / 2)
        expected[i, j] = terms.real.mean()
    return expected


@pytest.mark.fast
def test_a_centre_on_an_axis_does_not_cost_the_others_their_digits():
    w = simrf_jax.draw_projection(jax.random.key(0), 64, 3)
    q, r = np.float32([[0, 1, 0.5], [1, 1, 0.5]]), np.float32([[1, 1, -0.5]])
    p = simrf_jax.ClusteredProjection(w, q, r)
    np.testing.assert_allclose(clustered_estimate(q[1:], r, p), np.exp(q[1:] @ r.T), rtol=1e-5)


def test_an_empty_cluster_does_not_silence_the_others():
    w = simrf_jax.draw_projection(jax.random.key(0), 64, 3)
    q, r = np.full((1, 3), 6.0, np.float32), np.float32([[-6, -6, -6], [6, 6, 6]])
    keys, value = np.full((4, 1, 3), -6.0, np.float32), np.ones((4, 1, 1), np.float32)
    p = simrf_jax.ClusteredProjection(w, q, r, 0.05)
    out = simrf_jax.random_feature_attention(
        q[None], keys, value, p, feature_map="clustered_hybrid", scale=1.0
    )
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_half_precision_inputs_are_widened_before_anything_is_computed():
    x, p = vectors(), bipolar()
    half = x.astype(jnp.bfloat16)
    for name, features in FEATURES.items():
        wide = features(half.astype(np.float32), p, side="key")
        np.testing.assert_allclose(
            features(half, p, side="key").astype(jnp.float32), wide, rtol=1e-2, err_msg=name
        )
    sharp = FEATURES["gaussian"](
        np.full(4, 100, np.float16), p, side="key", bandwidth=1e-3, kernel="gaussian"
    )
    chex.assert_tree_all_finite(sharp)
    centres = np.float16([[300] * 4, [-300] * 4])
    far = simrf_jax.ClusteredProjection(p.weights, centres, centres[:1], 1.0)
    x = np.full(4, -2, np.float16)
    phi = simrf_jax.clustered_hybrid_features(x, far, side="query", kernel="gaussian")
    np.testing.assert_array_equal(phi[:10], 0)  # Nearest to the second centre.


def test_the_bandwidth_may_be_learned():
    x, p = vectors(), bipolar()

    def loss(bandwidth):
        return estimate("gaussian", x, x, p, bandwidth=bandwidth).sum()

    slope = jax.jit(jax.grad(loss))(1.5)
    expected = (loss(1.51) - loss(1.49)) / 0.02
    np.testing.assert_allclose(slope, expected, rtol=1e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_clustered_hybrid_is_unbiased(spread, kernel):
    x, y = vectors(n=2)[:, None]

    def one(key):
        w = simrf_jax.draw_projection(key, 9, 4, coupling="orthogonal")
        p = clustered()
        p = simrf_jax.ClusteredProjection(w, p.query_centres, p.key_centres, spread)
        return clustered_estimate(x, y, p, kernel)[0, 0]

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000))
    assert_mean(samples, KERNELS[kernel](x, y)[0, 0])


def test_tuning_to_the_spread_pays_around_centres_with_a_small_coordinate():
    q, r = np.float32([[1.0, 0.02, -0.5, 0.3]]), np.float32([[0.8, 0.5, 0.4, -0.02]])
    x, y = q + 0.3 * vectors(n=20, scale=1), r + 0.3 * vectors(n=20, scale=1, seed=1)
    exact = np.exp(np.sum(x * y, axis=1))

    def errors(spread):
        def one(key):
            w = simrf_jax.draw_projection(key, 9, 4, coupling="orthogonal")
            p = simrf_jax.ClusteredProjection(w, q, r, spread)
            return jnp.mean(jnp.square(jnp.diagonal(clustered_estimate(x, y, p)) / exact - 1))

        return jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 2_000))

    assert_less(errors(0.3), np.minimum(errors(0.0), 1e3))  # Without tuning some are astronomic.


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("heads", [None, 2])
def test_attention_by_hybrids_against_float64(name, heads):
    rng = np.random.default_rng(0)
    q, k, v = (0.5 * rng.normal(size=(3, 6, 2, 4))).astype(np.float32)
    draws = [bipolar(400, 20, seed=s) for s in range(heads or 1)]
    p = jax.tree.map(lambda *leaves: jnp.stack(leaves), *draws) if heads else draws[0]
    actual = simrf_jax.random_feature_attention(q, k, v, p, feature_map=f"{name}_hybrid")
    root = 4**-0.25
    for head in range(2):
        kernel = estimate_by_definition(
            name, q[:, head] * root, k[:, head] * root, draws[head % len(draws)]
        )
        expected = kernel_attention(kernel, np.asarray(v[:, head], np.float64))
        assert relative_error(actual[:, head], expected) < 1e-5


def test_attention_by_clusters():
    rng = np.random.default_rng(0)
    q, k, v = (0.5 * rng.normal(size=(3, 6, 1, 4))).astype(np.float32)
    p = clustered(0.5, num_features=200)
    actual = simrf_jax.random_feature_attention(q, k, v, p, feature_map="clustered_hybrid")
    root = 4**-0.25
    kernel = clustered_by_definition(q[:, 0] * root, k[:, 0] * root, p)
    expected = kernel_attention(kernel, np.asarray(v[:, 0], np.float64))
    assert relative_error(actual[:, 0], expected) < 1e-4


def test_gradients_are_finite_and_the_record_is_a_pytree():
    p = bipolar()
    leaves, treedef = jax.tree.flatten(p)
    assert len(leaves) == 3
    assert treedef.unflatten(leaves).shape == (6, 4)
    for name, features in FEATURES.items():
        gradient = jax.grad(lambda x, f=features: f(x, p, side="key").sum())(vectors(scale=3.0))
        assert jnp.isfinite(gradient).all(), name
    far = 8 * vectors()  # Far from all centres, where other clusters' features leave the range.
    gradient = jax.grad(
        lambda x: simrf_jax.clustered_hybrid_features(x, clustered(0.5), side="query").sum()
    )(far)
    assert not jnp.isnan(gradient).any()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda x, p: FEATURES["angular"](x, p, side="value"),
            ValueError,
            "side must be one of 'query', 'key', got 'value'",
        ),
        (
            lambda x, p: FEATURES["angular"](x, p.weights, side="key"),
            TypeError,
            "must be a BipolarProjection, made by draw_bipolar_projection, got ArrayImpl",
        ),
        (
            lambda x, p: FEATURES["gaussian"](x, p, side="key", kernel="laplace"),
            ValueError,
            "'gaussian', 'softmax', got 'laplace'",
        ),
        (
            lambda x, p: FEATURES["gaussian"](x, p, side="key", bandwidth=0.0),
            ValueError,
            "bandwidth must be positive, got 0.0",
        ),
        (
            lambda x, p: FEATURES["gaussian"](x, p, side="key", bandwidth="wide"),
            TypeError,
            "bandwidth must be one real number, got 'wide'",
        ),
        (
            lambda x, p: FEATURES["gaussian"](x, p, side="key", bandwidth=np.ones(4)),
            TypeError,
            "bandwidth must be one real number",
        ),
        (
            lambda x, p: FEATURES["angular"](
                x, simrf_jax.BipolarProjection(p.hyperbolic, x, p.weights), side="key"
            ),
            ValueError,
            r"must be \[\.\.\., num_features, dim\] of one shape, and weights .* got \(6, 4\), \(7",
        ),
        (
            lambda x, p: FEATURES["angular"](
                x, simrf_jax.BipolarProjection(p.hyperbolic, p.trigonometric, None), side="key"
            ),
            TypeError,
            "must be an array .* got None",
        ),
        (
            lambda x, p: simrf_jax.clustered_hybrid_features(
                x, simrf_jax.ClusteredProjection(p.weights, x, x, -1.0), side="key"
            ),
            ValueError,
            "spread must be at least 0, got -1.0",
        ),
        (
            lambda x, p: simrf_jax.clustered_hybrid_features(x[0, 0], clustered(), side="key"),
            ValueError,
            r"x must be \[\.\.\., dim\], got shape \(\)",
        ),
        (
            lambda x, p: simrf_jax.random_feature_attention(
                *x[None, :, None].repeat(3, 0),
                simrf_jax.ClusteredProjection(p.weights[None], x, x),
                feature_map="clustered_hybrid",
            ),
            ValueError,
            r"key_centres \[\.\.\., clusters, dim\], got \(1, 5, 4\), \(7, 4\)",
        ),
        (
            lambda x, p: simrf_jax.hybrid_features([x, x[:2]], [x], [0.5], side="key"),
            ValueError,
            "bases and weights must have one leading shape",
        ),
        (
            lambda x, p: simrf_jax.hybrid_features([x, x], [x], ["a"], side="key"),
            TypeError,
            "offsets must be numbers, got",
        ),
        (
            lambda x, p: simrf_jax.hybrid_features([x[0, 0], x], [x], [0.5], side="key"),
            ValueError,
            r"each of bases must be \[\.\.\., dim\], got shape \(\)",
        ),
        (
            lambda x, p: FEATURES["angular"](x[:, :3], p, side="key"),
            ValueError,
            r"dim=4, got shape \(7, 3\)",
        ),
        (
            lambda x, p: simrf_jax.hybrid_features([x], [], [], side="key"),
            ValueError,
            "p at least 1; got 0, 0 and 1",
        ),
        (
            lambda x, p: simrf_jax.hybrid_features([x, x], [x, x], [0.5], side="key"),
            ValueError,
            "got 2, 1 and 2",
        ),
        (
            lambda x, p: simrf_jax.clustered_hybrid_features(x, p, side="key"),
            TypeError,
            "must be a ClusteredProjection, got BipolarProjection",
        ),
        (
            lambda x, p: simrf_jax.clustered_hybrid_features(
                x, simrf_jax.ClusteredProjection(p.weights, x[:0], x), side="key"
            ),
            ValueError,
            r"query_centres must be \[clusters, 4\], at least one, got \(0, 4\)",
        ),
        (
            lambda x, p: simrf_jax.clustered_hybrid_features(
                x, simrf_jax.ClusteredProjection(p.weights, x, x[:, :3]), side="key"
            ),
            ValueError,
            r"key_centres must be \[clusters, 4\], at least one, got \(7, 3\)",
        ),
        (
            lambda x, p: simrf_jax.draw_bipolar_projection(jax.random.key(0), 3, 0, 4),
            ValueError,
            "num_weights must be at least 1",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call(jnp.asarray(vectors()), bipolar())
