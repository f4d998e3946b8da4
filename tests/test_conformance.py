import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special

import simrf_jax
from tests import conformance
from tests.standard_errors import assert_less, assert_mean


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()


couplings = pytest.mark.parametrize("coupling", conformance.COUPLINGS)
feature_maps = pytest.mark.parametrize("name", conformance.FEATURE_MAPS)
kernels = pytest.mark.parametrize("kernel", conformance.KERNELS)


def draw(coupling, num_features, dim, *, seed=0, dtype=jnp.float32):
    options = conformance.COUPLINGS[coupling]
    return simrf_jax.draw_projection(
        jax.random.key(seed), num_features, dim, dtype=dtype, **options
    )


def pair(dim, v, direction):
    """Two vectors with |x + y| = v, neither parallel nor of the same length."""
    u = np.eye(dim)[0]
    if direction == "random":
        u = np.random.default_rng(dim).normal(size=dim)
        u /= np.linalg.norm(u)
    offset = 0.3 * np.roll(u, 1) * np.sign(np.arange(dim) - 0.5)
    return (0.7 * v * u + offset).astype(np.float32), (0.3 * v * u - offset).astype(np.float32)


def draw_many(coupling, num_features, dim, num_draws):
    options = conformance.COUPLINGS[coupling]
    draw_all = jax.jit(
        jax.vmap(lambda key: simrf_jax.draw_projection(key, num_features, dim, **options))
    )
    return draw_all(jax.random.split(jax.random.key(5), num_draws))


def estimates(projections, name, kernel, x, y):
    """K_hat / K for many independent projections."""
    phi = conformance.feature_map(name, kernel)
    estimate = jax.vmap(lambda w: jnp.dot(phi(x, w), phi(y, w)))
    exact = conformance.KERNELS[kernel](x[None], y[None])[0, 0]
    return np.asarray(estimate(projections), np.float64) / exact


@couplings
@pytest.mark.parametrize("dim", [2, 4, 8, 16])
def test_unbiased(coupling, dim):
    # 2 d + 3 features: whole blocks and a remainder.
    projections = draw_many(coupling, 2 * dim + 3, dim, 20_000)
    for direction, name, kernel in itertools.product(
        ["axis", "random"], conformance.FEATURE_MAPS, conformance.KERNELS
    ):
        x, y = pair(dim, 1.0, direction)
        assert_mean(estimates(projections, name, kernel, x, y), 1)


def variance_ratio(v, dim, num_features, blocks):
    """MSE over that of iid features, by quadrature; Reid et al., Eqs. 10 and 11."""
    ratio = 1.0
    for size, cosine in blocks:

        def density(phi, cosine=cosine):
            t = v**2 * (1 + cosine * np.sin(phi)) / 2
            return scipy.special.hyp1f1(dim, dim / 2, t) * np.sin(phi) ** (dim - 1)

        norm = scipy.integrate.quad(lambda phi: np.sin(phi) ** (dim - 1), 0, np.pi)[0]
        rho = scipy.integrate.quad(density, 0, np.pi)[0] / norm
        pairs = size * (size - 1) / num_features
        ratio += pairs * (rho - np.exp(v**2)) / (np.exp(2 * v**2) - np.exp(v**2))
    return ratio


@couplings
@pytest.mark.parametrize(("dim", "num_features"), [(8, 8), (8, 20), (16, 5), (2, 5)])
def test_variance_is_that_of_theory(coupling, dim, num_features):
    v = 1.0
    x, y = pair(dim, v, "axis")
    blocks = conformance.BLOCKS[coupling](num_features, dim)
    ratio = variance_ratio(v, dim, num_features, blocks)
    expected = ratio * np.expm1(v**2) / num_features  # Of K_hat / K.
    projections = draw_many(coupling, num_features, dim, 40_000)
    samples = estimates(projections, "positive", "gaussian", x, y)
    assert_mean((samples - 1) ** 2, expected)


def test_variance_ratio_agrees_with_published_numbers():
    # Fig. 6 at v = 1, and the limit for small v of Sec. 5.1.
    assert variance_ratio(1.0, 64, 64, [(64, 0.0)]) == pytest.approx(0.73109, abs=1e-5)
    assert variance_ratio(1.0, 64, 64, [(64, -1 / 63)]) == pytest.approx(0.1704984, abs=1e-5)
    assert variance_ratio(0.05, 64, 64, [(64, -1 / 63)]) == pytest.approx(0.0078, abs=3e-4)


def squared_errors(coupling, num_features, dim, v, num_draws):
    x, y = pair(dim, v, "axis")
    projections = draw_many(coupling, num_features, dim, num_draws)
    return (estimates(projections, "positive", "gaussian", x, y) - 1) ** 2


def test_simplex_beats_orthogonal_beats_iid_on_paired_draws():
    iid, orthogonal, simplex = (
        squared_errors(coupling, 16, 16, 1.0, 40_000)
        for coupling in ("iid", "orthogonal", "simplex")
    )
    assert_less(orthogonal, iid)
    assert_less(simplex, orthogonal)


@pytest.mark.parametrize("num_features", [130, 8])
def test_regular_blocks_beat_square_ones_on_paired_draws(num_features):
    regular, square = (
        squared_errors(coupling, num_features, 64, 0.5, 3_000)
        for coupling in ("simplex", "simplex-square")
    )
    assert_less(regular, square)


@pytest.mark.fast
@couplings
@feature_maps
@kernels
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_shape_dtype_and_value(coupling, name, kernel, dtype):
    phi = conformance.feature_map(name, kernel)
    w = draw(coupling, 10, 4)
    x = 0.3 * jax.random.normal(jax.random.key(1), (2, 3, 4))
    features = phi(x.astype(dtype), w)
    chex.assert_shape(features, (2, 3, 10))
    assert features.dtype == dtype
    tolerance = {jnp.float16: 3e-3, jnp.bfloat16: 2e-2, jnp.float32: 1e-6}[dtype]
    chex.assert_trees_all_close(features.astype(jnp.float32), phi(x, w), rtol=tolerance)


@pytest.mark.fast
@couplings
@feature_maps
def test_float64(coupling, name):
    with jax.enable_x64(True):
        w = draw(coupling, 10, 4, dtype=jnp.float64)
        x = jnp.linspace(0.1, 0.4, 4, dtype=jnp.float64)
        features = conformance.feature_map(name, "gaussian")(x, w)
        assert features.dtype == jnp.float64
        expected = np.exp(np.asarray(w) @ np.asarray(x) - np.sum(np.square(x))) / np.sqrt(10)
        np.testing.assert_allclose(features, expected, rtol=1e-14)


@pytest.mark.fast
@couplings
def test_draw_is_the_same_traced_mapped_or_neither(coupling):
    options = conformance.COUPLINGS[coupling]

    def draw_one(key):
        return simrf_jax.draw_projection(key, 11, 5, **options)

    def keys():
        return jax.random.split(jax.random.key(0), 3)

    eager = jnp.stack([draw_one(key) for key in keys()])
    chex.assert_trees_all_close(jax.jit(draw_one)(keys()[1]), eager[1], atol=1e-6)
    chex.assert_trees_all_close(jax.vmap(draw_one)(keys()), eager, atol=1e-6)
    abstract = jax.eval_shape(draw_one, keys()[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, eager[0])
    assert float(jnp.abs(eager[0] - eager[1]).min()) > 0


@pytest.mark.fast
@feature_maps
@kernels
def test_features_under_transformations(name, kernel):
    def phi(x, w):
        return conformance.FEATURE_MAPS[name](x, w, kernel=kernel)

    w = draw("simplex", 10, 4)
    x = jax.random.normal(jax.random.key(1), (8, 3, 4))
    eager = phi(x, w)
    traced_once = jax.jit(chex.assert_max_traces(phi, n=1))
    chex.assert_trees_all_close(traced_once(x, w), eager, rtol=1e-5)
    traced_once(2 * x, w)
    chex.assert_trees_all_close(jax.vmap(phi, in_axes=(0, None))(x, w), eager, rtol=1e-5)
    stack = jnp.stack([w, 2 * w])
    mapped = jax.vmap(phi, in_axes=(None, 0))(x, stack)
    chex.assert_trees_all_close(mapped[1], phi(x, 2 * w), rtol=1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(phi, x, w), eager)
    chex.assert_shape(phi(x[:0], w), (0, 3, 10))


@pytest.mark.fast
@feature_maps
@kernels
def test_features_keep_the_sharding_of_their_input(name, kernel):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(jnp.ones((16, 4)), sharding)
    features = jax.jit(conformance.feature_map(name, kernel))(x, draw("simplex", 10, 4))
    assert features.sharding.is_equivalent_to(sharding, features.ndim)


@pytest.mark.fast
@couplings
@feature_maps
@kernels
def test_gradients_are_finite_at_large_inputs(coupling, name, kernel):
    phi = conformance.feature_map(name, kernel)
    w = draw(coupling, 10, 4)
    gradient = jax.grad(lambda x: phi(x, w).sum())
    assert jnp.isfinite(gradient(jnp.full((3, 4), 30.0))).all()
    assert jnp.abs(gradient(jnp.full((3, 4), 0.3))).min() > 0


@pytest.mark.fast
@feature_maps
def test_nan_stays_nan(name):
    features = conformance.feature_map(name, "gaussian")(jnp.full(4, jnp.nan), draw("iid", 10, 4))
    assert jnp.isnan(features).all()


@pytest.mark.fast
@feature_maps
@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (np.zeros(5), {}, ValueError, r"dim=4, got shape \(5,\)"),
        (np.zeros(4), {"kernel": "laplace"}, ValueError, "'gaussian', 'softmax', got 'laplace'"),
        (np.zeros(4, int), {}, TypeError, "x must be a floating type, got int"),
    ],
)
def test_features_refuse(name, x, options, error, match):
    with pytest.raises(error, match=match):
        conformance.FEATURE_MAPS[name](x, np.zeros((10, 4)), **options)
