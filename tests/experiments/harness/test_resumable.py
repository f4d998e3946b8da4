import json

import ml_collections
import numpy as np
import pytest

import simrf_jax
from experiments.harness import resumable
from experiments.harness.mistakes import UserError

pytestmark = pytest.mark.fast


def config(**changes):
    fields = ml_collections.ConfigDict({"seed": 0, "model": {"width": 4}})
    fields.update_from_flattened_dict(changes)
    return fields


def test_pieces_are_kept_whole_and_belong_to_one_config(tmp_path):
    pieces = resumable.Pieces(tmp_path / "run", config())
    assert pieces.load("a") is None
    pieces.save("a", np.arange(3))
    np.testing.assert_array_equal(resumable.Pieces(tmp_path / "run", config()).load("a"), [0, 1, 2])
    assert not list((tmp_path / "run").rglob("*.partial*"))
    with pytest.raises(UserError, match="holds a run of another config"):
        resumable.Pieces(tmp_path / "run", config(seed=1))


def test_pieces_of_another_selection_are_gone_on_with(tmp_path):
    resumable.Pieces(tmp_path, config(), selection=["seed"]).save("a", np.arange(3))
    pieces = resumable.Pieces(tmp_path, config(seed=1), selection=["seed"])
    np.testing.assert_array_equal(pieces.load("a"), np.arange(3))
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 1
    with pytest.raises(UserError, match=r"differs in seed\. Give another --workdir"):
        resumable.Pieces(tmp_path, config(), selection=["model"])


def test_pieces_of_another_version_or_of_a_damaged_config_are_refused(tmp_path, monkeypatch):
    resumable.Pieces(tmp_path, config())
    monkeypatch.setattr(simrf_jax, "__version__", "9.9")
    with pytest.raises(UserError, match="differs in version"):
        resumable.Pieces(tmp_path, config())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is damaged: Expecting"):
        resumable.Pieces(tmp_path, config())


def test_pieces_of_another_or_an_unknown_text_are_refused(tmp_path):
    pieces = resumable.Pieces(tmp_path, config())
    pieces.check_text("near", "a1")
    pieces.check_text("near", "b2")  # There is no piece of the other text yet.
    pieces.save("near-0", np.arange(3))
    pieces.check_text("near", "b2")
    with pytest.raises(UserError, match=r"near-\* of a text with SHA-256 b2, .* has SHA-256 c3\. "):
        pieces.check_text("near", "c3")
    pieces.check_text("near_far", "c3")
    pieces.save("far-0", np.arange(3))
    with pytest.raises(UserError, match=r"far-\* of an unknown text, .* has SHA-256 c3\. "):
        pieces.check_text("far", "c3")


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:-1], lambda b: b"x" + b[1:]])
def test_a_damaged_piece_is_named(tmp_path, change):
    pieces = resumable.Pieces(tmp_path, config())
    pieces.save("a", np.arange(3))
    path = tmp_path / "pieces" / "a.npy"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=r"a.npy is damaged \(.*\). Delete it; the same command"):
        pieces.get("a", pytest.fail)


@pytest.mark.parametrize("name", ["pieces", "config.json"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / name).write_text("{}") if name == "pieces" else (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{tmp_path}.* cannot be (written|read): "):
        resumable.Pieces(tmp_path, config())


def test_pieces_are_computed_once_and_timed(tmp_path):
    pieces = resumable.Pieces(tmp_path, config())
    first = pieces.get("part-a", lambda: np.arange(3))
    np.testing.assert_array_equal(pieces.get("part-a", lambda: np.zeros(9)), first)
    assert pieces.seconds("part-*") > 0
    assert pieces.seconds("other") == 0
