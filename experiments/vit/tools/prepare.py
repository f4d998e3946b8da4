"""Prepares a data set: ``python -m experiments.vit.tools.prepare NAME --data_dir=DIR``.

Run it once, on one machine and on its disk. The trainer reads the files without TensorFlow, also
from a bucket that they are copied to.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import tensorflow_datasets as tfds
from etils import epath

from experiments.harness.mistakes import UserError, exit_on_user_error, user_mistakes
from experiments.vit.data import records


def prepare(name: str, data_dir: str, manual_dir: str = "") -> str:
    """Downloads a data set and writes it as ArrayRecord; one that is prepared stays as it is.

    Args:
      name: Name in ``records.DATASETS``.
      data_dir: The folder for ``name/``, on a disk; "" as for ``records.open_records``. In a bucket
        a data set can only be described.
      manual_dir: Folder of the files that were downloaded by hand; "" for ``downloads/manual`` in
        ``data_dir``.

    Returns:
      One line that says what is prepared.

    Raises:
      UserError: If files are not there that must be downloaded by hand or that TensorFlow Datasets
        should have brought; the folder is that of a bucket where the data set is not; TensorFlow
        is needed and not installed; or files cannot be read or written.
    """
    data_dir = records.find_data_dir(data_dir)
    try:
        return describe(name, data_dir)
    except records.NotPreparedError:
        if "://" in data_dir:  # ArrayRecord does not write to buckets.
            raise
    manual_dir = manual_dir or os.path.join(data_dir, "downloads", "manual")
    known = records.DATASETS[name]
    folder = epath.Path(manual_dir)  # It may be in a bucket.
    with user_mistakes(ImportError, OSError, prefix=f"{manual_dir} cannot be read: "):
        missing = [file for file in known.manual_files if not (folder / file).exists()]
    if missing:
        raise UserError(
            f"{name} must be downloaded by hand, from {known.manual_source}, which asks for an "
            f"account. In {manual_dir!r} there is no {' and no '.join(missing)}; "
            "--manual_dir=DIR says where else to look."
        )
    options = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare(download_config=options)
    except ImportError as error:
        raise UserError(
            f"Preparing {name} needs TensorFlow, once (pip install tensorflow): {error}"
        ) from error
    except FileNotFoundError as error:
        raise UserError(
            f"TensorFlow Datasets cannot prepare {name}: {error}\nIts wheels lack some files; a "
            "clone of https://github.com/tensorflow/datasets has them (pip install -e CLONE)."
        ) from error
    except OSError as error:  # A full disk, or no network.
        raise UserError(f"TensorFlow Datasets cannot prepare {name}: {error}") from error
    return describe(name, data_dir)


def describe(name: str, data_dir: str) -> str:
    """Says how many examples of how many classes there are.

    Raises:
      NotPreparedError: If the data set is not prepared.
      UserError: If it cannot be read.
    """
    splits = [
        (split, records.open_records(name, split, data_dir))
        for split in ("train", records.DATASETS[name].test_split)
    ]
    counts = ", ".join(f"{len(examples)} in {split}" for split, examples in splits)
    return f"{name} in {data_dir}: {splits[0][1].num_classes} classes, {counts}."


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares what the command line names; mistakes end it with one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=records.DATASETS)
    parser.add_argument("--data_dir", default="", help="Folder for it; else TFDS_DATA_DIR.")
    parser.add_argument("--manual_dir", default="", help="Where files downloaded by hand lie.")
    arguments = parser.parse_args(argv)
    with exit_on_user_error():
        print(prepare(arguments.name, arguments.data_dir, arguments.manual_dir))


if __name__ == "__main__":
    main()
