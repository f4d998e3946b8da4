"""Tests that only one run at a time uses a folder."""

import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from etils import epath

from experiments.harness import locking
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[3]
OTHER = locking.Holder("elsewhere", 12, "2026-01-02 03:04:05.678+00:00", "/runs/other")


def test_a_second_run_is_refused_in_one_line_that_says_where_the_first_one_runs(tmp_path):
    with locking.locked(tmp_path):
        holder = locking.Holder(**json.loads((tmp_path / "run.lock").read_text()))
        match = (
            f"^{tmp_path} is in use by another run: process {os.getpid()} on {holder.host}, since "
            rf"{holder.since[:10]} [^\n]*, with --workdir={tmp_path}. Stop it, or give this one "
            "another folder.$"
        )
        with pytest.raises(UserError, match=match), locking.locked(tmp_path):
            pass
        assert (tmp_path / "run.lock").exists()  # A refusal does not touch the lock.
    with locking.locked(tmp_path):
        pass


@pytest.mark.parametrize("made_before", [False, True])
def test_a_lock_leaves_nothing(tmp_path, made_before):
    folder = tmp_path / "run"
    if made_before:
        folder.mkdir()
    with locking.locked(folder):
        assert folder.exists()
    assert folder.exists() == made_before
    with locking.locked(folder):
        (folder / "results.json").touch()
    assert [path.name for path in folder.iterdir()] == ["results.json"]


HOLD = """
import pathlib, sys, time
from experiments.harness import locking
with locking.locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_holds_nothing_and_is_remembered(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"process {first.pid} on"), locking.locked(tmp_path):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with locking.locked(tmp_path) as lock:
            assert lock.left_by.pid == first.pid


def test_one_of_many_that_start_at_once_gets_the_lock(tmp_path):
    """Each holds the lock for a moment, so that lock files vanish while others open them."""
    inside, most, refused = [], [], []

    def compete():
        for _ in range(50):
            try:
                with locking.locked(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(1e-4)
                    inside.pop()
            except UserError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=compete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(refused) == 200
    assert all("is in use by another run" in line for line in refused)


def move(folder):
    folder.rename(folder.with_name("renamed"))


def replace(folder):
    move(folder)
    folder.mkdir()
    (folder / "run.lock").touch()


@pytest.mark.parametrize("lose", [shutil.rmtree, move, replace])
def test_a_folder_that_vanished_is_noticed_and_another_one_left_alone(tmp_path, lose):
    folder = tmp_path / "run"
    with locking.locked(folder) as lock:
        lock.check()
        lose(folder)
        with pytest.raises(UserError, match=f"^{folder} was removed, renamed or replaced"):
            lock.check()
    assert (folder / "run.lock").exists() == (lose is replace)


@pytest.mark.parametrize("below", ["", "run"])
def test_what_is_no_folder_cannot_be_written(tmp_path, below):
    (tmp_path / "file").touch()
    locked = locking.locked(tmp_path / "file" / below)
    with pytest.raises(UserError, match=r"file.* cannot be written: "), locked:
        pass


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    match = r"run.lock cannot be locked \(No locks available\): two runs in its folder would not"
    with pytest.warns(UserWarning, match=match), locking.locked(tmp_path) as lock:
        lock.check()


def test_another_failure_to_lock_is_an_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    match = "cannot be written: .*Input/output error"
    with pytest.raises(UserError, match=match), locking.locked(tmp_path):
        pass


def holder(**changes):
    return locking.Holder("here", 1, "2026-01-02 03:04:05.678+00:00", "/runs/a")._replace(**changes)


def write_lease(folder, of, age):
    lease = of._asdict() | {"renewed": int(time.time() - age)}
    (folder / "run.lock").write_text(json.dumps(lease))


def test_a_lease_is_refused_while_it_is_fresh(tmp_path):
    folder = epath.Path(tmp_path / "run")
    with locking.leased(folder, OTHER):
        match = (
            r"run is in use by another run: process 12 on elsewhere, since 2026-01-02 [^\n]* with "
            r"--workdir=/runs/other\. [^\n]* If that run was killed, start again in 1(20|19) s"
        )
        with pytest.raises(UserError, match=match), locking.leased(folder, holder()):
            pass
    assert not (folder / "run.lock").exists()
    with locking.leased(folder, holder()):
        pass


def test_a_lease_that_was_not_renewed_is_over(tmp_path):
    write_lease(tmp_path, OTHER, age=locking.EXPIRY + 1)
    with locking.leased(epath.Path(tmp_path), holder()) as lease:
        lease.check()


@pytest.mark.parametrize(
    ("of", "left_by", "taken"),
    [
        (holder(), holder(), True),
        (holder(), None, False),
        (holder(), holder(pid=2), False),
        (holder(host="elsewhere"), holder(host="elsewhere"), False),  # The workdir is a copy.
        (holder(workdir="/runs/b"), holder(workdir="/runs/b"), False),  # The workdir is a copy.
    ],
)
def test_the_lease_of_a_killed_run_of_this_workdir_is_over_at_once(tmp_path, of, left_by, taken):
    write_lease(tmp_path, of, age=1)
    lease = locking.Lease(epath.Path(tmp_path), holder(pid=3))
    if taken:
        lease.take(left_by)
        lease.check()
    else:
        with pytest.raises(UserError, match="is in use by another run"):
            lease.take(left_by)


def test_a_lease_is_renewed_as_long_as_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "RENEWAL", 0.01)
    path = tmp_path / "run.lock"
    with locking.leased(epath.Path(tmp_path), holder()) as lease:
        write_lease(tmp_path, holder(), age=100)
        end = time.monotonic() + 10
        while time.time() - json.loads(path.read_text() or '{"renewed": 0}')["renewed"] > 50:
            assert time.monotonic() < end
        lease.check()
    assert not path.exists()
    time.sleep(0.1)
    assert not path.exists()  # The lock is not renewed after its release.


def test_who_lost_the_lease_writes_over_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(locking, "RENEWAL", 0.01)
    with locking.leased(epath.Path(tmp_path), holder()) as lease:
        write_lease(tmp_path, OTHER, age=0)
        with pytest.raises(UserError, match=r"was taken over by process 12 on elsewhere.* ends"):
            lease.check()
        time.sleep(0.1)
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == 12
    (tmp_path / "run.lock").unlink()
    with pytest.raises(UserError, match=r"has lost its run\.lock"):
        lease.check()


@pytest.mark.parametrize("text", ["{", "[]", '{"host": "a"}', json.dumps(OTHER._asdict())])
def test_a_lease_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    match = r"run\.lock does not say who holds the folder\. Delete it"
    with pytest.raises(UserError, match=match), locking.leased(epath.Path(tmp_path), holder()):
        pass


def test_a_bucket_that_cannot_be_read_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # Makes its import fail.
    match = r"^gs://bucket/run cannot be read and written: .*gcsfs"
    with pytest.raises(UserError, match=match):
        locking.Lease(epath.Path("gs://bucket/run"), holder()).take(None)
