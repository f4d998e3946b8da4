"""Mixture projections: their rows, their weights, and the moments of the estimates."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import simrf_jax
from simrf_jax import DrawOptions, Projection, draw_projection
from simrf_jax.calibration import draw_mixture_projection
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast
CENTERS = np.array([[1.0, 0.5, 0.0], [-1.0, 0.0, 0.5], [0.2, -1.0, -1.0]], np.float32)
X, Y = np.array([0.5, 0.4, -0.1], np.float32), np.array([0.6, -0.2, 0.1], np.float32)


def relative_estimates(draw, x, y, num_draws=4000):
    """Returns K_hat / K for positive features of many projections."""

    @jax.jit
    @jax.vmap
    def estimate(key):
        w = draw(key)
        phi_x, phi_y = (simrf_jax.positive_features(z, w, kernel="softmax") for z in (x, y))
        return phi_x @ phi_y

    estimates = estimate(jax.random.split(jax.random.key(0), num_draws))
    return np.float64(estimates) / np.exp(np.float64(x) @ np.float64(y))


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", "cross_polytope"])
def test_one_center_at_zero_is_no_mixture(coupling):
    options = DrawOptions(coupling=coupling)
    w = draw_mixture_projection(jax.random.key(0), jnp.zeros((1, 3)), 7, options=options)
    assert isinstance(w, Projection)
    [key] = jax.random.split(jax.random.key(0), 1)
    np.testing.assert_allclose(w.rows, options.draw(key, 7, 3), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(w.log_weights, np.zeros(7), atol=1e-6)


@pytest.mark.slow
def test_weights_are_ratios_of_densities():
    w = draw_mixture_projection(jax.random.key(0), CENTERS, 10, weights=(1, 2, 2))
    rows = np.float64(w.rows)
    densities = [stats.multivariate_normal.pdf(rows, mean) for mean in np.float64(CENTERS)]
    mixture = np.array([0.2, 0.4, 0.4]) @ densities
    expected = np.log(stats.multivariate_normal.pdf(rows, np.zeros(3)) / mixture)
    np.testing.assert_allclose(w.log_weights, expected, rtol=1e-5, atol=1e-5)


def test_each_component_is_coupled_around_its_center():
    options = DrawOptions(coupling="cross_polytope", norms="pair")
    w = draw_mixture_projection(jax.random.key(0), CENTERS, 12, options=options)
    offsets = np.asarray(w.rows).reshape(3, 4, 3) - CENTERS[:, None]
    np.testing.assert_allclose(offsets[:, 0::2], -offsets[:, 1::2], atol=1e-5)
    products = np.sum(offsets[:, 0] * offsets[:, 2], axis=-1)
    np.testing.assert_allclose(products, np.zeros(3), atol=1e-4)
    assert not np.allclose(offsets[0], offsets[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_features", "weights", "counts"),
    [
        (9, None, (3, 3, 3)),
        (10, None, (4, 3, 3)),
        (3, (1e6, 1, 1), (1, 1, 1)),
        (20, (5, 3, 2), (10, 6, 4)),
    ],
)
def test_rows_are_divided_in_proportion(num_features, weights, counts):
    far = np.array([[100.0, 0], [0, 100], [-100, 0]], np.float32)
    w = draw_mixture_projection(jax.random.key(0), far, num_features, weights=weights)
    nearest = np.argmax(np.asarray(w.rows) @ far.T, axis=-1)
    np.testing.assert_array_equal(np.bincount(nearest), counts)
    np.testing.assert_array_equal(nearest, np.sort(nearest))


LAWS = {
    "iid": {"options": DrawOptions(coupling="iid")},
    "simplex": {},
    "antithetic": {"options": DrawOptions(norms="antithetic")},
    "cross_polytope": {"options": DrawOptions(coupling="cross_polytope", norms="shared")},
    "weights": {"weights": (5, 1, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_estimates_are_unbiased(law):
    ratios = relative_estimates(
        lambda key: draw_mixture_projection(key, CENTERS, 12, **LAWS[law]), X, Y
    )
    assert_mean(ratios, 1)
    # The bound on the second moment limits the tails, so that the test can tell a bias of 1 %.
    assert ratios.std() / len(ratios) ** 0.5 < 0.01


def grid(dim, width=14.0):
    """Returns nodes ``[n, dim]`` of the trapezoidal rule, and the volume of a cell.

    The rule has all digits for integrands such as these.
    """
    axis = np.arange(-width, width, {1: 0.01, 2: 0.05}[dim])
    nodes = np.stack(np.meshgrid(*[axis] * dim), axis=-1).reshape(-1, dim)
    return nodes, (axis[1] - axis[0]) ** dim


def moments(centers, shares, v):
    """Returns E (l f)^2 over the mixture, and mean and variance of l f over each component."""
    nodes, cell = grid(len(v))

    def normal(mean):
        return np.exp(-np.sum((nodes - mean) ** 2, axis=-1) / 2) / (2 * np.pi) ** (len(v) / 2)

    components = np.array([normal(mean) for mean in centers])
    mixture = shares @ components
    ratio = normal(v) / mixture  # l f, because f N(w; 0, I) = N(w; v, I).
    means = components @ ratio * cell
    squares = components @ ratio**2 * cell
    return mixture @ ratio**2 * cell, means, squares - means**2


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2])
def test_variance_is_that_of_quadrature(dim):
    centers, shares = CENTERS[:, :dim] + 0.5, np.array([0.5, 0.25, 0.25])
    x, y = X[:dim], Y[:dim]
    options = DrawOptions(coupling="iid")
    ratios = relative_estimates(
        lambda key: draw_mixture_projection(key, centers, 8, weights=(2, 1, 1), options=options),
        x,
        y,
        num_draws=20_000,
    )
    _, means, variances = moments(np.float64(centers), shares, np.float64(x + y))
    np.testing.assert_allclose(shares @ means, 1, rtol=1e-10)
    assert_mean(np.square(ratios - 1), shares @ variances / 8)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("length", [0.0, 0.7, 2.0, 4.0])
def test_second_moment_has_its_bound(dim, length):
    rng = np.random.default_rng(0)
    centers, shares = 2 * rng.normal(size=(4, dim)), np.array([0.4, 0.3, 0.2, 0.1])
    v = rng.normal(size=dim)
    v *= length / np.linalg.norm(v)
    second, means, _ = moments(centers, shares, v)
    np.testing.assert_allclose(shares @ means, 1, rtol=1e-10)
    bounds = np.exp(np.sum((v - centers) ** 2, axis=-1)) / shares
    assert 1 <= second <= bounds.min()


def test_the_bound_is_sharp_for_centers_far_apart():
    v, shares = np.array([4.5]), np.array([0.5, 0.5])
    second, _, _ = moments(np.array([[4.0], [-8.0]]), shares, v)
    np.testing.assert_allclose(second, np.exp(0.25) / 0.5, rtol=1e-6)


@pytest.mark.slow
def test_attention_takes_a_mixture_for_each_head():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 3))
    centers = jnp.stack([CENTERS, -CENTERS])
    draw = jax.jit(jax.vmap(lambda key, one: draw_mixture_projection(key, one, 8)))
    w = draw(jax.random.split(jax.random.key(1), 2), centers)
    assert w.shape == (2, 8, 3)
    out = simrf_jax.random_feature_attention(query, key, value, w)
    keys = jax.random.split(jax.random.key(1), 2)
    for head in range(2):
        own = draw_mixture_projection(keys[head], centers[head], 8)
        one = [z[..., head : head + 1, :] for z in (query, key, value)]
        expected = simrf_jax.random_feature_attention(*one, own)
        np.testing.assert_allclose(out[..., head : head + 1, :], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_centers_have_gradients_and_set_the_dtype():
    def total(centers):
        w = draw_mixture_projection(jax.random.key(0), centers, 6)
        return jnp.sum(simrf_jax.positive_features(X, w))

    gradient = jax.grad(total)(jnp.asarray(CENTERS))
    chex.assert_tree_all_finite(gradient)
    assert np.any(gradient)
    w = draw_mixture_projection(jax.random.key(0), jnp.asarray(CENTERS, jnp.bfloat16), 6)
    assert (w.rows.dtype, w.log_weights.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_a_redraw_says_how_to_draw_again():
    w = draw_mixture_projection(jax.random.key(0), CENTERS, 6)
    with pytest.raises(TypeError, match=r"cannot be redrawn here; .* redraw_key"):
        simrf_jax.redraw_projections(jax.random.key(0), [w], options=DrawOptions())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"centers": np.zeros(3, np.float32)}, ValueError, r"must be \[num_centers, dim\].*\(3,\)"),
        ({"centers": np.zeros((0, 3), np.float32)}, ValueError, r"got shape \(0, 3\)"),
        ({"centers": np.zeros((2, 2, 3), np.float32)}, ValueError, "use jax.vmap for a stack"),
        ({"centers": np.zeros((2, 3), int)}, TypeError, "centers must be a floating type"),
        ({"num_features": 2}, ValueError, "at least the number of centers, got 2 and 3"),
        ({"num_features": 8.0}, TypeError, "num_features must be an integer"),
        ({"weights": (1, 2)}, ValueError, "one positive number for each of 3 centers, got"),
        ({"weights": (1, 0, 2)}, ValueError, "one positive number for each of 3 centers, got"),
        ({"options": DrawOptions(norms="sqrt_dim")}, ValueError, "got norms='sqrt_dim'"),
        ({"options": DrawOptions(norms="radau")}, ValueError, "got norms='radau'"),
        ({"options": "iid"}, TypeError, "options must be a simrf_jax.DrawOptions, got 'iid'"),
    ],
)
def test_refuses(change, error, match):
    arguments = {"centers": CENTERS, "num_features": 8} | change
    with pytest.raises(error, match=match):
        draw_mixture_projection(jax.random.key(0), **arguments)


def test_a_key_must_be_typed():
    with pytest.raises(TypeError, match="key must be a typed PRNG key"):
        draw_mixture_projection(jnp.zeros(2, jnp.uint32), CENTERS, 8)


@pytest.mark.slow
def test_a_mixture_near_the_pair_lowers_the_error():
    x, y = 3 * X, 3 * Y
    centers = np.stack([x + y, -(x + y)])
    plain = relative_estimates(lambda key: draw_projection(key, 16, 3), x, y)
    mixture = relative_estimates(lambda key: draw_mixture_projection(key, centers, 16), x, y)
    assert np.mean((mixture - 1) ** 2) < 0.1 * np.mean((plain - 1) ** 2)
