import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import hybrid, theory
from tests import formulas
from tests.attention.reference import kernel_attention, relative_error
from tests.features.vectors import KERNELS, vectors
from tests.standard_errors import assert_mean


def features_of(feature_map):
    """Returns a function of vectors and W, with the fields of the map as keywords."""
    return lambda x, p, *, side, **fields: feature_map(**fields).features(x, p, side=side)


FEATURES = {
    "angular": features_of(hybrid.AngularHybrid),
    "gaussian": features_of(hybrid.GaussianHybrid),
}


def bipolar(num_features=6, num_weights=5, dim=4, seed=0, coupling="orthogonal"):
    return hybrid.draw_bipolar_projection(
        jax.random.key(seed), num_features, num_weights, dim, coupling=coupling
    )


def estimate(name, x, y, p, kernel="softmax", **options):
    """Returns Psi_1(x) . Psi_2(y) for all pairs."""
    psi_1 = FEATURES[name](x, p, side="query", kernel=kernel, **options)
    psi_2 = FEATURES[name](y, p, side="key", kernel=kernel, **options)
    return jnp.dot(psi_1, psi_2.T)


def estimate_by_definition(name, x, y, p, kernel="softmax", bandwidth=1.0):
    """Returns lambda K_hyperbolic + (1 - lambda) K_trigonometric, in float64."""
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_widths_and_dtypes():
    x, p = vectors(), bipolar(num_features=6, num_weights=5)
    assert FEATURES["angular"](x, p, side="query").shape == (7, 4 * 6 * (5 + 1))
    assert FEATURES["gaussian"](x, p, side="key").shape == (7, 2 * 6 * (4 * 5 + 1))
    assert FEATURES["angular"](x.astype(jnp.bfloat16), p, side="key").dtype == jnp.bfloat16
    assert FEATURES["angular"](x[:0], p, side="query").shape[0] == 0
    nan = np.full(4, np.nan, np.float32)
    for features in FEATURES.values():
        assert jnp.isnan(features(nan, p, side="query")).all()


@pytest.mark.slow
def test_features_cost_the_sum_and_not_the_product_of_all_sizes():
    # Memory is O(nd + md + mn): with d = 4,096 no array is as large as m n d.
    p = bipolar(64, 64, 4096)
    compiled = jax.jit(FEATURES["angular"], static_argnames="side").lower(
        np.zeros((8, 4096), np.float32), p, side="query"
    )
    cost = compiled.compile().cost_analysis()
    assert cost["flops"] < 8 * (2 * 3 * 64 * 4096 * 2 + 100 * 64 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
def test_unbiased(coupling):
    x, y = vectors(n=2)[:, None]

    def one(key):
        p = hybrid.draw_bipolar_projection(key, 6, 5, 4, coupling=coupling)
        return {
            (name, kernel): estimate(name, x, y, p, kernel)[0, 0]
            for name in FEATURES
            for kernel in KERNELS
        }

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 20_000))
    for (_, kernel), estimates in samples.items():
        assert_mean(estimates, KERNELS[kernel](x, y)[0, 0])


def pair_at(angle, radius, dim=4):
    x, y = np.zeros((2, dim), np.float32)
    x[0], y[:2] = radius, (radius * np.cos(angle), radius * np.sin(angle))
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("angle", [0, np.pi])
def test_angular_hybrid_has_no_variance_at_either_end(angle):
    x, y = pair_at(angle, 1.5)
    draws = [float(estimate("angular", x[None], y[None], bipolar(seed=s))[0, 0]) for s in range(20)]
    np.testing.assert_allclose(draws, np.exp(x @ y), rtol=2e-4)


@pytest.mark.slow
def test_gaussian_hybrid_has_no_variance_at_antiparallel_vectors():
    x, y = pair_at(np.pi, 1.0)
    draws = [
        float(estimate("gaussian", x[None], y[None], bipolar(seed=s))[0, 0]) for s in range(20)
    ]
    np.testing.assert_allclose(draws, np.exp(x @ y), rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal"])
@pytest.mark.parametrize("angle", [0.4, 1.5, 2.6])
def test_angular_mse_is_that_of_theorem_3_1_and_lemma_3_2(coupling, angle):
    m, n, dim = 6, 5, 4
    x, y = pair_at(angle, 0.8, dim)
    a = angle / np.pi
    second = a * (a - a / n + 1 / n)  # Lemma 3.2
    expected = theory.hybrid_mse(x, y, m, n, coupling=coupling)  # Theorem 3.1

    def one(key):
        p = hybrid.draw_bipolar_projection(key, m, n, dim, coupling=coupling)
        signs = jnp.sign(jnp.dot(p.weights, x)) * jnp.sign(jnp.dot(p.weights, y))
        return estimate("angular", x[None], y[None], p)[0, 0], 0.5 - signs.mean() / 2

    samples, weights = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 40_000))
    assert_mean((np.asarray(samples, np.float64) - np.exp(x @ y)) ** 2, expected)
    assert_mean(weights, a)
    assert_mean(np.asarray(weights, np.float64) ** 2, second)


def test_shared_projections_have_the_mse_of_theory_too():
    # For iid rows, Theorem 3.1 lacks the covariance of both bases, which is
    # 2 E[lambda (1 - lambda)] e^{2 x.y} (cos(|x|^2 - |y|^2) - 1) / m.
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
        p = hybrid.draw_bipolar_projection(key, m, n, dim, coupling="iid")
        p = hybrid.BipolarProjection(p.hyperbolic, p.hyperbolic, p.weights)
        return estimate("angular", x[None], y[None], p)[0, 0]

    samples = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), 40_000))
    assert_mean((np.asarray(samples, np.float64) - np.exp(x @ y)) ** 2, expected)


@pytest.mark.slow
def test_half_precision_inputs_are_widened_before_anything_is_computed():
    x, p = vectors(), bipolar()
    half = x.astype(jnp.bfloat16)
    for name, features in FEATURES.items():
        wide = features(half.astype(np.float32), p, side="key", kernel="softmax")
        phi = features(half, p, side="key", kernel="softmax").astype(jnp.float32)
        np.testing.assert_allclose(phi, wide, rtol=1e-2, err_msg=name)
    sharp = FEATURES["gaussian"](
        np.full(4, 100, np.float16), p, side="key", bandwidth=1e-3, kernel="gaussian"
    )
    chex.assert_tree_all_finite(sharp)


@pytest.mark.slow
def test_the_bandwidth_may_be_learned():
    x, p = vectors(), bipolar()

    def loss(bandwidth):
        return estimate("gaussian", x, x, p, bandwidth=bandwidth).sum()

    slope = jax.jit(jax.grad(loss))(1.5)
    expected = (loss(1.51) - loss(1.49)) / 0.02
    np.testing.assert_allclose(slope, expected, rtol=1e-2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_gradients_are_finite_and_the_record_is_a_pytree():
    p = bipolar()
    leaves, treedef = jax.tree.flatten(p)
    assert len(leaves) == 3
    assert treedef.unflatten(leaves).shape == (6, 4)
    for name, features in FEATURES.items():
        gradient = jax.grad(lambda x, f=features: f(x, p, side="key", kernel="softmax").sum())(
            vectors(scale=3.0)
        )
        assert jnp.isfinite(gradient).all(), name


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
            "must be a BipolarProjection, made by draw_bipolar_projection, got an array",
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
                x, hybrid.BipolarProjection(p.hyperbolic, x, p.weights), side="key"
            ),
            ValueError,
            r"must be \[\.\.\., num_features, dim\] of one shape, and weights .* got \(6, 4\), \(7",
        ),
        (
            lambda x, p: FEATURES["angular"](
                x,
                hybrid.BipolarProjection(p.hyperbolic, p.trigonometric, None),
                side="key",
            ),
            TypeError,
            "must be an array .* got None",
        ),
        (
            lambda x, p: FEATURES["angular"](x[:, :3], p, side="key"),
            ValueError,
            r"dim=4, got shape \(7, 3\)",
        ),
        (
            lambda x, p: hybrid.draw_bipolar_projection(jax.random.key(0), 3, 0, 4),
            ValueError,
            "num_weights must be at least 1",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call(jnp.asarray(vectors()), bipolar())


@pytest.mark.slow
def test_gradients_of_queries_that_share_a_key_head():
    """XLA's CPU backend ended the process where sums of a hybrid's gradient were fused."""
    q, k, v = (np.random.default_rng(n).normal(size=(2, 16, 8, 4)).astype("f4") for n in range(3))
    p = bipolar(num_features=8, num_weights=8)

    @jax.jit
    @jax.grad
    def gradient(q, k, v):
        out = simrf_jax.random_feature_attention(q, k, v, p, feature_map="gaussian_hybrid")
        return jnp.sum(jnp.sin(0.1 * out))

    few = k[:, :, :4], v[:, :, :4]
    expected = gradient(q, *(np.repeat(x, 2, axis=2) for x in few))
    found = gradient(q, *few)
    assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)
