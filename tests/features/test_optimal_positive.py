"""Optimal positive features: their formula, mean, variance, parameters and refusals."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import feature_maps, random_feature_attention
from simrf_jax._src.projections import Projection
from tests import formulas
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, relative_error
from tests.features.vectors import KERNELS
from tests.standard_errors import assert_less, assert_mean
from tests.tiers import slow_but
from tests.two_rows import mean_product
from tests.versions import enable_x64

PARAMETERS = [0.1, 0.0, -0.05, -2.0]


def features(x, w, parameter, kernel="softmax"):
    return simrf_jax.feature_maps.OptimalPositive(parameter, kernel).features(x, w)


def vectors(*shape, dim=6):
    return 0.3 * jax.random.normal(jax.random.key(2), (*shape, dim))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_the_formula(parameter, kernel):
    x, w = vectors(2, 3), projection(10, 6)
    log, _ = formulas.optimal_positive(
        np.asarray(x, np.float64), np.asarray(w, np.float64), kernel, parameter
    )
    np.testing.assert_allclose(features(x, w, parameter, kernel), np.exp(log), rtol=1e-5)


@pytest.mark.slow
def test_a_parameter_of_zero_gives_positive_features():
    x, w = vectors(3), projection(10, 6)
    plain = simrf_jax.positive_features(x, w, kernel="softmax")
    np.testing.assert_allclose(features(x, w, 0), plain, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes(dtype):
    x, w = vectors(3).astype(dtype), projection(10, 6).astype(dtype)
    assert features(x, w, -0.1).dtype == dtype
    wide = (each.astype(jnp.float32) for each in (x, w))
    expected = features(*wide, -0.1).astype(dtype)
    np.testing.assert_allclose(*(a.astype(jnp.float32) for a in (features(x, w, -0.1), expected)))


@pytest.mark.fast
def test_float64():
    with enable_x64(True):
        x, w = (np.random.default_rng(i).normal(size=(5, 6)) for i in range(2))
        log, _ = formulas.optimal_positive(x, w, "softmax", -0.1)
        np.testing.assert_allclose(features(x, w, -0.1), np.exp(log), rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 6])
def test_fast_projections_have_their_norms_in_the_padded_dimension(dim):
    fast = simrf_jax.draw_fast_projection(jax.random.key(0), 10, dim)
    padded = simrf_jax.Projection(dataclasses.replace(fast.rows, dim=8))
    rows = simrf_jax.project(jnp.eye(8), padded).T
    x = vectors(4, dim=dim)
    dense = features(jnp.pad(x, ((0, 0), (0, 8 - dim))), rows, -0.1)
    np.testing.assert_allclose(features(x, fast, -0.1), dense, rtol=1e-4)


@pytest.mark.fast
def test_tilts_of_tilts_multiply():
    w = projection(10, 6)
    twice = Projection(w).tilted(-0.1).tilted(-0.2)
    # The standard deviations multiply, and so do the densities.
    once = Projection(w).tilted((1 - (1 + 0.4) * (1 + 0.8)) / 4)
    np.testing.assert_allclose(twice.rows, once.rows, rtol=1e-6)
    chain = Projection(w).tilted(-0.1)
    exact = -0.5 * jnp.sum(once.rows**2 - w**2, axis=1) + 3 * jnp.log(1.4 * 1.8)
    np.testing.assert_allclose(once.log_weights, exact, rtol=1e-4, atol=1e-5)
    assert chain.shape == w.shape


@pytest.mark.fast
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_weights_are_the_ratio_of_densities(parameter):
    w = projection(10, 6)
    found = Projection(w).tilted(parameter)
    variance = 1 - 4 * parameter
    squares = np.sum(np.square(np.asarray(found.rows, np.float64)), axis=1)
    ratio = -squares / 2 + squares / (2 * variance) + 3 * np.log(variance)
    np.testing.assert_allclose(found.log_weights, ratio, rtol=1e-5, atol=1e-5)


def samples(dim, num_features, v, parameter, num_draws=40_000, coupling="simplex"):
    """Returns K_hat / K at |x + y| = v."""
    x = jnp.full(dim, v / 2 / dim**0.5)

    def one(key):
        w = simrf_jax.draw_projection(key, num_features, dim, coupling=coupling)
        phi = features(x, w, parameter)
        return jnp.dot(phi, phi) / jnp.exp(jnp.dot(x, x))

    keys = jax.random.split(jax.random.key(7), num_draws)
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


def expected_error(dim, num_features, v, parameter, cosine):
    """Returns E (K_hat / K - 1)^2 of rows of one row block at one angle."""
    rho = 1 / (1 - 8 * parameter)
    second = ((1 + rho) / (2 * rho**0.5)) ** dim * np.exp(rho * v**2)
    # The weights leave the mean product of two rows with independent norms as it is.
    cross = mean_product(v, dim, cosine, "independent")
    return (second - 1 + (num_features - 1) * (cross - 1)) / num_features


@pytest.mark.slow
@pytest.mark.parametrize("parameter", [-0.03, -0.1, 0.02])
@pytest.mark.parametrize(("coupling", "cosine"), [("simplex", -1 / 8), ("orthogonal", 0.0)])
def test_unbiased_with_the_variance_of_the_closed_form(coupling, cosine, parameter):
    num_features = 9 if coupling == "simplex" else 8
    found = samples(8, num_features, 0.8, parameter, coupling=coupling)
    assert_mean(found, 1)
    assert_mean((found - 1) ** 2, expected_error(8, num_features, 0.8, parameter, cosine))


@pytest.mark.fast
def test_the_closed_form_has_the_published_numbers():
    # Relative to iid positive features; with the best parameter at each v, d = m = 64.
    for v, ratio in ((1.0, 0.1246), (1.5, 0.3502), (2.0, 0.4778)):
        t = v**2 / 64
        parameter = (1 - 2 * t - np.sqrt((2 * t + 1) ** 2 + 8 * t)) / 16
        error = expected_error(64, 64, v, parameter, -1 / 63)
        assert error / (np.expm1(v**2) / 64) == pytest.approx(ratio, rel=2e-3)


@pytest.mark.slow
def test_the_best_parameter_beats_positive_features_on_paired_draws():
    plain, best = ((samples(8, 9, 1.5, parameter, 20_000) - 1) ** 2 for parameter in (0.0, -0.0645))
    assert_less(best, plain, errors=4)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_key_head_has_its_own_parameter(per_head, is_causal):
    q, k, v = inputs(9, heads=4, key_heads=2)
    parameters = np.float32([-0.05, -0.4])
    w = projection(heads=2 if per_head else None)
    options = {"is_causal": True, "chunk_size": 4} if is_causal else {}
    own = feature_maps.OptimalPositive(parameters)
    out = random_feature_attention(q, k, v, w, feature_map=own, **options)
    for head in range(2):
        one = feature_maps.OptimalPositive(parameters[head])
        group, key_head = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        of_head = w[head] if per_head else w
        expected = random_feature_attention(
            q[:, group], k[:, key_head], v[:, key_head], of_head, feature_map=one, **options
        )
        np.testing.assert_allclose(out[:, group], expected, rtol=1e-5, atol=1e-6)


def test_a_mask_that_differs_between_query_heads_repeats_the_parameters():
    q, k, v = inputs(9, heads=4, key_heads=2, batch=(1,))
    mask = np.random.default_rng(0).random((1, 4, 1, 9)) < 0.7
    w, own = projection(), feature_maps.OptimalPositive(jnp.array([-0.05, -0.4]))
    out = random_feature_attention(q, k, v, w, feature_map=own, mask=mask)
    for n in range(4):
        expected = random_feature_attention(
            q[:, :, n : n + 1],
            k[:, :, n // 2][:, :, None],
            v[:, :, n // 2][:, :, None],
            w,
            feature_map=feature_maps.OptimalPositive(own.parameter[n // 2]),
            mask=mask[:, n : n + 1],
        )
        np.testing.assert_allclose(out[:, :, n : n + 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_decoding_with_a_parameter_for_each_head():
    q, k, v = inputs(9)
    own = feature_maps.OptimalPositive(jnp.array([-0.05, -0.4]))
    mechanism = simrf_jax.RandomFeatureMechanism(projection(), own)
    whole = mechanism.attend(q, k, v, is_causal=True)
    state = mechanism.init(num_key_heads=2, head_dim=8, value_dim=8)
    prompt, state = mechanism.step(state, q[:5], k[:5], v[:5])
    rest, state = mechanism.step(state, q[5:], k[5:], v[5:])
    np.testing.assert_allclose(np.concatenate([prompt, rest]), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_in_the_parameter():
    q, k, v = inputs(6, heads=1)
    w = projection()

    @jax.jit
    def loss(parameter):
        own = feature_maps.OptimalPositive(parameter)
        return jnp.sum(jnp.sin(random_feature_attention(q, k, v, w, feature_map=own)))

    def at(parameter):
        out = attention(q, k, v, w, formula=formulas.with_parameter(parameter))
        return np.sum(np.sin(out))

    slope = (at(-0.1 + 1e-5) - at(-0.1 - 1e-5)) / 2e-5
    assert float(jax.grad(loss)(-0.1)) == pytest.approx(slope, rel=1e-3)
    chex.assert_tree_all_finite(jax.grad(loss)(0.0))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 1, 2, 4, 8])
def test_attention_against_float64(scale):
    q, k, v = inputs(32, dim=16, scale=scale)
    w = projection(40, 16)
    out = random_feature_attention(q, k, v, w, feature_map=feature_maps.OptimalPositive(-0.2))
    expected = attention(q, k, v, w, formula=formulas.with_parameter(-0.2))
    assert relative_error(out, expected) < 1e-5


SQRT_DIM = simrf_jax.DrawOptions(norms="sqrt_dim")
FIXED = {
    "sqrt_dim": lambda: Projection.draw(jax.random.key(0), 10, 8, options=SQRT_DIM),
    "radau": lambda: simrf_jax.draw_projection(jax.random.key(0), 10, 8, norms="radau"),
    "sqrt_dim, fast": lambda: simrf_jax.draw_fast_projection(
        jax.random.key(0), 10, 6, norms="sqrt_dim"
    ),
    "sqrt_dim, bfloat16": lambda: Projection.draw(
        jax.random.key(0), 10, 8, options=SQRT_DIM, dtype=jnp.bfloat16
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_refuses_rows_of_fixed_norms(name):
    w, match = FIXED[name](), f"as norms='{name.split(',')[0]}' draws them"
    own = feature_maps.OptimalPositive(-0.1)
    with pytest.raises(ValueError, match=match):
        features(jnp.ones(w.shape[-1]), w, -0.1)
    with pytest.raises(ValueError, match=match):
        random_feature_attention(*inputs(5, dim=w.shape[-1]), w, feature_map=own)
    with pytest.raises(ValueError, match=match):
        simrf_jax.RandomFeatureMechanism(w, own)
    with pytest.raises(ValueError, match=match):
        simrf_jax.attention_matrix(*inputs(5, dim=w.shape[-1])[:2], w, feature_map=own)


@pytest.mark.fast
@pytest.mark.parametrize("norms", slow_but(["antithetic"], ["shared", "antithetic"]))
def test_takes_rows_whose_norms_are_coupled(norms):
    w = simrf_jax.draw_projection(jax.random.key(0), 9, 8, norms=norms)
    chex.assert_tree_all_finite(features(jnp.ones(8), w, -0.1))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("parameter", "error", "match"),
    [
        (0.125, ValueError, "must be finite and below 1/8, .* got 0.125"),
        (np.array([0.0, 0.2]), ValueError, "below 1/8"),
        (float("nan"), ValueError, "must be finite"),
        (float("-inf"), ValueError, "must be finite"),
        ("0", TypeError, "parameter must be a real number, got '0'"),
        (None, TypeError, "parameter must be a real number, got None"),
        (1j, TypeError, "parameter must be a real number"),
        (True, TypeError, "parameter must be a real number, got True"),
    ],
)
def test_refuses_parameters(parameter, error, match):
    with pytest.raises(error, match=match):
        feature_maps.OptimalPositive(parameter)


@pytest.mark.fast
def test_refuses_several_parameters_for_one_projection():
    with pytest.raises(ValueError, match=r"parameter must be one number.* got shape \(2,\)"):
        features(vectors(3), projection(10, 6), np.zeros(2))
    for shape in ((3,), (2, 2)):
        own = feature_maps.OptimalPositive(np.zeros(shape, np.float32))
        with pytest.raises(ValueError, match=r"of the 2 key heads|must be one number"):
            random_feature_attention(*inputs(5), projection(), feature_map=own)
