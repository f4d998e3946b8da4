"""The trainer as a program of its own, for tests that stop it."""

import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time

from experiments.vit.metrics import log
from tests.experiments.vit import tiny

ROOT = pathlib.Path(__file__).parents[3]
BAR = r" *\d+%\|"  # How tqdm's lines begin.


PROGRAM = """
from absl import app
from experiments.vit import main
from tests.experiments.vit.commands import *
{call}
app.run(main.main, flags_parser=main.parse_flags)
"""


def at_row(step, action, *paths):
    """Does something when the row of a step is on disk."""
    write = log.Log.write

    def write_and_act(self, row):
        write(self, row)
        if row["step"] == step:
            action(*paths)

    log.Log.write = write_and_act


def wait():
    """Waits to be killed or interrupted."""
    time.sleep(600)


def stop_growth(size):
    """Lets no file grow beyond so many bytes, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def delete(folder):
    """Deletes a folder, although a save goes on to write into it."""
    while os.path.exists(folder):
        shutil.rmtree(folder, ignore_errors=True)


def flags(workdir, changes):
    """The flags of a run of tiny.py with some fields changed; of their names, "__" is a dot."""
    fields = [f"--config.{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return [f"--config={tiny.__file__}", f"--workdir={workdir}", *fields]


def start(workdir, *arguments, call="", **changes):
    """Starts the trainer, which prints to a pipe.

    Args:
      workdir: Of the run.
      *arguments: Flags.
      call: Code to run in the new process before the trainer, with the names of this module.
      **changes: See ``flags``.
    """
    program = ["-c", PROGRAM.format(call=call)] if call else ["-m", "experiments.vit.main"]
    return subprocess.Popen(
        [sys.executable, *program, *flags(workdir, changes), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the group of processes that a terminal runs.
    )


def finish(process, timeout=240):
    """Waits for the end; returns the code and the lines of the output without those of the bar."""
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
    lines = output.replace("\r", "\n").splitlines()
    return process.returncode, [line for line in lines if line and not re.match(BAR, line)]


def wait_until(condition, process, seconds=200):
    """Waits for what the process is to bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, "It did not come about."
        time.sleep(0.005)
