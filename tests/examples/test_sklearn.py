"""Tests of the examples with scikit-learn."""

import numpy as np
import pytest

from examples import sklearn_gaussian_process, sklearn_kernel_ridge


@pytest.mark.slow
def test_kernel_ridge_comes_near_the_exact_kernel_with_many_features():
    results, exact = sklearn_kernel_ridge.scores(sizes=(32, 1024))
    assert exact > 0.4
    assert results[32] < results[1024] - 0.05
    assert abs(results[1024] - exact) < 0.03


@pytest.fixture(scope="module")
def of_diabetes():
    """Returns the test targets, the prediction of 512 features and that of the exact process."""
    train, test, targets, test_targets = sklearn_gaussian_process.data()
    model = sklearn_gaussian_process.fit(train, targets, 512)
    exact = sklearn_gaussian_process.predict_exactly(model, train, targets, test)
    return test_targets, sklearn_gaussian_process.predict(model, test), exact


@pytest.mark.slow
def test_the_gaussian_process_predicts_with_honest_error_bars(of_diabetes):
    targets, (mean, std), _ = of_diabetes
    assert np.sqrt(np.mean((targets - mean) ** 2)) < 0.8  # The targets have a deviation of 1.
    assert 0.9 < np.mean(np.abs(targets - mean) < 1.96 * std) < 0.99


@pytest.mark.slow
def test_the_gaussian_process_is_near_the_exact_one(of_diabetes):
    _, (mean, std), (exact_mean, exact_std) = of_diabetes
    assert np.sqrt(np.mean((mean - exact_mean) ** 2)) < 0.1
    np.testing.assert_allclose(std, exact_std, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("example", [sklearn_kernel_ridge, sklearn_gaussian_process])
def test_examples_print_their_results(example, capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert "features" in lines[0]
