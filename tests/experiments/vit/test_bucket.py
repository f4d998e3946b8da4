"""``gs://bucket``: a folder is the stand-in of fsspec, and a server that of storage."""

import importlib.util
import time

import fsspec
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

from benchmarks import local_bucket
from benchmarks.local_bucket import BUCKET
from experiments.harness.mistakes import UserError
from experiments.vit.data import records
from experiments.vit.tools import prepare
from tests.experiments.vit import prepared

has_tensorflow = importlib.util.find_spec("tensorflow") is not None
pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(has_tensorflow, reason="where TensorFlow is, it reads buckets, not fsspec"),
]


@pytest.fixture
def storage(monkeypatch):
    """Makes a class of file systems that of ``gs://``."""

    def register(file_system):
        backend.fsspec_backend._get_filesystem.cache_clear()
        monkeypatch.setattr(fsspec, "filesystem", lambda name, **_: file_system())

    yield register
    backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.fixture
def bucket(tmp_path):
    """A folder of this machine as a bucket."""
    with local_bucket.serve(tmp_path) as server:
        yield server


@pytest.fixture
def folder(bucket, tmp_path):
    """What is in the bucket."""
    return tmp_path


def test_records_in_a_bucket_are_those_on_disk(folder):
    prepared.write(folder, train=9, validation=5)
    here = prepared.load(folder).train_batch(0)
    there = prepared.load(BUCKET).train_batch(0)
    for name, x in here.items():
        np.testing.assert_array_equal(there[name], x)
    line = prepare.prepare("imagenet2012", BUCKET)
    assert line == "imagenet2012 in gs://bucket: 100 classes, 9 in train, 5 in validation."


def test_windows_are_read_by_a_request_a_block(bucket, folder):
    prepared.write(folder, train=100, validation=5)
    here, there = (prepared.load(at, shuffle_window=25) for at in (folder, BUCKET))
    opened = bucket.requests
    for step in range(12):  # Nearly one epoch: two lanes of 50 examples.
        ours, theirs = here.train_batch(step), there.train_batch(step)
        np.testing.assert_array_equal(ours["label"], theirs["label"])
    # One opens the file. Each lane has two windows, of a block each, and asks early for the first
    # one of the next epoch. An exact shuffle takes 96 requests.
    expected = 1 + 2 * (2 + 1)
    deadline = time.monotonic() + 20  # The last blocks may still be under way.
    while bucket.requests - opened < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bucket.requests - opened == expected


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, pytest.param(25, marks=pytest.mark.slow)])
def test_a_bucket_that_is_busy_is_asked_again(bucket, folder, window, monkeypatch):
    monkeypatch.setattr("experiments.harness.storage.time.sleep", lambda _: None)
    prepared.write(folder, train=30, validation=5)
    here, there = (prepared.load(at, shuffle_window=window) for at in (folder, BUCKET))
    bucket.failures += [503, 503, 429]
    ours, theirs = here.train_batch(0), there.train_batch(0)
    np.testing.assert_array_equal(ours["label"], theirs["label"])
    assert not bucket.failures


def test_a_shard_that_was_not_copied_to_the_bucket_is_named(folder):
    prepared.write(folder, train=9)
    (shard,) = folder.glob("*/*/*train*")
    shard.unlink()
    with pytest.raises(UserError, match=f"gs://bucket/.*{shard.name} cannot be read: "):
        records.open_records("imagenet2012", "train", BUCKET)


def test_a_bucket_without_the_data_set_says_that_it_is_prepared_elsewhere(folder):
    match = r"no imagenet2012 in 'gs://bucket'.* --data_dir=DIR, and copy DIR/imagenet2012 there"
    with pytest.raises(SystemExit, match=match):
        prepare.main(["imagenet2012", f"--data_dir={BUCKET}"])


@pytest.mark.parametrize("error", [PermissionError("403"), ImportError("Please install gcsfs")])
def test_a_bucket_that_cannot_be_read_says_why(storage, error):
    class Refusing(LocalFileSystem):
        def exists(self, path, **_):
            raise error

        info = ls = open = isdir = exists

    storage(Refusing)
    with pytest.raises(UserError, match=f"imagenet2012 in 'gs://bucket' cannot be read: {error}"):
        records.open_records("imagenet2012", "train", BUCKET)
