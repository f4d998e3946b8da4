import json

import ml_collections
import numpy as np
import pytest

from experiments import harness

pytestmark = pytest.mark.fast
FIELDS = {"seed": int, "model.width": int}


def config(**changes):
    fields = ml_collections.ConfigDict({"seed": 0, "model": {"width": 4}})
    fields.update_from_flattened_dict(changes)
    return fields


def test_fields_are_returned_by_their_dotted_names():
    assert harness.check_fields(config(), FIELDS) == {"seed": 0, "model.width": 4}


@pytest.mark.parametrize(
    ("broken", "error", "match"),
    [
        ({"seed": 0}, ValueError, "lacks model.width"),
        ({"seed": 0, "model": {"width": 4, "x": 1}}, ValueError, "field model.x; the known ones"),
        ({"seed": 0.0, "model": {"width": 4}}, TypeError, "config.seed must be int, got 0.0"),
    ],
)
def test_fields_refuse(broken, error, match):
    with pytest.raises(error, match=match):
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
    with pytest.raises(FileExistsError, match="holds a run of another config"):
        harness.Pieces(tmp_path / "run", config(seed=1))


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        harness.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"a": 1}, ValueError, "config.a must be at least 2, got 1"),
        ({"a": (3, 1)}, ValueError, "Each of config.a must be at least 2, got 1"),
        ({"a": ()}, ValueError, r"config.a must have at least one entry, got \(\)"),
        ({"a": (2.0,)}, TypeError, "Each of config.a must be an integer, got 2.0"),
    ],
)
def test_least_refuses(values, error, match):
    harness.check_least({"a": (2, 3)}, {"a": 2})
    with pytest.raises(error, match=match):
        harness.check_least(values, {"a": 2})
