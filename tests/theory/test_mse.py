import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from mpmath import mp

import simrf_jax
from simrf_jax.theory import kernel_mse, mse_ratio
from tests.standard_errors import assert_mean
from tests.theory import oracle

FEATURES = ["positive", "hyperbolic", "trigonometric"]
COUPLINGS = ["iid", "orthogonal", "simplex"]
# Pairs (coupling, row-block mode). The row blocks of orthogonal rows are the same in both modes.
COUPLED = [("orthogonal", "regular"), ("simplex", "regular"), ("simplex", "square")]
DISTANCES = np.array([1e-3, 0.02, 0.3, 1.0, 1.4999, 1.5001, 2.0, 3.0, 5.0, 8.0])


def sizes(dim):
    return [1, 2, 8, dim, dim + 1, dim + 2, 2 * (dim + 1), 130]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dim", [2, 3, 5, 8, 17, 64, 127, 128])
def test_ratio_against_arbitrary_precision(dim, features):
    for coupling, block in COUPLED:
        for m in sizes(dim):
            got = mse_ratio(DISTANCES, m, dim, coupling=coupling, features=features, block=block)
            expected = [oracle.ratio(v, m, dim, coupling, features, block) for v in DISTANCES]
            np.testing.assert_allclose(
                got, np.array(expected, float), rtol=3e-13, err_msg=f"{coupling} {block} {m}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "distance"), [(2, 100), (3, 22), (5, 13.4), (7, 13.5), (64, 40)])
@pytest.mark.parametrize("features", FEATURES)
def test_ratio_at_large_distances(dim, distance, features):
    # An antiparallel pair of rows affects trigonometric and hyperbolic features at any distance.
    got = mse_ratio(distance, 2, dim, coupling="simplex", features=features)
    expected = oracle.ratio(distance, 2, dim, "simplex", features, "regular")
    np.testing.assert_allclose(got, float(expected), rtol=1e-12)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex"])
def test_ratio_in_1024_dimensions(features, coupling):
    for v in [1e-3, 1.0, 1.5001, 4.0]:
        got = mse_ratio(v, 1024, 1024, coupling=coupling, features=features)
        expected = oracle.ratio(v, 1024, 1024, coupling, features, "regular")
        np.testing.assert_allclose(got, float(expected), rtol=1e-12)


@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dim", [2, 3, 64, 127])
def test_log_mse_against_arbitrary_precision(dim, features, kernel):
    rng = np.random.default_rng(dim)
    for v in [1e-3, 0.1, 1.0, 3.0, 10.0]:
        other = rng.normal(size=dim) / np.sqrt(dim)
        direction = rng.normal(size=dim)
        x = other + v * direction / np.linalg.norm(direction)
        y = other if features == "trigonometric" else -other
        for coupling, block in [("iid", "regular"), *COUPLED]:
            for m in [1, dim + 1, 130]:
                options = {"coupling": coupling, "features": features, "kernel": kernel}
                got = kernel_mse(x, y, m, **options, block=block, log=True)
                with mp.workdps(30):
                    expected = mp.log(oracle.mse(x, y, m, coupling, features, kernel, block))
                np.testing.assert_allclose(got, float(expected), rtol=1e-13, atol=3e-13)
                plain = kernel_mse(x, y, m, **options, block=block)
                np.testing.assert_array_equal(plain, np.exp(got))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "v", "coupling"),
    [(3, 30, "orthogonal"), (128, 30, "orthogonal"), (3, 100, "simplex"), (128, 100, "simplex")],
)
@pytest.mark.parametrize("features", FEATURES)
def test_log_mse_at_large_distances(dim, v, coupling, features):
    x, y = v * np.eye(dim)[0] + 0.01, np.full(dim, 0.01 if features == "trigonometric" else -0.01)
    got = kernel_mse(x, y, 130, coupling=coupling, features=features, log=True)
    with mp.workdps(30):
        expected = mp.log(oracle.mse(x, y, 130, coupling, features, "gaussian", "regular"))
    np.testing.assert_allclose(got, float(expected), rtol=1e-13)


@pytest.mark.fast
@pytest.mark.parametrize("v", [30.0, 100.0])
@pytest.mark.parametrize("features", FEATURES)
def test_log_mse_far_beyond_overflow(v, features):
    x = np.array([v, 0.0])
    y = np.zeros(2)
    # At these distances the coupling no longer matters: V1 = e^{2 v^2} or half of it, or 1/2.
    expected = {"positive": 0, "hyperbolic": -np.log(2), "trigonometric": -np.log(2)}[features]
    got = kernel_mse(x, y, 2, coupling="orthogonal", features=features, log=True)
    np.testing.assert_allclose(got, expected - np.log(2), rtol=1e-14)
    softmax = kernel_mse(
        x, y, 2, coupling="orthogonal", features=features, kernel="softmax", log=True
    )
    np.testing.assert_allclose(softmax - got, v**2, rtol=1e-14)


def _estimates(projected_x, projected_y, features):
    """Returns estimates of the Gaussian kernel by a feature map, without the norms' prefactors."""
    if features == "trigonometric":
        return np.cos(projected_x - projected_y).mean(axis=-1)
    exponent = projected_x + projected_y
    return (np.exp if features == "positive" else np.cosh)(exponent).mean(axis=-1)


@functools.cache
def _projections(coupling, block):
    keys = jax.random.split(jax.random.key(7), 40_000)
    draw = functools.partial(
        simrf_jax.draw_projection, num_features=5, dim=3, coupling=coupling, block=block
    )
    return np.asarray(jax.vmap(draw)(keys), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "block"), [("iid", "regular"), *COUPLED])
@pytest.mark.parametrize("features", FEATURES)
def test_is_the_error_of_estimates_with_drawn_projections(features, coupling, block):
    x, y = np.array([0.5, -0.2, 0.1]), np.array([0.0, 0.4, 0.3])
    projections = _projections(coupling, block)
    estimates = _estimates(projections @ x, projections @ y, features)
    if features != "trigonometric":
        estimates *= np.exp(-x @ x - y @ y)
    kernel = np.exp(-((x - y) @ (x - y)) / 2)
    expected = kernel_mse(x, y, 5, coupling=coupling, features=features, block=block)
    assert_mean(np.square(estimates - kernel), expected)


@pytest.mark.fast
@pytest.mark.parametrize(("coupling", "block"), COUPLED)
@pytest.mark.parametrize("dim", [2, 3, 64])
def test_limits_at_zero(dim, coupling, block):
    weights = {}
    for rows, cosine in oracle.blocks(130, dim, coupling, block):
        c = cosine[0] / cosine[1]
        weights[c] = weights.get(c, 0) + rows * (rows - 1) / 130
    mu2_over_d = 2 / dim * scipy.special.poch(dim / 2, 0.5) ** 2
    limit = {
        "positive": 1 + sum(p * c * mu2_over_d for c, p in weights.items()),
        "hyperbolic": 1 - sum(p * (1 - c**2 * dim) / (dim + 2) for c, p in weights.items()),
    }
    limit["trigonometric"] = limit["hyperbolic"]
    for features in FEATURES:
        got = mse_ratio(
            [0, 1e-200, 1e-160, 1e-9], 130, dim, coupling=coupling, features=features, block=block
        )
        np.testing.assert_allclose(got, limit[features], rtol=1e-12)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
def test_an_exact_estimate_has_no_error(features, coupling):
    x = np.array([0.3, -1.0, 2.0])
    y = x if features == "trigonometric" else -x
    assert kernel_mse(x, y, 5, coupling=coupling, features=features) == 0
    assert kernel_mse(x, y, 5, coupling=coupling, features=features, log=True) == -np.inf


@pytest.mark.fast
@pytest.mark.parametrize("features", FEATURES)
def test_where_couplings_are_the_same(features):
    v = np.array([0.0, 0.1, 1.0, 4.0])
    for coupling in COUPLINGS:
        one_row = mse_ratio(v, 1, 4, coupling=coupling, features=features)
        np.testing.assert_array_equal(one_row, 1)
    one_dimension = mse_ratio(v, 8, 1, coupling="orthogonal", features=features)
    np.testing.assert_array_equal(one_dimension, 1)
    far = mse_ratio([60.0, 1e3, 1e200, np.inf], 8, 4, coupling="simplex", features=features)
    np.testing.assert_array_equal(far, 1)


@pytest.mark.fast
@pytest.mark.parametrize("features", FEATURES)
def test_baseline(features):
    v = np.array([0.0, 1e-3, 0.7, 1.6, 5.0])
    options = {"dim": 5, "num_features": 8, "features": features, "block": "square"}
    for first in COUPLINGS:
        for second in COUPLINGS:
            forth = mse_ratio(v, coupling=first, baseline=second, **options)
            back = mse_ratio(v, coupling=second, baseline=first, **options)
            np.testing.assert_allclose(forth * back, 1, rtol=1e-15)
            over_iid = mse_ratio(v, coupling=first, **options)
            under_iid = mse_ratio(v, coupling=second, **options)
            np.testing.assert_allclose(forth, over_iid / under_iid, rtol=1e-15)
        np.testing.assert_array_equal(mse_ratio(v, coupling=first, baseline=first, **options), 1)


@pytest.mark.fast
@pytest.mark.parametrize("features", ["hyperbolic", "trigonometric"])
def test_orthogonal_rows_are_best_for_even_features_at_small_distances(features):
    v = np.array([0.0, 1e-3, 0.1, 1.0])
    for dim in [2, 3, 8, 64]:
        for m in sizes(dim):
            for block in ["regular", "square"]:
                options = {"features": features, "block": block}
                orthogonal = mse_ratio(v, m, dim, coupling="orthogonal", **options)
                simplex = mse_ratio(v, m, dim, coupling="simplex", **options)
                # With d + 1 rows in a row block, the simplex has more pairs.
                if block == "square" or m <= dim:
                    assert np.all(orthogonal <= simplex)


@pytest.mark.fast
def test_mse_is_the_ratio_times_the_iid_mse():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 7, 5)) / 2
    for features in FEATURES:
        options = {"features": features, "kernel": "softmax"}
        sign = -1 if features == "trigonometric" else 1
        v = np.linalg.norm(x + sign * y, axis=-1)
        expected = kernel_mse(x, y, 8, coupling="iid", **options)
        expected *= mse_ratio(v, 8, 5, coupling="simplex", features=features)
        got = kernel_mse(x, y, 8, coupling="simplex", **options)
        np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("features", FEATURES)
def test_shapes_and_nan(features, coupling):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 1, 3)), rng.normal(size=(6, 3))
    x[2, 0, 1] = np.nan
    got = kernel_mse(x, y, 5, coupling=coupling, features=features)
    assert got.shape == (4, 6)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(np.isnan(got), np.arange(4)[:, None] == np.full(6, 2))
    one = kernel_mse(x[1, 0], y[3], 5, coupling=coupling, features=features)
    assert isinstance(one, np.float64)
    np.testing.assert_allclose(one, got[1, 3], rtol=1e-14)
    v = np.array([[0.0, np.nan], [1.0, 30.0]])
    ratio = mse_ratio(v, 5, 3, coupling=coupling, features=features)
    np.testing.assert_array_equal(np.isnan(ratio), np.isnan(v))
    assert isinstance(mse_ratio(1, 5, 3, coupling=coupling, features=features), np.float64)
    assert mse_ratio([], 5, 3, coupling=coupling, features=features).shape == (0,)


@pytest.mark.fast
def test_any_real_type():
    x = jnp.array([0.5, 1.25], jnp.bfloat16)
    expected = kernel_mse([0.5, 1.25], [1.0, 2.0], 4, coupling="simplex")
    assert kernel_mse(x, [1, 2], 4, coupling="simplex") == expected


X = np.zeros(3)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("x", "y", "m", "options", "error", "match"),
    [
        (X, np.zeros(4), 4, {}, ValueError, r"same dim.*got \(3,\) and \(4,\)"),
        (X, np.zeros((2, 1)), 4, {}, ValueError, r"same dim.*got \(3,\) and \(2, 1\)"),
        (1.0, X, 4, {}, ValueError, r"must be \[\.\.\., dim\].*got \(\) and \(3,\)"),
        (np.zeros(0), np.zeros(0), 4, {}, ValueError, "dim of at least 1"),
        (np.zeros((2, 3)), np.zeros((4, 3)), 4, {}, ValueError, "leading shapes that broadcast"),
        (X + 1j, X, 4, {}, TypeError, "x must hold real numbers, got complex128"),
        (X, X > 0, 4, {}, TypeError, "y must hold real numbers, got bool"),
        (X, ["a", "b", "c"], 4, {}, TypeError, "y must hold real numbers, got str"),
        (X, X, 0, {}, ValueError, "num_features must be at least 1, got 0"),
        (X, X, 4.0, {}, TypeError, "num_features must be an integer, got 4.0"),
        (X, X, 4, {"log": "no"}, TypeError, "log must be True or False, got 'no'"),
        (X, X, 4, {"kernel": "laplace"}, ValueError, "kernel must be one of 'gaussian', 'softmax'"),
        (X, X, 4, {"features": "relu"}, ValueError, "features must be one of 'positive', 'hyperb"),
        (X, X, 4, {"block": "full"}, ValueError, "block must be one of 'regular', 'square'"),
        (X, X, 4, {"coupling": "halton"}, ValueError, "coupling must be one of 'iid', 'orthog"),
        (X, X, 4, {"coupling": "simplex_plus"}, ValueError, "no closed form.*Monte Carlo"),
        (X[:1], X[:1], 4, {"coupling": "simplex"}, ValueError, "dim of at least 2, got dim=1"),
    ],
)
def test_mse_refuses(x, y, m, options, error, match):
    with pytest.raises(error, match=match):
        kernel_mse(x, y, m, **{"coupling": "iid", **options})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("v", "dim", "m", "options", "error", "match"),
    [
        ([0.1, -2.0, np.nan], 4, 4, {}, ValueError, "v is a norm.*at least 0, got -2.0"),
        (1j, 4, 4, {}, TypeError, "v must hold real numbers, got complex128"),
        (1.0, 0, 4, {}, ValueError, "dim must be at least 1, got 0"),
        (1.0, 4.5, 4, {}, TypeError, "dim must be an integer, got 4.5"),
        (1.0, 4, 0, {}, ValueError, "num_features must be at least 1, got 0"),
        (1.0, 4, 4.0, {}, TypeError, "num_features must be an integer, got 4.0"),
        (1.0, 4, 4, {"features": "relu"}, ValueError, "features must be one of 'positive', 'hyp"),
        (1.0, 4, 4, {"block": "full"}, ValueError, "block must be one of 'regular', 'square'"),
        (1.0, 4, 4, {"coupling": "halton"}, ValueError, "coupling must be one of 'iid', 'orth"),
        (1.0, 4, 4, {"baseline": "halton"}, ValueError, "baseline must be one of 'iid', 'orth"),
        (1.0, 4, 4, {"baseline": "simplex_plus"}, ValueError, "baseline 'simplex_plus' has no cl"),
        (1.0, 4, 4, {"coupling": "simplex_plus"}, ValueError, "coupling 'simplex_plus' has no cl"),
        (1.0, 1, 1, {"coupling": "simplex"}, ValueError, "coupling='simplex' needs dim of at le"),
        (1.0, 1, 1, {"baseline": "simplex"}, ValueError, "baseline='simplex' needs dim of at le"),
    ],
)
def test_ratio_refuses(v, dim, m, options, error, match):
    with pytest.raises(error, match=match):
        mse_ratio(v, m, dim, **{"coupling": "iid", **options})
