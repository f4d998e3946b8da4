"""Checkpoints in a folder."""

import resource
import shutil
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from experiments.harness.mistakes import UserError
from experiments.vit.data import stream
from experiments.vit.training import (
    checkpoint_contents,
    checkpoint_damage,
    checkpoint_manager,
    hosts,
    sharding,
)
from tests.experiments.vit import tiny

pytestmark = pytest.mark.devices(8)
STEPS = 12


def get_config(**changes):
    """A run whose steps, redraws, evaluations and checkpoints are out of step with each other."""
    return tiny.get_config(
        **{
            "num_steps": STEPS,
            "eval_interval": 5,
            "redraw_interval": 4,
            "mesh__data": 8,
            "checkpoint__interval": 3,
        }
        | changes
    )


def make_mesh(size):
    return sharding.make_mesh({"data": size, "fsdp": 1, "tensor": 1, "sequence": 1})


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def make_state(mesh_size=8, width=16, value=1.0):
    mesh = make_mesh(mesh_size)
    return {
        "key": jax.device_put(jax.random.key(1), NamedSharding(mesh, PartitionSpec())),
        "kernel": jax.device_put(
            value * jnp.arange(width, dtype=jnp.float32), NamedSharding(mesh, PartitionSpec("data"))
        ),
    }


def make_rows(*accuracies):
    """A row a step; None where nothing was evaluated."""
    return [
        {"step": step, "train_loss": 0.1} | ({} if a is None else {"test_accuracy": a})
        for step, a in enumerate(accuracies, start=1)
    ]


def progress_of(rows):
    return checkpoint_contents.Progress(rows, 2.0, {"step": len(rows)})


def test_what_was_sharded_over_eight_devices_is_restored_over_four(tmp_path):
    state, target = make_state(8), abstract(make_state(4))
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        assert checkpoints.restore(target) is None
        checkpoints.save(1, state, progress_of(make_rows(0.5)))
        checkpoints.wait()
        restored, progress = checkpoints.restore(target)
    assert restored["kernel"].sharding == target["kernel"].sharding
    np.testing.assert_array_equal(restored["kernel"], state["kernel"])
    assert jax.random.key_data(restored["key"]).tolist() == [0, 1]
    assert progress == progress_of(make_rows(0.5))


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    accuracies = [0.1, 0.9, None, 0.8, None, None, 0.9, 0.2, None, 0.3]
    rows = make_rows(*accuracies)
    best = [step for step in range(1, 11) if checkpoint_manager.is_best(rows[:step])]
    assert best == [1, 2]
    for some in (range(1, 7), range(7, 11)):  # Also when the run is opened again.
        with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=2) as checkpoints:
            for step in some:
                checkpoints.save(step, make_state(), progress_of(rows[:step]))
        kept = sorted(int(path.name) for path in tmp_path.iterdir())
        assert kept == ([2, 5, 6] if some[-1] == 6 else [7, 9, 10])


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path):
    def opened():
        return checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=2)

    target, rows = abstract(make_state()), make_rows(0.1, 0.2)
    with opened() as checkpoints:
        for step in (1, 2):
            state = make_state(value=step)
            checkpoints.save(step, state, progress_of(rows[:step]))
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    # Cut off in the arrays, then in the progress too, which is read first.
    for aside, folder in enumerate(("state", ".")):
        for path in (tmp_path / "2" / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with (
            warnings.catch_warnings(record=True, action="always") as warned,
            opened() as checkpoints,
        ):
            restored, progress = checkpoints.restore(target)
            checkpoints.save(2, make_state(value=2), progress_of(rows))
        messages = {str(warning.message).split(";")[0].split(" (")[0] for warning in warned}
        half_written = (
            {f"{tmp_path / '3.orbax-checkpoint-tmp'} is half-written"} if not aside else set()
        )
        assert messages == {f"{tmp_path / '2'} is damaged"} | half_written
        np.testing.assert_array_equal(restored["kernel"], make_state(value=1)["kernel"])
        assert progress.rows == rows[:1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "2.damaged"]


def test_the_iterator_of_the_data_goes_on_where_it_was(tmp_path):
    def numbers():
        return stream.Batches(lambda step: {"step": np.array(step)}, num_steps=10, num_workers=0)

    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        with numbers() as batches:
            assert [int(next(batches)["step"]) for _ in range(4)] == [0, 1, 2, 3]
            progress = checkpoint_contents.Progress(make_rows(None), 0.0, batches.get_state())
        checkpoints.save(1, make_state(), progress)
        checkpoints.wait()
        _, restored = checkpoints.restore(abstract(make_state()))
    with numbers() as batches:
        batches.set_state(restored.data)
        assert int(next(batches)["step"]) == 4


def test_who_finds_checkpoints_of_another_run_writes_over_nothing(tmp_path):
    """Two runs may save into one folder of a bucket, which has no locks."""
    rows = make_rows(0.1, 0.2, 0.3)
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=9) as behind:
        behind.save(1, make_state(), progress_of(rows[:1]))
        behind.wait()
        with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=9) as ahead:
            ahead.save(3, make_state(value=3), progress_of(rows))
        with pytest.raises(UserError, match=r"was taken over by another run, which has saved st"):
            behind.save(2, make_state(), progress_of(rows[:2]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_arrays_of_other_shapes_are_refused_by_name(tmp_path):
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        checkpoints.save(1, make_state(), progress_of(make_rows(None)))
        checkpoints.wait()
        other = abstract(make_state(width=24) | {"bias": make_state()["kernel"]})
        match = (
            r"kernel is 'float32\[16\]' there, 'float32\[24\]' here; bias is absent there, 'float"
        )
        with pytest.raises(checkpoint_damage.IncompatibleError, match=match):
            checkpoints.restore(other)


def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # One array on one device: Orbax lets go of what else it was writing only when it is collected.
    state = {"kernel": jax.random.normal(jax.random.key(0), (80_000,))}
    target = abstract(state)
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        checkpoints.save(1, state, progress_of(make_rows(None)))
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            checkpoints.save(2, state, progress_of(make_rows(None, None)))
            with pytest.raises(UserError, match=r"(?s)could not be saved.*That of step 1 is whole"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.warns(UserWarning, match=r"2.orbax-checkpoint-tmp is half-written"):
        checkpoints = checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1)
    with checkpoints:
        restored, progress = checkpoints.restore(target)
    assert len(progress.rows) == 1
    np.testing.assert_array_equal(restored["kernel"], state["kernel"])


def test_when_no_checkpoint_can_be_read_none_is_given_up(tmp_path):
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        checkpoints.save(1, make_state(), progress_of(make_rows(None)))
        checkpoints.wait()
        shutil.rmtree(tmp_path / "1" / "run")
        match = r"No checkpoint in .* can be read: .*1 is damaged \(.*\). To start over, delete it"
        with pytest.raises(UserError, match=match):
            checkpoints.restore(abstract(make_state()))
    assert (tmp_path / "1").exists()
    (tmp_path / "1").rename(tmp_path / "1.damaged")
    with (
        checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints,
        pytest.raises(UserError, match=r"can be read: each of them is damaged. To start over"),
    ):
        checkpoints.restore(abstract(make_state()))


def test_what_another_host_cannot_read_is_passed_over_here_too(tmp_path, monkeypatch):
    rows, answers = make_rows(0.1, 0.2), iter([True, False, True, True])  # Of two reads each.
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(value=step), progress_of(rows[:step]))
        checkpoints.wait()
        monkeypatch.setattr(hosts, "everywhere", lambda here: here and next(answers))
        with pytest.warns(
            UserWarning, match=r"2 is damaged \(another host cannot read it\); it is"
        ):
            restored, _ = checkpoints.restore(abstract(make_state()))
    np.testing.assert_array_equal(restored["kernel"], make_state(value=1)["kernel"])


@pytest.mark.fast
def test_a_folder_that_the_hosts_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: None)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: x)
    with pytest.raises(
        UserError, match=r"the hosts do not share it; config.checkpoint.folder says"
    ):
        checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1)


@pytest.mark.fast
def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Checkpoints cannot be kept in .*file/checkpoints: "):
        checkpoint_manager.Checkpoints(tmp_path / "file" / "checkpoints", get_config(), keep=1)


@pytest.mark.fast
def test_a_bucket_is_no_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # As if it were not installed.
    with pytest.raises(UserError, match=r"Checkpoints cannot be kept in gs://bucket/run: .*gcsfs"):
        checkpoint_manager.Checkpoints("gs://bucket/run", get_config(), keep=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_a_bucket_that_is_no_checkpoint_is_not_deleted(tmp_path, monkeypatch):
    def lacks_the_mark(path):
        return path.is_dir() and not (path / "commit_success.txt").exists()

    for name in ("tfds/imagenet2012", "3/state", "4.damaged"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(ocp.path.step, "is_path_temporary", lacks_the_mark)  # As in a bucket.
    with (
        pytest.warns(UserWarning, match=r"/(3|4\.damaged) is half-written; it is passed over"),
        checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["tfds"]
