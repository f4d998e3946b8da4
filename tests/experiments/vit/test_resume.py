"""Runs that are stopped, and go on."""

import csv
import gc
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.metrics import log
from experiments.vit.tools import compare, evaluate, export
from experiments.vit.training import checkpoint_damage, checkpoint_manager, hosts, train_step
from tests.experiments.vit.metrics.test_log import assert_same_rows, read_events, read_rows
from tests.experiments.vit.training.test_checkpoint_damage import (
    files_of,
    flip,
    ignore_abandoned_reads,
    largest,
)
from tests.experiments.vit.training.test_checkpoint_manager import (
    STEPS,
    get_config,
    make_mesh,
    make_rows,
    progress_of,
)
from tests.tiers import slow_but

pytestmark = pytest.mark.devices(8)
ROOT = pathlib.Path(__file__).parents[3]


def read_losses(workdir):
    with (workdir / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["train_loss"])) for row in csv.DictReader(file)]


def read_state(workdir, step=STEPS):
    with ocp.PyTreeCheckpointer() as checkpointer:
        folder = (workdir / "checkpoints" / str(step) / "state").resolve()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sharding info not provided")
            state = checkpointer.restore(folder)
    return state | {"key": jax.random.key_data(state["key"])}


def steps_kept(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*[0-9]"))


def assert_same_run(workdir, whole, step=STEPS):
    assert read_losses(workdir) == read_losses(whole)
    ours, theirs = read_state(workdir, step), read_state(whole, step)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped."""
    workdir = tmp_path_factory.mktemp("whole")
    train.train(get_config(), workdir)
    return workdir


def signal_at(monkeypatch, step, number):
    """Sends this process a signal when the row of a step is on disk."""
    write = log.Log.write

    def write_and_signal(self, row):
        write(self, row)
        if row["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(log.Log, "write", write_and_signal)


@pytest.mark.slow
def test_sigterm_saves_and_exits_0_and_the_run_goes_on_bit_for_bit(
    whole, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        signal_at(patch, 6, signal.SIGTERM)
        with pytest.raises(SystemExit) as stopped:
            train.train(get_config(), tmp_path)
    assert stopped.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert steps_kept(tmp_path)[-1] == 7
    train.train(get_config(), tmp_path)
    assert "Goes on after step 7." in capsys.readouterr().out
    assert_same_run(tmp_path, whole)


def train_until_killed(workdir, step):
    signal_at(pytest.MonkeyPatch(), step, signal.SIGKILL)
    train.train(get_config(), workdir)


def run_until_killed(workdir, step):
    code = f"from {__name__} import *; train_until_killed({str(workdir)!r}, {step})"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()


@pytest.mark.filterwarnings("ignore:.* is half-written; it is passed over")
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_and_resumed_is_the_whole_run_bit_for_bit(kills, whole, tmp_path):
    for step in sorted(random.Random(kills).sample(range(1, STEPS + 1), kills)):
        run_until_killed(tmp_path, step)
    train.train(get_config(), tmp_path)
    assert_same_run(tmp_path, whole)
    assert_same_rows(read_events(tmp_path), read_rows(tmp_path))


def reopened(whole, workdir):
    """A copy of a run as it was before its results were written."""
    shutil.copytree(whole, workdir, dirs_exist_ok=True)
    (workdir / "results.json").unlink()
    return workdir / "checkpoints"


@pytest.mark.slow
@ignore_abandoned_reads
@pytest.mark.parametrize("part", slow_but(["state"], ["state", "run"]))
def test_a_damaged_checkpoint_is_neither_trained_on_nor_evaluated_nor_exported(
    part, whole, tmp_path
):
    folder = reopened(whole, tmp_path) / str(STEPS)
    size = largest(folder, part).stat().st_size
    for path in files_of(folder / part):
        # A file of arrays may have bytes that nobody reads, and so may a folder have such files.
        for eighth in range(1, 8) if path.stat().st_size > size / 2 else ():
            flip(path, eighth * path.stat().st_size)
    damaged = rf"/{STEPS} is damaged \(.*\); it is passed over"
    with pytest.warns(UserWarning, match=damaged):
        assert evaluate.evaluate(tmp_path, best=False)["step"] < STEPS
    with pytest.warns(UserWarning, match=damaged):
        assert export.export(tmp_path, tmp_path / "model", platforms=["cpu"])["step"] < STEPS
    # No other was evaluated.
    with (
        pytest.warns(UserWarning, match=damaged),
        pytest.raises(UserError, match=r"evaluated.*; leave out --best"),
    ):
        evaluate.evaluate(tmp_path, best=True)
    with pytest.warns(UserWarning, match=damaged):
        train.train(get_config(), tmp_path)
    assert_same_run(tmp_path, whole)
    gc.collect()


@pytest.mark.slow
def test_a_run_stopped_before_its_results_only_writes_them(whole, tmp_path):
    reopened(whole, tmp_path)
    results = train.train(get_config(), tmp_path)
    before = json.loads((whole / "results.json").read_text())
    assert {**results, "seconds": 0} == {**before, "seconds": 0}
    assert results["seconds"] > 0
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("best", [False, True])
def test_a_checkpoint_has_the_accuracy_it_had_in_training(best, whole):
    rows = log.read_metrics(whole)
    accuracies = dict(rows["test_accuracy"])
    result = evaluate.evaluate(whole, best=best, batch_size=77 if best else None)
    if best:
        assert result["test_accuracy"] == max(accuracies.values())
    else:
        assert result["step"] == STEPS
    assert result["test_accuracy"] == accuracies[result["step"]]
    np.testing.assert_allclose(result["test_loss"], dict(rows["test_loss"])[result["step"]], 1e-6)


def test_evaluation_needs_a_run_a_checkpoint_and_images(whole, tmp_path):
    with pytest.raises(UserError, match="batch_size must be at least 1, got 0"):
        evaluate.evaluate(whole, best=False, batch_size=0)
    with pytest.raises(UserError, match=r"config\.json"):
        evaluate.evaluate(tmp_path, best=False)
    shutil.copy(whole / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"There is no checkpoint in .*checkpoints"):
        evaluate.evaluate(tmp_path, best=False)


def test_a_run_without_checkpoints_is_not_evaluated_by_those_of_another(whole, tmp_path):
    folder = str(whole / "checkpoints")
    ours = get_config(checkpoint__interval=0, checkpoint__folder=folder)
    (tmp_path / "config.json").write_text(ours.to_json())
    with pytest.raises(
        UserError, match=r"config.json has checkpoint.interval=0: the run keeps no weights"
    ):
        evaluate.evaluate(tmp_path, best=False)


@pytest.mark.slow
def test_eight_devices_go_on_as_four(whole, tmp_path):
    folder = reopened(whole, tmp_path)
    shutil.rmtree(folder / str(STEPS))
    assert train.train(get_config(mesh__data=4), tmp_path)["device"].startswith("4 x ")
    np.testing.assert_allclose(read_losses(tmp_path), read_losses(whole), atol=1e-5, rtol=0)
    ours, theirs = read_state(tmp_path), read_state(whole)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.slow
def test_a_stopped_run_of_another_config_is_refused_by_its_fields(whole, tmp_path):
    folder = reopened(whole, tmp_path)
    other = get_config(learning_rate=0.5, model__attention="iid", log_interval=2)
    differ = (
        "learning_rate is 0.001 there, 0.5 here; model.attention is 'simplex' there, 'iid' here"
    )
    with pytest.raises(UserError, match=f"a run of another config: {differ}. Give"):
        train.train(other, tmp_path)
    elsewhere = get_config(checkpoint__folder=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"checkpoint.folder is '' there, .*elsewhere' here"):
        train.train(elsewhere, tmp_path)  # It would start over.
    other.checkpoint.folder = str(folder)
    with pytest.raises(
        checkpoint_damage.IncompatibleError, match=f"of another run: {differ}. Give"
    ):
        train.train(other, tmp_path / "other")
    with pytest.raises(UserError, match=r"holds a run with checkpoint\.interval=3"):
        train.train(get_config(checkpoint__interval=0), tmp_path)


# What is being written when the disk is full: by whom, and at which call.
FILES = {
    "metrics": (log.Log, "write", 7),
    "checkpoint": (checkpoint_manager.Checkpoints, "save", 3),
    "results": (log, "finish", 1),
}


def train_until_the_disk_is_full(workdir, file):
    """From some call on no file may grow beyond 200 bytes."""
    owner, name, number = FILES[file]
    write, calls = getattr(owner, name), itertools.count(1)

    def write_and_fill(*args, **kwargs):
        if next(calls) == number:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        return write(*args, **kwargs)

    pytest.MonkeyPatch().setattr(owner, name, write_and_fill)
    train.train(get_config(), workdir)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is half-written; it is passed over")
@pytest.mark.parametrize("file", FILES)
def test_a_disk_that_fills_up_loses_nothing(file, whole, tmp_path):
    code = f"from {__name__} import *; train_until_the_disk_is_full({str(tmp_path)!r}, {file!r})"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    message = r"UserError: .*(cannot be written|could not be saved in).*\n.*same command goes on"
    assert re.search(message, process.stderr), process.stderr
    assert not (tmp_path / "results.json").exists()
    train.train(get_config(), tmp_path)
    assert_same_run(tmp_path, whole)


def count_until_preempted(folder):
    """One of two hosts: adds one a step, and saves when the notice is reached."""
    sharded = NamedSharding(make_mesh(-1), PartitionSpec("data"))
    state = {"kernel": jax.jit(lambda: jnp.zeros(8), out_shardings=sharded)()}
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with (
        checkpoint_manager.Checkpoints(folder, get_config(), keep=1) as checkpoints,
        hosts.Preemption() as notice,
    ):
        for step in itertools.count(1):
            state = add(state)
            if step == 5:
                print("counting", flush=True)
            if notice.reached(step):
                checkpoints.save(step, state, progress_of(make_rows(None)))
                print(step, float(state["kernel"].addressable_shards[0].data[0]))
                return


@pytest.mark.slow
def test_a_comparison_goes_on_with_a_run_that_was_stopped(whole, tmp_path, monkeypatch):
    reopened(whole, tmp_path / "simplex-0")
    monkeypatch.setattr(train_step, "train_step", pytest.fail)  # The only run has all of its steps.
    compare.compare(get_config(), tmp_path, ["simplex"], [0])
    assert_same_run(tmp_path / "simplex-0", whole)


@pytest.mark.slow
@pytest.mark.cpu
def test_a_notice_to_one_host_stops_both_at_the_same_step(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    hosts = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import jax; jax.distributed.initialize({address!r}, 2, {index}); "
                f"from {__name__} import *; count_until_preempted({str(tmp_path)!r})",
            ],
            cwd=ROOT,
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(2)
    ]
    try:
        while hosts[1].stdout.readline().strip() != "counting":
            assert hosts[1].poll() is None
        hosts[1].send_signal(signal.SIGTERM)
        last = [host.communicate(timeout=60)[0].splitlines()[-1].split() for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0]
    assert last[0] == last[1]
    assert float(last[0][1]) == int(last[0][0])
    assert [path.name for path in tmp_path.iterdir()] == [last[0][0]]
