import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from experiments.kernel_regression import classify, uci
from tests.experiments.kernel_regression import toy


@pytest.fixture
def split(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path, num_rows=401)
    return uci.load("car", str(tmp_path))


def draw(method, num_features=8, dim=4, trials=30):
    return classify.draw(jax.random.split(jax.random.key(0), trials), num_features, dim, method)


@pytest.mark.slow
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


@pytest.mark.slow
def test_padding_with_zeros_is_leaving_coordinates_of_w_out(split):
    w = draw("orthogonal", num_features=8, dim=8)
    padded = split._replace(
        **{name: np.pad(getattr(split, name), ((0, 0), (0, 4))) for name in ("train", "test")}
    )
    np.testing.assert_array_equal(
        classify.accuracies(w, split, 0.5), classify.accuracies(w, padded, 0.5)
    )


@pytest.mark.slow
def test_batches_do_not_show(split, monkeypatch):
    w = draw("iid")
    whole = classify.accuracies(w, split, 0.5)
    assert np.unique(whole).size > 3
    monkeypatch.setattr(classify, "_FLOATS_AT_A_TIME", 7 * len(split.train) * 8)
    np.testing.assert_array_equal(classify.accuracies(w, split, 0.5), whole)


@pytest.mark.parametrize(("train_scale", "test_scale"), [(1, 100), (20, 1), (20, 20)])
def test_far_rows_neither_overflow_nor_vanish(split, train_scale, test_scale):
    far = split._replace(train=split.train * train_scale, test=split.test * test_scale)
    w = draw("simplex", trials=5)
    expected = [naive_accuracy_in_log_space(far, rows) for rows in np.asarray(w, np.float64)]
    np.testing.assert_allclose(classify.accuracies(w, far, 1.0), expected, atol=1e-12)


def naive_accuracy_in_log_space(split, w):
    squares = np.sum(split.train**2, axis=1)[:, None]
    exponents = (split.train @ w.T - squares)[None] + (split.test @ w.T)[:, None]
    weights = np.exp(exponents - exponents.max(axis=(1, 2), keepdims=True)).sum(axis=2)
    scores = weights @ np.eye(split.num_classes)[split.train_labels]
    return np.mean(scores.argmax(axis=1) == split.test_labels)


@pytest.mark.slow
def test_classification_is_attention(split):
    [w] = draw("simplex", trials=1)
    train, test = (0.5 * jnp.asarray(x, jnp.float32)[:, None] for x in (split.train, split.test))
    votes = jax.nn.one_hot(split.train_labels, split.num_classes)[:, None]
    # Attention estimates the softmax kernel, which this bias turns into the Gaussian kernel.
    bias = -jnp.sum(train**2, axis=-1).T[None] / 2
    scores = simrf_jax.random_feature_attention(test, train, votes, w, bias=bias, scale=1.0)
    accuracy = np.mean(np.asarray(scores)[:, 0].argmax(axis=-1) == split.test_labels)
    np.testing.assert_allclose(classify.accuracies(w[None], split, 0.5), [accuracy], atol=1e-6)


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
