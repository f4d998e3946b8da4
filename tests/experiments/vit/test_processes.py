"""Two processes of four devices each, on one machine, as the hosts of a pod."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.vit import log, train
from tests.experiments.vit import prepared, tiny
from tests.experiments.vit.test_damage import flip, largest
from tests.experiments.vit.test_sharding import EIGHT_HEADS, losses_on
from tests.experiments.vit.test_train import read_losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROCESSES = 2

# Runs the trainer, and notes in a file which records this process reads.
MAIN = """
import sys
from absl import app
from experiments.vit import main, records

read = records.Records.read

def noted(self, indices):
    with open(sys.argv[1], "a") as file:
        file.writelines(f"{self.source.split} {index}\\n" for index in indices)
    return read(self, indices)

records.Records.read = noted
app.run(main.main, argv=sys.argv[1:], flags_parser=main.parse_flags)
"""


def start(process, port, folder, **changes):
    """A process of a run; it has half of the devices."""
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
        [sys.executable, "-c", MAIN, noted, "--distributed"]
        + [f"--{name}={value}" for name, value in flags.items()],
        env=os.environ
        | {
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 "
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


def run(folder, *, of_second=None, **changes):
    """Runs both to their end; returns their codes and what they print."""
    port, others = free_port(), [{}, of_second or {}]
    both = [start(i, port, folder, **(changes | others[i])) for i in range(PROCESSES)]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    return [process.returncode for process in both], outputs


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


def test_a_process_without_the_other_ends_with_an_error(tmp_path):
    port = free_port()
    changes = {"num_steps": 10**6, "eval_interval": 10**6}
    first, second = (start(number, port, tmp_path / "run", **changes) for number in (0, 1))
    with first, second:
        try:
            while not (tmp_path / "run" / "metrics.csv").exists():
                assert first.poll() is None, first.communicate()[0]
                time.sleep(1)
            second.kill()
            first.communicate(timeout=60)
            assert first.returncode != 0
        finally:
            first.kill()
            second.kill()


def test_one_that_cannot_start_says_why_and_the_other_ends(tmp_path):
    before = time.monotonic()
    absent = {"in_memory": False, "dataset": "imagenet2012", "augment__shift": 0.0}
    codes, outputs = run(tmp_path / "run", of_second=absent | {"data_dir": "/nowhere"})
    assert time.monotonic() - before < 60
    assert codes[1] == 1
    assert outputs[1].splitlines()[-1].startswith("There is no imagenet2012 in '/nowhere'")
    assert codes[0] != 0
