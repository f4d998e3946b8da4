"""Runs that are killed, interrupted or robbed of their disk: one line says why, nothing is lost."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from experiments.harness import locking
from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.tools import compare, evaluate
from tests.experiments.vit import commands, prepared, tiny
from tests.experiments.vit.test_resume import assert_same_run
from tests.experiments.vit.training.test_checkpoint_manager import STEPS

# A run whose steps, redraws, evaluations and checkpoints are out of step with each other.
CHANGES = {
    "num_steps": STEPS,
    "eval_interval": 5,
    "redraw_interval": 4,
    "checkpoint__interval": 3,
}
STOPPED = "Stopped; the same command goes on from the last checkpoint, if any are kept."
pytestmark = pytest.mark.filterwarnings("ignore:.* is half-written; it is passed over")


def get_config(**changes):
    return tiny.get_config(**(CHANGES | changes))


@pytest.fixture
def start():
    """Starts trainers, and sees to it that none is left."""
    processes = []

    def start_one(*args, **changes):
        processes.append(commands.start(*args, **changes))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def processes_of(session):
    """The processes that a terminal's session has."""
    command = ["ps", "-s", str(session), "-o", "pid="]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(number) for number in listed.stdout.split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train.train(get_config(), workdir)
    return workdir


def assert_goes_on(workdir, whole, **changes):
    """The same command gives what it gives undisturbed, and leaves no other files."""
    train.train(get_config(**changes), workdir)
    assert_same_run(workdir, whole, step=changes.get("num_steps", STEPS))
    assert names_in(workdir) == names_in(whole)


def names_in(workdir):
    """The files of a run, and its checkpoints."""
    return {
        path.relative_to(workdir) for path in (*workdir.glob("*"), *workdir.glob("checkpoints/*"))
    }


def rows(workdir):
    path = workdir / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


# Two runs in one workdir.


@pytest.mark.slow
def test_a_second_run_is_refused_while_readers_work_and_a_killed_one_holds_nothing(
    start, whole, tmp_path
):
    workdir = tmp_path / "run"
    first = start(workdir, call="at_row(7, wait)", **CHANGES)
    commands.wait_until((workdir / "checkpoints" / "6").exists, first)
    with pytest.raises(UserError, match=f"^{workdir} is in use .*: process {first.pid} on"):
        train.train(get_config(), workdir)
    elsewhere = get_config(checkpoint__folder=str(workdir / "checkpoints"))
    with pytest.raises(UserError, match=f"checkpoints is in use .*: process {first.pid} on"):
        train.train(elsewhere, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert evaluate.evaluate(workdir, best=False)["step"] == 6
    first.kill()
    first.wait()
    assert_goes_on(workdir, whole)


# SIGKILL.


def kill_at_random(start, rng, workdir, **changes):
    """Starts the run and kills it: while it starts, some steps later, or while it saves."""
    changes = CHANGES | changes
    process = start(workdir, call=f"at_row({changes['num_steps']}, wait)", **changes)
    commands.wait_until((workdir / "run.lock").exists, process)
    wanted = rows(workdir) + rng.randint(0, 3)
    if wanted:
        commands.wait_until(lambda: process.poll() is not None or rows(workdir) >= wanted, process)
    time.sleep(rng.uniform(0, 0.3))
    process.kill()
    code, lines = commands.finish(process)
    assert code == -signal.SIGKILL, lines
    assert not any("in use" in line for line in lines)


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_and_leave_nothing(start, whole, tmp_path):
    rng = random.Random(0)
    for _ in range(2):
        kill_at_random(start, rng, tmp_path / "run")
    assert_goes_on(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifteen_kills_in_one_run_lose_nothing_and_leave_nothing(start, tmp_path):
    train.train(get_config(num_steps=60), tmp_path / "whole")
    rng = random.Random(1)
    for _ in range(15):
        kill_at_random(start, rng, tmp_path / "run", num_steps=60)
    assert_goes_on(tmp_path / "run", tmp_path / "whole", num_steps=60)


# Ctrl-C.


def interrupt(process, times):
    """Sends what Ctrl-C sends, to all processes of the group, unless they have ended."""
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
        if process.poll() is not None:
            return


# What is there of a run when it is interrupted.
MOMENTS = {
    "start": "run.lock",
    "compilation": "metrics.csv",
    "saving": "checkpoints/3.orbax-checkpoint-tmp",
    "training": "checkpoints/3",
}


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupts_print_one_line_and_lose_nothing(start, moment, times, whole, tmp_path):
    # On a fast machine the run would otherwise end before the interrupt.
    process = start(tmp_path / "run", call=f"at_row({STEPS}, wait)", **CHANGES)
    commands.wait_until((tmp_path / "run" / MOMENTS[moment]).exists, process)
    interrupt(process, times)
    code, lines = commands.finish(process)
    assert lines == [STOPPED]
    assert code == -signal.SIGINT
    assert_goes_on(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.0, 1.5, 2.0, 3.0])
def test_an_interrupt_of_the_imports_prints_one_line(start, seconds, tmp_path):
    process = start(tmp_path / "run", **CHANGES)
    time.sleep(seconds)
    interrupt(process, 2)
    code, lines = commands.finish(process)
    assert lines in (["Stopped before it started."], [STOPPED])
    assert code == -signal.SIGINT


# Processes that read and augment records.


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["start of the workers", "training"])
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGKILL, 1)]
)
def test_workers_end_with_the_run(start, number, times, moment, tmp_path):
    prepared.write(tmp_path / "data", train=48, validation=16)
    records = prepared.OPTIONS | {"data_dir": tmp_path / "data", "eval_batch_size": 8}
    changes = CHANGES | records | {"num_steps": 10_000, "num_workers": 2}
    process = start(tmp_path / "run", **changes)
    if moment == "training":
        commands.wait_until((tmp_path / "run" / MOMENTS[moment]).exists, process)
    else:  # The trainer, two workers, and the process that multiprocessing tracks memory by.
        commands.wait_until(lambda: len(processes_of(process.pid)) == 4, process)
    if number == signal.SIGKILL:
        process.kill()
    else:
        interrupt(process, times)
    code, lines = commands.finish(process)
    assert code == -number
    if number == signal.SIGINT:
        assert [line for line in lines if "Load dataset info" not in line] == [STOPPED]
    end = time.monotonic() + 30
    while processes_of(process.pid):
        assert time.monotonic() < end
        time.sleep(0.1)


# A disk that fills up.


def assert_says_that_the_disk_is_full(code, lines, why):
    assert code == 1
    assert len(lines) == 2, lines
    assert re.search(f"(could not be saved in|cannot be written).*{why}", lines[0])
    assert re.search("same command (goes on from|starts anew)", lines[1])


@pytest.mark.slow
@pytest.mark.parametrize("size", [8000, 200])
def test_a_file_that_cannot_grow_is_told_in_two_lines_without_a_traceback(
    start, size, whole, tmp_path
):
    process = start(tmp_path / "run", call=f"at_row(6, stop_growth, {size})", **CHANGES)
    assert_says_that_the_disk_is_full(*commands.finish(process), why="File too large")
    assert_goes_on(tmp_path / "run", whole)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("File systems cannot be mounted here.")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [12, 24, 60, 200, 500, 900])
def test_a_disk_that_fills_up_loses_nothing(start, kilobytes, disk, whole):
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(4 * 2**20 - kilobytes * 2**10))
    process = start(disk / "run", **CHANGES)
    assert_says_that_the_disk_is_full(*commands.finish(process), why="No space left on device")
    ballast.unlink()
    assert_goes_on(disk / "run", whole)


# A workdir that vanishes, or cannot be written.


def assert_says_that_it_vanished(folder, code, lines):
    assert code == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{folder} was removed, renamed or replaced while the run wrote")


# The row of step 6 is written while a checkpoint of step 5 is saved, and is followed by one.
@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 6, 12])
def test_a_workdir_that_is_renamed_ends_the_run(start, step, whole, tmp_path):
    workdir, away = tmp_path / "run", tmp_path / "away"
    call = f"at_row({step}, os.rename, {str(workdir)!r}, {str(away)!r})"
    process = start(workdir, call=call, **CHANGES)
    code, lines = commands.finish(process)
    assert_says_that_it_vanished(
        workdir / "checkpoints" if step in (6, 12) else workdir, code, lines
    )
    shutil.rmtree(workdir, ignore_errors=True)  # What a save went on to write there.
    away.rename(workdir)
    assert_goes_on(workdir, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_a_folder_that_is_deleted_ends_the_run(start, name, whole, tmp_path):
    call = f"at_row(6, delete, {str(tmp_path / name)!r})"
    process = start(tmp_path / "run", call=call, **CHANGES)
    assert_says_that_it_vanished(tmp_path / "run" / "checkpoints", *commands.finish(process))
    assert_goes_on(tmp_path / "run", whole)


@pytest.fixture
def read_only(tmp_path):
    """A folder that cannot be written, and what makes it one that can."""
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid():
        path.chmod(0o500)
        yield path, lambda: path.chmod(0o700)
        path.chmod(0o700)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=4m", "tmpfs", path]  # Root may write anywhere.
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("Root can make no folder read-only here.")
    yield path, lambda: subprocess.run(["mount", "-o", "remount,rw", path], check=True)
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("below", [".", "run"])
def test_a_workdir_that_cannot_be_written_is_refused(below, whole, read_only):
    path, mend = read_only
    with pytest.raises(UserError, match=f"^{path / below} cannot be written: "):
        train.train(get_config(), path / below)
    mend()
    assert_goes_on(path / below, whole)


# Comparisons.

COMPARED = {"num_steps": 6, "eval_interval": 3, "checkpoint__interval": 2}


def start_comparison(start, workdir, interval):
    changes = COMPARED | {"checkpoint__interval": interval}
    return start(workdir, "--compare=exact,iid", "--seeds=0,1", **changes)


def read_comparison(workdir):
    """What a comparison found, without its times."""
    results = json.loads((workdir / "results.json").read_text())
    return {
        attention: [{name: run[name] for name in ("test_loss", "test_accuracy")} for run in some]
        for attention, some in results.items()
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison that nothing disturbed, without checkpoints."""
    workdir = tmp_path_factory.mktemp("compared") / "runs"
    config = tiny.get_config(**(COMPARED | {"checkpoint__interval": 0}))
    compare.compare(config, workdir, ["exact", "iid"], [0, 1])
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 2])
@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_comparison_that_is_stopped_goes_on(start, number, between, interval, compared, tmp_path):
    workdir = tmp_path / "runs"
    process = start_comparison(start, workdir, interval)
    inside, after = workdir / "iid-0", workdir / "exact-0" / "results.json"
    commands.wait_until(lambda: after.exists() and (between or rows(inside) > 2), process)
    process.send_signal(number)
    code, lines = commands.finish(process)
    assert not (workdir / "results.json").exists()
    if number == signal.SIGINT:
        *started, last = lines
        assert started == [f"{workdir / 'exact-0'}", f"{inside}"][: len(started)]
        assert last == STOPPED
    code, lines = commands.finish(start_comparison(start, workdir, interval))
    assert code == 0, lines
    assert f"{workdir / 'exact-0'} is finished." in lines
    assert read_comparison(workdir) == read_comparison(compared)
    assert not list(workdir.rglob("run.lock"))


@pytest.mark.parametrize("folder", ["runs", "runs/exact-0"])
def test_a_comparison_whose_folders_are_in_use_is_refused(folder, tmp_path):
    metrics = tmp_path / "runs" / "exact-0" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.touch()  # Without checkpoints, a comparison starts its runs over.
    config = tiny.get_config(checkpoint__interval=0)
    stopped = tiny.get_config(checkpoint__interval=0, model__attention="exact")
    (metrics.parent / "config.json").write_text(stopped.to_json())
    match = f"{folder} is in use by another run"
    with locking.locked(tmp_path / folder), pytest.raises(UserError, match=match):
        compare.compare(config, tmp_path / "runs", ["exact"], [0])
    assert metrics.exists()
