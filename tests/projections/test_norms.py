"""Laws of the row norms: marginals, couplings, and the error that they leave, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import simrf_jax
from simrf_jax import Projection, draw_fast_projection, draw_projection
from simrf_jax._src.kernels import GAUSSIAN
from simrf_jax._src.projections.norms import norms_of_normal
from tests.projections.matrices import dense
from tests.standard_errors import assert_mean
from tests.two_rows import exact_chi, mean_product
from tests.versions import enable_x64

COUPLED_NORMS = ("antithetic", "shared", "pair")
CROSS = "cross_polytope"


@pytest.mark.fast
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 64, 512, 1000, 4096])
def test_norms_of_normal_against_scipy(dim):
    normal = np.linspace(-5.5, 5.5, 4_001).astype(np.float32)
    found = jax.jit(norms_of_normal, static_argnums=(1, 2))(normal, GAUSSIAN, dim)
    np.testing.assert_allclose(found, exact_chi(normal.astype(np.float64), dim), 4e-7, 2e-6)


@pytest.mark.fast
def test_norms_of_normal_in_float64():
    normal = np.linspace(-8.4, 8.4, 1_001)
    with enable_x64(True):
        found = np.asarray(norms_of_normal(jnp.asarray(normal), GAUSSIAN, 64))
    np.testing.assert_allclose(found, exact_chi(normal, 64), rtol=1e-9)


DRAWS = {"dense": draw_projection, "fast": draw_fast_projection}


def norms_of(draw, num_draws, num_features, dim, **options):
    def one(key):
        if draw == "fast":
            return draw_fast_projection(key, num_features, dim, **options).rows.row_norms
        return jnp.linalg.norm(draw_projection(key, num_features, dim, **options), axis=1)

    keys = jax.random.split(jax.random.key(3), num_draws)
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("norms", COUPLED_NORMS)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_norm_is_chi_distributed(draw, norms):
    dim = 4
    for row in norms_of(draw, 4_000, 11, dim, coupling=CROSS, norms=norms).T:
        assert scipy.stats.kstest(row, "chi", (dim,)).pvalue > 1e-4


# The norm of each row of each row block, 11 rows in all, with a star for the antithetic norm.
PATTERNS = {
    (CROSS, "pair"): "a a b b c c d d | e e f",
    (CROSS, "shared"): "a a a a a a a a | b b b",
    (CROSS, "antithetic"): "a a a* a* b b b* b* | c c c*",
    ("simplex", "antithetic"): "a a* b b* c | d d* e e* | f f*",
    ("orthogonal", "antithetic"): "a a* b b* | c c* d d* | e e* f",
    ("orthogonal", "shared"): "a a a a | b b b b | c c c",
}


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "norms"), PATTERNS)
@pytest.mark.parametrize("draw", DRAWS)
def test_which_norms_belong_together(draw, coupling, norms):
    dim, pattern = 4, PATTERNS[coupling, norms].replace("|", "").split()
    [drawn] = norms_of(draw, 1, 11, dim, coupling=coupling, norms=norms)
    u = scipy.stats.chi.cdf(drawn, dim)
    for i, j in np.ndindex(11, 11):
        one, other = pattern[i], pattern[j]
        if one == other:
            np.testing.assert_allclose(u[i], u[j], atol=1e-5)
        elif one.strip("*") == other.strip("*"):
            np.testing.assert_allclose(u[i] + u[j], 1, atol=1e-5)
        else:
            assert min(abs(u[i] - u[j]), abs(u[i] + u[j] - 1)) > 1e-4


@pytest.mark.slow
def test_couplings_share_coupled_norms_as_paired_draws():
    options = {"num_draws": 1, "num_features": 4, "dim": 4, "norms": "antithetic"}
    [one], [other] = (norms_of("dense", coupling=c, **options) for c in ("simplex", "orthogonal"))
    np.testing.assert_allclose(one, other, rtol=1e-5)


def blocks_of(coupling, num_features, dim):
    size = {"orthogonal": dim, CROSS: 2 * dim}.get(coupling)
    if size is None:  # Simplices of at most d + 1 rows.
        assert num_features <= dim + 1
        size = num_features
    return [min(size, num_features - start) for start in range(0, num_features, size)]


def cosine_of_rows(coupling, i, j, size):
    if coupling == CROSS:
        return 1.0 if i == j else -1.0 if i ^ 1 == j else 0.0
    return 1.0 if i == j else -1 / (size - 1) if coupling == "simplex" else 0.0


def relation_of_norms(coupling, norms, i, j):
    if i == j or norms == "shared":
        return "equal"
    width = 2 if coupling == CROSS else 1
    if i // width == j // width and norms in ("pair", "antithetic"):
        return "equal"
    together = norms == "antithetic" and i // width ^ 1 == j // width
    return "antithetic" if together else "independent"


def expected_error(coupling, norms, num_features, dim, v):
    """Returns E (K_hat / K - 1)^2 of positive features."""
    total = num_features**2
    for size in blocks_of(coupling, num_features, dim):
        for i, j in np.ndindex(size, size):
            cosine = cosine_of_rows(coupling, i, j, size)
            relation = relation_of_norms(coupling, norms, i, j)
            total += mean_product(v, dim, cosine, relation) - 1
    return total / num_features**2 - 1


@functools.cache
def ratios(coupling, norms, num_features, dim, v, num_draws=40_000, **options):
    """Returns K_hat / K of positive features at |x + y| = v."""
    x = jnp.full(dim, v / 2 / dim**0.5)

    def one(key):
        w = draw_projection(key, num_features, dim, coupling=coupling, norms=norms, **options)
        phi = simrf_jax.positive_features(x, w, kernel="softmax")
        return jnp.dot(phi, phi) / jnp.exp(jnp.dot(x, x))

    keys = jax.random.split(jax.random.key(7), num_draws)
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


CASES = [
    (CROSS, "chi", 19),
    (CROSS, "pair", 19),
    (CROSS, "antithetic", 19),
    (CROSS, "shared", 19),
    ("simplex", "antithetic", 9),
    ("simplex", "shared", 9),
    ("orthogonal", "antithetic", 11),
]


@pytest.mark.parametrize(("coupling", "norms", "num_features"), CASES)
def test_unbiased_with_the_variance_of_the_closed_form(coupling, norms, num_features):
    samples = ratios(coupling, norms, num_features, 8, 1.0)
    assert_mean(samples, 1)
    assert_mean((samples - 1) ** 2, expected_error(coupling, norms, num_features, 8, 1.0))


def test_the_closed_form_has_the_published_numbers():
    # Relative to iid rows, at 128 features in 64 dimensions.
    for norms, expected in {"pair": (0.0943, 0.369), "antithetic": (0.0861, 0.3618)}.items():
        for v, ratio in zip((1.0, 1.5), expected, strict=True):
            error = expected_error(CROSS, norms, 128, 64, v)
            assert error / (np.expm1(v**2) / 128) == pytest.approx(ratio, rel=2e-3)


def radau_error(num_features, dim, v):
    """Returns the bias and the mean squared error of a whole cross-polytope and a zero row."""
    norm, rows = (dim + 2) ** 0.5, num_features - 1
    assert rows == 2 * dim

    def mean(length):
        return scipy.special.hyp0f1(dim / 2, v**2 * length**2 / 4)

    one, zero = dim / (dim + 2), 2 / (dim + 2)
    bias = (one * mean(norm) + zero) * np.exp(-(v**2) / 2) - 1
    pairs = (mean(2 * norm) + mean(0) + (rows - 2) * mean(2**0.5 * norm)) / rows
    second = (one**2 * pairs + 2 * one * zero * mean(norm) + zero**2) * np.exp(-(v**2))
    return bias, second - 2 * bias - 1


@pytest.mark.slow
def test_radau_has_the_bias_and_the_error_of_the_closed_form():
    samples = ratios(CROSS, "radau", 17, 8, 1.0)
    bias, error = radau_error(17, 8, 1.0)
    assert_mean(samples - 1, bias)
    assert_mean((samples - 1) ** 2, error)


@pytest.mark.parametrize("dim", [4, 64])
def test_the_bias_of_radau_that_its_docstring_says(dim):
    bias, _ = radau_error(2 * dim + 1, dim, 0.3)
    assert bias == pytest.approx(-(0.3**6) / (24 * (dim + 4)) * np.exp(-(0.3**2) / 2), rel=0.1)


def test_radau_has_the_published_numbers():
    for v, ratio, relative_bias in ((1.0, 0.0384, -5e-4), (1.5, 0.191, -5e-3), (2.0, 0.302, -0.02)):
        bias, error = radau_error(129, 64, v)
        assert error / (np.expm1(v**2) / 129) == pytest.approx(ratio, rel=0.02)
        assert bias == pytest.approx(relative_bias, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["haar", "hadamard"])
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", CROSS, "simplex_plus"])
def test_radau_rows_and_weights(coupling, rotation):
    options = {"coupling": coupling, "rotation": rotation, "norms": "radau"}
    w = draw_projection(jax.random.key(0), 12, 8, dtype=jnp.bfloat16, **options)
    assert isinstance(w, Projection)
    assert (w.shape, w.dtype, w.log_weights.dtype) == ((12, 8), jnp.bfloat16, jnp.float32)
    rows = np.asarray(w.rows, np.float64)
    np.testing.assert_array_equal(rows[-1], 0)
    np.testing.assert_allclose(np.linalg.norm(rows[:-1], axis=1), 10**0.5, rtol=1e-2)
    weights = np.exp(w.log_weights) / 12
    np.testing.assert_allclose(weights[-1], 0.2, rtol=1e-6)
    np.testing.assert_allclose(weights[:-1], 0.8 / 11, rtol=1e-6)


@pytest.mark.fast
def test_radau_takes_whole_row_blocks_beside_the_zero_row():
    w = draw_projection(jax.random.key(0), 10, 8, coupling="simplex", norms="radau")
    gram = np.where(np.eye(9), 10, -10 / 8)
    np.testing.assert_allclose(w.rows[:-1] @ w.rows[:-1].T, gram, atol=1e-4)


@pytest.mark.fast
def test_radau_works_in_the_padded_dimension():
    options = {"coupling": CROSS, "norms": "radau"}
    slow = draw_projection(jax.random.key(0), 17, 6, rotation="hadamard", **options)
    fast = draw_fast_projection(jax.random.key(0), 17, 6, **options)
    np.testing.assert_allclose(slow.log_weights, fast.log_weights)
    np.testing.assert_allclose(np.exp(slow.log_weights[-1]) / 17, 2 / 10, rtol=1e-6)
    assert fast.shape == (17, 6)
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    found = simrf_jax.project(x, Projection(fast.rows))
    np.testing.assert_allclose(found, x @ dense(fast).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[:, -1], 0)


REFUSALS = [
    (
        {"coupling": "iid", "norms": "shared"},
        "couples the norms of a row block, and coupling='iid'",
    ),
    ({"coupling": "iid", "norms": "antithetic"}, "coupling='iid' has no row blocks"),
    ({"coupling": "simplex", "norms": "pair"}, "only coupling='cross_polytope' has, got .*simplex"),
    ({"coupling": "orthogonal", "norms": "pair"}, "got coupling='orthogonal'"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("options", "match"), REFUSALS)
def test_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        draw_projection(jax.random.key(0), 8, 8, **options)


@pytest.mark.fast
@pytest.mark.parametrize("draw", DRAWS.values())
def test_fast_draws_refuse_too(draw):
    with pytest.raises(ValueError, match="only coupling='cross_polytope' has"):
        draw(jax.random.key(0), 8, 8, coupling="simplex", norms="pair")
    with pytest.raises(ValueError, match="needs num_features of at least 2, got 1"):
        draw(jax.random.key(0), 1, 8, norms="radau")


@pytest.mark.fast
def test_hybrids_refuse_weighted_rows():
    with pytest.raises(ValueError, match="a bipolar hybrid takes any other law of norms"):
        simrf_jax.hybrid.draw_bipolar_projection(jax.random.key(0), 8, 4, 8, norms="radau")
