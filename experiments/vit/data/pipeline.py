"""Batches of a run, which depend on (seed, step) alone; each host gets its own rows of them.

Of records, each host reads only its rows. Of a data set in memory it makes the whole batch, because
one generator augments all the images of a batch, and keeps its rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grain
import numpy as np
import PIL.Image
import PIL.ImageOps
from ml_collections import ConfigDict

from experiments.harness.mistakes import UserError
from experiments.vit.data import augment, in_memory, records, shuffle
from experiments.vit.data.stream import Batch, concatenate
from experiments.vit.data.window_reader import WindowReader

# Returns the ascending numbers of the images that this host reads, given the size of a batch.
Rows = Callable[[int], np.ndarray]


# Iterates over a host's rows of all images of a split.
Evaluation = Callable[[], Iterator[Batch]]


class Input(NamedTuple):
    """The images of a run, or those alone that a trained model is tested on.

    Attributes:
      channels: Number of channels of the images.
      num_classes: Number of classes of the labels.
      num_train: Examples to train on; 0 if only what is tested on is open.
      num_test: Examples to test on.
      eval_batches: Iterates over this host's rows of the whole test split, once and in order, the
        last batches filled up with images of ``weight`` 0.
      num_parts: Parts of this host's rows that workers make. Each worker always makes the same
        part, as it holds the windows in which the part is shuffled; with 1 it makes all rows.
      train_part: Returns the part of a number, step * num_parts + part.
      num_held_out: Examples that are held out of training to choose the best checkpoint.
      held_out_batches: Iterates over these, as ``eval_batches``.
    """

    channels: int
    num_classes: int
    num_train: int
    num_test: int
    eval_batches: Evaluation
    num_parts: int = 1
    train_part: Callable[[int], Batch] = lambda number: {}
    num_held_out: int = 0
    held_out_batches: Evaluation | None = None

    def train_batch(self, step: int) -> Batch:
        """Returns this host's rows of the batch of a step."""
        first = step * self.num_parts
        return concatenate([self.train_part(first + part) for part in range(self.num_parts)])


def load(config: ConfigDict, *, eval_batch_size: int, rows: Rows = np.arange) -> Input:
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
        held_out leaves none to train on; the two images of a mixture are not on one host; or the
        images have another size and are not resized.
    """
    mine = rows(config.batch_size)
    if config.augment.mixup and {*mine.tolist()} != {*(mine ^ 1).tolist()}:
        raise UserError(
            "config.batch_size must be a multiple of twice the devices that share the images of a "
            f"batch, as mixup takes images in pairs, got {config.batch_size}."
        )
    open_input = _from_memory if config.in_memory else _from_records
    return open_input(config, eval_batch_size, rows)


def load_test(config: ConfigDict, *, eval_batch_size: int, rows: Rows = np.arange) -> Input:
    """Opens what a trained model is tested on, and of records nothing else; see ``load``."""
    open_test = _from_memory if config.in_memory else _test_records
    return open_test(config, eval_batch_size, rows)


def _from_memory(config: ConfigDict, eval_batch_size: int, rows: Rows) -> Input:
    dataset = in_memory.load(config.dataset, config.data_dir)
    height, width, channels = dataset.train.images.shape[1:]
    if (height, width) != (config.image_size, config.image_size):
        raise UserError(
            f"config.image_size must be {height}, as the images of {config.dataset} are {height} x "
            f"{width} and those in memory are not resized, got {config.image_size}."
        )
    size, count = len(dataset.train.labels), _num_held_out(config, len(dataset.train.labels))
    train, held_out = (
        dataset.train.part(*ends) for ends in ((0, size - count), (size - count, size))
    )
    batches = in_memory.train_batches(
        train,
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

    def evaluation(split: in_memory.Split) -> Evaluation:
        return lambda: map(take_rows, in_memory.eval_batches(split, eval_batch_size))

    return Input(
        channels,
        dataset.num_classes,
        num_train=len(train.labels),
        num_test=len(dataset.test.labels),
        eval_batches=evaluation(dataset.test),
        train_part=train_batch,
        num_held_out=count,
        held_out_batches=evaluation(held_out) if count else None,
    )


def _num_held_out(config: ConfigDict, size: int) -> int:
    """Returns the number of training examples to hold out, which are the last ones."""
    count = math.ceil(config.held_out * size)
    if count >= size:
        raise UserError(
            f"config.held_out must leave at least one of the {size} training images of "
            f"{config.dataset}, got {config.held_out}."
        )
    return count


def _from_records(config: ConfigDict, eval_batch_size: int, rows: Rows) -> Input:
    train = records.open_records(config.dataset, "train", config.data_dir)
    held_out = None
    if count := _num_held_out(config, len(train)):
        first = len(train) - count
        held_out = _evaluation(train.part(first, len(train)), config, eval_batch_size, rows)
        train = train.part(0, first)
    read, parts = _shuffled(train, config, rows(config.batch_size))

    def train_part(number: int) -> Batch:
        step, part = divmod(number, len(parts))
        positions = step * config.batch_size + parts[part]
        return _mix(_read_train(read, positions, config), positions, config, train.num_classes)

    return _test_records(config, eval_batch_size, rows)._replace(
        num_train=len(train),
        num_parts=len(parts),
        train_part=train_part,
        num_held_out=count,
        held_out_batches=held_out,
    )


def _test_records(config: ConfigDict, eval_batch_size: int, rows: Rows) -> Input:
    split = records.DATASETS[config.dataset].test_split
    test = records.open_records(config.dataset, split, config.data_dir)
    batches = _evaluation(test, config, eval_batch_size, rows)
    return Input(test.channels, test.num_classes, 0, len(test), batches)


def _evaluation(
    examples: records.Records, config: ConfigDict, eval_batch_size: int, rows: Rows
) -> Evaluation:
    def eval_batches() -> Iterator[Batch]:
        mine = rows(eval_batch_size)
        starts = np.arange(0, len(examples), eval_batch_size)
        images = grain.MapDataset.source((starts[:, None] + mine).ravel())
        threads = max(1, config.num_workers)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        read = functools.partial(_read_eval, examples, config=config)
        return iter(images.map(read).to_iter_dataset(options).batch(len(mine)))

    return eval_batches


# Returns the images and labels at some positions of the run.
Read = Callable[[list[int]], list[records.Decoded]]


def _shuffled(
    train: records.Records, config: ConfigDict, rows: np.ndarray
) -> tuple[Read, list[np.ndarray]]:
    """Returns how examples are read in the order of the run, and the parts of the host's rows.

    Raises:
      UserError: If there are too few examples for the lanes, or too few lanes for the workers.
    """
    if not config.shuffle_window:
        return functools.partial(_read_shuffled, train, config.seed), [rows]
    lanes = config.batch_size // shuffle.LANE
    starts = shuffle.blocks([stop - start for _, start, stop in train.files])
    windows = shuffle.Windows(config.seed, lanes, config.shuffle_window, starts)
    if not windows.length:
        raise UserError(
            f"config.shuffle_window must be 0 with fewer examples than the {lanes} lanes of a "
            f"batch, got {config.shuffle_window} for {len(train)} examples."
        )
    lane_of_row = rows // shuffle.LANE
    mine = np.unique(lane_of_row)
    if config.num_workers > len(mine):
        raise UserError(
            f"config.num_workers must be at most {len(mine)}, the number of lanes that this host "
            f"reads, got {config.num_workers}."
        )
    parts = np.array_split(mine, max(1, config.num_workers))
    rows_of_parts = [rows[np.isin(lane_of_row, part)] for part in parts]
    return WindowReader(train, windows).read, rows_of_parts


def _read_shuffled(
    examples: records.Records, seed: int, positions: list[int]
) -> list[records.Decoded]:
    """Reads examples of which each comes once before any comes again."""
    indices = []
    for position in positions:
        epoch, place = divmod(position, len(examples))
        indices.append(int(shuffle.order(seed, epoch, len(examples))[place]))
    return examples.read(indices)


def _read_train(read: Read, positions: np.ndarray, config: ConfigDict) -> Batch:
    """Reads and augments the examples at some positions of the run."""
    images, labels = zip(*read(positions.tolist()), strict=True)
    rngs = _generators(config, shuffle.AUGMENTATION, positions)
    augmented = [_augmented(x, rng, config) for x, rng in zip(images, rngs, strict=True)]
    return {"image": _to_array(augmented), "label": np.array(labels, np.int32)}


def _read_eval(examples: records.Records, position: int, config: ConfigDict) -> Batch:
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


def _augmented(
    image: PIL.Image.Image, rng: np.random.Generator, config: ConfigDict
) -> PIL.Image.Image:
    """Applies crop, flip and RandAugment, in this order, as configured."""
    if config.augment.crop_area < 1:
        box = augment.inception_box(image.size, config.augment.crop_area, rng)
    else:
        box = augment.center_box(image.size, config.eval_crop)
    image = augment.resize(image, box, config.image_size)
    if config.augment.flip and rng.random() < 0.5:
        image = PIL.ImageOps.mirror(image)
    return augment.randaugment(
        image,
        rng,
        num_layers=config.augment.randaugment_layers,
        magnitude=config.augment.randaugment_magnitude,
    )


def _mix(batch: Batch, positions: np.ndarray, config: ConfigDict, num_classes: int) -> Batch:
    """Mixes images with weights from Beta(alpha, alpha); with alpha 0 it returns the batch."""
    alpha = config.augment.mixup
    if not alpha:
        return batch
    rngs = _generators(config, shuffle.MIXUP, positions)
    drawn = np.array([rng.beta(alpha, alpha) for rng in rngs])
    # The larger share is an image's own, or neighbors would often become two of the same mixture.
    weights = np.maximum(drawn, 1 - drawn)
    images, labels = augment.mixup(
        batch["image"], batch["label"], weights=weights, num_classes=num_classes
    )
    return {"image": images, "label": labels}


def _generators(
    config: ConfigDict, number: int, positions: np.ndarray
) -> Iterator[np.random.Generator]:
    """Yields a generator for each position; see the numbers of draws in ``shuffle``."""
    return (np.random.default_rng((config.seed, number, p)) for p in positions.tolist())


def _to_array(images: list[PIL.Image.Image]) -> np.ndarray:
    """Returns float32 images ``[batch, height, width, channels]`` in [-1, 1]."""
    pixels = np.stack([np.asarray(image) for image in images]).astype(np.float32)
    pixels /= 127.5  # In place: fresh memory takes longer than the arithmetic.
    pixels -= 1
    return pixels if pixels.ndim == 4 else pixels[..., None]
