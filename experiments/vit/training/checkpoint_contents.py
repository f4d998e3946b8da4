"""The contents of a checkpoint: what it says of itself, its arrays, and how both are read.

A checkpoint that is read is the one that was saved, bit for bit, or it is damaged: digests of the
arrays and of the JSON are saved with it and compared with what is read. OCDBT, in which Orbax keeps
arrays, checks its index alone; without digests a flipped bit in an array would be another weight.

The digests are those of the arrays in the devices' memory (``digest.py``), not those of the files:

- They are computed before the arrays are written, and again from the very arrays that the caller
  gets. So they cover every file and every program between the two, and nothing is read twice.
- They do not depend on the sharding, so that a run may go on with other devices or processes.
- They are in the checkpoint before it is committed, in a bucket as on a disk.
- A part of the arrays, as evaluation reads it, is checked by the digests of this part.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from experiments.harness import config_fields, storage
from experiments.harness.mistakes import UserError
from experiments.vit.metrics import log
from experiments.vit.training import digest
from experiments.vit.training.checkpoint_damage import (
    DamagedError,
    IncompatibleError,
    agreeing_on_damage,
)

State = TypeVar("State")  # A pytree of arrays, or of what jax.eval_shape makes of them.


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
      rows: Rows of ``metrics.csv``. They are in the checkpoint, so that a run that goes on has
        each of them once, also in another folder.
      seconds: Seconds that the run took.
      data: State of the iterator of the data, of ``stream.Batches``.
    """

    rows: list[dict[str, float]]
    seconds: float
    data: dict[str, int]


class CheckpointRecord(NamedTuple):
    """The description that a checkpoint holds of itself, its item run, checked by its digest.

    Attributes:
      step: The step after which it was saved.
      config: The config of its run.
      types: The type and shape of each array, ``{"params.head.bias.value": "float32[10]", ...}``.
      digests: The digest of each array.
      rows: Rows of ``metrics.csv``; see ``Progress``.
      seconds: Seconds that the run took.
      data: State of the iterator of the data.
    """

    step: int
    config: Mapping[str, Any]
    types: dict[str, str]
    digests: dict[str, str]
    rows: list[dict[str, float]]
    seconds: float
    data: dict[str, int]

    @property
    def progress(self) -> Progress:
        """Returns the progress of the run."""
        return Progress(self.rows, self.seconds, self.data)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns ``{"params.head.bias.value": (10,), ...}``."""
        return {name: tuple(json.loads(x[x.index("[") :])) for name, x in self.types.items()}

    @property
    def test_accuracy(self) -> float | None:
        """Returns the test accuracy at its step, or None if the test set was not evaluated."""
        return self.rows[-1].get("test_accuracy") if self.rows else None

    @property
    def accuracy(self) -> float:
        """Returns the accuracy that chooses the best checkpoint; see ``log.accuracy``."""
        return log.accuracy(self.rows[-1] if self.rows else {})


_FIELDS = (*CheckpointRecord._fields, "sha256")  # Of the item run.


def run_item(
    step: int, config: Mapping[str, Any], arrays: Mapping[str, jax.Array], progress: Progress
) -> dict[str, Any]:
    """Returns the item run of a checkpoint, from which ``read`` makes a ``CheckpointRecord``.

    Args:
      step: Number of steps done.
      config: Config of the run, without the folder of the checkpoints.
      arrays: Arrays of the state, by name.
      progress: Progress of the run.
    """
    progress = progress._replace(rows=list(progress.rows))  # It is written while more come.
    digests = digest.digests(arrays)
    run = CheckpointRecord(step, config, types_by_name(arrays), digests, *progress)._asdict()
    return run | {"sha256": sha256(run)}


def find(folder: epath.PathLike, *, best: bool) -> Iterator[CheckpointRecord]:
    """Yields the checkpoints of a run, which may be still training, in the order to try them in.

    Nothing in the folder is changed. A checkpoint that cannot say what it holds is passed over with
    a warning; whether its arrays are whole turns out when they are loaded.

    Args:
      folder: Folder of the checkpoints.
      best: If true, begin with the most accurate one instead of the newest, and leave
        out those that were not evaluated.

    Raises:
      IncompatibleError: If a checkpoint has no digests, or another program wrote it.
      UserError: If there is no checkpoint, the folder cannot be read, or best is wanted and none
        was evaluated.
    """
    folder = absolute(folder)
    with storage.faults(
        lambda cause: UserError(f"The checkpoints in {folder} cannot be read: {cause}")
    ):
        steps = sorted(steps_in(folder), reverse=True)
    if not steps:
        raise UserError(f"There is no checkpoint in {folder}.")
    found = _whole(folder, steps)
    if not best:
        yield from found
        return
    some = list(found)
    evaluated = [one for one in some if one.accuracy > -math.inf]
    if some and not evaluated:
        raise UserError(f"No checkpoint in {folder} was evaluated; leave out --best.")
    # Of equal ones, the newest.
    yield from sorted(evaluated, key=lambda one: (one.accuracy, one.step), reverse=True)


def _whole(folder: epath.Path, steps: Sequence[int]) -> Iterator[CheckpointRecord]:
    """Yields what can be found, and warns of the rest."""
    for step in steps:
        try:
            yield read(folder, step)
        except DamagedError as error:
            warnings.warn(f"{error}; it is passed over.", stacklevel=4)


def load(folder: epath.PathLike, found: CheckpointRecord, state: State) -> State:
    """Reads the arrays of a checkpoint, or a part of them, and compares their digests.

    Args:
      folder: Folder of the checkpoints.
      found: The checkpoint.
      state: Shapes, types and shardings of what to read.

    Raises:
      DamagedError: If an array is lost, or is not the one that was saved.
      IncompatibleError: If the checkpoint holds no such arrays; the message names them.
      UserError: If the storage fails.
    """
    path = absolute(folder) / str(found.step)
    wanted = by_name(state)
    theirs = {name: x for name, x in found.types.items() if name in wanted}
    if differ := config_fields.differences(theirs, types_by_name(wanted)):
        raise IncompatibleError(f"{path} holds other arrays: {some_of(differ)}.")
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    handler = ocp.PyTreeCheckpointHandler()
    with agreeing_on_damage(path):
        arrays = handler.restore(path / "state", args=args)
        for name, like in wanted.items():
            _check_alike(name, arrays.get(name), like)
    # Each host adds up its part of the digests, and each gets the same sum.
    digests = digest.digests({name: arrays[name] for name in wanted})
    if differ := [name for name in wanted if digests[name] != found.digests[name]]:
        raise DamagedError(f"{path} is damaged ({differ[0]} is not what was saved)")
    return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in wanted])


def read(folder: epath.Path, step: int) -> CheckpointRecord:
    """Reads what a checkpoint says of itself.

    Raises:
      DamagedError: If it is not what was saved, or is that of another step.
      IncompatibleError: If it has no digests, or another program wrote it.
      UserError: If the storage fails.
    """
    path = folder / str(step)
    handler = ocp.JsonCheckpointHandler()
    with agreeing_on_damage(path):
        _check_items(path)
        run = handler.restore(path / "run")
        is_whole = isinstance(run, dict) and run.get("sha256") == sha256(run)
        _check_fields(path, run, is_whole=is_whole)
        if not is_whole:
            raise DamagedError("run is not what was saved")
        if run["step"] != step:
            raise DamagedError(f"it was saved as that of step {run['step']}")
    return CheckpointRecord(*(run[name] for name in CheckpointRecord._fields))


def _check_items(path: epath.Path) -> None:
    """Refuses a checkpoint that has other items than those of this trainer, and none of them."""
    items = sorted(item.name for item in path.iterdir() if item.is_dir())
    if items and {"run", "state"}.isdisjoint(items):
        raise IncompatibleError(
            f"{path} is not a checkpoint of this trainer: it must hold the items run and state, "
            f"got {', '.join(items)}. Give another --workdir."
        )


def _check_fields(path: epath.Path, run: Any, *, is_whole: bool) -> None:
    """Refuses what another program, or another version of this one, wrote as the item run.

    Of what this trainer wrote, a flipped bit changes the name of one field, and the digest tells.
    """
    names = list(run) if isinstance(run, dict) else []
    missing = [name for name in _FIELDS if name not in names]
    if len(missing) <= (0 if is_whole else 1):
        return
    if missing == ["step", "types", "digests", "sha256"]:
        raise IncompatibleError(
            f"{path} has no digests to check it by: it was saved by an earlier version of this "
            "package, which can go on with it. Give another --workdir to start over."
        )
    got = f"one with {', '.join(names) or 'no fields'}" if isinstance(run, dict) else f"{run!r:.80}"
    raise IncompatibleError(
        f"{path} is not a checkpoint of this trainer: its item run must be a JSON object with the "
        f"fields {', '.join(_FIELDS)}, got {got:.400}. Give another --workdir."
    )


def _check_alike(name: str, array: Any, like: Any) -> None:
    """Refuses an array that is none or is of another type, shape or sharding."""
    if not isinstance(array, jax.Array):  # Orbax leaves what it does not find as it was.
        raise DamagedError(f"{name} is not there")
    if (array.dtype, array.shape) != (like.dtype, like.shape):
        raise DamagedError(f"{name} is {array.dtype}{list(array.shape)}")
    if like.sharding and not array.sharding.is_equivalent_to(like.sharding, array.ndim):
        raise DamagedError(f"{name} is sharded as {array.sharding}")


def sha256(run: Mapping[str, Any]) -> str:
    """Returns the digest of all fields but that of the digest itself."""
    others = {name: value for name, value in run.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def some_of(differences: Sequence[str]) -> str:
    """Returns up to eight differences as one text, and how many more there are."""
    more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
    return f"{'; '.join(differences[:8])}{more}"


def steps_in(folder: epath.Path) -> list[int]:
    """Returns the steps in a folder, damaged ones too."""
    return [found.step for found in ocp.path.step.standard_name_format().find_all(folder)]


def absolute(folder: epath.PathLike) -> epath.Path:
    """Returns the absolute path that Orbax needs; a bucket must not be resolved like a path."""
    path = epath.Path(folder).expanduser()
    return path if "://" in str(path) else path.resolve()


def by_name(state: Any) -> dict[str, Any]:
    """Returns ``{"params.head.kernel": array, ...}``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def types_by_name(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns ``{"params.head.bias.value": "float32[10]", ...}``."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
