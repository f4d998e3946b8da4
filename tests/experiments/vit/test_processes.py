"""Two processes of four devices each, on one machine, as the hosts of a pod."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.harness import locking
from experiments.vit import train
from experiments.vit.metrics import log
from tests import compilation
from tests.experiments.vit import prepared, tiny
from tests.experiments.vit.commands import wait_until
from tests.experiments.vit.test_train import read_losses
from tests.experiments.vit.training.test_checkpoint_damage import flip, largest
from tests.experiments.vit.training.test_sharding import EIGHT_HEADS, losses_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.cpu]
PROCESSES = 2

# Runs the trainer, and notes in a file which records this process reads.
MAIN = """
import sys
from absl import app
from experiments.vit import main
from experiments.vit.data import records

read = records.Records.read

def noted(self, indices):
    with open(sys.argv[1], "a") as file:
        file.writelines(f"{self.name.split()[1]} {index}\\n" for index in indices)
    return read(self, indices)

records.Records.read = noted
{fault}
app.run(main.main, argv=sys.argv[1:], flags_parser=main.parse_flags)
"""


def start(process, port, folder, fault="", **changes):
    """A process of a run; it has half of the devices, and runs the code of a fault first."""
    changes = EIGHT_HEADS | changes
    flags = {
        "coordinator": f"localhost:{port}",
        "num_processes": PROCESSES,
        "process_id": process,
        "workdir": folder,
        "config": pathlib.Path(tiny.__file__),
        "config.mesh.data": 2,
        "config.mesh.fsdp": 2,
        "config.mesh.tensor": 2,
        **{f"config.{name.replace('__', '.')}": value for name, value in changes.items()},
    }
    noted = folder.parent / f"read-by-{process}"
    return subprocess.Popen(
        [sys.executable, "-c", MAIN.replace("{fault}", fault), noted, "--distributed"]
        + [f"--{name}={value}" for name, value in flags.items()],
        env=os.environ
        | {
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": f"{compilation.FLAGS} "
            f"--xla_force_host_platform_device_count={8 // PROCESSES}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def run(folder, *, of_second=None, fault_of_second="", **changes):
    """Runs both to their end; returns their codes and what they print."""
    port, others, faults = free_port(), [{}, of_second or {}], ["", fault_of_second]
    both = [start(i, port, folder, faults[i], **(changes | others[i])) for i in range(PROCESSES)]
    return end(both)


def end(processes):
    """Waits for the end of all; returns their codes and what they print."""
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def test_two_processes_train_as_one(tmp_path):
    changes = {"diagnostics__images": 4}
    expected = losses_on(tmp_path / "one", 2, 2, 2, **changes)
    codes, outputs = run(tmp_path / "two", **changes)
    assert codes == [0, 0], outputs
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    losses = [*read_losses(tmp_path / "two"), results["test_loss"]]
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    assert ["test accuracy" in output for output in outputs] == [True, False]
    errors = [dict(log.read_metrics(tmp_path / run)["attention_error"]) for run in ("one", "two")]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


def test_each_reads_its_records_alone_and_one_process_goes_on_with_their_run(tmp_path):
    prepared.write(tmp_path / "data", train=48, validation=16)
    changes = prepared.OPTIONS | {
        "data_dir": str(tmp_path / "data"),
        "eval_batch_size": 8,
        "checkpoint__interval": 3,
    }
    codes, outputs = run(tmp_path / "run", **changes)
    assert codes == [0, 0], outputs

    # Six steps of eight images are one epoch.
    noted = [(tmp_path / f"read-by-{i}").read_text().splitlines() for i in range(PROCESSES)]
    every = {f"train {i}" for i in range(48)} | {f"validation {i}" for i in range(16)}
    assert [len(lines) for lines in noted] == [32, 32]
    assert {*noted[0], *noted[1]} == every

    expected = read_losses(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    mesh = {"mesh__data": 4, "mesh__fsdp": 2}
    train.train(tiny.get_config(**(EIGHT_HEADS | changes | mesh)), tmp_path / "run")
    np.testing.assert_allclose(read_losses(tmp_path / "run"), expected, atol=1e-5, rtol=0)
    assert len({*expected}) == 6


# Reads of one host that take a while, and images of one host that are not finite.
SLOW = """
import time
from experiments.vit.data import window_reader
read_at_once = window_reader.WindowReader.read
window_reader.WindowReader.read = lambda *args: time.sleep(2) or read_at_once(*args)
"""
POISON = """
from experiments.vit.data import pipeline
mix = pipeline._mix

def poisoned(batch, positions, *args):
    batch = mix(batch, positions, *args)
    return batch | {"image": batch["image"] * float("nan")} if 16 <= positions[0] < 24 else batch

pipeline._mix = poisoned
"""


def test_a_slow_host_and_windows_give_the_losses_of_one_process(tmp_path):
    prepared.write(tmp_path / "data", train=48, validation=16)
    changes = prepared.OPTIONS | {"data_dir": str(tmp_path / "data"), "eval_batch_size": 8}
    changes["shuffle_window"] = 8
    expected = losses_on(tmp_path / "one", 2, 2, 2, **changes)
    codes, outputs = run(tmp_path / "two", fault_of_second=SLOW, **changes)
    assert codes == [0, 0], outputs
    results = json.loads((tmp_path / "two" / "results.json").read_text())
    losses = [*read_losses(tmp_path / "two"), results["test_loss"]]
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)


def test_a_batch_that_is_bad_on_one_host_is_skipped_by_all(tmp_path):
    prepared.write(tmp_path / "data", train=48, validation=16)
    changes = prepared.OPTIONS | {"data_dir": str(tmp_path / "data"), "eval_batch_size": 8}
    codes, outputs = run(
        tmp_path / "run", fault_of_second=POISON, checkpoint__interval=1, **changes
    )
    assert codes == [0, 0], outputs
    assert all("skips the batches of the steps 3 to 3" in output for output in outputs)
    assert "Goes on after step 2." in outputs[0]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["skipped_batches"] == 1
    assert np.isfinite(read_losses(tmp_path / "run")).all()


@pytest.mark.parametrize("part", ["state", "run"])
def test_two_processes_agree_that_a_checkpoint_is_damaged(part, tmp_path):
    changes = {"checkpoint__interval": 3, "num_steps": 6}
    codes, outputs = run(tmp_path / "run", **changes)
    assert codes == [0, 0], outputs
    expected = read_losses(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    path = largest(tmp_path / "run" / "checkpoints" / "6", part)
    flip(path, 4 * path.stat().st_size)
    codes, outputs = run(tmp_path / "run", **changes)
    assert codes == [0, 0], outputs
    assert all("6 is damaged (" in output for output in outputs)
    assert "Goes on after step 3." in outputs[0]
    assert read_losses(tmp_path / "run") == expected


FOREVER = {"num_steps": 10**6, "eval_interval": 10**6, "checkpoint__interval": 3}


@pytest.mark.parametrize("number", range(PROCESSES))
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_without_the_other_ends_with_a_line(number, end, tmp_path):
    port, folder = free_port(), tmp_path / "run"
    both = [start(i, port, folder, **FOREVER) for i in range(PROCESSES)]
    gone, other = both[number], both[1 - number]
    with both[0], both[1]:
        try:
            wait_until((folder / "checkpoints" / "3").exists, other)
            gone.send_signal(end)
            output = other.communicate(timeout=60)[0]
            assert other.returncode != 0
            assert re.search("another (process is gone|task died)", output), output
            assert "Fatal Python error" not in output  # No stacks of all threads.
            gone.send_signal(signal.SIGCONT)  # One that was stopped notices that it is alone.
            gone.wait(timeout=60)
        finally:
            for process in both:
                process.kill()
    with locking.locked(folder), locking.locked(folder / "checkpoints"):
        pass


def test_one_that_cannot_start_says_why_and_the_other_ends(tmp_path):
    prepared.write(tmp_path / "data", train=16, validation=8)
    before = time.monotonic()
    records = prepared.OPTIONS | {"data_dir": str(tmp_path / "data")}
    codes, outputs = run(tmp_path / "run", of_second={"data_dir": "/nowhere"}, **records)
    assert time.monotonic() - before < 60
    assert codes[1] == 1
    assert outputs[1].splitlines()[-1].startswith("There is no imagenet2012 in '/nowhere'")
    assert codes[0] != 0


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"learning_rate": 0.5}, "learning_rate is 0.01 there, 0.5 here"),
        ({"model__width": 64}, "model.width is 32 there, 64 here"),
        ({"checkpoint__interval": 0}, "checkpoint.interval is 3 there, 0 here"),
    ],
)
def test_processes_that_differ_in_their_config_end(changes, differ, tmp_path):
    codes, outputs = run(tmp_path / "run", of_second=changes, **FOREVER)
    assert codes == [1, 1]
    first, second = (output.splitlines()[-1] for output in outputs)
    assert first.endswith("must have one config; the output of another says what differs.")
    assert second.endswith(f"in process 1 (here): {differ}.")
    assert not (tmp_path / "run").exists()


def test_a_refused_run_ends_in_all_processes(tmp_path):
    with locking.locked(tmp_path / "run"):
        codes, outputs = run(tmp_path / "run", **FOREVER)
    assert codes == [1, 1]
    assert "run is in use by another run: process" in outputs[0].splitlines()[-1]
    assert outputs[1].splitlines()[-1] == "The first process cannot train; its output says why."


def test_only_the_first_process_writes_the_workdir(tmp_path):
    shared = {"checkpoint__interval": 3, "checkpoint__folder": str(tmp_path / "checkpoints")}
    port = free_port()
    folders = [tmp_path / "run", pathlib.Path("/proc/run")]  # Nobody can write there.
    both = [start(i, port, folder, **shared) for i, folder in enumerate(folders)]
    codes, outputs = end(both)
    assert codes == [0, 0], outputs
    assert (tmp_path / "run" / "results.json").exists()


def test_checkpoints_that_a_process_cannot_write_end_all(tmp_path):
    port = free_port()
    folders = [tmp_path / "run", pathlib.Path("/proc/run")]
    both = [start(i, port, folder, **FOREVER) for i, folder in enumerate(folders)]
    codes, outputs = end(both)
    assert codes[1] == 1
    line = outputs[1].splitlines()[-1]
    assert line.startswith("Checkpoints cannot be kept in /proc/run/checkpoints: "), outputs
    assert codes[0] != 0


def test_a_process_that_is_started_twice_ends_all(tmp_path):
    port = free_port()
    three = [start(i, port, tmp_path / "run", **FOREVER) for i in (0, 1, 1)]
    codes, outputs = end(three)
    assert 0 not in codes
    for output in outputs:
        assert "Fatal Python error" not in output
    assert not (tmp_path / "run" / "metrics.csv").exists()
