import logging
import os
import subprocess
import sys

import pytest

from experiments.harness import process

pytestmark = pytest.mark.fast
PROGRAM = """
import jax
from absl import app
from experiments.harness import process
def main(_):
    QUIET
    jax.devices()
if __name__ == "__main__":
    app.run(main)
"""


def errors_of(program):
    environment = {key: os.environ[key] for key in os.environ if key != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stderr


@pytest.mark.slow
def test_a_machine_without_a_tpu_is_not_told_so():
    if "cannot open shared object file" not in errors_of(PROGRAM.replace("QUIET", "pass")):
        pytest.skip("This machine has libtpu, or this version of JAX does not ask for it.")
    assert "Unable to initialize" not in errors_of(PROGRAM.replace("QUIET", "process.quiet_jax()"))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("'tpu': Failed to open libtpu.so: libtpu.so: cannot open shared object file", False),
        ("'tpu': ABORTED: The TPU is already in use by another process.", True),
        ("'cuda': libcudart.so: cannot open shared object file", True),
    ],
)
def test_only_what_is_not_there_goes_unmentioned(message, shown):
    text = f"Unable to initialize backend {message}"
    record = logging.LogRecord("jax._src.xla_bridge", logging.INFO, "x.py", 1, text, (), None)
    process.quiet_jax()
    assert bool(logging.getLogger("jax._src.xla_bridge").filter(record)) == shown
