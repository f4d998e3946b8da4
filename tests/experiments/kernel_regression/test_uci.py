import os

import numpy as np
import pytest

from experiments.harness import downloads
from experiments.harness.mistakes import UserError
from experiments.kernel_regression import uci
from tests.experiments.kernel_regression import toy

pytestmark = pytest.mark.fast


def test_rows_are_numbers_then_one_hot_vectors_without_the_last_line(monkeypatch, tmp_path):
    lines = toy.add(monkeypatch, tmp_path)
    rows, classes = uci.read("car", str(tmp_path))
    assert rows.shape == (60, 4)
    for line, row, label in zip(lines, rows, classes, strict=False):
        a, _, letter, b, name = line.split(",")
        np.testing.assert_array_equal(row, [float(a), float(b), letter == "x", letter == "y"])
        assert name == f"class{label}"


def test_split_is_the_published_one(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path)
    rows, classes = uci.read("car", str(tmp_path))
    split = uci.load("car", str(tmp_path))
    order = np.random.default_rng(42).permutation(60)
    np.testing.assert_array_equal(split.train_labels, classes[order[:57]])
    np.testing.assert_array_equal(split.test_labels, classes[order[57:]])
    np.testing.assert_allclose(split.train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(split.train.std(axis=0), 1)
    mean, std = rows[order[:57]].mean(axis=0), rows[order[:57]].std(axis=0)
    np.testing.assert_allclose(split.test * std + mean, rows[order[57:]], atol=1e-12)


def test_validation_rows_come_from_the_training_set(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path)
    _, classes = uci.read("car", str(tmp_path))
    order = np.random.default_rng(42).permutation(60)
    split = uci.load("car", str(tmp_path), validation=True)
    np.testing.assert_array_equal(split.train_labels, classes[order[:54]])
    np.testing.assert_array_equal(split.test_labels, classes[order[54:57]])
    np.testing.assert_allclose(split.train.mean(axis=0), 0, atol=1e-12)


def test_folder_of_the_environment_and_both_names(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path)
    monkeypatch.setenv("SIMRF_DATA_DIR", str(tmp_path))
    assert uci.find("car") == tmp_path / "toy.data"
    (tmp_path / "toy.data").rename(tmp_path / "car.data")
    assert uci.find("car") == tmp_path / "car.data"


def test_missing_file_says_both_ways(tmp_path):
    message = (
        r"no krkopt.data or chess.data in .* by SIMRF_DATA_DIR or.*--config.data_dir=DIR.*https://"
    )
    with pytest.raises(UserError, match=message):
        uci.find("chess", str(tmp_path))
    with pytest.raises(UserError, match=r"There is no abalone.data in /"):
        uci.find("abalone", str(tmp_path))


def test_no_network_says_both_ways(monkeypatch):
    def offline(*arguments, **keywords):
        raise ConnectionError("no route to host")

    monkeypatch.delenv("SIMRF_DATA_DIR", raising=False)
    monkeypatch.setattr(downloads.pooch, "retrieve", offline)
    message = "Cannot download wifi: no route to host.*--config.data_dir=DIR.*downloaded once"
    with pytest.raises(UserError, match=message):
        uci.find("wifi")


def test_download_is_kept_in_the_cache(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path)
    (tmp_path / "files" / "toy").mkdir(parents=True)
    (tmp_path / "toy.data").rename(tmp_path / "files" / "toy" / "toy.data")
    fetched = []

    def download(url, output_file, pooch):
        fetched.append(url)
        source = tmp_path / "files" / url.removeprefix(uci.ARCHIVE)
        with open(output_file, "wb") as file:
            file.write(source.read_bytes())

    retrieve = downloads.pooch.retrieve
    monkeypatch.delenv("SIMRF_DATA_DIR", raising=False)
    monkeypatch.setattr(downloads.pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(
        downloads.pooch, "retrieve", lambda *a, **kw: retrieve(*a, **kw, downloader=download)
    )
    path = uci.find("car")
    assert path == tmp_path / "cache" / "simrf_jax" / "uci" / "toy.data"
    assert uci.find("car") == path
    assert fetched == [uci.ARCHIVE + "toy/toy.data"]

    path.unlink()
    (tmp_path / "files" / "toy" / "toy.data").write_text("another file\n")
    with pytest.raises(UserError, match=r"car is not what it was.*hash of downloaded file"):
        uci.find("car")
    assert not path.exists()


def test_another_file_is_refused(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path)
    with (tmp_path / "toy.data").open("a") as file:
        file.write("one more line\n")
    with pytest.raises(
        UserError, match=r"toy.data is not the file of the UCI repository: its SHA-256"
    ):
        uci.find("car", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "num_train", "num_test", "dim", "num_classes"),
    [
        ("abalone", 3967, 208, 10, 28),
        ("banknote", 1302, 68, 4, 2),
        ("car", 1640, 86, 21, 4),
        ("yeast", 1408, 74, 8, 10),
        ("cmc", 1398, 73, 9, 3),
        ("nursery", 12312, 648, 27, 5),
        ("wifi", 1899, 99, 7, 4),
        ("chess", 26652, 1402, 40, 18),
    ],
)
def test_real_data(name, num_train, num_test, dim, num_classes):
    if not os.environ.get("SIMRF_DATA_DIR"):
        pytest.skip("Needs the UCI files; SIMRF_DATA_DIR does not say where they are.")
    split = uci.load(name)
    assert split.train.shape == (num_train, dim)
    assert split.test.shape == (num_test, dim)
    assert split.num_classes == num_classes
    assert np.isfinite(split.test).all()
