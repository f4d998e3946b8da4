"""Kernels that are mixtures of Gaussians: their values, laws of norms, features and refusals."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

import simrf_jax
from simrf_jax import Projection, draw_fast_projection, draw_projection, kernels
from simrf_jax._src.projections.norms import log_norm_of_normal
from simrf_jax.calibration import draw_mixture_projection
from simrf_jax.kernels import Gaussian, Matern, PoweredExponential, RationalQuadratic, ScaleMixture
from tests.standard_errors import assert_mean
from tests.tiers import slow_but
from tests.versions import enable_x64

pytestmark = pytest.mark.fast
DISTANCES = np.array([0.0, 1e-3, 0.1, 0.7, 1.0, 2.5, 6.0])


def matern(nu):
    def value(r):
        z = mpmath.sqrt(2 * nu) * r
        return 2 ** (1 - nu) / mpmath.gamma(nu) * z**nu * mpmath.besselk(nu, z) if r else 1

    return value


# Each kernel with its textbook formula.
KERNELS = {
    Gaussian(): lambda r: mpmath.exp(-(r**2) / 2),
    Matern(0.5): lambda r: mpmath.exp(-r),
    Matern(1.5): matern(1.5),
    Matern(2.5): matern(2.5),
    Matern(0.8): matern(0.8),
    Matern(40): matern(40),
    RationalQuadratic(1): lambda r: 1 / (1 + r**2 / 2),
    RationalQuadratic(0.3): lambda r: (1 + r**2 / 0.6) ** -0.3,
    PoweredExponential(1): lambda r: mpmath.exp(-r),
    PoweredExponential(0.5): lambda r: mpmath.exp(-mpmath.sqrt(r)),
    PoweredExponential(1.8): lambda r: mpmath.exp(-(r**1.8)),
}
MIXTURES = [kernel for kernel in KERNELS if kernel != Gaussian()]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_kernel_is_the_formula_of_the_textbook(kernel):
    expected = [float(KERNELS[kernel](mpmath.mpf(float(r)))) for r in DISTANCES]
    with enable_x64(True):
        x, y = jnp.zeros((1, 3)), jnp.asarray(DISTANCES)[:, None] * jnp.array([[0.6, 0.0, 0.8]])
        np.testing.assert_allclose(kernel(x, y)[0], expected, rtol=1e-9, atol=1e-12)
    x, y = np.float32(x), np.float32(y)
    wide, close = kernel(x, y), kernel(jnp.float16(x), jnp.float16(y))
    assert (wide.dtype, close.dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_allclose(wide[0], expected, atol=1e-6)


@pytest.mark.parametrize("kernel", MIXTURES, ids=str)
def test_the_density_of_scales_is_that_of_the_kernel(kernel):
    with enable_x64(True):
        squares = jnp.asarray(DISTANCES**2)
        found, expected = ScaleMixture.profile(kernel, squares), kernel.profile(squares)
    np.testing.assert_allclose(found, expected, atol=1e-9)


LEAST = {
    Matern(0.2): matern(0.2),
    RationalQuadratic(0.3): KERNELS[RationalQuadratic(0.3)],
    PoweredExponential(0.4): lambda r: mpmath.exp(-(r**0.4)),
}


@pytest.mark.parametrize("kernel", LEAST, ids=str)
def test_the_law_of_scales_is_accurate_for_the_least_parameters(kernel):
    with enable_x64(True):
        found = ScaleMixture.profile(kernel, jnp.asarray(DISTANCES**2))
    expected = [float(LEAST[kernel](mpmath.mpf(float(r)))) for r in DISTANCES]
    np.testing.assert_allclose(found, expected, atol=2e-7)


@pytest.mark.parametrize("dim", [1, 2, 5, 64])
@pytest.mark.parametrize("nu", [0.5, 1.5])
def test_norms_of_the_multivariate_t_law(nu, dim):
    normal = np.linspace(-6, 6, 101)
    f = np.where(
        normal < 0,
        scipy.stats.f.ppf(scipy.special.ndtr(normal), dim, 2 * nu),
        scipy.stats.f.isf(scipy.special.ndtr(-normal), dim, 2 * nu),
    )
    expected = np.log(dim * f) / 2
    np.testing.assert_allclose(log_norm_of_normal(Matern(nu), dim)(normal), expected, atol=2e-6)


@pytest.mark.parametrize("kernel", [Matern(1e6), RationalQuadratic(1e6)], ids=str)
def test_norms_are_chi_variables_for_the_largest_parameters(kernel):
    normal = np.linspace(-6, 6, 101)
    squares = np.where(
        normal < 0,
        scipy.stats.chi2.ppf(scipy.special.ndtr(normal), 64),
        scipy.stats.chi2.isf(scipy.special.ndtr(-normal), 64),
    )
    expected = np.log(squares) / 2
    np.testing.assert_allclose(log_norm_of_normal(kernel, 64)(normal), expected, atol=2e-5)


@pytest.mark.parametrize("kernel", [RationalQuadratic(0.7), PoweredExponential(1.3)], ids=str)
def test_norms_have_the_characteristic_function_of_the_kernel(kernel):
    # A row along one axis has the norm times a cosine of a uniform direction.
    log_norm = log_norm_of_normal(kernel, 3)
    normal = np.linspace(-8, 8, 4001)
    weights = np.exp(-(normal**2) / 2)
    for r in (0.3, 1.0):
        values = np.sinc(r * np.exp(log_norm(normal)) / np.pi)  # In three dimensions.
        expected = float(kernel.profile(jnp.float32(r**2)))
        assert weights @ values / weights.sum() == pytest.approx(expected, abs=1e-4)


COUPLINGS = ("iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus")
NORMS = ("chi", "antithetic", "shared", "stratified", "pair")
DRAWS = {
    f"{coupling}-{norms}": (coupling, norms)
    for coupling in COUPLINGS
    for norms in NORMS
    if (coupling != "iid" or norms in ("chi", "stratified"))
    and (norms != "pair" or coupling == "cross_polytope")
}
# Each coupling and each law of norms once.
SOME_DRAWS = [
    "iid-chi",
    "orthogonal-stratified",
    "simplex-shared",
    "cross_polytope-pair",
    "simplex_plus-antithetic",
]
DIM, ROWS, NUM_DRAWS = 4, 11, 4_000
VECTORS = np.float32([[0.3, -0.2, 0.1, 0.0], [-0.4, 0.5, 0.3, 0.2], [1.0, 0.4, -1.1, 0.6]])


def estimates(kernel, coupling, norms):
    """Returns products of features ``[draws, pairs]`` and the kernel of all pairs."""

    @jax.jit
    @jax.vmap
    def products(key):
        options = {"coupling": coupling, "norms": norms, "kernel": kernel}
        w = draw_projection(key, ROWS, DIM, **options)
        phi = simrf_jax.trigonometric_features(VECTORS, w, kernel=kernel)
        return (phi @ phi.T)[np.triu_indices(3, 1)]

    samples = products(jax.random.split(jax.random.key(2), NUM_DRAWS))
    return np.asarray(samples, np.float64), np.asarray(kernel(VECTORS, VECTORS))


@pytest.mark.parametrize("draw", slow_but(SOME_DRAWS, DRAWS))
@pytest.mark.parametrize(
    "kernel",
    slow_but(
        ["Matern"],  # test_norms.py has the Gaussian kernel.
        {
            "Gaussian": Gaussian(),
            "Laplace": Matern(0.5),
            "Matern": Matern(1.5),
            "RationalQuadratic": RationalQuadratic(1.0),
            "PoweredExponential": PoweredExponential(0.7),
        },
    ),
)
def test_unbiased_with_the_variance_of_theory(kernel, draw):
    coupling, norms = draw
    samples, gram = estimates(kernel, coupling, norms)
    first, second = np.triu_indices(3, 1)
    expected = gram[first, second]
    assert_mean(samples, expected)
    if coupling != "simplex_plus":  # It has no closed form.
        options = {"coupling": coupling, "norms": norms, "kernel": kernel}
        errors = simrf_jax.theory.kernel_mse(
            VECTORS[first], VECTORS[second], ROWS, features="trigonometric", **options
        )
        assert_mean((samples - expected) ** 2, errors)


@pytest.mark.parametrize("coupling", slow_but(["simplex"], COUPLINGS))
@pytest.mark.parametrize(
    "kernel",
    slow_but(["Matern"], {"Matern": Matern(0.5), "RationalQuadratic": RationalQuadratic(1.0)}),
)
def test_draws_are_the_same_in_every_transform_and_type(kernel, coupling):
    options = {"coupling": coupling, "norms": "stratified", "kernel": kernel}

    def draw(key, dtype=jnp.float32):
        return draw_projection(key, ROWS, DIM, dtype=dtype, **options)

    def keys():
        return jax.random.split(jax.random.key(4), 3)

    many = jax.jit(jax.vmap(draw))(keys())
    for key, one in zip(keys(), many, strict=True):
        np.testing.assert_allclose(draw(key), one, rtol=1e-4, atol=1e-5)
    half = draw(keys()[0], jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(half), many[0], rtol=1e-2, atol=1e-2)
    with enable_x64(True):
        wide = draw(keys()[0], jnp.float64)
        assert wide.dtype == jnp.float64
        norms = np.linalg.norm(np.asarray(wide), axis=1)
    # One norm comes from each stratum in float64, too.
    edges = np.exp(log_norm_of_normal(kernel, DIM)(scipy.special.ndtri(np.arange(1, 11) / 11)))
    assert list(np.searchsorted(edges, np.sort(norms))) == list(range(ROWS))


@pytest.mark.parametrize("norms", ["chi", "stratified"])
def test_fast_and_other_rotations_estimate_the_kernel(norms):
    kernel, x = Matern(1.5), jnp.asarray(VECTORS[:, :3])  # Padded to four dimensions.
    draws = {
        "fast": lambda key: draw_fast_projection(
            key, 8, 3, coupling="orthogonal", norms=norms, kernel=kernel
        ),
        "givens": lambda key: draw_projection(
            key, 8, 3, coupling="orthogonal", rotation="givens", norms=norms, kernel=kernel
        ),
    }
    for name, draw in draws.items():

        def product(key, draw=draw):
            phi = simrf_jax.trigonometric_features(x[:2], draw(key), kernel=kernel)
            return phi[0] @ phi[1]

        samples = jax.jit(jax.vmap(product))(jax.random.split(jax.random.key(0), 4_000))
        bias = np.mean(np.asarray(samples, np.float64)) - kernel(x[:1], x[1:2])[0, 0]
        # Hadamard rotations are nearly unbiased; in four dimensions least of all.
        assert abs(bias) < (0.05 if name == "fast" else 5 * np.std(samples) / 4_000**0.5)


def test_stratified_norms_come_from_one_stratum_each():
    for key in jax.random.split(jax.random.key(0), 5):
        w = draw_projection(key, 12, 5, norms="stratified", coupling="orthogonal")
        probability = scipy.stats.chi.cdf(np.linalg.norm(w, axis=1), 5)
        assert sorted(np.floor(12 * probability)) == list(range(12))


def test_phase_features_estimate_the_kernel():
    kernel = RationalQuadratic(2.0)
    one, two = jax.random.split(jax.random.key(0))
    w = draw_projection(one, 20_000, DIM, coupling="orthogonal", kernel=kernel)
    phases = jax.random.uniform(two, (20_000,), maxval=2 * jnp.pi)
    phi = simrf_jax.phase_features(VECTORS, w, phases, kernel=kernel)
    np.testing.assert_allclose(phi @ phi.T, kernel(VECTORS, VECTORS), atol=0.03)


def test_length_scales_divide_the_columns_and_have_gradients():
    scale = jnp.array([0.5, 1.0, 2.0, 4.0])
    x = jnp.asarray(VECTORS)
    w = draw_projection(jax.random.key(0), 64, DIM, coupling="orthogonal", kernel=Matern(0.5))
    phases = jnp.zeros(64)
    for features in (
        lambda x, **options: simrf_jax.trigonometric_features(x, w, kernel=Matern(0.5), **options),
        lambda x, **options: simrf_jax.phase_features(x, w, phases, kernel=Matern(0.5), **options),
        lambda x, **options: Matern(0.5)(x, x, **options),
    ):
        units = x / scale[None]
        np.testing.assert_allclose(features(x, length_scale=scale), features(units), rtol=1e-5)
        np.testing.assert_allclose(features(x, length_scale=2.0), features(x / 2), rtol=1e-5)

    def entry(scale):  # The diagonal, where a root has no derivative, is among the entries.
        return Matern(0.5)(x, x, length_scale=scale).sum()

    with enable_x64(True):
        x, scale = jnp.asarray(VECTORS, jnp.float64), jnp.asarray(scale, jnp.float64)
        found = jax.grad(entry)(scale)
        differences = [(entry(scale + h) - entry(scale - h)) / 2e-6 for h in 1e-6 * np.eye(DIM)]
    np.testing.assert_allclose(found, differences, rtol=1e-6)


@pytest.mark.parametrize("nu", [1.5, 2.5])
def test_second_derivatives_of_matern_kernels(nu):
    with enable_x64(True):
        x = jnp.array([[0.3, -0.2]])

        def hessian(kernel, y):
            return jax.hessian(lambda x: kernel(x, y)[0, 0])(x)[0, :, 0]

        # At equal points the derivative of order two is -nu / (nu - 1).
        np.testing.assert_allclose(hessian(Matern(nu), x), -nu / (nu - 1) * np.eye(2), rtol=1e-12)
        y = jnp.array([[1.0, 0.4]])
        by_quadrature = hessian(Matern(nu + 1e-9), y)
        np.testing.assert_allclose(hessian(Matern(nu), y), by_quadrature, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "x", "y", "length_scale"),
    [("bfloat16", 100, 100.5, 0.7), ("float16", 6e4, 59968, 0.5), ("float16", 6e4, 59968, 50.0)],
)
def test_length_scales_divide_in_float32(dtype, x, y, length_scale):
    x, y = jnp.full((1, 1), x, dtype), jnp.full((1, 1), y, dtype)
    options = {"length_scale": length_scale}
    expected = Matern(1.5)(x.astype(jnp.float32), y.astype(jnp.float32), **options)
    np.testing.assert_array_equal(Matern(1.5)(x, y, **options), expected.astype(dtype))
    w, phases = jnp.ones((1, 1)), jnp.zeros(1)
    for features in (
        lambda x: simrf_jax.trigonometric_features(x, w, kernel="gaussian", **options),
        lambda x: simrf_jax.phase_features(x, w, phases, kernel="gaussian", **options),
    ):
        np.testing.assert_array_equal(features(x), features(x.astype(jnp.float32)).astype(dtype))


@pytest.mark.parametrize(
    "kernel", [*map(Matern, (0.5, 1.0, 1.5, 2.5)), PoweredExponential(1.0)], ids=str
)
def test_nan_stays_nan_and_far_away_kernels_are_zero(kernel):
    zero, far = jnp.zeros((1, 2)), jnp.full((1, 2), 2e19)
    assert np.isnan(kernel(jnp.full((1, 2), jnp.nan), zero)).all()
    assert np.isnan(kernel(zero, zero, length_scale=jnp.nan)).all()
    assert kernel(far, zero) == 0
    np.testing.assert_allclose(kernel(zero, zero), 1, rtol=1e-6)


def test_redraws_and_adapters_keep_the_kernel():
    kernel = Matern(1.5)
    options = simrf_jax.DrawOptions(coupling="orthogonal", kernel=kernel)
    known = Projection.draw(jax.random.key(0), 8, 4, options=options)
    again = known.redraw(jax.random.key(1))
    assert again.draw_options == options
    drawn = draw_projection(jax.random.key(1), 8, 4, coupling="orthogonal", kernel=kernel)
    np.testing.assert_array_equal(again.rows, drawn)

    from flax import nnx

    from simrf_jax.integrations.nnx import RandomFeatureAttention, RandomProjection

    def norms(kernel):
        feature_map = simrf_jax.feature_maps.Trigonometric(kernel)
        adapter = RandomFeatureAttention(2, 4, 8, feature_map=feature_map, rngs=nnx.Rngs(0))
        x = jnp.ones((1, 3, 2, 4))
        assert adapter(x, x, x).shape == x.shape
        [w] = jax.tree.leaves(nnx.state(adapter, RandomProjection))
        return np.linalg.norm(w, axis=-1)

    assert not np.allclose(norms(kernel), norms("gaussian"), rtol=0.1)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_features_refuse_rows_for_another_kernel(is_jitted):
    options = simrf_jax.DrawOptions(coupling="orthogonal", kernel=Matern(1.5))
    known = Projection.draw(jax.random.key(0), 8, 4, options=options)
    refused = {
        "positive": simrf_jax.positive_features,
        "hyperbolic": simrf_jax.hyperbolic_features,
        "relu": simrf_jax.relu_features,
        "softmax": simrf_jax.trigonometric_features,
        "nu": lambda x, w: simrf_jax.trigonometric_features(x, w, kernel=Matern(0.5)),
        "tilt": lambda x, w: simrf_jax.feature_maps.OptimalPositive(-0.1).features(x, w),
    }
    for features in refused.values():
        features = jax.jit(features) if is_jitted else features
        with pytest.raises(ValueError, match=r"drawn for kernel=.*, got one for Matern\(nu=1.5\)"):
            features(VECTORS, known)
    q = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="drawn for kernel=Gaussian"):
        simrf_jax.random_feature_attention(q, q, q, known)
    with pytest.raises(ValueError, match=r"chi variables, got rows for kernel=Matern\(nu=1.5\)"):
        known.check_chi_norms()


BAD = [
    (lambda: Gaussian().log_density(np.zeros(1)), ValueError, "has one scale, s = 1"),
    (
        lambda: draw_mixture_projection(
            jax.random.key(0), VECTORS, 8, options=simrf_jax.DrawOptions(kernel=Matern())
        ),
        ValueError,
        r"norms='chi' and kernel=Matern\(nu=1.5\)",
    ),
    (lambda: Matern()(VECTORS, VECTORS, length_scale=2), TypeError, "length_scale"),
    (lambda: Matern(0), ValueError, "nu must be from 0.2 to 1,000,000, got 0"),
    (lambda: Matern(np.inf), ValueError, "nu must be from 0.2 to 1,000,000, got inf"),
    (lambda: Matern("1.5"), TypeError, "nu must be a number, got '1.5'"),
    (lambda: RationalQuadratic(-1), ValueError, "alpha must be from 0.3 to 1,000,000, got -1"),
    (lambda: PoweredExponential(0.3), ValueError, "power must be from 0.4 to 1.9, got 0.3"),
    (lambda: PoweredExponential(2), ValueError, "power must be from 0.4 to 1.9, got 2"),
    (
        lambda: draw_projection(jax.random.key(0), 4, 4, kernel="matern"),
        TypeError,
        "kernel must be a simrf_jax.kernels.ScaleMixture, .* got 'matern'",
    ),
    (
        lambda: draw_projection(jax.random.key(0), 4, 4, norms="radau", kernel=Matern()),
        ValueError,
        r"norms='radau' fixes .* got kernel=Matern\(nu=1.5\)",
    ),
    (
        lambda: Matern()(VECTORS, VECTORS, length_scale=jnp.ones(3)),
        ValueError,
        r"length_scale must be one number or one for each of 4 columns, got shape \(3,\)",
    ),
    (
        lambda: simrf_jax.theory.kernel_mse(
            VECTORS, VECTORS, 4, coupling="simplex", kernel=Matern()
        ),
        ValueError,
        "features='positive' estimate only the Gaussian and the softmax kernel",
    ),
    (
        lambda: simrf_jax.trigonometric_features(VECTORS, np.ones((4, 4)), kernel="matern"),
        ValueError,
        "kernel must be one of",
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_kernels_are_equal_by_value():
    assert kernels.Matern(1.5) == Matern() != Matern(2.5)
    assert len({Matern(1.5), Matern(), Gaussian(), Gaussian()}) == 2


def test_positive_features_of_heavy_tails_would_have_infinite_variance():
    # Rows sqrt(s) g have the unbiased positive features e^(w.x - s |x|^2). The second moment of
    # their product is E e^(4 s x.y) over s, which grows without bound for x.y > 0.
    x, y = np.array([0.4, 0.1]), np.array([0.3, 0.2])

    def second_moment(largest):
        return scipy.integrate.quad(
            lambda u: np.exp(4 * np.exp(u) * (x @ y) + Matern(1.5).log_density(u)), -8, largest
        )[0]

    assert second_moment(3) < second_moment(4) / 10 < second_moment(5) / 1e6
