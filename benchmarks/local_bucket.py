"""A folder of this machine as a bucket: a server that answers reads as Google Cloud Storage does.

ArrayRecord reads ``gs://`` by the address in ``CLOUD_STORAGE_EMULATOR_ENDPOINT``, which is this
server's; what TensorFlow Datasets reads of a bucket by fsspec comes from the folder itself. The
server can wait before each answer, and can fail: a stand-in for tests and measurements.
"""

import contextlib
import http.server
import os
import pathlib
import re
import threading
import time
import urllib.parse
from unittest import mock

import fsspec
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem

BUCKET = "gs://bucket"
_CHUNK = 2**16


class _Reads(http.server.BaseHTTPRequestHandler):
    """The downloads of Google Cloud Storage's JSON API, which ArrayRecord asks for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.split("/o/")[1])
        path = self.server.folder / name
        if status := self.server.asked(name):
            return self._answer(status, 0, 0)
        size = path.stat().st_size if path.exists() else 0
        suffix, first = re.fullmatch(r"bytes=(-?)(\d+)-?", self.headers["Range"]).groups()
        first = max(0, size - int(first)) if suffix else int(first)
        self._answer(206 if size else 404, first, size)
        if not size:
            return None
        with path.open("rb") as file, contextlib.suppress(OSError):  # The reader has enough.
            file.seek(first)
            while chunk := file.read(_CHUNK):
                self.wfile.write(chunk)
                self.server.count(len(chunk))
        self.close_connection = True
        return None

    def _answer(self, status, first, size):
        self.send_response(status)
        self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - first))
        self.end_headers()

    def log_message(self, *_):
        pass


class LocalBucket(http.server.ThreadingHTTPServer):
    """Serves the files of a folder and counts what is read.

    Attributes:
      latency: Seconds before each answer.
      failures: Statuses to answer the next requests with, instead of the file.
      requests: Number of requests so far.
      bytes: Number of bytes sent so far.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder, latency=0.0):
        super().__init__(("127.0.0.1", 0), _Reads)
        self.folder, self.latency = pathlib.Path(folder), latency
        self.failures = []
        self.requests = self.bytes = 0
        self._lock = threading.Lock()

    def asked(self, name):
        """Counts a request, and returns the status to fail with, or None."""
        del name
        time.sleep(self.latency)
        with self._lock:
            self.requests += 1
            return self.failures.pop(0) if self.failures else None

    def count(self, size):
        """Counts bytes that were sent."""
        with self._lock:
            self.bytes += size

    def handle_error(self, *_):
        """Says nothing of readers that close a connection when they have enough."""


@contextlib.contextmanager
def serve(folder, latency=0.0):
    """Makes a folder readable as ``gs://bucket`` in this process and those that it starts.

    Args:
      folder: The folder.
      latency: Seconds before each answer.

    Yields:
      The ``LocalBucket``.
    """

    class Folder(LocalFileSystem):
        """The metadata of the bucket."""

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).replace(BUCKET, str(folder)))

    server = LocalBucket(folder, latency)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    backend.fsspec_backend._get_filesystem.cache_clear()
    try:
        with (
            mock.patch.object(fsspec, "filesystem", return_value=Folder()),
            mock.patch.dict(os.environ, {"CLOUD_STORAGE_EMULATOR_ENDPOINT": address}),
        ):
            yield server
    finally:
        backend.fsspec_backend._get_filesystem.cache_clear()
        server.shutdown()
        server.server_close()
