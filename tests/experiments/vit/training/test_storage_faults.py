"""Checkpoints on storage that fails: what may be whole is left alone, and bugs show as bugs."""

import errno
import json
import os

import orbax.checkpoint as ocp
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.training import checkpoint_contents, checkpoint_damage, checkpoint_manager
from tests.experiments.vit.training.test_checkpoint_damage import (
    ROWS,
    folder,
    ignore_abandoned_reads,
    load_newest,
    make_state,
    restore,
    saved,
)
from tests.experiments.vit.training.test_checkpoint_manager import abstract, get_config, progress_of

__all__ = ["folder", "saved"]  # Fixtures.
pytestmark = ignore_abandoned_reads
READS = pytest.mark.parametrize("read", [load_newest, restore])
HANDLERS = pytest.mark.parametrize(
    "handler", [ocp.JsonCheckpointHandler, ocp.PyTreeCheckpointHandler]
)


def os_error(number):
    return OSError(number, os.strerror(number))  # Of the type that belongs to the number.


FAULTS = [
    os_error(number)
    for number in (
        errno.EACCES,
        errno.EIO,
        errno.ENOSPC,
        errno.ESTALE,
        errno.ETIMEDOUT,
    )
] + [ValueError("UNAVAILABLE: Error reading gs://bucket/run [tensorstore_spec='{}']")]
BUGS = [
    AttributeError("module 'orbax' has no attribute 'restore'"),
    ImportError("cannot import name 'restore'"),
    TypeError("restore() got an unexpected keyword argument"),
    ValueError("The mesh must have one axis"),
]


def names_in(path):
    return sorted(x.name for x in path.iterdir())


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def to_memory(path):
    """Makes a file one that cannot be read: nothing is at the start of a process' memory."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.slow
@READS
@pytest.mark.parametrize(
    ("part", "fault", "cause"),
    [
        ("run/metadata", to_memory, "Input/output error"),
        ("state/_METADATA", to_memory, "Input/output error"),
        ("state/array_metadatas/process_0", to_memory, "Input/output error"),
        ("state/manifest.ocdbt", to_itself, "Too many levels of symbolic links"),
        ("state/d/*", to_itself, "Too many levels of symbolic links"),
        ("state/ocdbt.process_0/d/*", to_itself, "Too many levels of symbolic links"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_damaged(part, fault, cause, read, folder):
    for path in (folder / "3").glob(part):
        fault(path)
    match = rf"^{folder / '3'} cannot be read: .*{cause}.*\. The checkpoint may be intact"
    with pytest.raises(UserError, match=match):
        read(folder)
    assert names_in(folder) == ["1", "2", "3"]


@READS
@HANDLERS
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_storage_that_fails_is_no_damage(fault, handler, read, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(handler, "restore", raising(fault))
        with pytest.raises(UserError, match=f"^{folder / '3'} cannot be read: ") as raised:
            read(folder)
    assert raised.value.__cause__ is fault
    assert names_in(folder) == ["1", "2", "3"]
    assert read(folder)[1].data == {"step": 3}


@READS
@HANDLERS
def test_a_folder_that_vanishes_is_not_damaged(handler, read, folder, monkeypatch):
    original, away = handler.restore, folder.with_name("away")

    def unmount(*args, **kwargs):
        folder.rename(away)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(handler, "restore", unmount)
        with pytest.raises(UserError, match=f"^{folder / '3'} cannot be read: "):
            read(folder)
    assert not folder.exists()
    away.rename(folder)
    assert names_in(folder) == ["1", "2", "3"]


@READS
@HANDLERS
@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_bug_in_reading_is_no_damage(bug, handler, read, folder, monkeypatch):
    monkeypatch.setattr(handler, "restore", raising(bug))
    with pytest.raises(type(bug)) as raised:
        read(folder)
    assert raised.value is bug
    assert names_in(folder) == ["1", "2", "3"]


@READS
@pytest.mark.parametrize("name", ["_check_alike", "sha256"])
def test_a_bug_in_the_checks_is_no_damage(name, read, folder, monkeypatch):
    monkeypatch.setattr(checkpoint_contents, name, raising(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        read(folder)
    assert names_in(folder) == ["1", "2", "3"]


def test_a_checkpoint_that_cannot_be_set_aside_ends_the_run(folder, monkeypatch):
    (folder / "3" / "run" / "metadata").unlink()
    monkeypatch.setattr(
        type(checkpoint_contents.absolute(folder)), "rename", raising(os_error(errno.EROFS))
    )
    with (
        pytest.warns(UserWarning, match="3 is damaged"),
        pytest.raises(UserError, match=f"^Checkpoints cannot be kept in {folder}: .*Read-only"),
    ):
        restore(folder)


# What opening, saving and waiting call.
CALLS = {
    "opening": (ocp, "CheckpointManager", r"^Checkpoints cannot be kept in .*: "),
    "deleting": (ocp.path.step, "is_path_temporary", r"^Checkpoints cannot be kept in .*: "),
    "saving": (
        ocp.CheckpointManager,
        "save",
        r"^A checkpoint could not be saved in .*: .*\n.*step 3",
    ),
    "waiting": (
        ocp.CheckpointManager,
        "wait_until_finished",
        r"^A checkpoint could not be saved in .*: .*\n.*step 3 is whole",
    ),
}


def save(folder):
    with checkpoint_manager.Checkpoints(folder, get_config(), keep=9) as checkpoints:
        checkpoints.save(4, make_state(4), progress_of(ROWS))


@pytest.mark.parametrize(("owner", "name", "match"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("fault", [*FAULTS, os_error(errno.ENOENT), os_error(errno.EROFS)], ids=str)
def test_storage_that_fails_in_saving_is_reported_in_one_line(
    fault, owner, name, match, folder, monkeypatch
):
    monkeypatch.setattr(owner, name, raising(fault))
    with pytest.raises(UserError, match=match):
        save(folder)


@pytest.mark.parametrize(("owner", "name", "_"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("bug", BUGS, ids=repr)
def test_a_bug_in_saving_keeps_its_place(bug, owner, name, _, folder, monkeypatch):
    monkeypatch.setattr(owner, name, raising(bug))
    with pytest.raises(type(bug)) as raised:
        save(folder)
    assert raised.value is bug


def test_a_bug_in_listing_keeps_its_place(folder, monkeypatch):
    bug = TypeError("a bug")
    monkeypatch.setattr(checkpoint_contents, "steps_in", raising(bug))
    with pytest.raises(TypeError, match="a bug"):
        next(checkpoint_contents.find(folder, best=False))


@pytest.mark.parametrize("second", [os_error(errno.ENOSPC), ValueError("No ArrayMetadata found")])
def test_the_first_error_is_the_one_to_see(second, folder, monkeypatch):
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", raising(second))
    with (
        pytest.raises(UserError, match=r"^The loss is nan\.$"),
        checkpoint_manager.Checkpoints(folder, get_config(), keep=9),
    ):
        raise UserError("The loss is nan.")


def test_a_bug_in_closing_keeps_its_place(folder, monkeypatch):
    monkeypatch.setattr(ocp.CheckpointManager, "close", raising(TypeError("a bug")))
    with (
        pytest.raises(TypeError, match="a bug"),
        checkpoint_manager.Checkpoints(folder, get_config(), keep=9),
    ):
        pass


# Checkpoints that another program wrote.


def write_foreign(folder, **items):
    """Writes a checkpoint of step 3 as any program may do by Orbax."""
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.Composite(**items))


@READS
@pytest.mark.parametrize(
    ("run", "got"),
    [
        ({"step": 3, "lr": 0.1}, "one with step, lr"),
        ({"config": {}, "digests": {}, "epoch": 2}, "one with config, digests, epoch"),
        ({}, "one with no fields"),
        ([1, 2], r"\[1, 2\]"),
        ("v1", "'v1'"),
    ],
    ids=["others", "some alike", "empty", "list", "string"],
)
def test_a_run_item_of_another_program_is_refused(run, got, read, tmp_path):
    arrays = {"kernel": make_state(3)["kernel"]}
    items = {"run": ocp.args.JsonSave(run), "state": ocp.args.PyTreeSave(arrays)}
    write_foreign(tmp_path, **items)
    match = (
        f"^{tmp_path / '3'} is not a checkpoint of this trainer: its item run must be a JSON "
        f"object with the fields step, config, types, .*, sha256, got {got}\\. Give another"
    )
    with pytest.raises(checkpoint_damage.IncompatibleError, match=match):
        read(tmp_path)
    assert names_in(tmp_path) == ["3"]


@READS
def test_items_of_another_program_are_refused(read, tmp_path):
    arrays = {"kernel": make_state(3)["kernel"]}
    write_foreign(tmp_path, default=ocp.args.StandardSave(arrays))
    match = r"3 is not a checkpoint of .*: it must hold the items run and state, got default"
    with pytest.raises(checkpoint_damage.IncompatibleError, match=match):
        read(tmp_path)


@READS
def test_a_whole_run_item_without_a_field_is_that_of_another_version(read, folder):
    path = folder / "3" / "run" / "metadata"
    run = json.loads(path.read_text())
    del run["seconds"]
    path.write_text(json.dumps(run | {"sha256": checkpoint_contents.sha256(run)}))
    with pytest.raises(
        checkpoint_damage.IncompatibleError, match=r"must be a JSON .*, got one with step"
    ):
        read(folder)


def test_arrays_of_another_type_are_refused_by_name(folder):
    found = next(checkpoint_contents.find(folder, best=False))
    wanted = abstract({"kernel": make_state(1)["moment"], "scale": make_state(1)["step"]})
    wanted["kernel"] = wanted["kernel"].update(shape=(64, 97))
    match = r"3 holds other arrays: kernel is 'float32\[64, 96\]' .*; scale is absent there"
    with pytest.raises(checkpoint_damage.IncompatibleError, match=match):
        checkpoint_contents.load(folder, found, wanted)


def test_a_run_without_rows_was_not_evaluated(tmp_path):
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        checkpoints.save(1, make_state(1), checkpoint_contents.Progress([], 0.0, {"step": 1}))
    assert next(checkpoint_contents.find(tmp_path, best=False)).test_accuracy is None
