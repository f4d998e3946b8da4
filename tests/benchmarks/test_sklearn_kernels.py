"""Tests of the comparison of kernels in scikit-learn, on one split."""

import numpy as np
import pytest

from benchmarks import sklearn_features, sklearn_kernels


@pytest.fixture(scope="module")
def data():
    """Returns a small split of digits."""
    rows, labels = sklearn_features.load("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn_features, "NUM_TRAIN", 300)
        patch.setattr(sklearn_features, "NUM_TEST", 200)
        return sklearn_features.split(rows, labels, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sklearn_kernels.KERNELS)
@pytest.mark.parametrize("method", sklearn_kernels.METHODS)
def test_every_method_comes_near_the_kernel_with_many_features(data, method, kernel, monkeypatch):
    errors = []
    most = 200 if method == "Nystroem" else 4096  # Nystroem has a feature for each row at most.
    for size in (32, most):
        monkeypatch.setattr(sklearn_kernels, "CHOSEN", size)
        error, accuracy, seconds = sklearn_kernels.judge(method, kernel, data, 0)
        errors.append(error)
        assert 0.3 < accuracy <= 1
        assert seconds > 0
    # The error of random features falls like the root of their number.
    bound = 0.8 if method == "Nystroem" else 2 * (32 / most) ** 0.5
    assert errors[1] < bound * errors[0]


@pytest.mark.fast
def test_tables_have_a_row_for_each_kernel_and_data_set():
    num_kernels, num_methods = len(sklearn_kernels.KERNELS), len(sklearn_kernels.METHODS)
    shape = (num_kernels, 2, sklearn_kernels.TRIALS, num_methods, 3)
    results = np.random.default_rng(0).uniform(0.5, 1, shape)
    results[..., 0] *= 2 ** np.arange(num_methods)
    relative = sklearn_kernels.summary(results, 0).splitlines()[2].split("|")[2:-1]
    assert relative[0].strip() == "1.000 (0.000)"
    assert 1.6 < float(relative[1].split()[0]) < 2.5
    for what in range(3):
        assert len(sklearn_kernels.summary(results, what).splitlines()) == 2 + shape[0]
    assert len(sklearn_kernels.table(results, 0, ("one", "other")).splitlines()) == 4
