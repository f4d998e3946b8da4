import os
import pathlib
import sys

import numpy as np
import PIL.Image
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.data import in_memory, records
from tests.experiments.vit import prepared
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast


def numbered(n=100):
    """Images that carry their own number in every pixel."""
    images = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None, None] / n, (n, 4, 4, 1))
    return in_memory.Split(np.ascontiguousarray(images), np.arange(n, dtype=np.int32))


def test_digits_have_a_fixed_stratified_split():
    digits = in_memory.load_digits("")
    assert digits.train.images.shape == (1437, 8, 8, 1)
    assert digits.test.images.shape == (360, 8, 8, 1)
    assert digits.test.labels[:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    assert np.bincount(digits.test.labels).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    images = np.concatenate([digits.train.images, digits.test.images])
    assert (images.min(), images.max()) == (0, 1)
    again = in_memory.load_digits("")
    np.testing.assert_array_equal(again.train.images, digits.train.images)


def batches(seed=0, n=100, **options):
    options = {"batch_size": 32, "shift": 0.0, "flip": False} | options
    return in_memory.train_batches(numbered(n), seed=seed, **options)


def test_batches_are_a_function_of_seed_and_step():
    np.testing.assert_array_equal(batches()[7]["label"], batches()[7]["label"])
    np.testing.assert_array_equal(batches(shift=1.0)[7]["image"], batches(shift=1.0)[7]["image"])
    assert batches()[7]["label"].tolist() != batches(seed=1)[7]["label"].tolist()
    assert batches()[7]["label"].tolist() != batches()[8]["label"].tolist()


def test_images_stay_with_their_labels_and_are_scaled():
    batch = batches()[3]
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int32
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0], batch["label"] / 100 * 2 - 1, atol=1e-6)


def test_every_epoch_is_a_new_order_of_all_images():
    stream = batches(batch_size=20)
    epochs = np.stack([stream[step]["label"] for step in range(15)]).reshape(3, 100)
    for epoch in epochs:
        assert sorted(epoch) == list(range(100))
    assert not (epochs[0] == epochs[1]).all()


def augmented(image, n, **options):
    split = in_memory.Split(np.repeat(image[None, :, :, None], n, axis=0), np.zeros(n, np.int32))
    batch = in_memory.train_batches(split, batch_size=n, seed=0, **options)[0]
    return (batch["image"][..., 0] + 1) / 2


def test_translation_moves_by_up_to_the_shift_each_way():
    image = np.zeros((9, 7), np.float32)
    image[4, 3] = 1
    moved = augmented(image, 2000, shift=1.5, flip=False)
    np.testing.assert_allclose(moved.sum(axis=(1, 2)), 1, rtol=1e-5)  # Nothing left the image.
    down = moved.sum(axis=2) @ np.arange(9) - 4
    right = moved.sum(axis=1) @ np.arange(7) - 3
    for offset in (down, right):
        assert np.abs(offset).max() <= 1.5 + 1e-5
        assert_mean(offset, 0)
        assert_mean(offset**2, 1.5**2 / 3)  # Uniform.
    assert_mean(down * right, 0)


def test_translation_fills_up_with_zeros_and_none_is_none():
    image = np.ones((5, 5), np.float32)
    moved = augmented(image, 100, shift=1.0, flip=False)
    np.testing.assert_allclose(moved[:, 1:-1, 1:-1], 1, rtol=1e-6)
    assert (moved.sum(axis=(1, 2)) < 25).all()
    ramp = np.arange(25, dtype=np.float32).reshape(5, 5) / 25
    still = augmented(ramp, 3, shift=0.0, flip=False)
    np.testing.assert_allclose(still, np.broadcast_to(ramp, (3, 5, 5)), atol=1e-6)


def test_half_of_the_images_are_mirrored():
    image = np.zeros((5, 5), np.float32)
    image[2, 1] = 1
    columns = augmented(image, 400, shift=0.0, flip=True).argmax(axis=2)[:, 2]
    assert set(columns.tolist()) == {1, 3}
    assert_mean(columns, 2)


@pytest.mark.parametrize("batch_size", [7, 100, 128])
def test_evaluation_sees_every_image_once(batch_size):
    found = list(in_memory.eval_batches(numbered(), batch_size))
    assert {len(b["label"]) for b in found} == {batch_size}
    labels = np.concatenate([b["label"][b["weight"] == 1] for b in found])
    assert labels.tolist() == list(range(100))
    assert sum(b["weight"].sum() for b in found) == 100


def make_dataset(**changes):
    split = numbered()
    return in_memory.Dataset(split, split, num_classes=100)._replace(**changes)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("label", [-1, 100])
def test_a_label_in_memory_that_is_no_class_is_named(monkeypatch, split, label):
    labels = numbered().labels
    labels[7] = label
    dataset = make_dataset(**{split: numbered()._replace(labels=labels)})
    monkeypatch.setitem(in_memory.DATASETS, "digits", lambda _: dataset)
    match = f"Image 7 of the {split} split of digits has the label {label}, .* from 0 to 99"
    with pytest.raises(UserError, match=match):
        in_memory.load("digits", "")


def test_images_in_memory_of_two_sizes_are_refused(monkeypatch):
    dataset = make_dataset(test=numbered()._replace(images=np.zeros((100, 5, 4, 1), np.float32)))
    monkeypatch.setitem(in_memory.DATASETS, "digits", lambda _: dataset)
    match = r"of digits must be of one size, got \(4, 4, 1\) to train on and \(5, 4, 1\) to test"
    with pytest.raises(UserError, match=match):
        in_memory.load("digits", "")


def test_digits_without_scikit_learn_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"digits come with scikit-learn: .*sklearn\.datasets"):
        in_memory.load("digits", "")


def test_fashion_mnist_is_decoded_by_its_own_features(tmp_path):
    prepared.write(tmp_path, "fashion_mnist", train=5, test=3)
    fashion = in_memory.load("fashion_mnist", str(tmp_path))
    assert fashion.train.images.shape == (5, 28, 28, 1)
    assert sorted(fashion.test.labels) == [0, 1, 2]
    assert fashion.num_classes == 100
    np.testing.assert_allclose(fashion.train.images[:, :, 0], 40 / 255, rtol=1e-6)


def test_fashion_mnist_of_two_sizes_is_refused(tmp_path, monkeypatch):
    prepared.write(tmp_path, "fashion_mnist", train=5, test=3)
    sizes = iter([(28, 28), (28, 27), *[(28, 28)] * 9])
    monkeypatch.setattr(records, "decode", lambda *_: PIL.Image.new("L", next(sizes)))
    match = r"the train split of fashion_mnist in .* of one size, got 27 x 28 and 28 x 28"
    with pytest.raises(UserError, match=match):
        in_memory.load("fashion_mnist", str(tmp_path))


def test_fashion_mnist_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(
        UserError, match=r"--config.data_dir=DIR .*experiments.vit.tools.prepare fashion_mnist"
    ):
        in_memory.load_fashion_mnist(str(tmp_path))


@pytest.mark.slow
def test_fashion_mnist_is_read_from_tensorflow_datasets():
    folder = os.environ.get("TFDS_DATA_DIR", "")
    if not pathlib.Path(folder, "fashion_mnist").exists():
        pytest.skip("needs Fashion-MNIST, prepared, in TFDS_DATA_DIR")
    fashion = in_memory.load_fashion_mnist("")
    assert fashion.train.images.shape == (60_000, 28, 28, 1)
    assert fashion.train.images.dtype == np.float32
    assert (fashion.train.images.min(), fashion.train.images.max()) == (0, 1)
    assert np.bincount(fashion.train.labels).tolist() == [6_000] * 10
    assert len(fashion.test.labels) in (9_946, 10_000)  # The official one has 10,000.
