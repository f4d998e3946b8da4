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

from experiments.harness import locking
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[3]


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


def test_a_killed_run_holds_nothing(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"process {first.pid} on"), locking.locked(tmp_path):
            pass
        first.send_signal(signal.SIGKILL)
        first.wait()
        with locking.locked(tmp_path):
            pass


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
