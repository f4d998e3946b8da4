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


def run_program(folder, arguments):
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
    run = run_program(tmp_path, arguments)
    assert run.returncode == code, run.stderr
    assert text in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_a_second_program_in_one_workdir_is_refused(tmp_path):
    with locking.locked(tmp_path / "out"):
        run = run_program(tmp_path, ["--workdir=out"])
    assert run.returncode == 1
    line = f"out is in use by another run: process {os.getpid()} on .* Stop it, or give [^\n]*\n"
    assert re.fullmatch(line, run.stderr), run.stderr
    assert not (tmp_path / "out").exists()
