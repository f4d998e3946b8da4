"""Tests of one or several Ctrl-C in a program that takes a while to clean up."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.harness import interrupts

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[3]
# The program prints where it is and waits there. At exit it waits as JAX does, where an interrupt
# would print a traceback.
PROGRAM = """
import atexit, sys, time
from experiments.harness import interrupts

def wait(where, seconds=60):
    print(where, flush=True)
    time.sleep(seconds)

class Caught:
    def __del__(self):
        wait("destructor")

atexit.register(wait, "exit")
interrupts.end_at_once("Stopped early.")
if sys.argv[1] == "import":
    wait("import")
with interrupts.exit_on_interrupt("Stopped."):
    try:
        if sys.argv[1] == "destructor":
            Caught()
        elif sys.argv[1] == "error":
            try:
                wait("error")
            except KeyboardInterrupt:
                raise ImportError("A library was interrupted.")
        elif sys.argv[1] == "body":
            wait("body")
    finally:
        wait("cleaning", 0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "times", "line"),
    [
        ("import", 1, "Stopped early."),
        ("import", 3, "Stopped early."),
        ("body", 1, "Stopped."),
        ("body", 2, "Stopped."),
        ("body", 3, "Stopped."),
        ("error", 1, "Stopped."),
        ("destructor", 1, "Stopped."),
        ("exit", 1, "Stopped early."),
        ("exit", 2, "Stopped early."),
    ],
)
def test_interrupts_print_one_line_and_end_as_the_signal_would(where, times, line):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, where],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while program.stdout.readline().strip() != where:
        assert program.poll() is None
    for _ in range(times):
        program.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, errors = program.communicate(timeout=30)
    assert errors.strip("\n") == line
    assert program.returncode == -signal.SIGINT
    assert ("cleaning" in output) == (where in ("body", "error"))


def test_what_is_no_interrupt_passes_and_the_handlers_are_put_back():
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="of ours"), interrupts.exit_on_interrupt("Stopped."):
        raise ValueError("A mistake of ours.")
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.unraisablehook is hook
