"""Runs the commands of the READMEs and of the site as they are written, in a copy of the tree.

Each command ends well, or goes on without an error for ``SECONDS`` and is then stopped. What cannot
run everywhere is left out for a reason in ``LEFT_OUT``.
"""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_commands import CASES

SECONDS = 25
# Words of a command, and what they need that is not here.
LEFT_OUT = {
    "BUCKET": "a bucket of Google Cloud Storage",
    "--distributed": "a pod",
    "--compare=simplex --seeds": "the flags of the command beside it",
    "tpu_attention": "libtpu, and nothing else that compiles for a TPU at the same time",
    "sequence_parallel": "libtpu, and nothing else that compiles for a TPU at the same time",
    "pod_compile": "libtpu, and nothing else that compiles for a TPU at the same time",
    "gpu_attention": "a GPU of NVIDIA",
    "gpu_compile": "JAX's plugin for CUDA; the job for GPUs has it and runs --check",
    "imagenet2012": "a data set that has to be downloaded by hand",
    "first_contact": "minutes of its own; tests/benchmarks/test_first_contact.py rehearses it",
    "tools.evaluate": "a finished run; tests/experiments/vit has one",
    "tools.export": "a finished run; tests/experiments/vit has one",
    "tools.report": "a finished run; tests/experiments/vit has one",
    "runs/decoder --relative_error": "a trained model; tests/examples has a small one",
    "colabs.store": "a kernel of Jupyter; tests/test_colabs.py runs the notebooks",
}
MODELS = os.environ.get("SIMRF_MODEL_DIR")
# What a reader writes in the place of words, from the environment where that has it.
PLACES = {
    "--config.model_dir=DIR": ("--config.model_dir=", MODELS),
    "--model_dir=DIR": (
        "--model_dir=",
        MODELS and f"{MODELS}/all-MiniLM-L6-v2",
    ),
    "--config.data_dir=DIR": ("--config.data_dir=", os.environ.get("TFDS_DATA_DIR")),
    "DOLLARS_A_CHIP_HOUR": ("", "1.5"),
    "OWNER/NAME": ("", "someone/simrf_jax"),
}

COMMANDS = sorted({" ".join((module, *arguments)) for module, arguments in CASES.values()})


def filled(word):
    """Returns a word of a command with what a reader writes in the place of others."""
    for name, (flag, value) in PLACES.items():
        if name in word:
            if value is None:
                pytest.skip(f"{name} is not known here")
            return flag + value if flag else word.replace(name, value)
    return word


def reason_against(command):
    """Returns what a command needs that is not here, or None."""
    return next((reason for words, reason in LEFT_OUT.items() if words in command), None)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Makes a copy of the repository, as commands write pictures and results into it."""
    folder = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns(".*", "runs", "_build", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(copy, command):
    if reason := reason_against(command):
        pytest.skip(f"needs {reason}")
    module, arguments = {" ".join((m, *a)): (m, a) for m, a in CASES.values()}[command]
    program = [sys.executable, "-m", module, *map(filled, arguments)]
    environment = os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        program,
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors[-3000:]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    assert "Traceback" not in errors, errors[-3000:]


@pytest.mark.fast
def test_what_is_left_out_is_there():
    for words in LEFT_OUT:
        assert any(words in command for command in COMMANDS), words
    run = [command for command in COMMANDS if reason_against(command) is None]
    assert len(run) > len(COMMANDS) / 2
