"""Tests of the scikit-learn transformer."""

import concurrent.futures
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
import scipy.sparse
import sklearn.base
from sklearn.datasets import load_digits, load_iris
from sklearn.gaussian_process.kernels import RBF, Matern, RationalQuadratic
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from simrf_jax import kernels
from simrf_jax._src.integrations import sklearn as integration
from simrf_jax.integrations.sklearn import RandomFeatures
from tests.standard_errors import assert_less, assert_mean
from tests.tiers import slow_but

MAPS = ("trigonometric", "phase", "positive", "hyperbolic")
PAIRS = np.triu_indices(3, k=1)
X = np.random.default_rng(0).normal(1.0, 0.5, (70, 5))


KERNELS = {
    "rbf": RBF(),
    "laplace": Matern(nu=0.5),
    "matern": Matern(nu=1.5),
    "rational_quadratic": RationalQuadratic(),
}
COUPLINGS = ("iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus")
ESTIMATORS = [RandomFeatures(feature_map="positive", center=False)] + [
    RandomFeatures(8, kernel=kernel, coupling=coupling)
    for kernel in (*KERNELS, kernels.PoweredExponential(0.7))
    for coupling in COUPLINGS
]


@parametrize_with_checks([RandomFeatures(8, kernel="matern")])
def test_scikit_learn_accepts_the_transformer(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_accepts_all_kernels_and_couplings(estimator, check):
    check(estimator)


@pytest.mark.fast
@pytest.mark.parametrize("kernel", slow_but(["laplace", "matern"], [*KERNELS]))
def test_kernels_are_those_of_scikit_learn(kernel):
    scale = np.array([0.5, 1.0, 2.0, 4.0, 1.0])
    features = RandomFeatures(30_000, kernel=kernel, length_scale=scale, random_state=0).fit(X)
    phi = features.transform(X)
    expected = KERNELS[kernel](X / scale)
    np.testing.assert_allclose(phi @ phi.T, expected, atol=0.03)
    found = features.kernel_(X.astype(np.float32), X.astype(np.float32), length_scale=scale)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("coupling", slow_but(["simplex"], COUPLINGS))
@pytest.mark.parametrize("kernel", slow_but(["rbf", "rational_quadratic"], [*KERNELS]))
def test_every_kernel_and_coupling_is_unbiased(kernel, coupling):
    x = np.random.default_rng(1).normal(size=(3, 4))
    grams = []
    for seed in range(200):
        features = RandomFeatures(
            11, kernel=kernel, length_scale=1.0, coupling=coupling, random_state=seed
        )
        phi = features.fit_transform(x)
        grams.append((phi @ phi.T)[PAIRS])
    assert_mean(grams, KERNELS[kernel](x)[PAIRS])


@pytest.mark.fast
def test_a_kernel_may_be_an_object():
    features = RandomFeatures(8, kernel=kernels.Matern(2.5), random_state=0).fit(X)
    assert features.kernel_ == kernels.Matern(2.5)
    clone = sklearn.base.clone(features)
    np.testing.assert_array_equal(clone.fit_transform(X), features.transform(X))
    copy = pickle.loads(pickle.dumps(features))
    np.testing.assert_array_equal(copy.transform(X), features.transform(X))


@pytest.mark.fast
def test_partial_fit_keeps_the_features_of_the_first_batch():
    features = RandomFeatures(8, random_state=0).partial_fit(X[:30])
    expected = features.transform(X)
    np.testing.assert_array_equal(features.partial_fit(X[30:]).transform(X), expected)
    of_fit = RandomFeatures(8, random_state=0).fit(X[:30])
    np.testing.assert_array_equal(of_fit.transform(X), expected)
    with pytest.raises(ValueError, match="X has 4 features, but RandomFeatures is expecting 5"):
        features.partial_fit(X[:, :4])
    np.testing.assert_array_equal(features.fit(X).mean_, X.mean(axis=0))  # A fit begins anew.


def formula(features, x):
    """Returns features in float64 by NumPy, from what the transformer has learned."""
    x = (x - features.mean_) / features.length_scale_
    logits, n = x @ features.projection_.T, features.n_components
    shrink = np.exp(-np.sum(x**2, axis=1, keepdims=True))
    if features.feature_map == "positive":
        return shrink * np.exp(logits) / n**0.5
    if features.feature_map == "phase":
        phases = np.pi * (0.25 + np.arange(n) / n)
        return (2 / n) ** 0.5 * np.cos(logits + phases)
    pairs, last = logits[:, : n // 2], logits[:, n // 2 :]
    if features.feature_map == "hyperbolic":
        return shrink * np.hstack([np.exp(pairs), np.exp(-pairs), np.exp(last)]) / n**0.5
    single = np.cos(last + np.pi / 4)
    return (2 / n) ** 0.5 * np.hstack([np.sin(pairs), np.cos(pairs), single])


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("n_components", [1, 7, 8])
def test_features_are_those_of_the_formula_in_float64(feature_map, n_components):
    features = RandomFeatures(n_components, feature_map=feature_map, random_state=0).fit(X)
    phi = features.transform(X)
    assert phi.shape == (70, n_components)
    assert phi.dtype == np.float64
    np.testing.assert_allclose(phi, formula(features, X), rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("n_components", [1, 5])
def test_estimates_of_the_kernel_are_unbiased(feature_map, n_components):
    # The pairs are short, so that exponential features have finite fourth moments to speak of.
    x = 0.3 * np.random.default_rng(1).normal(size=(3, 4))
    grams = []
    for seed in range(400):
        features = RandomFeatures(
            n_components, gamma=0.5, feature_map=feature_map, random_state=seed
        )
        phi = features.fit_transform(x)
        grams.append((phi @ phi.T)[PAIRS])
    assert_mean(grams, rbf_kernel(x, gamma=0.5)[PAIRS])


@pytest.mark.parametrize(
    ("feature_map", "dim", "expected"),
    [
        ("trigonometric", 4, ("orthogonal", "stratified")),
        ("phase", 4, ("orthogonal", "stratified")),
        ("hyperbolic", 4, ("orthogonal", "chi")),
        ("positive", 4, ("simplex", "chi")),
        ("positive", 1, ("cross_polytope", "chi")),
        ("trigonometric", 1, ("orthogonal", "stratified")),
    ],
)
def test_coupling_and_norms_by_default_suit_the_feature_map(feature_map, dim, expected):
    features = RandomFeatures(4, feature_map=feature_map, random_state=0).fit(X[:, :dim])
    assert (features.coupling_, features.norms_) == expected
    assert (features.coupling, features.norms) == ("auto", "auto")


@pytest.mark.fast
def test_rows_of_one_row_block_have_the_coupling():
    directions = RandomFeatures(10, random_state=0).fit(X).projection_
    products = directions @ directions.T
    np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-13)
    iid = RandomFeatures(10, coupling="iid", random_state=0).fit(X).projection_
    assert np.abs(iid @ iid.T - np.diag(np.sum(iid**2, axis=1))).max() > 0.5


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "expected"),
    [("float64", "float64"), ("float32", "float32"), ("float16", "float64"), ("int32", "float64")],
)
@pytest.mark.parametrize("fitted", ["float64", "float32"])
def test_the_dtype_is_that_of_the_rows_transformed(fitted, given, expected):
    data = np.arange(12).reshape(4, 3) % 5
    features = RandomFeatures(6, gamma=0.1, random_state=0).fit(data.astype(fitted))
    phi = features.transform(data.astype(given))
    assert phi.dtype == expected
    tolerance = 1e-13 if expected == "float64" else 1e-6
    np.testing.assert_allclose(phi, formula(features, data), atol=tolerance)


@pytest.mark.slow
def test_centering_keeps_the_digits_of_float32():
    far = (X + 10_000).astype(np.float32)
    kernel = rbf_kernel(far.astype(np.float64), gamma=1.0)

    def error(center):
        features = RandomFeatures(20, gamma=1.0, center=center, random_state=0).fit(far)
        close, wide = features.transform(far), features.transform(far.astype(np.float64))
        assert close.dtype == np.float32
        assert np.abs(wide @ wide.T - kernel).max() < 1
        return np.abs(close - wide).max()

    assert error(center=True) < 1e-5
    assert error(center=False) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["csr_array", "csc_matrix", "coo_array", "lil_matrix"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_sparse_rows_have_the_features_of_dense_ones(layout, dtype):
    dense = np.random.default_rng(2).poisson(0.3, (40, 6)).astype(dtype)
    as_sparse = getattr(scipy.sparse, layout)(dense)
    both = [RandomFeatures(9, random_state=0).fit(data) for data in (dense, as_sparse)]
    tolerance = 1e-6 if dtype == "float32" else 1e-13
    scales = [each.length_scale_ for each in both]
    np.testing.assert_allclose(scales[1], scales[0], rtol=tolerance)
    np.testing.assert_allclose(both[1].mean_, both[0].mean_, atol=tolerance)
    phi = both[0].transform(dense)
    of_sparse = both[1].transform(as_sparse)
    assert isinstance(of_sparse, np.ndarray)
    assert of_sparse.dtype == phi.dtype
    np.testing.assert_allclose(of_sparse, phi, atol=10 * tolerance)


@pytest.mark.fast
@pytest.mark.parametrize("data", [X, scipy.sparse.csr_array(X)], ids=["dense", "sparse"])
def test_batches_do_not_show(monkeypatch, data):
    features = RandomFeatures(8, random_state=0).fit(data)
    whole = features.transform(data)
    batches = []

    def padded(rows):
        batches.append(len(rows))
        return rows

    monkeypatch.setattr(integration, "_rows_of_batch", lambda width: 32)
    monkeypatch.setattr(integration, "_padded", padded)
    np.testing.assert_allclose(features.transform(data), whole, atol=1e-13)
    assert batches == [32, 32, 6]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("width", "expected"), [(1, 2**20), (2**10, 2**10), (2**10 + 1, 2**9), (2**30, 64)]
)
def test_batches_are_powers_of_two_of_bounded_size(width, expected):
    assert integration._rows_of_batch(width) == expected


@pytest.mark.fast
def test_any_number_of_rows_needs_few_programs():
    features = RandomFeatures(8, random_state=0).fit(X)
    features.transform(np.ones((600, 5)))
    before = integration._features._cache_size()
    for rows in (513, 700, 1000, 1024):
        features.transform(np.ones((rows, 5)))
    assert integration._features._cache_size() <= before + 1


@pytest.mark.fast
def test_float64_stays_switched_off_for_the_user():
    assert not jax.config.jax_enable_x64
    phi = RandomFeatures(8, random_state=0).fit_transform(X)
    assert phi.dtype == np.float64
    assert not jax.config.jax_enable_x64
    assert jax.numpy.ones(3).dtype == "float32"


@pytest.mark.fast
def test_features_can_be_changed_in_place():
    phi = RandomFeatures(8, random_state=0).fit_transform(X)
    phi *= 2
    assert np.abs(phi).max() > 0.5


@pytest.mark.fast
def test_a_seed_repeats_the_draw_and_a_random_state_goes_on():
    seeded = RandomFeatures(8, random_state=3)
    first = seeded.fit(X).projection_
    np.testing.assert_array_equal(seeded.fit(X).projection_, first)
    going_on = RandomFeatures(8, random_state=np.random.RandomState(3))
    np.testing.assert_array_equal(going_on.fit(X).projection_, first)
    assert np.abs(going_on.fit(X).projection_ - first).max() > 0.1
    assert np.abs(seeded.set_params(random_state=4).fit(X).projection_ - first).max() > 0.1


def gamma_of(features):
    """Returns gamma of a transformer that has been fitted, which is the same for all columns."""
    [scale] = set(features.length_scale_)
    return 1 / (2 * scale**2)


@pytest.mark.fast
def test_scale_is_the_gamma_of_scikit_learn():
    assert gamma_of(RandomFeatures().fit(X)) == pytest.approx(1 / (5 * X.var()), rel=1e-14)
    assert gamma_of(RandomFeatures(gamma=0.25).fit(X)) == pytest.approx(0.25, rel=1e-15)
    assert gamma_of(RandomFeatures().fit(np.ones((3, 2)))) == pytest.approx(1.0, rel=1e-15)
    zeros = scipy.sparse.csr_array((3, 2))
    assert gamma_of(RandomFeatures().fit(zeros)) == pytest.approx(1.0, rel=1e-15)


@pytest.mark.fast
@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("mean", [0, 1e4, 1e8])
def test_scale_of_sparse_rows_is_that_of_dense_ones(mean, share):
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((40, 3)) < share, mean + rng.normal(size=(40, 3)), 0)
    for sparse in (scipy.sparse.csr_array(dense), scipy.sparse.csr_matrix(dense)):
        gamma = gamma_of(RandomFeatures().fit(sparse))
        assert gamma == pytest.approx(gamma_of(RandomFeatures().fit(dense)), rel=1e-12)
    twice = scipy.sparse.csr_array((np.ones(4), [0, 0, 1, 1], [0, 2, 4]))  # Entries of 2.
    dense = twice.toarray()
    assert gamma_of(RandomFeatures().fit(twice)) == gamma_of(RandomFeatures().fit(dense))


@pytest.mark.fast
def test_clones_and_pickles_are_equal_to_the_original():
    features = RandomFeatures(9, feature_map="hyperbolic", gamma=0.3, center=False, random_state=1)
    clone = sklearn.base.clone(features)
    assert clone.get_params() == features.get_params()
    features.fit(X)
    expected = features.transform(X)
    np.testing.assert_array_equal(clone.fit_transform(X), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(features)).transform(X), expected)


@pytest.mark.fast
def test_a_parameter_that_is_set_after_the_fit_waits_for_the_next_fit():
    features = RandomFeatures(8, random_state=0).fit(X)
    expected = features.transform(X)
    features.set_params(feature_map="positive", n_components=3, gamma=9.0, center=False)
    np.testing.assert_array_equal(features.transform(X), expected)
    assert features.fit_transform(X).shape == (70, 3)


@pytest.mark.fast
def test_features_have_names():
    features = RandomFeatures(3, random_state=0).fit(X)
    names = ["randomfeatures0", "randomfeatures1", "randomfeatures2"]
    assert features.get_feature_names_out().tolist() == names
    assert features.n_features_in_ == 5


@pytest.mark.fast
def test_data_frames_in_and_out():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcde"), index=np.arange(70) + 5)
    features = RandomFeatures(3, random_state=0).set_output(transform="pandas").fit(frame)
    assert features.feature_names_in_.tolist() == list("abcde")
    out = features.transform(frame)
    assert out.columns.tolist() == features.get_feature_names_out().tolist()
    assert out.index.tolist() == frame.index.tolist()
    np.testing.assert_array_equal(out.to_numpy(), features.set_output().transform(frame))
    with pytest.raises(ValueError, match="feature names should match"):
        features.transform(frame[list("edcba")])


@pytest.mark.fast
def test_threads_do_not_disturb_each_other():
    expected = [RandomFeatures(8, random_state=seed).fit_transform(X) for seed in range(8)]

    def transformed(seed):
        return RandomFeatures(8, random_state=seed).fit_transform(X)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        np.testing.assert_array_equal(list(threads.map(transformed, range(8))), expected)


@pytest.mark.slow
def test_a_grid_search_over_a_pipeline():
    x, y = load_iris(return_X_y=True)
    model = make_pipeline(RandomFeatures(random_state=0), RidgeClassifier(1e-2))
    grid = {
        "randomfeatures__n_components": np.array([2, 40]),
        "randomfeatures__gamma": ["scale", 0.3],
    }
    search = GridSearchCV(model, grid, cv=3, error_score="raise").fit(x, y)
    assert search.best_params_["randomfeatures__n_components"] == 40
    assert search.best_score_ > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("n_components", [16, 65, 256])
def test_the_gram_error_on_digits_is_below_that_of_rbf_sampler(n_components):
    x, _ = load_digits(return_X_y=True)
    train, test = train_test_split(x, test_size=400, random_state=0)
    kernel = rbf_kernel(test, gamma=1 / (train.shape[1] * train.var()))

    def errors(transformer):
        transformer.set_params(n_components=n_components, gamma="scale")
        for seed in range(40):
            phi = transformer.set_params(random_state=seed).fit(train).transform(test)
            yield np.linalg.norm(phi @ phi.T - kernel) / np.linalg.norm(kernel)

    assert_less(list(errors(RandomFeatures())), list(errors(RBFSampler())))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"n_components": 0}, ValueError, "n_components must be at least 1, got 0"),
        ({"n_components": 2.0}, TypeError, "n_components must be an integer, got 2.0"),
        ({"gamma": "auto"}, ValueError, "gamma must be 'scale' or a positive number .* got 'auto'"),
        ({"gamma": 0.0}, ValueError, "gamma must be 'scale' or a positive number .* got 0.0"),
        ({"gamma": np.inf}, ValueError, "gamma must be 'scale' or a positive number .* got inf"),
        ({"gamma": 1e308}, ValueError, "gamma must be 'scale' or a positive number .* got 1e.308"),
        ({"gamma": True}, ValueError, "gamma must be 'scale' or a positive number .* got True"),
        ({"gamma": None}, ValueError, "gamma must be 'scale' or a positive number .* got None"),
        ({"coupling": "best"}, ValueError, "coupling must be one of 'auto', 'iid', .*got 'best'"),
        ({"feature_map": "relu"}, ValueError, "feature_map must be one of 'trigonometric', .*relu"),
        ({"kernel": "laplacian"}, ValueError, "uses the Manhattan distance .* kernel='laplace'"),
        (
            {"kernel": "cosine"},
            ValueError,
            "kernel must be one of 'rbf', .* got 'cosine'",
        ),
        (
            {"kernel": "matern", "feature_map": "positive"},
            ValueError,
            "feature_map='positive' estimates only kernel='rbf', got kernel='matern'",
        ),
        ({"norms": "sqrt_dim"}, ValueError, "norms must be one of 'auto', 'chi', .*'sqrt_dim'"),
        ({"length_scale": 0.0}, ValueError, "length_scale must be a positive number up to 1e.300"),
        ({"length_scale": 10**400}, ValueError, "length_scale must be .* or one for each of 5"),
        ({"length_scale": 1e-320}, ValueError, "length_scale must be .* got 1e-320"),
        ({"length_scale": True}, ValueError, "length_scale must be .* got True"),
        ({"length_scale": [1.0, 2.0]}, ValueError, "or one for each of 5 columns, got .1.0, 2.0."),
        ({"length_scale": "one"}, ValueError, "length_scale must be a positive number .* 'one'"),
        ({"length_scale": 1.0, "gamma": 0.5}, ValueError, "leave one of them out, got .*gamma=0.5"),
        ({"center": "yes"}, TypeError, "center must be True or False, got 'yes'"),
        ({"random_state": "x"}, ValueError, "'x' cannot be used to seed"),
    ],
)
def test_parameters_are_checked_by_fit_and_kept_as_they_are(arguments, error, match):
    features = RandomFeatures(**arguments)
    for name, value in arguments.items():
        assert getattr(features, name) is value
    with pytest.raises(error, match=match):
        features.fit(X)


@pytest.mark.fast
def test_a_simplex_needs_two_dimensions():
    with pytest.raises(ValueError, match="needs at least 2 columns, got n_features = 1"):
        RandomFeatures(coupling="simplex").fit(X[:, :1])


def test_a_variance_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"variance is within the range of float64, got X.var"):
        RandomFeatures().fit(np.array([[0.0], [1e-160]]))
    assert np.isfinite(RandomFeatures(gamma=1.0).fit_transform([[0.0], [1e-160]])).all()


@pytest.mark.slow
def test_without_scikit_learn_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import simrf_jax.integrations.nnx\n"
        "import simrf_jax.integrations.sklearn"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "integrations.sklearn needs scikit-learn 1.6 or newer" in run.stderr
    assert "pip install 'simrf_jax[sklearn]'" in run.stderr
    assert run.returncode == 1


@pytest.mark.slow
def test_nothing_else_imports_scikit_learn():
    code = "import simrf_jax.integrations.nnx, sys; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
