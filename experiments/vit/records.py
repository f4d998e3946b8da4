"""Data sets that TensorFlow Datasets prepared, read record by record and without TensorFlow."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import PIL.Image


class Prepared(NamedTuple):
    """What is known of a data set of TensorFlow Datasets with the features image and label.

    Attributes:
      test_split: The labelled split that is not trained on.
      manual_files: What nobody may download without an account.
      manual_source: Where they are.
    """

    test_split: str
    manual_files: tuple[str, ...] = ()
    manual_source: str = ""


DATASETS: dict[str, Prepared] = {
    "fashion_mnist": Prepared("test"),
    "imagenet2012": Prepared(
        "validation",
        ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"),
        "https://image-net.org/download-images",
    ),
    "i_naturalist2021": Prepared("val"),
    "places365_small": Prepared("validation"),
}


class Records(NamedTuple):
    """The examples of one split, their images still encoded.

    Attributes:
      source: Random access to them; may be pickled, and then opens its files anew.
      num_classes: Of the labels.
      channels: Of the images, 1 or 3.
    """

    source: Any
    num_classes: int
    channels: int

    def __len__(self) -> int:
        """How many examples there are."""
        return len(self.source)

    def read(self, indices: Sequence[int]) -> list[tuple[PIL.Image.Image, int]]:
        """Images, in mode L or RGB, and labels; the records are read in parallel.

        Raises:
          OSError: If an image cannot be decoded; the message names the example.
        """
        found = []
        for index, example in zip(indices, self.source.__getitems__(indices), strict=True):
            try:
                found.append((decode(example["image"], self.channels), example["label"]))
            except OSError as error:
                raise OSError(f"Example {index} of {self.source} is damaged: {error}") from error
        return found


def find_data_dir(data_dir: str) -> str:
    """The folder itself, or for "" ``TFDS_DATA_DIR`` or the default of TensorFlow Datasets."""
    import tensorflow_datasets as tfds

    return os.path.expanduser(
        data_dir or os.environ.get("TFDS_DATA_DIR") or tfds.core.constants.DATA_DIR
    )


def open_records(name: str, split: str, data_dir: str) -> Records:
    """Opens a split of a prepared data set, whichever version of it there is.

    Args:
      name: Of ``DATASETS``.
      split: As TensorFlow Datasets calls it.
      data_dir: The folder that holds ``name/``, or one in a bucket, ``gs://bucket/folder``, which
        needs ``gcsfs``; "" for ``TFDS_DATA_DIR`` or, without it, the default of TensorFlow
        Datasets.

    Returns:
      Its records.

    Raises:
      FileNotFoundError: If it is not there in ArrayRecord format; the message says how to get it.
      OSError: If it cannot be read, or not the whole of it.
    """
    import tensorflow_datasets as tfds

    data_dir = find_data_dir(data_dir)
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        raise FileNotFoundError(
            f"There is no {name} in {data_dir!r}. Say where it is by --config.data_dir=DIR or "
            f"TFDS_DATA_DIR, or {how_to_prepare(name, data_dir)}"
        ) from None
    except Exception as error:  # Each kind of storage, and of damage, has errors of its own.
        raise OSError(f"The {name} in {data_dir!r} cannot be read: {error}") from error
    splits, file_format = builder.info.splits, builder.info.file_format.value
    if file_format != "array_record":
        raise FileNotFoundError(
            f"The {name} in {data_dir!r} is in {file_format} format, not in array_record; delete "
            f"it and {how_to_prepare(name, data_dir)}"
        )
    if split not in splits:
        raise FileNotFoundError(
            f"The {name} in {data_dir!r} has no split {split!r}, only {', '.join(splits)}; delete "
            f"it and {how_to_prepare(name, data_dir)}"
        )
    _check_whole(splits[split])
    source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    features = builder.info.features
    return Records(source, features["label"].num_classes, features["image"].shape[-1])


def _check_whole(split: Any) -> None:
    """Opens every file; one that is missing or cut off would else end a run in its midst."""
    from array_record.python import array_record_data_source

    def check(path: os.PathLike[str], length: int) -> None:
        try:
            found = len(array_record_data_source.ArrayRecordDataSource(os.fspath(path)))
        except Exception as error:
            raise OSError(f"{path} cannot be read: {error}") from error
        if found != length:
            raise OSError(f"{path} should hold {length} examples, and holds {found}.")

    # Of a bucket many files at once; each takes a request.
    with futures.ThreadPoolExecutor(32) as pool:
        list(pool.map(check, split.filepaths, split.shard_lengths))


def how_to_prepare(name: str, data_dir: str) -> str:
    """The end of a sentence, with the command."""
    if "://" in data_dir:
        return f"{how_to_prepare(name, 'DIR')}, and copy DIR/{name} there."
    return (
        "prepare it, which needs TensorFlow once (pip install tensorflow): "
        f"python -m experiments.vit.prepare {name} --data_dir={data_dir}"
    )


def decode(encoded: bytes, channels: int) -> PIL.Image.Image:
    """An image of 1 or 3 channels; ImageNet has some in CMYK, and some in grey."""
    with PIL.Image.open(io.BytesIO(encoded)) as image:
        return image.convert({1: "L", 3: "RGB"}[channels])
