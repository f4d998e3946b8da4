import os
import pathlib

import numpy as np
import pytest

from experiments.vit import data

pytestmark = pytest.mark.fast


def numbered(n=100):
    """Images that carry their own number in every pixel."""
    images = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None, None] / n, (n, 4, 4, 1))
    return data.Split(np.ascontiguousarray(images), np.arange(n, dtype=np.int32))


def test_digits_have_a_fixed_stratified_split():
    digits = data.load_digits("")
    assert digits.train.images.shape == (1437, 8, 8, 1)
    assert digits.test.images.shape == (360, 8, 8, 1)
    assert digits.test.labels[:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    assert np.bincount(digits.test.labels).tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]
    images = np.concatenate([digits.train.images, digits.test.images])
    assert (images.min(), images.max()) == (0, 1)
    again = data.load_digits("")
    np.testing.assert_array_equal(again.train.images, digits.train.images)


def batches(seed=0, n=100, **options):
    options = {"batch_size": 32, "shift": 0, "flip": False} | options
    return data.train_batches(numbered(n), seed=seed, **options)


def test_batches_are_a_function_of_seed_and_step():
    np.testing.assert_array_equal(batches()[7]["label"], batches()[7]["label"])
    np.testing.assert_array_equal(batches(shift=1)[7]["image"], batches(shift=1)[7]["image"])
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


def test_augmentation_moves_and_mirrors():
    image = np.zeros((1, 5, 5, 1), np.float32)
    image[0, 2, 1] = 1
    split = data.Split(np.repeat(image, 200, axis=0), np.zeros(200, np.int32))
    options = {"batch_size": 200, "seed": 0}
    [shifted] = [data.train_batches(split, shift=1, flip=False, **options)[0]["image"]]
    rows, columns = np.nonzero(shifted[..., 0] == 1)[1:]
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {
        (r, c) for r in (1, 2, 3) for c in (0, 1, 2)
    }
    flipped = data.train_batches(split, shift=0, flip=True, **options)[0]["image"]
    columns = np.nonzero(flipped[..., 0] == 1)[2]
    assert set(columns.tolist()) == {1, 3}
    assert 60 < (columns == 3).sum() < 140
    still = data.train_batches(split, shift=0, flip=False, **options)[0]["image"]
    np.testing.assert_array_equal(still, split.images * 2 - 1)


@pytest.mark.parametrize("batch_size", [7, 100, 128])
def test_evaluation_sees_every_image_once(batch_size):
    found = list(data.eval_batches(numbered(), batch_size))
    assert {len(b["label"]) for b in found} == {batch_size}
    labels = np.concatenate([b["label"][b["weight"] == 1] for b in found])
    assert labels.tolist() == list(range(100))
    assert sum(b["weight"].sum() for b in found) == 100


def test_fashion_mnist_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--config.data_dir=DIR .*download_and_prepare"):
        data.load_fashion_mnist(str(tmp_path))


def test_fashion_mnist_is_read_from_tensorflow_datasets():
    folder = os.environ.get("TFDS_DATA_DIR", "")
    if not pathlib.Path(folder, "fashion_mnist").exists():
        pytest.skip("needs Fashion-MNIST, prepared, in TFDS_DATA_DIR")
    fashion = data.load_fashion_mnist("")
    assert fashion.train.images.shape == (60_000, 28, 28, 1)
    assert fashion.train.images.dtype == np.float32
    assert (fashion.train.images.min(), fashion.train.images.max()) == (0, 1)
    assert np.bincount(fashion.train.labels).tolist() == [6_000] * 10
    assert len(fashion.test.labels) in (9_946, 10_000)  # The official one has 10,000.
