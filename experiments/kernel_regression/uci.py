"""Eight UCI data sets of Sec. 5.3 of the paper, and the split of the published experiments."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

from experiments.harness.downloads import Place

ARCHIVE = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
PLACE = Place("--config.data_dir", "SIMRF_DATA_DIR", "uci", "the file of the UCI repository")
TEST_SHARE = 0.05


class Source(NamedTuple):
    """Address and columns of a data set; its last column is the label.

    Attributes:
      path: Path of the file below ``ARCHIVE``.
      sha256: Hash of the file.
      sigma: Factor of the rows in the published experiments.
      separator: Separator of columns; None for white space.
      categorical: Columns to encode as one-hot vectors.
      dropped: Columns without information, such as names.
    """

    path: str
    sha256: str
    sigma: float
    separator: str | None = ","
    categorical: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


# Data sets in the paper's order.
SOURCES = {
    "abalone": Source(
        "abalone/abalone.data",
        "de37cdcdcaaa50c309d514f248f7c2302a5f1f88c168905eba23fe2fbc78449f",
        0.41331138,
        categorical=(0,),
    ),
    "banknote": Source(
        "00267/data_banknote_authentication.txt",
        "d0539aaed2139ba7a587b3e34fb345ce503ff7d5d33dbf9912d8e195ce425cb9",
        1.06445901,
    ),
    "car": Source(
        "car/car.data",
        "b703a9ac69f11e64ce8c223c0a40de4d2e9d769f7fb20be5f8f2e8a619893d83",
        0.77656608,
        categorical=tuple(range(6)),
    ),
    "yeast": Source(
        "yeast/yeast.data",
        "7cf61776fc04f527f93bf57a327b863893a1225d82df02d457e8950173218258",
        0.90918797,
        None,
        dropped=(0,),
    ),
    "cmc": Source(
        "cmc/cmc.data",
        "ad2a49da55df24b061a994ecc4d90c856aba35acd05138851aa251c4f06303c9",
        0.48389667,
    ),
    "nursery": Source(
        "nursery/nursery.data",
        "8e0389c3dd37590248a921c2726d869ee96b817761a35eb8416afa24f31f931d",
        0.18788887,
        categorical=tuple(range(8)),
    ),
    "wifi": Source(
        "00422/wifi_localization.txt",
        "2ae62faa28071e47b875d6bb64175238574a8d1366d1b64ab355bc1c87220294",
        0.21997651,
        None,
    ),
    "chess": Source(
        "chess/king-rook-vs-king/krkopt.data",
        "497b61d20d3d9e2ce310f9f4d2ca92dbdb0691d9e449d983ec6f7baf387dc7a9",
        0.25754408,
        categorical=tuple(range(6)),
    ),
}


class Split(NamedTuple):
    """Standardized rows ``[n, dim]`` in float64, and their classes ``[n]``."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    num_classes: int


def find(name: str, data_dir: str = "") -> pathlib.Path:
    """Returns the path of a data set's file, after downloading it if necessary.

    Args:
      name: One of ``SOURCES``.
      data_dir: Folder with the files, under their names in the UCI repository or as
        ``abalone.data``, ``banknote.txt`` and so on. "" stands for the folder in
        ``SIMRF_DATA_DIR`` or, without that variable, for a cache to which the file is downloaded.

    Raises:
      UserError: If the folder lacks the file, it cannot be downloaded, or it is not the file that
        the UCI repository publishes.
    """
    source = SOURCES[name]
    short_name = name + pathlib.PurePosixPath(source.path).suffix
    return PLACE.find(name, ARCHIVE + source.path, source.sha256, data_dir, short_name)


def read(name: str, data_dir: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Reads rows ``[n, dim]``, numbers before one-hot vectors, and classes ``[n]``.

    The last line of the file is left out, as in the published experiments. In nursery it is empty;
    in the other files it is a row like any other.

    Args:
      name: One of ``SOURCES``.
      data_dir: Folder with the files; see ``find``.

    Raises:
      UserError: If ``find`` cannot find the file.
    """
    source = SOURCES[name]
    lines = find(name, data_dir).read_text().splitlines()[:-1]
    *columns, labels = np.array([line.split(source.separator) for line in lines]).T
    numbers = [
        column.astype(np.float64)[:, None]
        for i, column in enumerate(columns)
        if i not in source.categorical + source.dropped
    ]
    indicators = [
        column[:, None] == np.unique(column)
        for i, column in enumerate(columns)
        if i in source.categorical
    ]
    rows = np.concatenate([*numbers, *indicators], axis=1, dtype=np.float64)
    return rows, np.unique(labels, return_inverse=True)[1]


def load(name: str, data_dir: str = "", *, validation: bool = False) -> Split:
    """Returns the published split: 95 per cent to train, 5 to test, after a fixed permutation.

    Args:
      name: One of ``SOURCES``.
      data_dir: Folder with the files; see ``find``.
      validation: If true, leave the test set alone and test on the same number of rows held out of
        the training set.

    Raises:
      UserError: If ``find`` cannot find the file.
    """
    rows, labels = read(name, data_dir)
    order = np.random.default_rng(42).permutation(len(rows))
    num_test = int(len(rows) * TEST_SHARE)
    train, test = order[: int(len(rows) * (1 - TEST_SHARE))], order[-num_test:]
    if validation:
        train, test = train[:-num_test], train[-num_test:]
    mean, std = rows[train].mean(axis=0), rows[train].std(axis=0)
    rows = (rows - mean) / std
    return Split(rows[train], labels[train], rows[test], labels[test], int(labels.max()) + 1)
