import jax
import numpy as np
import pytest

from experiments.kernel_regression import classify, uci
from tests.experiments.kernel_regression import toy


@pytest.fixture
def split(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path, num_rows=401)
    return uci.load("car", str(tmp_path))


def draw(method, num_features=8, dim=4, trials=30):
    return classify.draw(jax.random.split(jax.random.key(0), trials), num_features, dim, method)


@pytest.mark.parametrize("method", ["simplex", "fast_simplex"])
def test_accuracies_are_those_of_a_loop_in_float64(split, method):
    w = draw(method)
    expected = [
        naive_accuracy(0.5 * split.train, 0.5 * split.test, split, rows)
        for rows in np.asarray(w, np.float64)
    ]
    np.testing.assert_allclose(classify.accuracies(w, split, 0.5), expected, atol=1e-12)


def naive_accuracy(train, test, split, w):
    def features(x):
        return np.exp(w @ x - x @ x)

    sums = np.zeros((split.num_classes, len(w)))
    for x, label in zip(train, split.train_labels, strict=True):
        sums[label] += features(x)
    classes = [np.argmax(sums @ features(x)) for x in test]
    return np.mean(classes == split.test_labels)


def test_padding_with_zeros_is_leaving_coordinates_of_w_out(split):
    w = draw("orthogonal", num_features=8, dim=8)
    padded = split._replace(
        **{name: np.pad(getattr(split, name), ((0, 0), (0, 4))) for name in ("train", "test")}
    )
    np.testing.assert_array_equal(
        classify.accuracies(w, split, 0.5), classify.accuracies(w, padded, 0.5)
    )


def test_batches_do_not_show(split, monkeypatch):
    w = draw("iid")
    whole = classify.accuracies(w, split, 0.5)
    assert np.unique(whole).size > 3
    monkeypatch.setattr(classify, "_FLOATS_AT_A_TIME", 7 * len(split.train) * 8)
    np.testing.assert_array_equal(classify.accuracies(w, split, 0.5), whole)


def test_far_rows_neither_overflow_nor_vanish(split):
    far = split._replace(test=split.test * 100)
    w = draw("simplex", trials=3)
    expected = [naive_accuracy_in_log_space(split, far.test, rows) for rows in np.asarray(w)]
    np.testing.assert_allclose(classify.accuracies(w, far, 1.0), expected, atol=1e-12)
    assert classify.exact_accuracies(far, np.array([1.0])) > 0.3


def naive_accuracy_in_log_space(split, test, w):
    sums = np.zeros((split.num_classes, len(w)))
    for x, label in zip(split.train, split.train_labels, strict=True):
        sums[label] += np.exp(w @ x - x @ x)
    classes = []
    for x in test:
        exponents = np.asarray(w, np.float64) @ x
        classes.append(np.argmax(sums @ np.exp(exponents - exponents.max())))
    return np.mean(classes == split.test_labels)


@pytest.mark.fast
def test_exact_kernel(split):
    def accuracy(sigma):
        classes = []
        for x in sigma * split.test:
            weights = np.exp(-np.square(x - sigma * split.train).sum(axis=1) / 2)
            classes.append(np.argmax(weights @ np.eye(split.num_classes)[split.train_labels]))
        return np.mean(classes == split.test_labels)

    sigmas = np.array([0.01, 0.3, 1.0])
    expected = [accuracy(sigma) for sigma in sigmas]
    assert len(set(expected)) > 1
    np.testing.assert_allclose(classify.exact_accuracies(split, sigmas), expected)


@pytest.mark.fast
def test_mean_distance(split):
    distances = [np.linalg.norm(0.5 * (x + y)) for x in split.test for y in split.train]
    assert classify.mean_distance(split, 0.5) == pytest.approx(np.mean(distances))
