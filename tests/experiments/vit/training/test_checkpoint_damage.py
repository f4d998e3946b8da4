"""Checkpoints whose files were altered: what is read was saved, or is an error."""

import gc
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.harness.mistakes import UserError
from experiments.vit.training import checkpoint_contents, checkpoint_damage, checkpoint_manager
from tests.experiments.vit.training.test_checkpoint_manager import (
    abstract,
    get_config,
    make_mesh,
    make_rows,
    progress_of,
)

# When a read fails, Orbax abandons the others, which say so when they are collected.
ignore_abandoned_reads = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine .* was never awaited:RuntimeWarning",
)
pytestmark = [ignore_abandoned_reads, pytest.mark.devices(8)]
ROOT = pathlib.Path(__file__).parents[4]
STEPS = (1, 2, 3)
ROWS = make_rows(0.1, 0.3, 0.2)
FLIPS = 200
SAMPLE = 12  # Of the flips, in the default suite.


def random_bits(rng, shape):
    """Returns floats that cannot be compressed, in which any flipped bit makes another float."""
    return rng.integers(2**32, size=shape, dtype=np.uint32).view(np.float32)


def make_state(step):
    """Returns arrays of all kinds; OCDBT keeps large ones apart from its index, unchecked."""
    mesh = make_mesh(8)
    rng = np.random.default_rng(step)
    arrays = {
        "kernel": (rng.standard_normal((64, 96), np.float32), PartitionSpec("data")),
        "moment": (random_bits(rng, (64, 96)), PartitionSpec(None, "data")),
        "bias": (jnp.asarray(rng.standard_normal(24), jnp.bfloat16), PartitionSpec()),
        "step": (np.int32(step), PartitionSpec()),
        "key": (jax.random.key(step), PartitionSpec()),
    }
    return {k: jax.device_put(x, NamedSharding(mesh, spec)) for k, (x, spec) in arrays.items()}


def assert_saved(state, step):
    """The state is that of a step, bit for bit, in arrays of its types and shardings."""
    for name, expected in make_state(step).items():
        x = state[name]
        assert isinstance(x, jax.Array)
        assert (x.dtype, x.shape) == (expected.dtype, expected.shape)
        assert x.sharding.is_equivalent_to(expected.sharding, x.ndim)
        if name == "key":
            x, expected = jax.random.key_data(x), jax.random.key_data(expected)
        assert np.asarray(x).tobytes() == np.asarray(expected).tobytes()


def opened(folder):
    return checkpoint_manager.Checkpoints(folder, get_config(), keep=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of three checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, make_state(step), progress_of(ROWS[:step]))
    gc.freeze()  # So that what each test leaves behind is soon collected.
    yield folder
    gc.unfreeze()
    time.sleep(1)  # Reads that were abandoned may end after their test.
    gc.collect()


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be damaged."""
    yield pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    gc.collect()  # Here they are ignored.


def load_newest(folder):
    """Reads what evaluation and export would take."""
    for found in checkpoint_contents.find(folder, best=False):
        try:
            return checkpoint_contents.load(folder, found, abstract(make_state(1))), found.progress
        except checkpoint_damage.DamagedError as error:
            warnings.warn(str(error), stacklevel=1)
    raise OSError("There is none.")


def restore(folder):
    """Reads what training would go on from."""
    with opened(folder) as checkpoints:
        return checkpoints.restore(abstract(make_state(1)))


def step_read_by(read, folder):
    """Reads a checkpoint, which must be one that was saved; returns its step.

    There must be a warning for each newer one.
    """
    with warnings.catch_warnings(record=True, action="always") as warned:
        state, progress = read(folder)
    step = progress.data["step"]
    assert_saved(state, step)
    assert progress == progress_of(ROWS[:step])
    damaged = {int(m[1]) for w in warned if (m := re.search(r"/(\d) is damaged", str(w.message)))}
    assert damaged == {*range(step + 1, max(STEPS) + 1)}
    return step


def step_read(folder):
    """Reads for evaluation, which leaves the folder as it is, and then for training."""
    before = {path: path.read_bytes() for path in files_of(folder)}
    step = step_read_by(load_newest, folder)
    assert {path: path.read_bytes() for path in files_of(folder)} == before
    assert step_read_by(restore, folder) == step
    left = [f"{i}" for i in range(1, step + 1)] + [f"{i}.damaged" for i in STEPS[step:]]
    assert sorted(path.name for path in folder.iterdir()) == left
    return step


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def replace(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s >= SAMPLE)) for s in range(FLIPS)]
)
def test_a_flipped_bit_leads_to_no_other_state(seed, folder):
    rng = random.Random(seed)
    files = [path for path in files_of(folder / "3") if path.stat().st_size]
    sizes = [path.stat().st_size for path in files]
    # By turns, each file is as likely as any other, and each byte.
    (path,) = rng.choices(files, weights=sizes if seed % 2 else None)
    flip(path, rng.randrange(8 * path.stat().st_size))
    assert step_read(folder) in (2, 3)


def largest(folder, part="state"):
    """The file of a part of a checkpoint that holds most of it."""
    return max(files_of(folder / part), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_flipped_bit_of_a_weight_is_damage(place, folder):
    path = largest(folder / "3")
    flip(path, int(8 * path.stat().st_size * place))
    assert step_read(folder) == 2


PARTS = [
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "run/commit_success.txt",
    "run/metadata",
    "state/_METADATA",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/commit_success.txt",
    "state/d/*",
    "state/manifest.ocdbt",
    "state/ocdbt.process_0/d/*",
    "state/ocdbt.process_0/manifest.ocdbt",
]


def cut_off(path, other):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose(path, other):
    path.unlink()


def exchange(path, other):
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize("fault", [cut_off, lose, exchange])
@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_is_cut_off_lost_or_of_another_checkpoint_leads_to_no_other_state(
    part, fault, folder
):
    ours, theirs = (sorted((folder / n).glob(part), key=lambda x: x.stat().st_size) for n in "32")
    for path, other in zip(ours, theirs, strict=False):  # Some have a file more than others.
        fault(path, other)
    assert step_read(folder) in (1, 2, 3)


def test_no_file_is_forgotten_here(folder):
    files = {path.relative_to(folder / "3") for path in files_of(folder / "3")}
    assert files == {
        x.relative_to(folder / "3") for part in PARTS for x in (folder / "3").glob(part)
    }


@pytest.mark.parametrize("part", ["", "state", "run", "state/d"])
def test_additional_files_change_nothing(part, folder):
    (folder / "3" / part / "additional").write_text("A file.")
    assert step_read_by(load_newest, folder) == 3
    assert step_read_by(restore, folder) == 3


@pytest.mark.parametrize("part", ["", "state", "run"])
def test_what_two_checkpoints_exchanged_is_damage_of_both(part, folder):
    paths = [folder / step / part for step in "23"]
    paths[0].rename(folder / "between")
    paths[1].rename(paths[0])
    (folder / "between").rename(paths[1])
    assert step_read(folder) == 1


def test_a_copy_under_the_name_of_another_step_is_damage(folder):
    shutil.rmtree(folder / "3")
    shutil.copytree(folder / "2", folder / "3")
    assert step_read(folder) == 2


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("run/metadata", b'"learning_rate": 0.001', b'"learning_rate": 0.003'),
        ("run/metadata", b'"learning_rate"', b'"learning_rat%"'),
        ("run/metadata", b'"config"', b'"condig"'),
        ("run/metadata", b'"kernel": "float32[64, 96]"', b'"kernel": "float32[64, 97]"'),
        ("run/metadata", b'"moment": "float32', b'"moMent": "float32'),
        ("run/metadata", b'"sha256"', b'"sha25v"'),
        ("run/metadata", b'"digests"', b'"digesTs"'),
        ("run/metadata", b'"step": 3', b'"step": 2'),
        ("run/metadata", b'"seconds": 2.0', b'"seconds": 3.0'),
        ("run/metadata", b'"train_loss": 0.1', b'"train_loss": 0.5'),
        ("run/metadata", b'"test_accuracy": 0.3', b'"test_accuracy": 0.7'),
        ("state/_METADATA", b'"key": "moment"', b'"key": "moMent"'),
        ("state/_METADATA", b'"key": "bias"', b'"key": "bi!s"'),
        ("state/array_metadatas/process_0", b"threefry2x32", b"threefry2x33"),
    ],
)
def test_json_that_is_still_json_is_damage(part, old, new, folder):
    replace(folder / "3" / part, old, new)
    assert step_read(folder) == 2


@pytest.mark.parametrize("best", [False, True])
def test_evaluation_takes_the_next_best_or_the_next_newest(best, folder):
    order = [found.step for found in checkpoint_contents.find(folder, best=best)]
    assert order == ([2, 3, 1] if best else [3, 2, 1])
    replace(folder / str(order[0]) / "run" / "metadata", b"0.1", b"0.5")
    with pytest.warns(
        UserWarning, match=rf"{order[0]} is damaged \(run is not what was saved\); it"
    ):
        assert [found.step for found in checkpoint_contents.find(folder, best=best)] == order[1:]


def test_evaluation_of_damaged_checkpoints_alone_finds_none(folder):
    for step in STEPS:
        lose(folder / str(step) / "run" / "metadata", None)
    with pytest.warns(UserWarning, match="is damaged"):
        assert not list(checkpoint_contents.find(folder, best=True))


@pytest.mark.parametrize("read", [load_newest, restore])
def test_a_checkpoint_without_digests_is_refused_with_what_to_do(read, folder):
    path = folder / "3" / "run" / "metadata"
    run = json.loads(path.read_text())
    run["shapes"] = run.pop("types")
    path.write_text(
        json.dumps({k: v for k, v in run.items() if k not in ("step", "digests", "sha256")})
    )
    match = (
        "3 has no digests to check it by: it was saved by an earlier version .* Give another --w"
    )
    with pytest.raises(checkpoint_damage.IncompatibleError, match=match):
        read(folder)


def save(folder, steps, accuracies, keep):
    """Saves some steps of a run; each was evaluated."""
    with checkpoint_manager.Checkpoints(folder, get_config(), keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), progress_of(make_rows(*accuracies[:step])))


ACCURACIES = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5]
DELETED = {
    "all": "**/*",
    "the arrays": "state/**/*",
    "a file of the arrays": "state/manifest.ocdbt",
    "the progress": "run/**/*",
    "the mark": "commit_success.txt",
}


@pytest.mark.slow
@pytest.mark.parametrize("deleted", DELETED.values(), ids=DELETED)
def test_a_deletion_that_was_interrupted_is_finished(deleted, tmp_path):
    save(tmp_path, range(1, 7), ACCURACIES, keep=2)
    for name in ("3", "4", "1.damaged", "7.damaged"):
        shutil.copytree(tmp_path / "5", tmp_path / name)
    for path in (tmp_path / "3").glob(deleted):
        if path.is_file():
            path.unlink()
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=2) as checkpoints:
        state, _ = checkpoints.restore(abstract(make_state(1)))
    assert_saved(state, 6)
    # What is damaged and newer may be looked into; the run has not come so far again.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5", "6", "7.damaged"]


def test_a_deletion_that_fails_is_made_up_for(tmp_path, monkeypatch):
    def delete_in_part(self, path, **_):
        (path / "run").rmtree()
        raise OSError("Interrupted.")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.path.deleter.PathDeleter, "delete", delete_in_part)
        with pytest.raises(UserError, match=r"Interrupted.\nThat of step 2 is whole"):
            save(tmp_path, (1, 2), [0.1, 0.2], keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    with checkpoint_manager.Checkpoints(tmp_path, get_config(), keep=1) as checkpoints:
        assert_saved(checkpoints.restore(abstract(make_state(1)))[0], 2)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.slow
def test_half_written_checkpoints_are_deleted_also_if_nothing_is_saved(folder):
    (folder / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"4\.orbax-checkpoint-tmp is half-written; it is passed"):
        restore(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]


READ_DAMAGED = """
import sys
import absl.logging
from experiments.harness import process
from tests.experiments.vit.training import test_checkpoint_damage

absl.logging.use_absl_handler()  # As absl.app does.
process.quiet_orbax()
test_checkpoint_damage.restore(test_checkpoint_damage.pathlib.Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_damage_is_reported_in_one_line(folder):
    path = largest(folder / "3")
    path.write_bytes(bytes(path.stat().st_size))
    command = [sys.executable, "-W", "always", "-c", READ_DAMAGED, str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    # The line of the code follows a warning.
    warning, code = process.stderr.splitlines()
    assert re.search(r"UserWarning: .*/3 is damaged \(.*\); it is passed over, and now", warning)
    assert code.startswith("  ")
