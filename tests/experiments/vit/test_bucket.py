"""``gs://bucket``: a folder is the stand-in of fsspec, and a server that of storage."""

import http.server
import importlib.util
import pathlib
import re
import threading
import urllib.parse

import fsspec
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

from experiments.harness.mistakes import UserError
from experiments.vit.data import records
from experiments.vit.tools import prepare
from experiments.vit.training.folders import Folders
from tests.experiments.vit import prepared

has_tensorflow = importlib.util.find_spec("tensorflow") is not None
pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(has_tensorflow, reason="where TensorFlow is, it reads buckets, not fsspec"),
]
BUCKET = "gs://bucket"


class Storage(http.server.BaseHTTPRequestHandler):
    """The downloads of Google Cloud Storage's JSON API, which ArrayRecord asks for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.split("/o/")[1])
        path = self.server.folder / name
        content = path.read_bytes() if path.exists() else b""
        suffix, start = re.fullmatch(r"bytes=(-?)(\d+)-?", self.headers["Range"]).groups()
        start = max(0, len(content) - int(start)) if suffix else int(start)
        self.send_response(206 if content else 404)
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def storage(monkeypatch):
    """Makes a class of file systems that of ``gs://``."""

    def register(file_system):
        backend.fsspec_backend._get_filesystem.cache_clear()
        monkeypatch.setattr(fsspec, "filesystem", lambda name, **_: file_system())

    yield register
    backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.fixture
def folder(tmp_path, storage, monkeypatch):
    """What is in the bucket."""

    class Folder(LocalFileSystem):
        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).replace(BUCKET, str(tmp_path)))

    storage(Folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage)
    server.folder = pathlib.Path(tmp_path)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", address)
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_records_in_a_bucket_are_those_on_disk(folder):
    prepared.write(folder, train=9, validation=5)
    here = prepared.load(folder).train_batch(0)
    there = prepared.load(BUCKET).train_batch(0)
    for name, x in here.items():
        np.testing.assert_array_equal(there[name], x)
    line = prepare.prepare("imagenet2012", BUCKET)
    assert line == "imagenet2012 in gs://bucket: 100 classes, 9 in train, 5 in validation."


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


CHECKPOINTS = f"{BUCKET}/checkpoints"


def test_a_run_holds_its_folder_in_a_bucket(folder, tmp_path):
    with Folders(tmp_path / "a", CHECKPOINTS) as folders:
        match = f"^{CHECKPOINTS} is in use by another run: .*a. .* start again in 1.. seconds"
        with pytest.raises(UserError, match=match):
            Folders(tmp_path / "b", CHECKPOINTS).__enter__()
        assert not (tmp_path / "b").exists()
        folders.check_checkpoints(1)
        (folder / "checkpoints" / "run.lock").unlink()
        with pytest.raises(UserError, match=rf"{CHECKPOINTS} has lost its run\.lock"):
            folders.check_checkpoints(2)
    with Folders(tmp_path / "b", CHECKPOINTS):
        pass


@pytest.mark.parametrize(("workdir", "goes_on"), [("a", True), ("b", False)])
def test_who_was_killed_goes_on_at_once_in_its_workdir(folder, tmp_path, workdir, goes_on):
    locks = tmp_path / "a" / "run.lock", folder / "checkpoints" / "run.lock"
    with Folders(tmp_path / "a", CHECKPOINTS):
        left = [path.read_text() for path in locks]
    (tmp_path / "a").mkdir()
    for path, text in zip(locks, left, strict=True):
        path.write_text(text)
    folders = Folders(tmp_path / workdir, CHECKPOINTS)
    if goes_on:
        with folders:
            folders.check_checkpoints(1)
    else:
        with pytest.raises(UserError, match="is in use by another run"):
            folders.__enter__()
