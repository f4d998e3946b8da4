"""Images and labels: whole data sets in memory, and batches that depend on (seed, step) alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grain
import numpy as np

from experiments.harness.mistakes import UserError, user_mistakes
from experiments.vit.data import records


class Split(NamedTuple):
    """Images ``[n, height, width, channels]`` in [0, 1], float32, and int32 labels ``[n]``."""

    images: np.ndarray
    labels: np.ndarray

    def part(self, start: int, stop: int) -> Split:
        """Returns the examples from ``start`` up to ``stop``."""
        return Split(self.images[start:stop], self.labels[start:stop])


class Dataset(NamedTuple):
    """A data set and how it is split."""

    train: Split
    test: Split
    num_classes: int


def load_digits(data_dir: str) -> Dataset:
    """Loads scikit-learn's handwritten digits, 8 x 8 images, 1,437 to train and 360 to test.

    They come with scikit-learn; ``data_dir`` is not used. They have no official split: this one is
    stratified and fixed.

    References:
      Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998).
    """
    del data_dir
    with user_mistakes(ImportError, prefix="The digits come with scikit-learn: "):
        import sklearn.datasets
        import sklearn.model_selection

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    parts = sklearn.model_selection.train_test_split(
        images, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )
    return Dataset(Split(parts[0], parts[2]), Split(parts[1], parts[3]), num_classes=10)


def load_fashion_mnist(data_dir: str) -> Dataset:
    """Loads Fashion-MNIST, 28 x 28 images of clothes, as TensorFlow Datasets prepared them.

    The split is that of the prepared files, which is the official one only if they are.

    Args:
      data_dir: The folder that holds ``fashion_mnist/``; "" for ``TFDS_DATA_DIR`` or, without it,
        the default of TensorFlow Datasets.

    Raises:
      UserError: If it is not there, and the message says how to get it, or it is damaged.

    References:
      Xiao et al., Fashion-MNIST (2017).
    """
    train, test = (
        records.open_records("fashion_mnist", split, data_dir) for split in ("train", "test")
    )
    return Dataset(_decode_all(train), _decode_all(test), num_classes=train.num_classes)


def _decode_all(examples: records.Records) -> Split:
    images, labels = zip(*examples.read(range(len(examples))), strict=True)
    if len(sizes := {image.size for image in images}) > 1:
        (width, height), (other_width, other_height) = sorted(sizes)[:2]
        raise UserError(
            f"The images of {examples.name} must be of one size, got {height} x {width} and "
            f"{other_height} x {other_width}."
        )
    pixels = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255
    pixels = pixels.reshape(*pixels.shape[:3], examples.channels)
    return Split(pixels, np.array(labels, np.int32))


DATASETS: dict[str, Callable[[str], Dataset]] = {
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
}


def load(name: str, data_dir: str) -> Dataset:
    """Loads a data set, and refuses labels that are no class and images of two sizes.

    JAX raises no error for such a label: one below 0 counts from the end, and one beyond the last
    class makes the loss NaN.

    Args:
      name: A name of ``DATASETS``.
      data_dir: The folder that holds it, unless it comes with a package.

    Raises:
      UserError: If it is not there, is damaged, or has such labels or images.
    """
    dataset = DATASETS[name](data_dir)
    for kind, split in (("train", dataset.train), ("test", dataset.test)):
        wrong = np.flatnonzero((split.labels < 0) | (split.labels >= dataset.num_classes))
        if wrong.size:
            raise UserError(
                f"Image {wrong[0]} of the {kind} split of {name} has the label "
                f"{split.labels[wrong[0]]}, and must have one from 0 to {dataset.num_classes - 1}."
            )
    sizes = [split.images.shape[1:] for split in (dataset.train, dataset.test)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"The images of {name} must be of one size, got {sizes[0]} to train on and {sizes[1]} "
            "to test on."
        )
    return dataset


def train_batches(
    split: Split, *, batch_size: int, seed: int, shift: float, flip: bool
) -> grain.MapDataset:
    """Returns shuffled, augmented batches without end.

    Each epoch has another order. A batch may span two epochs, and one generator augments it whole.

    Args:
      split: Images and labels; each comes once before any comes again.
      batch_size: Number of images in a batch.
      seed: Seed of the order and the augmentation.
      shift: Largest random translation in pixels, each way, interpolated linearly; the border is
        padded with zeros.
      flip: If true, mirror each image with probability one half.

    Returns:
      A data set whose element ``[step]`` is ``{"image": [batch, h, w, c], "label": [batch]}``,
      the images scaled to [-1, 1].

    Example:
      >>> split = Split(np.zeros((100, 8, 8, 1), np.float32), np.arange(100, dtype=np.int32))
      >>> batches = train_batches(split, batch_size=32, seed=0, shift=0.5, flip=False)
      >>> batches[7]["image"].shape, bool((batches[7]["label"] == batches[7]["label"]).all())
      ((32, 8, 8, 1), True)
    """

    def gather(indices: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        images = _translate(split.images[indices], shift, rng)
        if flip:
            mirrored = rng.random(len(images)) < 0.5
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        return {"image": _scale(images), "label": split.labels[indices]}

    order = grain.MapDataset.range(len(split.labels)).seed(seed).shuffle().repeat()
    return order.batch(batch_size).random_map(gather)


def eval_batches(split: Split, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields all of a split once, in order, the last batch filled up with images of weight 0."""
    for start in range(0, len(split.labels), batch_size):
        part = slice(start, start + batch_size)
        images, labels = _scale(split.images[part]), split.labels[part]
        batch = {"image": images, "label": labels, "weight": np.ones(len(labels), np.float32)}
        missing = batch_size - len(labels)
        yield {k: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for k, x in batch.items()}


def _scale(images: np.ndarray) -> np.ndarray:
    return images * 2 - 1


def _translate(images: np.ndarray, shift: float, rng: np.random.Generator) -> np.ndarray:
    """Moves each image by up to ``shift`` pixels each way, zeros coming in from the border."""
    n, height, width, _ = images.shape
    reach = math.ceil(shift)
    border = (reach, reach + 1)
    padded = np.pad(images, [(0, 0), border, border, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    corner = reach + rng.uniform(-shift, shift, (2, n))
    whole = np.floor(corner).astype(int)
    down, right = (corner - whole).astype(np.float32)[:, :, None, None, None]
    top, left = whole
    index = np.arange(n)

    def row(top: np.ndarray) -> np.ndarray:
        """Returns the windows from row ``top`` on, interpolated between two columns."""
        return (1 - right) * windows[index, top, left] + right * windows[index, top, left + 1]

    moved = (1 - down) * row(top) + down * row(top + 1)
    return np.moveaxis(moved, 1, -1)
