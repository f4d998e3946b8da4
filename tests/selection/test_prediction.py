import jax
import numpy as np
import pytest
from scipy import special

from simrf_jax.feature_maps import Calibrated
from simrf_jax.selection import attention_error
from simrf_jax.theory import optimal_parameter
from tests.theory import draws

OPTIMAL = float(optimal_parameter(2 * 0.3**2, 8))
LAWS = [
    ("iid", "chi", 0.0),
    ("orthogonal", "chi", 0.0),
    ("simplex", "chi", 0.0),
    ("simplex", "chi", OPTIMAL),
    ("simplex", "antithetic", OPTIMAL),
    ("simplex", "shared", 0.0),
    ("simplex", "sqrt_dim", 0.0),
    ("cross_polytope", "chi", OPTIMAL),
    ("cross_polytope", "antithetic", 0.0),
    ("cross_polytope", "shared", 0.0),
    ("cross_polytope", "pair", OPTIMAL),
    ("cross_polytope", "radau", 0.0),
]


def vectors(rng, length, dim, norm):
    x = rng.normal(size=(length, dim))
    return norm * x / np.linalg.norm(x, axis=1, keepdims=True)


def outputs(query, key, value, factors=1.0):
    """Returns normalized attention to one head, with factors on the kernel ``[..., T, S]``."""
    kernel = np.exp(query @ key.T) * factors
    return kernel @ value / np.sum(kernel, axis=-1, keepdims=True)


def trials(rng, query, key, value, num_features, num_draws, coupling, norms, parameter, features):
    """Returns the relative squared error of the output for each draw of W."""
    length, dim = query.shape
    sums = (query[:, None] + key).reshape(-1, dim)
    factors = draws.relative_estimates(
        rng, num_draws, sums, num_features, coupling, norms, parameter, features
    ).reshape(num_draws, length, len(key))
    exact = outputs(query, key, value)
    errors = np.sum((outputs(query, key, value, factors) - exact) ** 2, axis=(1, 2))
    return errors / np.sum(exact**2)


def predicted(query, key, value, num_features, **options):
    one_head = [each[:, None] for each in (query, key, value)]
    return attention_error(*one_head, num_features, scale=1.0, **options)[0]


def assert_first_order(errors, expected):
    """Asserts that the mean is as expected within 5 standard errors and 3 % for higher orders."""
    standard_error = np.std(errors, ddof=1) / np.sqrt(len(errors))
    assert 5 * standard_error < 0.25 * expected
    assert abs(np.mean(errors) - expected) < 5 * standard_error + 0.03 * expected


@pytest.mark.slow
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
@pytest.mark.parametrize(("coupling", "norms", "parameter"), LAWS)
def test_against_trials_of_short_vectors(coupling, norms, parameter, features):
    rng = np.random.default_rng(0)
    query, key = vectors(rng, 4, 8, 0.3), vectors(rng, 12, 8, 0.3)
    value = rng.normal(size=(12, 5))
    num_features = {"simplex": 18}.get(coupling, 16) + (norms == "radau")
    options = {
        "coupling": coupling,
        "norms": norms,
        "parameter": parameter,
        "features": features,
    }
    errors = trials(rng, query, key, value, num_features, 3000, **options)
    expected = predicted(query, key, value, num_features, **options)
    assert_first_order(errors, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coupling", "norms", "tilted"),
    [
        ("iid", "chi", False),
        ("orthogonal", "chi", False),
        ("simplex", "chi", False),
        ("simplex", "chi", True),
        ("simplex", "shared", False),
        ("simplex", "sqrt_dim", False),
        ("cross_polytope", "pair", False),
        ("cross_polytope", "shared", False),
        ("cross_polytope", "chi", True),
        ("cross_polytope", "sqrt_dim", False),
    ],
)
def test_against_trials_in_64_dimensions(coupling, norms, tilted):
    rng = np.random.default_rng(0)
    query, key = vectors(rng, 4, 64, 0.5), vectors(rng, 64, 64, 0.5)
    value = rng.normal(size=(64, 64))
    parameter = float(optimal_parameter(0.5, 64)) if tilted else 0.0
    options = {"coupling": coupling, "norms": norms, "parameter": parameter}
    expected = predicted(query, key, value, 128, **options)
    # Draws in groups take less memory.
    errors = [
        trials(rng, query, key, value, 128, 100, **options, features="positive") for _ in range(5)
    ]
    assert_first_order(np.concatenate(errors), expected)


def test_long_vectors_are_predicted_too_high():
    # The docstring says that the expansion fails there, because the output is an average of values.
    rng = np.random.default_rng(0)
    query, key = vectors(rng, 4, 8, 3.0), vectors(rng, 12, 8, 3.0)
    value = rng.normal(size=(12, 5))
    options = {"coupling": "simplex", "norms": "chi", "parameter": 0.0}
    errors = trials(rng, query, key, value, 18, 500, **options, features="positive")
    assert predicted(query, key, value, 18, **options) > 100 * np.mean(errors)


@pytest.mark.fast
def test_shared_norms_raise_the_error_of_the_kernel_and_lower_that_of_attention():
    rng = np.random.default_rng(1)
    query, key = vectors(rng, 2, 16, 0.5), vectors(rng, 16, 16, 0.5)
    value = rng.normal(size=(16, 4))
    chi = predicted(query, key, value, 32, coupling="cross_polytope")
    shared = predicted(query, key, value, 32, coupling="cross_polytope", norms="shared")
    assert shared < chi


@pytest.mark.fast
def test_what_all_keys_share_cancels():
    # A common part of all keys is a factor of the estimates only to first order, unlike a constant
    # value, which any normalized attention returns.
    rng = np.random.default_rng(2)
    query, key = vectors(rng, 3, 6, 1.0), vectors(rng, 5, 6, 1.0)
    got = predicted(query, key, np.ones((5, 2)), 8, coupling="simplex")
    np.testing.assert_allclose(got, 0, atol=1e-14)


@pytest.mark.fast
def test_heads_batches_and_causal_masks():
    rng = np.random.default_rng(3)
    query = rng.normal(size=(2, 6, 4, 8)) / 2
    key, value = rng.normal(size=(2, 2, 6, 2, 8)) / 2
    options = {"coupling": "simplex"}
    got = attention_error(query, key, value, 16, **options)
    assert got.shape == (2, 4)
    # Heads 0 and 1 of the queries see head 0 of the keys, and 2 and 3 see head 1.
    one = attention_error(query[1, :, 3:], key[1, :, 1:], value[1, :, 1:], 16, **options)
    np.testing.assert_allclose(got[1, 3], one[0], rtol=1e-12)
    scaled = attention_error(query * 8**-0.5, key, value, 16, scale=1.0, **options)
    # Only the product of queries and keys has to be right for attention, but not for its error.
    assert not np.allclose(scaled, got, rtol=1e-3)

    causal = attention_error(query, key, value, 16, is_causal=True, **options)[0, 0]
    errors, squares = [], []
    for t in range(6):
        seen = [each[0, : t + 1, :1] for each in (key, value)]
        x, y = query[0, t, 0] * 8**-0.25, seen[0][:, 0] * 8**-0.25
        output = special.softmax(y @ x) @ seen[1][:, 0]
        squares.append(output @ output)
        errors.append(attention_error(query[0, t : t + 1, :1], *seen, 16, **options)[0])
    expected = np.dot(errors, squares) / np.sum(squares)
    np.testing.assert_allclose(causal, expected, rtol=1e-12)


def calibrated(variances, seed=4, dim=8):
    """Returns a map of one head with means, a matrix and the given variances of the rows."""
    rng = np.random.default_rng(seed)
    matrix = np.eye(dim) + 0.1 * rng.normal(size=(dim, dim))
    means = 0.05 * rng.normal(size=(2, 1, dim))
    inverse = np.linalg.inv(matrix).T
    return Calibrated(*means, matrix[None], inverse[None], np.full((1, dim), variances))


def calibrated_trials(feature_map, query, key, value, rows):
    """Returns the relative squared error for each draw, from the definition of the features."""
    (bx,), (by,), (m,), (inverse,), (variances,) = (
        np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(feature_map)
    )
    tilted = np.sqrt(variances) * rows
    log_ratio = np.sum(np.log(variances) - tilted**2 + rows**2, axis=-1) / 2
    x, y = (query - bx) @ m.T, (key - by) @ inverse.T
    log_x = tilted @ x.T - np.sum(x**2, axis=-1) / 2 + (query - bx / 2) @ by
    log_y = tilted @ y.T - np.sum(y**2, axis=-1) / 2 + (key - by / 2) @ bx
    phi_x, phi_y = (np.exp(log + log_ratio[..., None] / 2) for log in (log_x, log_y))
    kernel = np.einsum("imt,ims->its", phi_x, phi_y)
    exact = outputs(query, key, value)
    estimates = kernel @ value / np.sum(kernel, axis=-1, keepdims=True)
    return np.sum((estimates - exact) ** 2, axis=(1, 2)) / np.sum(exact**2)


SPECTRUM = 1 + 0.3 / np.arange(1, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variances", "coupling"),
    [(SPECTRUM, "iid"), (1.0, "iid"), (1.0, "simplex"), (1.15, "cross_polytope")],
)
def test_calibrated_features_against_trials(variances, coupling):
    rng = np.random.default_rng(0)
    query, key = vectors(rng, 4, 8, 0.2), vectors(rng, 12, 8, 0.2)
    value = rng.normal(size=(12, 5))
    feature_map, m = calibrated(variances), 36 if coupling == "simplex" else 32
    rows = draws.draw_rows(rng, 4000, m, 8, coupling, "chi")
    errors = calibrated_trials(feature_map, query, key, value, rows)
    expected = predicted(query, key, value, m, coupling=coupling, features=feature_map)
    assert_first_order(errors, expected)


@pytest.mark.fast
@pytest.mark.parametrize("variances", [1.0, 1.2])
def test_an_isotropic_tilt_is_that_of_optimal_positive_features(variances):
    rng = np.random.default_rng(1)
    query, key, value = rng.normal(size=(3, 6, 8)) / 2
    eye, none = np.eye(8)[None], np.zeros((1, 8))
    plain = Calibrated(none, none, eye, eye, np.full((1, 8), variances))
    options = {"coupling": "iid"}
    expected = predicted(query, key, value, 16, parameter=(1 - variances) / 4, **options)
    got = predicted(query, key, value, 16, features=plain, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    # The closed form of unequal variances is continuous there.
    nearly = Calibrated(none, none, eye, eye, variances + 1e-9 * np.arange(8)[None])
    got = predicted(query, key, value, 16, features=nearly, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.fast
def test_calibrated_features_of_several_heads():
    rng = np.random.default_rng(2)
    query, key, value = rng.normal(size=(2, 5, 4, 8)) / 2, *rng.normal(size=(2, 2, 5, 2, 8)) / 2
    maps = [calibrated(SPECTRUM, seed=seed) for seed in (0, 1)]
    both = jax.tree.map(lambda *leaves: np.concatenate(leaves), *maps)
    options = {"coupling": "iid", "is_causal": True}
    got = attention_error(query, key, value, 16, features=both, **options)
    assert got.shape == (2, 4)
    one = [query[1, :, 3:], key[1, :, 1:], value[1, :, 1:]]
    expected = attention_error(*one, 16, features=maps[1], **options)
    np.testing.assert_allclose(got[1, 3], expected[0], rtol=1e-10)


TILTED = calibrated(SPECTRUM[:4], dim=4)
Q, K = np.zeros((5, 2, 4)), np.zeros((5, 1, 4))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arrays", "options", "error", "match"),
    [
        ((np.zeros((5, 4)), Q, Q), {}, ValueError, r"query must be \[\.\.\., length.*\(5, 4\)"),
        ((Q, np.zeros((0, 2, 4)), Q), {}, ValueError, r"key must be \[\.\.\., length.*\(0, 2, 4\)"),
        ((Q, np.zeros((5, 2, 3)), Q), {}, ValueError, r"one dim of at least 2, got \(5, 2, 4\)"),
        ((Q[..., :1], Q[..., :1], Q), {}, ValueError, "one dim of at least 2"),
        ((Q, Q[None], Q), {}, ValueError, "one leading shape"),
        ((Q, np.zeros((5, 3, 4)), Q), {}, ValueError, "multiple of the heads of key, got 2 and 3"),
        ((Q, Q, np.zeros((4, 2, 4))), {}, ValueError, r"value must be.*got \(4, 2, 4\)"),
        ((Q, Q, Q * 1j), {}, TypeError, "value must hold real numbers"),
        (
            (np.full(Q.shape, np.nan), Q, Q),
            {},
            ValueError,
            "query must be finite, got 40 other numbers",
        ),
        ((Q, Q, np.full(Q.shape, np.inf)), {}, ValueError, "value must be finite"),
        ((Q, Q, Q), {"num_features": 0}, ValueError, "num_features must be at least 1"),
        ((Q, Q, Q), {"scale": -1.0}, ValueError, "scale must be at least 0"),
        ((Q, Q, Q), {"is_causal": "no"}, TypeError, "is_causal must be True or False"),
        (
            (Q, Q, Q),
            {"features": "trigonometric"},
            ValueError,
            "features must be one of 'positive'",
        ),
        ((Q, Q, Q), {"coupling": "simplex_plus"}, ValueError, "no closed form"),
        ((Q, Q, Q), {"norms": "pair"}, ValueError, "only coupling='cross_polytope' has"),
        ((Q, Q, Q), {"parameter": 0.2}, ValueError, "parameter must be less than 1/8"),
        (
            (Q, K, K),
            {"features": TILTED},
            ValueError,
            "closed form for coupling='iid' and norms='chi' only, got 'simplex' and 'chi'",
        ),
        (
            (Q, K, K),
            {"features": TILTED, "norms": "sqrt_dim"},
            ValueError,
            "needs norms that are chi variables, got norms='sqrt_dim'",
        ),
        (
            (Q, K, K),
            {"features": TILTED, "parameter": -0.1},
            ValueError,
            "parameter is for maps without their own tilt, got -0.1",
        ),
        (
            (Q[..., :3], K[..., :3], K),
            {"features": TILTED},
            ValueError,
            r"variances \[1, 3\], got variances of shape \(1, 4\)",
        ),
        (
            (Q, Q, Q),
            {"features": TILTED},
            ValueError,
            r"variances \[2, 4\], got variances of shape \(1, 4\)",
        ),
        ((Q, Q, Q), {"block": "full"}, ValueError, "block must be one of"),
    ],
)
def test_refuses(arrays, options, error, match):
    with pytest.raises(error, match=match):
        attention_error(*arrays, **{"num_features": 4, "coupling": "simplex", **options})
