import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.tools import rehearse
from tests.experiments.vit import prepared

RESULTS = {
    "images_per_second": 2000.0,
    "seconds": 3600.0,
    "skipped_batches": 0,
    "test_accuracy": 0.5,
}
MEASURED = rehearse.Rehearsal(100, 5.0, 60.0, RESULTS, 0.13)


@pytest.mark.fast
def test_the_report_compares_and_counts_dollars():
    table = rehearse.report(MEASURED, chips=8, price=1.5)
    cells = {row.split("|")[1].strip(): row for row in table.splitlines()}
    assert "| 2,000.0 |" in cells["images a second, all chips"]
    assert "| 10% to 20% | 13.0% |" in cells["MFU"]
    assert "| 12.00 |" in cells["dollars of these steps"]
    # 93,835 steps of 4,096 images at 250 images a second and chip.
    assert "| 427.1 |" in cells["chip-hours of 93,835 steps at this speed"]
    assert "| 640.58 |" in cells["dollars of them"]


@pytest.mark.fast
def test_a_device_without_a_known_peak_is_said_to_be_one():
    table = rehearse.report(MEASURED._replace(mfu=None), chips=1, price=0)
    assert "| MFU | 10% to 20% | no peak known |" in table


@pytest.mark.fast
def test_a_workdir_that_is_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="is there already"):
        rehearse.rehearse(tmp_path, [])


@pytest.mark.fast
@pytest.mark.parametrize("flag", ["--config=other.py", "-config=other.py", "--config"])
def test_another_config_is_refused(tmp_path, flag):
    with pytest.raises(UserError, match=f"is of imagenet2012.py; change its fields .* got {flag}"):
        rehearse.rehearse(tmp_path / "run", ["--config.num_steps=9", flag])
    assert not (tmp_path / "run").exists()


@pytest.mark.fast
@pytest.mark.parametrize("flag", ["--chips=0", "--price=-1"])
def test_prices_and_chips_are_checked(tmp_path, capsys, flag):
    with pytest.raises(SystemExit):
        rehearse.main([f"--workdir={tmp_path}/a", "--price=1", flag])
    assert "--chips must be at least 1 and --price at least 0" in capsys.readouterr().err


# Runs the rehearsal as a program, with another one in place of Python for its trainer.
PROGRAM = """
import runpy, subprocess, sys
sys.executable, *sys.argv[1:] = sys.argv[1:]
wait = subprocess.Popen.wait
subprocess.Popen.wait = lambda self, timeout=None: wait(self, timeout and 1)
runpy.run_module("experiments.vit.tools.rehearse", run_name="__main__")
"""


def trainers(process):
    """The trainers in the session that a process leads, without those that have ended."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            program = (folder / "cmdline").read_text()
            if int(session) == process.pid and state != "Z" and "experiments.vit.main" in program:
                found.append(program)
    return found


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("on_sigterm", ["exit 0", ":"])
def test_a_rehearsal_that_is_ended_leaves_no_trainer(tmp_path, number, on_sigterm):
    """The trainer saves and ends, or does not hear."""
    trainer = tmp_path / "trainer"
    trainer.write_text(
        f"#!/bin/bash\ntrap 'touch {tmp_path}/told; {on_sigterm}' TERM\ntouch {tmp_path}/started\n"
        "while :; do sleep 0.1; done\n"
    )
    trainer.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, trainer, f"--workdir={tmp_path}/run", "--price=1"],
        cwd=rehearse.CONFIG.parents[3],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for((tmp_path / "started").exists)
        assert len(trainers(process)) == 1
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
        assert not trainers(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert error == "Stopped, and so is the trainer.\n"
    assert process.returncode
    assert (tmp_path / "told").exists()


def test_an_error_of_the_rehearsal_ends_the_trainer(tmp_path, monkeypatch):
    def fail(workdir):
        raise OSError("The disk is gone.")

    started = []
    start = subprocess.Popen

    def start_and_keep(words):
        started.append(start([sys.executable, "-c", "import time; time.sleep(600)"]))
        return started[0]

    monkeypatch.setattr(rehearse.subprocess, "Popen", start_and_keep)
    monkeypatch.setattr(rehearse, "_rows", fail)
    with pytest.raises(OSError, match="The disk is gone"):
        rehearse.rehearse(tmp_path / "run", [])
    assert started[0].poll() == -signal.SIGTERM


@pytest.fixture
def arguments(tmp_path):
    """Makes the rehearsal small, but for its steps: the program has to meet SIGTERM."""
    prepared.write(tmp_path / "data", train=64, validation=9)
    fields = {
        "data_dir": tmp_path / "data",
        "checkpoint.folder": tmp_path / "bucket",
        "batch_size": 8,
        "num_steps": 120,
        "eval_interval": 120,
        "log_interval": 1,
        "shuffle_window": 16,
        "num_workers": 1,
        "image_size": 16,
        "diagnostics.images": 0,
        "held_out": 0.1,
        "model.patch_size": 8,
        "model.width": 32,
        "model.depth": 1,
        "model.num_heads": 2,
        "model.mlp_dim": 32,
        "model.num_features": 34,
        "mesh.data": 1,
    }
    return [f"--config.{name}={value}" for name, value in fields.items()]


@pytest.mark.slow
def test_a_rehearsal_stops_goes_on_and_evaluates(tmp_path, arguments, capfd):
    workdir = f"--workdir={tmp_path / 'run'}"
    rehearse.main([workdir, "--chips=1", "--price=2.5", "--", *arguments])
    output = capfd.readouterr().out
    stopped = int(re.search(r"it stopped and went on \|  \| (\d+)", output)[1])
    assert 60 <= stopped < 120
    assert f"Goes on after step {stopped}." in output
    assert "Create the pod if the measured values are as expected" in output


@pytest.mark.slow
def test_a_run_that_starts_over_is_an_error(tmp_path, arguments, monkeypatch):
    def without_checkpoints(arguments, original=rehearse._trainer):
        shutil.rmtree(tmp_path / "bucket", ignore_errors=True)
        return original(arguments)

    monkeypatch.setattr(rehearse, "_trainer", without_checkpoints)
    with pytest.raises(SystemExit, match=r"must keep the \d+ rows up to step \d+, got others"):
        rehearse.main([f"--workdir={tmp_path / 'run'}", "--price=1", "--", *arguments])


@pytest.mark.slow
def test_a_rehearsal_that_cannot_read_its_data_says_so(tmp_path, arguments):
    arguments = [*arguments, f"--config.data_dir={tmp_path / 'nowhere'}"]
    with pytest.raises(SystemExit, match="The trainer must end with code 0, got 1"):
        rehearse.main([f"--workdir={tmp_path / 'run'}", "--price=1", "--", *arguments])
