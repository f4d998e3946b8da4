"""The folders of a run."""

import orbax.checkpoint as ocp
import pytest

from experiments.harness import locking
from experiments.harness.mistakes import UserError
from experiments.vit.training.folders import Folders

pytestmark = pytest.mark.fast


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_both_folders_are_locked_and_left_as_they_were(tmp_path):
    with Folders(tmp_path / "run", tmp_path / "run" / "checkpoints") as folders:
        assert names_in(tmp_path / "run") == ["checkpoints", "checkpoints/run.lock", "run.lock"]
        folders.check_workdir()
        folders.check_checkpoints()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("checkpoints", [None, "run"])
def test_a_run_may_have_one_folder_alone(checkpoints, tmp_path):
    checkpoints = checkpoints and tmp_path / checkpoints
    with Folders(tmp_path / "run", checkpoints) as folders:
        assert names_in(tmp_path / "run") == ["run.lock"]
        folders.check_workdir()
        folders.check_checkpoints()


def test_a_refused_folder_of_checkpoints_leaves_no_workdir(tmp_path):
    with locking.locked(tmp_path / "checkpoints"):
        folders = Folders(tmp_path / "run", tmp_path / "checkpoints")
        with pytest.raises(UserError, match="checkpoints is in use by another run"):
            folders.__enter__()
        assert not (tmp_path / "run").exists()


def test_a_folder_that_orbax_made_anew_is_not_the_one_that_was_locked(tmp_path):
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    with Folders(run, checkpoints) as folders:
        folders.check_checkpoints()
        run.rename(tmp_path / "away")
        (checkpoints / "5" / "state").mkdir(parents=True)
        with pytest.raises(UserError, match="checkpoints was removed, renamed or replaced"):
            folders.check_checkpoints()
    assert (checkpoints / "5").exists()


def test_a_lock_file_that_is_removed_takes_no_checkpoint_along(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    with Folders(tmp_path / "run", checkpoints) as folders:
        folders.check_checkpoints()
        (checkpoints / "5" / "state").mkdir(parents=True)
        (checkpoints / "run.lock").unlink()
        with pytest.raises(UserError, match="checkpoints was removed, renamed or replaced"):
            folders.check_checkpoints()
    assert (checkpoints / "5" / "state").exists()


def fail_in_orbax():
    ocp.path.step.step_from_checkpoint_name("no step")


def fail_here():
    raise ValueError("a bug")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "vanishes", "error", "match"),
    [
        (fail_in_orbax, True, UserError, "checkpoints was removed, renamed or replaced"),
        (fail_in_orbax, False, ValueError, "no step"),
        (fail_here, True, ValueError, "a bug"),
    ],
)
def test_what_orbax_fails_with_in_a_folder_that_vanished_is_told_as_such(
    fail, vanishes, error, match, tmp_path
):
    run = tmp_path / "run"

    def train():
        if vanishes:
            run.rename(tmp_path / "away")
        fail()

    with pytest.raises(error, match=match), Folders(run, run / "checkpoints"):
        train()
