"""Results of a long computation in files: found for equal inputs, and for no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax._src.integrations.linearization.kept_results import KeptResults

pytestmark = pytest.mark.fast
INPUTS = {"x": np.arange(6, dtype=np.float32), "key": jax.random.key(0)}


def is_computed(kept, what="error", inputs=INPUTS):
    """Returns whether a result was computed, and not found."""
    calls = []

    def compute():
        calls.append(what)
        return {"mean": jnp.asarray([1.5, 2]), "count": np.float64(3)}

    found = kept.recall(what, inputs, compute)
    np.testing.assert_array_equal(found["mean"], np.array([1.5, 2], np.float32))
    assert found["mean"].dtype == np.float32
    assert found["count"] == 3
    return bool(calls)


def test_a_result_is_found_again(tmp_path):
    folder = tmp_path / "of" / "a run"
    assert is_computed(KeptResults.in_folder(folder))
    assert not is_computed(KeptResults.in_folder(str(folder)))
    [file] = folder.iterdir()
    assert file.suffix == ".npz"


@pytest.mark.parametrize(
    "changed",
    [
        {"x": INPUTS["x"] + 1},
        {"x": INPUTS["x"].astype(np.float64)},
        {"x": INPUTS["x"].reshape(2, 3)},
        {"x": INPUTS["x"].astype(jnp.bfloat16)},
        {"x": (INPUTS["x"],)},
        {"x": None},
        {"key": jax.random.key(1)},
    ],
    ids=str,
)
def test_other_inputs_have_other_results(tmp_path, changed):
    kept = KeptResults.in_folder(tmp_path)
    is_computed(kept)
    assert is_computed(kept, inputs=INPUTS | changed)
    assert is_computed(kept, what="error of another option")
    assert not is_computed(kept)


def test_a_number_is_not_an_array_of_one(tmp_path):
    kept = KeptResults.in_folder(tmp_path)
    assert is_computed(kept, inputs=np.float32(1))
    assert is_computed(kept, inputs=np.ones(1, np.float32))


def test_nothing_is_kept_without_a_folder():
    kept = KeptResults.in_folder(None)
    assert is_computed(kept)
    assert is_computed(kept)


def test_what_fails_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError):
        KeptResults.in_folder(tmp_path).recall("error", INPUTS, lambda: {"mean": 1 / 0})
    assert not list(tmp_path.iterdir())


def unknown_compression(whole):
    """Returns a file whose first entry is compressed by a method that nobody knows."""
    place = whole.index(b"PK\x01\x02") + 10  # Of the method, in the directory of a zip file.
    return whole[:place] + b"\x63" + whole[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-30], lambda _: b"PK", lambda _: b"", unknown_compression],
    ids=["truncated", "two bytes", "empty", "unknown compression"],
)
def test_damaged_files_are_refused(tmp_path, damage):
    kept = KeptResults.in_folder(tmp_path)
    is_computed(kept)
    [file] = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file.name} is damaged; delete it to compute it again"):
        is_computed(kept)
    file.unlink()
    assert is_computed(kept)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "results"
    file.write_text("")
    with pytest.raises(ValueError, match=r"folder must be a folder, got the file .*results"):
        KeptResults.in_folder(file)
