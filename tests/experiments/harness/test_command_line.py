import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from experiments.harness import command_line, locking

pytestmark = pytest.mark.fast
FIELDS = {"seed": int, "model.width": int}
ROOT = pathlib.Path(__file__).parents[3]


def test_overrides_of_unknown_fields_end_the_program():
    argv = ["prog", "--config.seed=3", "--config.model.width=2", "--workdir=x"]
    assert command_line.overridden(argv, FIELDS) == ["seed", "model.width"]
    with pytest.raises(SystemExit, match="Unknown config field sead; the known ones are seed"):
        command_line.overridden(["prog", "--config.sead=3"], FIELDS)


PROGRAM = """
import pathlib, sys
from absl import flags
from experiments.harness import command_line, config_fields
from experiments.harness.mistakes import UserError
FIELDS = {"seed": int}
def check(config):
    config_fields.check_fields(config, FIELDS)
    if config.seed == 5: raise ValueError("a bug")
    if config.seed == 6: {}["a bug"]
def run(config, workdir):
    if config.seed == 7: raise KeyboardInterrupt
    if config.seed == 8: raise UserError("No space left")
    if config.seed == 9: raise OSError("a bug")
    return {"seed": config.seed}
def report(results): return f"seed {results['seed']}"
if __name__ == "__main__":
    command_line.launch(sys.modules["__main__"], pathlib.Path("paper.py"))
"""


CONFIG = "import ml_collections\ndef get_config(): return ml_collections.ConfigDict({'seed': 0})\n"


def run_program(folder, *arguments):
    (folder / "program.py").write_text(PROGRAM)
    (folder / "paper.py").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["--workdir=out"], 0, "seed 0", marks=pytest.mark.slow),
        (["--workdir=out", "--config.seed=3"], 0, "seed 3"),
        pytest.param(["--help"], 1, "--workdir: Folder for the results.", marks=pytest.mark.slow),
        pytest.param(["--help"], 1, "in paper.py):\n  seed  int  0\n", marks=pytest.mark.slow),
        (["--help", "--config=paper.py", "--config.seed=3"], 1, "  seed  int  3\n"),
        pytest.param(["--config=nofile.py"], 1, "nofile.py", marks=pytest.mark.slow),
        (["--workdir=out", "--config.seed=7"], -signal.SIGINT, "Stopped; the same command goes on"),
        (["--workdir=out", "--config.seed=8"], 1, "No space left"),
        ([], 1, "--workdir must have a value"),
    ],
)
def test_program(tmp_path, arguments, code, text):
    run = run_program(tmp_path, *arguments)
    assert run.returncode == code, run.stderr
    assert text in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_second_program_in_one_workdir_is_refused(tmp_path):
    with locking.locked(tmp_path / "out"):
        run = run_program(tmp_path, "--workdir=out")
    assert run.returncode == 1
    line = f"out is in use by another run: process {os.getpid()} on .* Stop it, or give [^\n]*\n"
    assert re.fullmatch(line, run.stderr), run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "where", "error"),
    [
        pytest.param(5, "check", "ValueError: a bug", marks=pytest.mark.slow),
        pytest.param(6, "check", "KeyError: 'a bug'", marks=pytest.mark.slow),
        (9, "run", "OSError: a bug"),
    ],
)
def test_a_bug_of_a_program_keeps_its_traceback(tmp_path, seed, where, error):
    run = run_program(tmp_path, "--workdir=out", f"--config.seed={seed}")
    assert run.returncode == 1
    assert re.search(rf'(?s)Traceback.*program.py", line \d+, in {where}\n.*\n{error}', run.stderr)


READMES = [ROOT / "README.md", *ROOT.glob("experiments/*/README.md")]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_readmes_say_that_a_config_is_executed(path):
    text = " ".join(path.read_text().split())
    assert "executes FILE as Python: run only configs that you trust" in text
