import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special

import simrf_jax
from simrf_jax._src.selection.inputs import attention_inputs
from simrf_jax._src.selection.prediction import LARGEST_SQUARED_DISTANCE
from simrf_jax._src.selection.trials import errors_in_trials, variance_of_ratio
from simrf_jax.selection import attention_error, choose_num_features, required_features
from simrf_jax.theory import optimal_parameter

pytestmark = pytest.mark.fast


def random_covariance(rng, dim):
    root = rng.normal(size=(dim, dim)) * np.arange(1, dim + 1) ** -0.7
    return root @ root.T / dim


def test_required_features_of_one_axis_by_quadrature():
    # With x + y = v ~ N(0, 2s) and a proposal N(0, sigma^2), the mean second moment is an integral.
    s = 0.7
    assert required_features([[s]], [[s]], relative_error=0.01) == np.ceil(
        (np.sqrt(1 + 4 * s) - 1) / 0.01
    )

    def mean_second_moment(width):
        rho = 1 / (2 * width - 1)

        def integrand(v):
            density = np.exp(-(v**2) / (4 * s)) / np.sqrt(4 * np.pi * s)
            return density * (1 + rho) / (2 * np.sqrt(rho)) * np.exp(rho * v**2)

        return integrate.quad(integrand, -60, 60)[0]

    best = 1 + 4 * s  # Variance of the proposal that is best for the mean.
    np.testing.assert_allclose(mean_second_moment(best), np.sqrt(1 + 4 * s), rtol=1e-8)
    assert (
        mean_second_moment(0.9 * best) > mean_second_moment(best) < mean_second_moment(1.1 * best)
    )


def test_required_features_do_not_depend_on_the_basis():
    rng = np.random.default_rng(0)
    x, y = random_covariance(rng, 5), random_covariance(rng, 5)
    m = rng.normal(size=(5, 5))
    inverse = np.linalg.inv(m)
    expected = required_features(x, y, relative_error=1e-3)
    got = required_features(m @ x @ m.T, inverse.T @ y @ inverse, relative_error=1e-3)
    assert abs(got - expected) <= 1


def test_balance_needs_the_fewest_features():
    # Unbalanced, the covariance of x + y is C_x + C_y, whose eigenvalues are at least 2 s_l.
    rng = np.random.default_rng(1)
    for _ in range(50):
        x, y = random_covariance(rng, 4), random_covariance(rng, 4)
        plain = np.prod(np.sqrt(1 + 2 * np.linalg.eigvalsh(x + y)))
        assert required_features(x, y, relative_error=1.0) <= np.ceil(plain - 1)


def test_required_features_of_a_batch_and_without_an_end():
    got = required_features(np.zeros((3, 1, 2, 2)), np.zeros((4, 2, 2)), relative_error=0.1)
    np.testing.assert_array_equal(got, np.ones((3, 4)))
    huge = 1e6 * np.eye(256)
    assert required_features(huge, huge, relative_error=0.1) == np.inf


@pytest.mark.parametrize(
    ("arguments", "relative_error", "error", "match"),
    [
        ((np.zeros((2, 3)), np.eye(2)), 0.1, ValueError, r"query_covariance must be .*\(2, 3\)"),
        ((np.eye(2), np.eye(3)), 0.1, ValueError, "must have one dim, got 2 and 3"),
        ((np.eye(2), -np.eye(2)), 0.1, ValueError, "key_covariance must be symmetric and positive"),
        (([[1.0, 0.5], [0.0, 1.0]], np.eye(2)), 0.1, ValueError, "must be symmetric"),
        ((np.stack([1e8 * np.eye(2), -np.eye(2)]), np.eye(2)), 0.1, ValueError, "semidefinite"),
        ((np.full((2, 2), np.nan), np.eye(2)), 0.1, ValueError, "finite"),
        ((np.eye(2), np.eye(2)), 0.0, ValueError, "relative_error must be positive"),
        ((np.eye(2), np.eye(2)), 1j, TypeError, "relative_error must be one real number"),
    ],
)
def test_required_features_refuses(arguments, relative_error, error, match):
    with pytest.raises(error, match=match):
        required_features(*arguments, relative_error=relative_error)


def inputs(scale, num_heads=1, length=12, dim=8):
    rng = np.random.default_rng(0)
    return scale * rng.normal(size=(3, length, num_heads, dim))


def predicted(choice, query, key, value, num_features=None):
    features = "hyperbolic" if choice.features == "hyperbolic" else "positive"
    return attention_error(
        query,
        key,
        value,
        num_features or choice.num_features,
        coupling=choice.coupling,
        features=features,
        parameter=choice.parameter,
    ).mean()


@pytest.mark.parametrize("relative_error", [0.5, 0.05, 0.005])
def test_the_choice_reaches_the_error_with_the_fewest_features(relative_error):
    query, key, value = inputs(0.5, num_heads=2)
    choice = choose_num_features(query, key, value, relative_error=relative_error, trials=False)
    assert choice.reached
    np.testing.assert_allclose(choice.predicted_error, predicted(choice, query, key, value))
    assert choice.predicted_error <= relative_error
    x, y = query * 8**-0.25, key * 8**-0.25
    squares = np.sum((x[:, None] + y[None]) ** 2, axis=-1)
    np.testing.assert_allclose(choice.mean_squared_distance, squares.mean())
    best = optimal_parameter(squares.mean(), 8)
    couplings = ["iid", "orthogonal", "simplex", "cross_polytope"]
    for coupling, parameter in itertools.product(couplings, [0.0, best]):
        if choice.num_entries > 1:
            others = attention_error(
                query, key, value, choice.num_entries - 1, coupling=coupling, parameter=parameter
            )
            assert others.mean() > relative_error
    assert "fewer entries" in str(choice)
    assert f"num_features={choice.num_features}" in str(choice)


def test_the_choice_says_so_if_no_map_reaches_the_error():
    query, key, value = inputs(3.0)
    options = {"relative_error": 0.1, "max_features": 64}
    choice = choose_num_features(query, key, value, **options, trials=False)
    assert not choice.reached
    assert choice.num_entries <= 64
    assert choice.predicted_error > 0.1
    np.testing.assert_allclose(choice.predicted_error, predicted(choice, query, key, value))
    assert str(choice).startswith("Not reached: ")
    assert f"the mean of |x + y|^2 is {choice.mean_squared_distance:.3g}" in choice.reason


@pytest.mark.slow
def test_no_trial_reaches_the_error_either():
    query, key, value = inputs(3.0)
    choice = choose_num_features(query, key, value, relative_error=0.1, max_features=16)
    assert not choice.reached
    assert 0.1 < choice.predicted_error < 10
    assert choice.standard_error > 0
    assert "measured error" in str(choice)
    assert str(choice).startswith("Not reached: ")


def long_inputs(sequences=6, length=24, heads=2, dim=8):
    """Returns long anisotropic vectors around means, as those of trained models."""
    rng = np.random.default_rng(0)
    spectrum = 3 * np.arange(1, dim + 1) ** -1.5
    query, key = rng.normal(size=(2, sequences, length, heads, dim)) * spectrum + 1
    return query, key, rng.normal(size=(sequences, length, heads, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("relative_error", "groups"), [(0.15, 1), (0.4, 1), (0.4, 2)])
def test_calibrated_features_are_chosen_where_only_they_reach_the_error(relative_error, groups):
    query, key, value = long_inputs()
    query = np.repeat(query, groups, axis=2)
    options = {"relative_error": relative_error, "max_features": 64, "num_queries": 8}
    choice = choose_num_features(query, key, value, **options)
    assert choice.reached
    assert (choice.features, choice.coupling) == ("calibrated", "cross_polytope")
    assert choice.standard_error > 0
    assert choice.predicted_error + choice.standard_error <= relative_error
    spread = f"{choice.predicted_error:.3g} ± {choice.standard_error:.1g}"
    assert f"measured error {spread} on the second half" in str(choice)
    # Independent draws of the library's features on the half that the map was not fitted on.
    calibrated = simrf_jax.calibrate(np.float32(query[:3]), np.float32(key[:3]))
    arrays = [jnp.asarray(x[3:], jnp.float32) for x in (query, key, value)]
    keys, values = (np.repeat(x[3:], groups, axis=2) for x in (key, value))
    weights = special.softmax(np.einsum("btnh,bsnh->bnts", query[3:], keys) / 8**0.5, axis=-1)
    exact = jnp.asarray(np.einsum("bnts,bsnd->btnd", weights, values), jnp.float32)

    @jax.jit
    @jax.vmap
    def error(prng_key):
        draw = functools.partial(
            simrf_jax.draw_projection,
            num_features=choice.num_features,
            dim=8,
            coupling="cross_polytope",
        )
        w = jax.vmap(draw)(jax.random.split(prng_key, 2))
        out = simrf_jax.random_feature_attention(*arrays, w, feature_map=calibrated)
        squares = jnp.sum((out - exact) ** 2, axis=(1, 3)) / jnp.sum(exact**2, axis=(1, 3))
        return jnp.mean(squares)

    errors = error(jax.random.split(jax.random.key(9), 100))
    gap = np.mean(errors) - choice.predicted_error
    spread = np.hypot(np.std(errors) / 10, choice.standard_error)
    assert abs(gap) < 5 * spread
    assert spread < 0.25 * choice.predicted_error
    without = choose_num_features(query, key, value, **options, trials=False)
    assert not without.reached


@pytest.mark.slow
def test_large_errors_of_other_maps_are_measured_too():
    # Their closed forms are far too high for long vectors, which one feature serves well enough.
    query, key, value = inputs(2.0)
    options = {"relative_error": 3.0, "max_features": 16, "num_queries": 4}
    choice = choose_num_features(query, key, value, **options)
    assert choice.reached
    assert choice.num_features == 1
    assert choice.features != "calibrated"  # No better than the others with as many features.
    assert choice.standard_error > 0
    assert not choose_num_features(query, key, value, **options, trials=False).reached


@pytest.mark.slow
def test_the_data_are_halved_by_sequences_or_by_tokens():
    query, key, value = long_inputs(sequences=2, length=8, heads=1)
    options = {"relative_error": 1e-6, "max_features": 8}
    both = choose_num_features(query, key, value, **options)
    # A sequence of both, one after the other, has the same halves.
    single = choose_num_features(
        *(x.reshape(16, *x.shape[2:]) for x in (query, key, value)), **options
    )
    np.testing.assert_allclose(single.predicted_error, both.predicted_error, rtol=1e-4)
    # Values are not fitted, so those of the first half do not count.
    other = np.concatenate([value[:1] + 7, value[1:]])
    same = choose_num_features(query, key, other, **options)
    np.testing.assert_allclose(same.predicted_error, both.predicted_error, rtol=1e-6)
    unlike = choose_num_features(np.stack([0.1 * query[0], query[1]]), key, value, **options)
    assert abs(unlike.predicted_error / both.predicted_error - 1) > 0.01


def test_features_of_grouped_queries_are_measured():
    query, key, value = inputs(0.6, num_heads=2)
    options = {"relative_error": 1e-6, "max_features": 2, "num_queries": 2}
    choice = choose_num_features(query, key[:, :1], value[:, :1], **options)
    assert not choice.reached
    assert choice.standard_error > 0  # It was measured.


def test_without_values_they_are_uncorrelated():
    query, key, _ = inputs(0.6)
    choice = choose_num_features(query, key, relative_error=0.05, trials=False)
    rng = np.random.default_rng(1)
    # The mean over many channels of values is that over their law.
    value = rng.normal(size=(12, 1, 20_000))
    np.testing.assert_allclose(
        predicted(choice, query, key, value), choice.predicted_error, rtol=0.03
    )


@pytest.mark.slow
def test_only_some_queries_are_evaluated():
    query, key, value = inputs(0.5)
    some = choose_num_features(query, key, value, relative_error=0.05, num_queries=2)
    ends = choose_num_features(query[[0, -1]], key, value, relative_error=0.05)
    assert some == ends
    scaled = choose_num_features(query, key, value, relative_error=0.05, scale=0.01)
    assert scaled.num_features < some.num_features


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"relative_error": -0.1}, ValueError, "relative_error must be positive"),
        ({"max_features": 0}, ValueError, "max_features must be at least 1, got 0"),
        ({"num_queries": 0}, ValueError, "num_queries must be at least 1, got 0"),
        ({"num_queries": 1.5}, TypeError, "num_queries must be an integer"),
        ({"scale": 1j}, TypeError, "scale must be one real number"),
        ({"value": np.zeros((3, 1, 8))}, ValueError, "value must be"),
        ({"trials": 1}, TypeError, "trials must be True or False, got 1"),
        ({"query": np.zeros((1, 1, 8))}, ValueError, "two queries and two keys.* got 1 and 12"),
    ],
)
def test_choice_refuses(options, error, match):
    query, key, value = inputs(0.5)
    with pytest.raises(error, match=match):
        choose_num_features(
            **{"query": query, "key": key, "value": value, "relative_error": 0.1, **options}
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("scale", "predicted_error"), [(4, 1), (20, np.inf), (100, np.inf)])
def test_a_prediction_that_cannot_hold_reaches_nothing(scale, predicted_error):
    # Most queries attend to one key. To first order the errors of all others hardly count:
    # at a scale of 4 the prediction alone is 0.09, and the mean error of 100 draws is 1.2.
    query, key, value = np.random.default_rng(1).normal(size=(3, 1, 12, 1, 4))
    choice = choose_num_features(
        scale * query,
        scale * key,
        value,
        relative_error=0.1,
        max_features=24,
        num_queries=2,
        trials=False,
    )
    assert choice.reached is False
    assert choice.predicted_error == predicted_error
    assert choice.num_entries == 24


@pytest.mark.filterwarnings("error")
def test_an_error_that_overflows_is_infinite():
    query, key, value = 20 * np.random.default_rng(0).normal(size=(3, 12, 1, 4))
    assert attention_error(query, key, value, 24, coupling="simplex") == np.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [400, 1e200])
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex", "cross_polytope"])
def test_long_vectors_have_an_infinite_error_at_once(scale, coupling):
    query, key, value = np.random.default_rng(0).normal(size=(3, 12, 2, 4))
    query[:, 0] *= scale
    errors = attention_error(query, key, value, 24, coupling=coupling)
    assert errors[0] == np.inf
    assert np.isfinite(errors[1])


@pytest.mark.filterwarnings("error")
def test_values_that_are_all_zeros_have_no_error():
    query, key, value = np.random.default_rng(0).normal(size=(3, 12, 2, 4)) / 4
    value[:, 0] = 0
    errors = attention_error(query, key, value, 24, coupling="simplex")
    assert errors[0] == 0
    alone = attention_error(query[:, 1:], key[:, 1:], value[:, 1:], 24, coupling="simplex")
    np.testing.assert_allclose(errors[1:], alone)
    for trials in (False, True):
        choice = choose_num_features(query, key, 0 * value, relative_error=0.1, trials=trials)
        assert choice.reached
        assert choice.predicted_error == 0


def test_no_error_is_negative():
    ones, value = np.ones((8, 1, 3)), np.random.default_rng(0).normal(size=(8, 1, 2))
    choice = choose_num_features(ones, ones, value, relative_error=0.1, trials=False)
    assert 0 <= choice.predicted_error < 1e-12


def test_iid_rows_have_finite_errors_for_long_vectors():
    query, key, value = 12 * np.random.default_rng(0).normal(size=(3, 12, 1, 4))
    sums = (query[:, None, 0] + key[None, :, 0]) * 4**-0.25
    assert np.max(np.sum(sums**2, axis=-1)) > LARGEST_SQUARED_DISTANCE
    assert np.isfinite(attention_error(query, key, value, 24, coupling="iid", parameter=-8.0))


def test_the_variance_of_a_ratio_is_that_over_samples():
    rng = np.random.default_rng(0)
    squares = rng.uniform(1, 3, (4000, 50))
    errors = 0.1 * squares + 0.05 * rng.normal(size=squares.shape)
    totals = squares.sum(axis=1)
    found = [
        variance_of_ratio(e[:, None] / total, s / total)[0]
        for e, s, total in zip(errors, squares, totals, strict=True)
    ]
    np.testing.assert_allclose(np.mean(found), np.var(errors.sum(axis=1) / totals), rtol=0.1)
    # The same relative error everywhere has no variance, however long the outputs are.
    shares = squares[0] / totals[0]
    np.testing.assert_allclose(variance_of_ratio(0.1 * shares[:, None], shares), 0, atol=1e-30)


def test_the_standard_error_is_that_of_queries_where_draws_are_many():
    inputs = attention_inputs(*long_inputs(sequences=1, length=12)[:2], None, None)
    sizes, variances = np.array([4, 32]), np.ones((2, 8))
    few, many = (errors_in_trials(inputs, variances, sizes, n)[1] for n in (64, 256))
    assert np.all(few > many)
    assert np.all(many > 0.7 * few)  # Half as large if it were that of draws alone.
