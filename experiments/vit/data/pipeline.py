"""Batches of a run, which depend on (seed, step) alone; each host gets its own rows of them.

Of records, each host reads only its rows. Of a data set in memory it makes the whole batch, because
one generator augments all the images of a batch, and keeps its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grain
import ml_collections
import numpy as np
import PIL.Image
import PIL.ImageOps

from experiments.harness.mistakes import UserError
from experiments.vit.data import augment, in_memory, records
from experiments.vit.data.randaugment import randaugment
from experiments.vit.data.stream import Batch

# Returns the ascending numbers of the images that this host reads, given the size of a batch.
Rows = Callable[[int], np.ndarray]

# Draws are seeded by (seed, number, index): ORDER by the epoch, AUGMENTATION and MIXUP by the
# position of the example in the run. In memory, Grain draws the order and the augmentation instead.
ORDER, AUGMENTATION, MIXUP = range(3)


class Input(NamedTuple):
    """The images of a run.

    Attributes:
      channels: Number of channels of the images.
      num_classes: Number of classes of the labels.
      num_train: Examples to train on.
      num_test: Examples to test on.
      train_batch: Returns this host's rows of the batch of a step.
      eval_batches: Iterates over this host's rows of the whole test split, once and in order, the
        last batches filled up with images of ``weight`` 0.
    """

    channels: int
    num_classes: int
    num_train: int
    num_test: int
    train_batch: Callable[[int], Batch]
    eval_batches: Callable[[], Iterator[Batch]]


def load(
    config: ml_collections.ConfigDict, *, eval_batch_size: int, rows: Rows = np.arange
) -> Input:
    """Opens the data set of a config.

    Args:
      config: Config with all the fields of ``experiments.vit.config.FIELDS``.
      eval_batch_size: Images of an evaluation batch, over all hosts.
      rows: Picklable function that returns the images of a batch that this host reads, given the
        size of the batch; by default all images.

    Returns:
      Batches of the data set, and its sizes.

    Raises:
      UserError: If the data set is not there, and the message says how to get it; it is damaged;
        the two images of a mixture are not on one host; or the images have another size and are
        not resized.
    """
    if config.augment.mixup and not _has_pairs(rows(config.batch_size)):
        raise UserError(
            "config.batch_size must be a multiple of twice the devices that share the images of a "
            f"batch, as mixup takes images in pairs, got {config.batch_size}."
        )
    open_input = _from_memory if config.in_memory else _from_records
    return open_input(config, eval_batch_size, rows)


def _has_pairs(rows: np.ndarray) -> bool:
    """Returns whether each row comes with its neighbour: 0 and 1, 2 and 3, and so on."""
    return set(rows.tolist()) == set((rows ^ 1).tolist())


def _from_memory(config: ml_collections.ConfigDict, eval_batch_size: int, rows: Rows) -> Input:
    dataset = in_memory.load(config.dataset, config.data_dir)
    height, width, channels = dataset.train.images.shape[1:]
    if (height, width) != (config.image_size, config.image_size):
        raise UserError(
            f"config.image_size must be {height}, as the images of {config.dataset} are {height} x "
            f"{width} and those in memory are not resized, got {config.image_size}."
        )
    batches = in_memory.train_batches(
        dataset.train,
        batch_size=config.batch_size,
        seed=config.seed,
        shift=config.augment.shift,
        flip=config.augment.flip,
    )

    def take_rows(batch: Batch) -> Batch:
        return {name: x[rows(len(x))] for name, x in batch.items()}

    def train_batch(step: int) -> Batch:
        positions = step * config.batch_size + rows(config.batch_size)
        return _mix(take_rows(batches[step]), positions, config, dataset.num_classes)

    def eval_batches() -> Iterator[Batch]:
        return map(take_rows, in_memory.eval_batches(dataset.test, eval_batch_size))

    sizes = len(dataset.train.labels), len(dataset.test.labels)
    return Input(channels, dataset.num_classes, *sizes, train_batch, eval_batches)


def _from_records(config: ml_collections.ConfigDict, eval_batch_size: int, rows: Rows) -> Input:
    train, test = (
        records.open_records(config.dataset, split, config.data_dir)
        for split in ("train", records.DATASETS[config.dataset].test_split)
    )

    def train_batch(step: int) -> Batch:
        positions = step * config.batch_size + rows(config.batch_size)
        return _mix(_read_train(train, positions, config), positions, config, train.num_classes)

    def eval_batches() -> Iterator[Batch]:
        mine = rows(eval_batch_size)
        starts = np.arange(0, len(test), eval_batch_size)
        images = grain.MapDataset.source((starts[:, None] + mine).ravel())
        threads = max(1, config.num_workers)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        read = functools.partial(_read_eval, test, config=config)
        return iter(images.map(read).to_iter_dataset(options).batch(len(mine)))

    sizes = len(train), len(test)
    return Input(train.channels, train.num_classes, *sizes, train_batch, eval_batches)


def _read_train(
    examples: records.Records, positions: np.ndarray, config: ml_collections.ConfigDict
) -> Batch:
    """Reads shuffled, augmented examples; each comes once before any comes again."""
    indices = []
    for position in positions:
        epoch, place = divmod(position, len(examples))
        indices.append(int(_order(config.seed, epoch, len(examples))[place]))
    images, labels = zip(*examples.read(indices), strict=True)
    rngs = (np.random.default_rng((config.seed, AUGMENTATION, p)) for p in positions.tolist())
    augmented = [_augmented(x, rng, config) for x, rng in zip(images, rngs, strict=True)]
    return {"image": _to_array(augmented), "label": np.array(labels, np.int32)}


def _read_eval(
    examples: records.Records, position: int, config: ml_collections.ConfigDict
) -> Batch:
    """Reads one example; beyond the last it returns a black image of weight 0."""
    side = config.image_size
    if position < len(examples):
        [(image, label)] = examples.read([int(position)])
        crop = augment.resize(image, augment.center_box(image.size, config.eval_crop), side)
        weight = 1
    else:
        crop = PIL.Image.new(records.MODES[examples.channels], (side, side))
        label, weight = 0, 0
    return {
        "image": _to_array([crop])[0],
        "label": np.array(label, np.int32),
        "weight": np.array(weight, np.float32),
    }


@functools.lru_cache(maxsize=2)  # A batch may begin in one epoch and end in the next.
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, ORDER, epoch)).permutation(size)


def _augmented(
    image: PIL.Image.Image, rng: np.random.Generator, config: ml_collections.ConfigDict
) -> PIL.Image.Image:
    """Applies crop, flip and RandAugment, in this order, as configured."""
    if config.augment.crop_area < 1:
        box = augment.inception_box(image.size, config.augment.crop_area, rng)
    else:
        box = augment.center_box(image.size, config.eval_crop)
    image = augment.resize(image, box, config.image_size)
    if config.augment.flip and rng.random() < 0.5:
        image = PIL.ImageOps.mirror(image)
    return randaugment(
        image,
        rng,
        num_layers=config.augment.randaugment_layers,
        magnitude=config.augment.randaugment_magnitude,
    )


def _mix(
    batch: Batch, positions: np.ndarray, config: ml_collections.ConfigDict, num_classes: int
) -> Batch:
    """Mixes images with weights from Beta(alpha, alpha); with alpha 0 it returns the batch."""
    alpha = config.augment.mixup
    if not alpha:
        return batch
    rngs = (np.random.default_rng((config.seed, MIXUP, p)) for p in positions.tolist())
    drawn = np.array([rng.beta(alpha, alpha) for rng in rngs])
    # The larger share is an image's own, or neighbours would often become two of the same mixture.
    weights = np.maximum(drawn, 1 - drawn)
    images, labels = augment.mixup(
        batch["image"], batch["label"], weights=weights, num_classes=num_classes
    )
    return {"image": images, "label": labels}


def _to_array(images: list[PIL.Image.Image]) -> np.ndarray:
    """Returns float32 images ``[batch, height, width, channels]`` in [-1, 1]."""
    pixels = np.stack([np.asarray(image) for image in images]).astype(np.float32)
    pixels /= 127.5  # In place: fresh memory takes longer than the arithmetic.
    pixels -= 1
    return pixels if pixels.ndim == 4 else pixels[..., None]
