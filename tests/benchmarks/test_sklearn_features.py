"""Tests of the comparison of kernel approximations in scikit-learn, on a few trials."""

import numpy as np
import pytest
from sklearn.metrics.pairwise import rbf_kernel

from benchmarks import sklearn_features

SIZES = (16, 64)


@pytest.fixture(scope="module")
def splits():
    """Returns a few splits of digits."""
    rows, labels = sklearn_features.load("digits")
    return [sklearn_features.split(rows, labels, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def small():
    """Returns splits of fewer rows."""
    rows, labels = sklearn_features.load("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn_features, "NUM_TRAIN", 300)
        patch.setattr(sklearn_features, "NUM_TEST", 200)
        return [sklearn_features.split(rows, labels, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def results(small):
    """Returns the errors and accuracies of digits."""
    return {"digits": sklearn_features.measure(small, SIZES)}


@pytest.mark.slow
def test_splits_are_scaled_by_the_training_rows_and_disjoint(splits):
    rows, _ = sklearn_features.load("digits")
    for data in splits:
        assert len(data.train) == 1000
        assert len(data.test) == 500
        np.testing.assert_allclose(data.train.mean(axis=0), 0, atol=1e-12)
        deviations = data.train.std(axis=0)
        np.testing.assert_allclose(deviations[deviations > 0], 1)
        assert data.gamma == pytest.approx(1 / (64 * data.train.var()))
        pixels = data.with_offset().train
        np.testing.assert_allclose(pixels.min(axis=0), 0, atol=1e-12)  # Some are always white.
        assert rbf_kernel(pixels[:3], gamma=1.0) == pytest.approx(
            rbf_kernel(data.train[:3], gamma=1.0)
        )
        both = np.concatenate([data.train, data.test])
        assert len(np.unique(both, axis=0)) == len(both) <= len(rows)


@pytest.mark.slow
def test_methods_come_nearer_to_the_kernel_with_more_features(results):
    of_data = results["digits"]
    for method in sklearn_features.METHODS:
        few, many = of_data[method].mean(axis=1)
        assert many[0] < 0.8 * few[0]
        assert few[1] < many[1] < of_data["exact"].mean() + 0.02
    assert sklearn_features.ratio_of_errors(of_data).mean() < 0


@pytest.mark.slow
def test_tables_and_the_figure_have_every_data_set_and_method(results, small, tmp_path):
    ratios = sklearn_features.table_of_ratios(results, SIZES)
    assert "| data set | 16 | 64 |" in ratios
    assert "below RBFSampler at every size on 1 of 1 data sets" in ratios
    methods = sklearn_features.table_of_methods(results, 1)
    assert methods.startswith("| data set | RandomFeatures, error |")
    assert f"{results['digits']['exact'].mean():.3f}" in methods
    options = sklearn_features.table_of_options({"digits": small})
    assert len(options.splitlines()) == 2 + len(sklearn_features.OPTIONS)
    path = tmp_path / "figures" / "figure.png"
    sklearn_features.draw_figure(results, SIZES, path)
    assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_a_table_says_if_no_data_set_has_the_smaller_error(results):
    of_data = results["digits"]
    swapped = of_data | {
        "RandomFeatures": of_data["RBFSampler"],
        "RBFSampler": of_data["RandomFeatures"],
    }
    text = sklearn_features.table_of_ratios({"digits": swapped}, SIZES)
    assert "not below RBFSampler at every size on any data set" in text
