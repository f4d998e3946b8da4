"""Data sets that TensorFlow Datasets prepared, read record by record and without TensorFlow."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from experiments.harness.mistakes import UserError, user_mistakes

# The modes of Pillow, by the number of channels.
MODES = {1: "L", 3: "RGB"}

_NEEDED = "Prepared data sets need what requirements/train.txt names: "


class Prepared(NamedTuple):
    """A data set of TensorFlow Datasets with the features image and label.

    Attributes:
      test_split: The labeled split that is not trained on.
      manual_files: Files that can be downloaded only with an account.
      manual_source: Address of these files.
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


Decoded = tuple[PIL.Image.Image, int]  # An image, in mode L or RGB, and its label.


class File(NamedTuple):
    """The records of a file that belong to a split, from ``start`` up to ``stop``."""

    path: str
    start: int
    stop: int


class NotPreparedError(UserError):
    """A data set is not there in the format that is read; preparing it helps."""


@dataclasses.dataclass(frozen=True)
class Records:
    """The examples of one split, their images still encoded.

    Attributes:
      name: The name in errors, such as ``"the train split of imagenet2012 in '/data'"``.
      source: Random access to the records; may be pickled, and then opens its files anew.
      files: The files that hold them, in the order of the examples.
      features: The meaning of the bytes of a record.
      num_classes: Number of classes of the labels.
      channels: Number of channels of the images, 1 or 3.
    """

    name: str
    source: Any
    files: tuple[File, ...]
    features: Any
    num_classes: int
    channels: int

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self.source)

    def part(self, start: int, stop: int) -> Records:
        """Returns the examples from ``start`` up to ``stop`` as records of their own."""
        from array_record.python import array_record_data_source

        files, first = [], 0
        for file in self.files:
            size = file.stop - file.start
            low, high = (min(max(end - first, 0), size) for end in (start, stop))
            if low < high:
                files.append(File(file.path, file.start + low, file.start + high))
            first += size
        source = array_record_data_source.ArrayRecordDataSource(
            [f"{file.path}[{file.start}:{file.stop}]" for file in files]
        )
        name = f"{self.name}, from its example {start}"
        return dataclasses.replace(self, name=name, source=source, files=tuple(files))

    def read(self, indices: Sequence[int]) -> list[Decoded]:
        """Reads records in parallel, by a request each, and returns images and labels.

        Raises:
          UserError: If an example cannot be read or decoded, or has a label that is no class; the
            message names the example.
        """
        which = f"Of the examples {indices} of {self.name} some"
        # Each kind of storage, and of damage, has errors of its own.
        with user_mistakes(Exception, prefix=f"{which} cannot be read: "):
            records = self.source.__getitems__(indices)
        return [self.decode(i, record) for i, record in zip(indices, records, strict=True)]

    def decode(self, index: int, record: bytes) -> Decoded:
        """Returns the image and the label of the bytes of a record.

        Raises:
          UserError: If it is damaged; see ``read``.
        """
        import tensorflow_datasets as tfds

        # Each kind of damage has errors of its own, of many types.
        with user_mistakes(Exception, prefix=f"Example {index} of {self.name} is damaged: "):
            example = self.features.deserialize_example_np(
                record, decoders={"image": tfds.decode.SkipDecoding()}
            )
            label = example["label"]
            if label is None:  # Of a file that shrinks while it is read, records come back empty.
                raise ValueError("it has no label.")
            image = decode(example["image"], self.channels)
        if not 0 <= label < self.num_classes:
            raise UserError(
                f"Example {index} of {self.name} has the label {label}, and must have one from 0 "
                f"to {self.num_classes - 1}."
            )
        return image, label


def find_data_dir(data_dir: str) -> str:
    """Returns the folder, or for "" ``TFDS_DATA_DIR`` or the default of TensorFlow Datasets."""
    with user_mistakes(ImportError, prefix=_NEEDED):
        import tensorflow_datasets as tfds

    return os.path.expanduser(
        data_dir or os.environ.get("TFDS_DATA_DIR") or tfds.core.constants.DATA_DIR
    )


def open_records(name: str, split: str, data_dir: str) -> Records:
    """Opens a split of a prepared data set, whichever version of it there is.

    Args:
      name: Name in ``DATASETS``.
      split: Name that TensorFlow Datasets gives the split.
      data_dir: The folder that holds ``name/``, or one in a bucket, ``gs://bucket/folder``, which
        needs ``gcsfs``; "" for ``TFDS_DATA_DIR`` or, without it, the default of TensorFlow
        Datasets.

    Returns:
      Its records.

    Raises:
      NotPreparedError: If it is not there in ArrayRecord format; the message says how to get it.
      UserError: If it cannot be read, or not the whole of it, or is not the data set of this name.
    """
    data_dir = find_data_dir(data_dir)
    import tensorflow_datasets as tfds

    what = f"The {name} in {data_dir!r}"
    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        raise NotPreparedError(
            f"There is no {name} in {data_dir!r}. Say where it is by --config.data_dir=DIR or "
            f"TFDS_DATA_DIR, or {how_to_prepare(name, data_dir)}"
        ) from None
    except Exception as error:  # Each kind of storage, and of damage, has errors of its own.
        raise UserError(f"{what} cannot be read: {error}") from error
    info = builder.info
    if info.name != name:
        raise UserError(f"{what} is not what its folder says: it is {info.name}.")
    fault = ""
    if (file_format := info.file_format.value) != "array_record":
        fault = f"is in {file_format} format, not in array_record"
    elif split not in info.splits:
        fault = f"has no split {split!r}, only {', '.join(info.splits)}"
    if fault:
        prepare = how_to_prepare(name, data_dir)
        raise NotPreparedError(f"{what} {fault}; delete it and {prepare}")
    _check_features(what, info.features)
    if not info.splits[split].num_examples:
        raise UserError(f"{what} has no examples in its split {split!r}.")
    _check_whole(info.splits[split])
    return Records(
        f"the {split} split of {name} in {data_dir!r}",
        builder.as_data_source(split).data_source,
        tuple(
            File(os.fspath(file.filename), file.skip, file.skip + file.take)
            for file in info.splits[split].file_instructions
        ),
        info.features,
        info.features["label"].num_classes,
        info.features["image"].shape[-1],
    )


def _check_features(what: str, features: Any) -> None:
    """Refuses examples that are not images of bytes, each of one class."""
    from tensorflow_datasets.core import features as kinds

    given = dict(features.items()) if isinstance(features, kinds.FeaturesDict) else {}
    image, label = given.get("image"), given.get("label")
    if not (
        isinstance(image, kinds.Image)
        and image.np_dtype == np.uint8
        and image.shape[-1] in MODES
        and isinstance(label, kinds.ClassLabel)
        and label.num_classes
    ):
        listed = ", ".join(f"{name}: {given[name]!r}" for name in sorted(given))
        raise UserError(
            f"{what} must have the features image, of 1 or 3 channels in uint8, and label, of "
            f"classes, got {listed}."
        )


def _check_whole(split: Any) -> None:
    """Opens every file; one that is missing or cut off would else end a run in its midst."""
    with user_mistakes(ImportError, prefix=_NEEDED):
        from array_record.python import array_record_data_source

    def check(path: os.PathLike[str], length: int) -> None:
        with user_mistakes(Exception, prefix=f"{path} cannot be read: "):
            found = len(array_record_data_source.ArrayRecordDataSource(os.fspath(path)))
        if found != length:
            raise UserError(f"{path} should hold {length} examples, and holds {found}.")

    # Each file in a bucket takes a request, so many are opened at once.
    with futures.ThreadPoolExecutor(32) as pool:
        list(pool.map(check, split.filepaths, split.shard_lengths))


def how_to_prepare(name: str, data_dir: str) -> str:
    """Returns the end of a sentence that says how to prepare a data set."""
    if "://" in data_dir:
        return f"{how_to_prepare(name, 'DIR')}, and copy DIR/{name} there."
    return (
        "prepare it, which needs TensorFlow once (pip install tensorflow): "
        f"python -m experiments.vit.tools.prepare {name} --data_dir={data_dir}"
    )


def decode(encoded: bytes, channels: int) -> PIL.Image.Image:
    """Decodes an image to 1 or 3 channels; ImageNet has some in CMYK and some in gray."""
    with PIL.Image.open(io.BytesIO(encoded)) as image:
        return image.convert(MODES[channels])
