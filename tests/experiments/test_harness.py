import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import ml_collections
import numpy as np
import pytest

from experiments import harness, locking
from experiments.mistakes import UserError

pytestmark = pytest.mark.fast
FIELDS = {"seed": int, "model.width": int}


def config(**changes):
    fields = ml_collections.ConfigDict({"seed": 0, "model": {"width": 4}})
    fields.update_from_flattened_dict(changes)
    return fields


def test_fields_are_returned_by_their_dotted_names():
    assert harness.check_fields(config(), FIELDS) == {"seed": 0, "model.width": 4}


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({"seed": 0}, "lacks model.width"),
        ({"seed": 0, "model": {"width": 4, "x": 1}}, "field model.x; the known ones"),
        ({"seed": 0.0, "model": {"width": 4}}, "config.seed must be int, got 0.0"),
    ],
)
def test_fields_refuse(broken, match):
    with pytest.raises(UserError, match=match):
        harness.check_fields(ml_collections.ConfigDict(broken), FIELDS)


def test_overrides_of_unknown_fields_end_the_program():
    argv = ["prog", "--config.seed=3", "--config.model.width=2", "--workdir=x"]
    assert harness.overridden(argv, FIELDS) == ["seed", "model.width"]
    with pytest.raises(SystemExit, match="Unknown config field sead; the known ones are seed"):
        harness.overridden(["prog", "--config.sead=3"], FIELDS)


def test_pieces_are_kept_whole_and_belong_to_one_config(tmp_path):
    pieces = harness.Pieces(tmp_path / "run", config())
    assert pieces.load("a") is None
    pieces.save("a", np.arange(3))
    np.testing.assert_array_equal(harness.Pieces(tmp_path / "run", config()).load("a"), [0, 1, 2])
    assert not list((tmp_path / "run").rglob("*.partial*"))
    with pytest.raises(UserError, match="holds a run of another config"):
        harness.Pieces(tmp_path / "run", config(seed=1))


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        harness.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"a": 1}, "config.a must be at least 2, got 1"),
        ({"a": (3, 1)}, "Each of config.a must be at least 2, got 1"),
        ({"a": ()}, r"config.a must have at least one entry, got \(\)"),
        ({"a": (2.0,)}, "Each of config.a must be an integer, got 2.0"),
    ],
)
def test_least_refuses(values, match):
    harness.check_least({"a": (2, 3)}, {"a": 2})
    with pytest.raises(UserError, match=match):
        harness.check_least(values, {"a": 2})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_refuses(seed):
    harness.check_seed({"seed": 2**32 - 1})
    with pytest.raises(UserError, match=rf"config.seed must be from 0 to 2\^32 - 1, got {seed}"):
        harness.check_seed({"seed": seed})


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ((), "config.a must have at least one entry"),
        (("x", 1.0), r"config.a must be numbers, got \('x', 1.0\)"),
        ((1, 1), r"config.a must ascend and have nothing twice, got \(1, 1\)"),
    ],
)
def test_ascending_refuses(value, match):
    with pytest.raises(UserError, match=match):
        harness.check_ascending({"a": value}, ["a"])


@pytest.mark.parametrize("value", [0.0, 3.5, 1, (1.0, float("inf")), (1.0, float("nan"))])
def test_distances_refuse(value):
    harness.check_distances({"a": (1.0, 3.0), "b": 2.0}, ["a", "b"], most=3.0)
    with pytest.raises(UserError, match=r"config.a must be floats above 0 and at most 3, got"):
        harness.check_distances({"a": value}, ["a"], most=3.0)


def test_pieces_of_another_selection_are_gone_on_with(tmp_path):
    harness.Pieces(tmp_path, config(), selection=["seed"]).save("a", np.arange(3))
    pieces = harness.Pieces(tmp_path, config(seed=1), selection=["seed"])
    np.testing.assert_array_equal(pieces.load("a"), np.arange(3))
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    with pytest.raises(UserError, match=r"differs in seed\. Give another --workdir"):
        harness.Pieces(tmp_path, config(), selection=["model"])


def test_pieces_of_another_version_or_of_a_damaged_config_are_refused(tmp_path, monkeypatch):
    harness.Pieces(tmp_path, config())
    monkeypatch.setattr(harness.simrf_jax, "__version__", "9.9")
    with pytest.raises(UserError, match="differs in version"):
        harness.Pieces(tmp_path, config())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is damaged: Expecting"):
        harness.Pieces(tmp_path, config())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is damaged: Expecting value: line 1"),
        (b'{"seed": 3, "mod', "is damaged: Unterminated string"),
        (b"\xff\xfe\xfd", "is damaged: .* can't decode"),
        (b"[" * 10**5, "is damaged: maximum recursion depth"),
        (b"[1, 2]", r"is damaged: it must hold a JSON object, got \[1, 2\]"),
        (None, "cannot be read: .*Is a directory"),
    ],
)
def test_damaged_json_is_named(tmp_path, content, match):
    path = tmp_path / "results.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=f"results.json {match}"):
        harness.read_json(path)


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:-1], lambda b: b"x" + b[1:]])
def test_a_damaged_piece_is_named(tmp_path, change):
    pieces = harness.Pieces(tmp_path, config())
    pieces.save("a", np.arange(3))
    path = tmp_path / "pieces" / "a.npy"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.npy is damaged \(.*\). Delete it; the same command"):
        pieces.get("a", pytest.fail)


@pytest.mark.parametrize("name", ["pieces", "config.json"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / name).write_text("{}") if name == "pieces" else (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{tmp_path}.* cannot be (written|read): "):
        harness.Pieces(tmp_path, config())


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "table.md"
    with harness.whole_file(path) as partial:
        partial.write_text("whole")

    def write_half():
        with harness.whole_file(path) as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"table.md cannot be written: .*No space left"):
        write_half()
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_drawing_says_that_the_results_are_whole(tmp_path):
    match = r"results\.json is whole; the same command draws what is missing"
    with pytest.raises(ZeroDivisionError, match=match), harness.drawing(tmp_path):
        raise ZeroDivisionError


def test_pieces_are_computed_once_and_timed(tmp_path):
    pieces = harness.Pieces(tmp_path, config())
    first = pieces.get("part-a", lambda: np.arange(3))
    np.testing.assert_array_equal(pieces.get("part-a", lambda: np.zeros(9)), first)
    assert pieces.seconds("part-*") > 0
    assert pieces.seconds("other") == 0


PROGRAM = """
import pathlib, sys
from absl import flags
from experiments import harness, locking
from experiments.mistakes import UserError
FIELDS = {"seed": int}
def check(config):
    harness.check_fields(config, FIELDS)
    if config.seed == 5: raise ValueError("a bug")
    if config.seed == 6: {}["a bug"]
def run(config, workdir):
    if config.seed == 7: raise KeyboardInterrupt
    if config.seed == 8: raise UserError("No space left")
    if config.seed == 9: raise OSError("a bug")
    return {"seed": config.seed}
def report(results): return f"seed {results['seed']}"
if __name__ == "__main__": harness.launch(sys.modules["__main__"], FIELDS, pathlib.Path("paper.py"))
"""
CONFIG = "import ml_collections\ndef get_config(): return ml_collections.ConfigDict({'seed': 0})\n"


def run_program(folder, *arguments):
    (folder / "program.py").write_text(PROGRAM)
    (folder / "paper.py").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(harness.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--workdir=out"], 0, "seed 0"),
        (["--workdir=out", "--config.seed=3"], 0, "seed 3"),
        (["--help"], 1, "--workdir: Folder for the results."),
        (["--config=nofile.py", "--workdir=out"], 1, "nofile.py"),
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


def test_a_second_program_in_one_workdir_is_refused(tmp_path):
    with locking.locked(tmp_path / "out"):
        run = run_program(tmp_path, "--workdir=out")
    assert run.returncode == 1
    line = f"out is in use by another run: process {os.getpid()} on .* Stop it, or give [^\n]*\n"
    assert re.fullmatch(line, run.stderr), run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("seed", "where", "error"),
    [
        (5, "check", "ValueError: a bug"),
        (6, "check", "KeyError: 'a bug'"),
        (9, "run", "OSError: a bug"),
    ],
)
def test_a_bug_of_a_program_keeps_its_traceback(tmp_path, seed, where, error):
    run = run_program(tmp_path, "--workdir=out", f"--config.seed={seed}")
    assert run.returncode == 1
    assert re.search(rf'(?s)Traceback.*program.py", line \d+, in {where}\n.*\n{error}', run.stderr)


ROOT = pathlib.Path(harness.__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "BEYOND.md", *ROOT.glob("experiments/*/README.md")]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_readmes_say_that_a_config_is_executed(path):
    text = " ".join(path.read_text().split())
    assert "executes FILE as Python: run only configs that you trust" in text
