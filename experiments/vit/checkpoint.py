"""Checkpoints by Orbax: asynchronous, sharded, whole or absent; the last ones and the best.

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

import contextlib
import hashlib
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import absl.logging
import jax
import ml_collections
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from experiments import harness, storage
from experiments.hosts import everywhere as _everywhere
from experiments.mistakes import UserError
from experiments.vit import config as config_lib
from experiments.vit import digest

# Orbax's files that log the errors they raise.
_RAISING = ("async_checkpointer.py", "checkpoint_manager.py", "future.py", "metadata/checkpoint.py")

State = TypeVar("State")  # A pytree of arrays, or of what jax.eval_shape makes of them.


class Progress(NamedTuple):
    """What a run has to show so far.

    Attributes:
      rows: Those of ``metrics.csv``. They are in the checkpoint, so that a run that goes on has
        each of them once, also in another folder.
      seconds: Time it took.
      data: State of the iterator of the data, of ``stream.Batches``.
    """

    rows: list[dict[str, float]]
    seconds: float
    data: dict[str, int]


# The fields of the item run.
_FIELDS = ("step", "config", "types", "digests", *Progress._fields, "sha256")


class IncompatibleError(UserError):
    """A checkpoint is that of another run, of another program, or of a version without digests."""


class DamagedError(UserError):
    """A checkpoint is not what was saved."""


class Found(NamedTuple):
    """What a checkpoint says of itself, which is what was saved.

    Attributes:
      step: The step after which it was saved.
      config: The config of its run.
      types: The type and shape of each array, ``{"params.head.bias.value": "float32[10]", ...}``.
      digests: The digest of each array.
      progress: The progress of the run.
    """

    step: int
    config: dict[str, Any]
    types: dict[str, str]
    digests: dict[str, str]
    progress: Progress

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns ``{"params.head.bias.value": (10,), ...}``."""
        return {name: tuple(json.loads(x[x.index("[") :])) for name, x in self.types.items()}

    @property
    def test_accuracy(self) -> float | None:
        """Returns the test accuracy at its step, or None if it was not evaluated."""
        rows = self.progress.rows
        return rows[-1].get("test_accuracy") if rows else None


def quiet() -> None:
    """Keeps a program's standard error free of what Orbax, TensorStore and asyncio say.

    Of a save or a read that fails each of them prints pages, some of them when the program ends;
    ``Checkpoints`` and ``load`` raise the error. Orbax's other errors stay.
    """
    absl.logging.get_absl_handler().addFilter(_is_news)
    # After a failed write, the writes that have not begun.
    warnings.filterwarnings("ignore", r"coroutine '.*write_fragment' was never awaited")
    hook = sys.unraisablehook

    def pass_on(unraisable: sys.UnraisableHookArgs) -> None:
        # Reads and writes go on after the first failure, which has ended asyncio's loop.
        abandoned = "Event loop is closed|Encountered error while reading array index"
        if not re.match(abandoned, str(unraisable.exc_value)):
            hook(unraisable)

    sys.unraisablehook = pass_on


def _is_news(record: logging.LogRecord) -> bool:
    """Returns whether nobody else tells what a record of the log says."""
    if record.name == "asyncio":
        return "exception was never retrieved" not in record.getMessage()
    if "orbax" not in record.pathname:
        return True
    return record.levelno >= logging.ERROR and not record.pathname.endswith(_RAISING)


def is_best(rows: list[dict[str, float]]) -> bool:
    """Whether the last row has a higher test accuracy than any before."""
    *before, last = (row.get("test_accuracy", -1.0) for row in rows)
    return last > max(before, default=-1.0)


class Checkpoints:
    """The checkpoints in a folder.

    A step is a subfolder that gets its name when it is whole (on a bucket: a mark). It holds
    ``state``, the arrays by name, and ``run``, the config, the progress, and the names, types and
    digests of the arrays.

    Args:
      folder: Made if needed; a path, or a bucket as in ``gs://bucket/run``.
      config: Of the run.
      keep: How many of the last checkpoints to keep, beside the one of the best test accuracy.

    Raises:
      UserError: If the folder cannot be read and written.
    """

    def __init__(self, folder: epath.PathLike, config: ml_collections.ConfigDict, *, keep: int):
        self._config = json.loads(config.to_json_best_effort())
        del self._config["checkpoint"]["folder"]  # A folder may be moved.
        self._policy = _LatestAndBest(keep)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            lightweight_initialize=True,  # It would fail on metadata that is damaged.
        )
        self._folder = _absolute(folder)
        with storage.faults(self._not_kept):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_access()
            self._delete_half_written()
            multihost_utils.sync_global_devices("half-written checkpoints are deleted")
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Checkpoints:
        """Is closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all is on disk; if that fails too, the first error is the one to see."""
        try:
            self.wait()
        except BaseException as error:
            with contextlib.suppress(Exception):  # What a save failed with is raised once more.
                self._manager.close()
            if kind is None or not isinstance(error, Exception):
                raise
        else:
            self._manager.close()

    def save(self, step: int, state: Any, progress: Progress) -> None:
        """Starts to save, after the last save is done; the state may be donated at once.

        Raises:
          UserError: If this or the last save failed. All checkpoints before them are whole.
        """
        arrays = _by_name(state)
        run = {
            "step": step,
            "config": self._config,
            "types": _types(arrays),
            "digests": digest.digests(arrays),
            **progress._asdict(),
            "rows": list(progress.rows),  # It is written while more come.
        }
        run["sha256"] = _sha256(run)
        items = {"state": ocp.args.PyTreeSave(arrays), "run": ocp.args.JsonSave(run)}
        self._policy.rows = run["rows"]
        with storage.faults(self._not_saved):
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          UserError: If it failed.
        """
        with storage.faults(self._not_saved):
            self._manager.wait_until_finished()

    def restore(self, state: State) -> tuple[State, Progress] | None:
        """Reads the newest checkpoint that is whole.

        Newer ones, which are damaged, are set aside with a warning. Of the older ones, those that
        are not to be kept are deleted: a run that is killed while it deletes leaves parts of them.

        Args:
          state: Shapes, types and shardings; the arrays go to these, whatever theirs were.

        Returns:
          The state and the progress, or None if there is no checkpoint.

        Raises:
          IncompatibleError: If it is of another config, or of arrays of other shapes, and the
            message names what differs; if it has no digests; or if another program wrote it.
          UserError: If there are checkpoints, and all are damaged; or if the storage fails, before
            anything is renamed.
        """
        damaged: dict[int, str] = {}  # Not the errors, which would keep what was read in memory.
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = _find(self._folder, step)
                self._check_compatible(found, _types(_by_name(state)))
                restored = load(self._folder, found, state)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            self._policy.rows = found.progress.rows
            with storage.faults(self._not_kept):
                for later, damage in damaged.items():
                    self._set_aside(later, damage)
                self._delete_older(step)
            return restored, found.progress
        if damaged or any(self._folder.glob("*.damaged")):
            each = "; ".join(damaged.values()) or "each of them is damaged"
            raise UserError(
                f"No checkpoint in {self._folder} can be read: {each}. To start over, delete it."
            )
        return None

    def _check_compatible(self, found: Found, types: dict[str, str]) -> None:
        differ = config_lib.differences(found.config, self._config)
        differ += harness.differences(found.types, types)
        if differ:
            raise IncompatibleError(
                f"{self._folder / str(found.step)} is a checkpoint of another run: "
                f"{_some_of(differ)}. Give another --workdir, or the config of that run."
            )

    def _set_aside(self, step: int, damage: str) -> None:
        """Renames a checkpoint, so that it neither counts as one nor stands in the way."""
        path = self._folder / str(step)
        aside = self._folder / f"{step}.damaged"
        warnings.warn(f"{damage}; it is passed over, and now {aside}.", stacklevel=3)
        if jax.process_index() == 0:
            if aside.exists():
                aside.rmtree()
            path.rename(aside)
        self._manager.delete(step)  # It finds nothing to delete, and forgets the step.

    def _delete_older(self, newest: int) -> None:
        """Deletes what is older than the newest whole checkpoint and is not to be kept."""
        steps = sorted(self._manager.all_steps())
        for step in {*steps} - self._policy.kept(steps):
            self._manager.delete(step)
        if jax.process_index() == 0:
            for path in self._folder.glob("*.damaged"):
                if path.stem.isdecimal() and int(path.stem) <= newest:
                    path.rmtree()

    def _check_access(self) -> None:
        probe = self._folder / f"access-{jax.process_index()}"
        probe.write_text("Can this folder be written?")
        multihost_utils.sync_global_devices("each host has written to the folder")
        seen = all((self._folder / f"access-{i}").exists() for i in range(jax.process_count()))
        if not _everywhere(seen):
            raise self._not_kept(
                "the hosts do not share it; config.checkpoint.folder says which they do."
            )
        probe.unlink()

    def _delete_half_written(self) -> None:
        """Deletes, with a warning, what a run that was killed while it saved has left."""
        if jax.process_index() != 0:
            return
        for path in self._folder.iterdir():
            # In a bucket, Orbax takes every folder without its mark for half-written.
            is_step = re.fullmatch(r"\d+(\..*)?", path.name)
            if is_step and ocp.path.step.is_path_temporary(path):
                warnings.warn(f"{path} is half-written; it is passed over.", stacklevel=3)
                path.rmtree()

    def _not_kept(self, cause: str) -> UserError:
        return UserError(f"Checkpoints cannot be kept in {self._folder}: {cause}")

    def _not_saved(self, cause: str) -> UserError:
        last = None
        with contextlib.suppress(Exception):  # The folder may be gone.
            last = max(_steps(self._folder), default=None)
        if last is None:
            rest = "There is no earlier one; the same command starts anew."
        else:
            rest = (
                f"That of step {last} is whole; when the cause is mended, the same command goes on "
                "from there."
            )
        return UserError(f"A checkpoint could not be saved in {self._folder}: {cause}\n{rest}")


class _LatestAndBest:
    """Says which checkpoints to keep: the latest ones and the one of the best test accuracy.

    Args:
      latest: How many of the latest ones to keep.

    Attributes:
      rows: Those of ``metrics.csv``, which have the accuracies.
    """

    def __init__(self, latest: int):
        self._latest = latest
        self.rows: list[dict[str, float]] = []

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Returns the steps to keep, of some in ascending order."""
        accuracies = {row["step"]: row.get("test_accuracy", -math.inf) for row in self.rows}
        best = max(steps, key=lambda step: (accuracies.get(step, -math.inf), step))
        return {best, *steps[-self._latest :]}

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Answers Orbax, which asks after each save."""
        del context
        steps = [info.step for info in checkpoints]
        kept = self.kept(steps)
        return [step in kept for step in steps]


def find(folder: epath.PathLike, *, best: bool) -> Iterator[Found]:
    """Yields the checkpoints of a run, which may be still training, in the order to try them in.

    Nothing in the folder is changed. A checkpoint that cannot say what it holds is passed over with
    a warning; whether its arrays are whole turns out when they are loaded.

    Args:
      folder: Where the checkpoints are.
      best: Whether to begin with the one of the best test accuracy, instead of the newest, and to
        leave out those that were not evaluated.

    Raises:
      IncompatibleError: If a checkpoint has no digests, or another program wrote it.
      UserError: If there is no checkpoint, the folder cannot be read, or best is wanted and none
        was evaluated.
    """
    folder = _absolute(folder)
    with storage.faults(
        lambda cause: UserError(f"The checkpoints in {folder} cannot be read: {cause}")
    ):
        steps = sorted(_steps(folder), reverse=True)
    if not steps:
        raise UserError(f"There is no checkpoint in {folder}.")
    found = _whole(folder, steps)
    yield from _best_first(folder, found) if best else found


def _whole(folder: epath.Path, steps: Sequence[int]) -> Iterator[Found]:
    """Yields what can be found, and warns of the rest."""
    for step in steps:
        try:
            yield _find(folder, step)
        except DamagedError as error:
            warnings.warn(f"{error}; it is passed over.", stacklevel=4)


def _best_first(folder: epath.Path, found: Iterator[Found]) -> list[Found]:
    """Returns those that were evaluated, the most accurate first; of equal ones, the newest."""
    some = list(found)
    evaluated = [one for one in some if one.test_accuracy is not None]
    if some and not evaluated:
        raise UserError(f"No checkpoint in {folder} was evaluated; leave out --best.")
    return sorted(evaluated, key=lambda one: (one.test_accuracy, one.step), reverse=True)


def load(folder: epath.PathLike, found: Found, state: State) -> State:
    """Reads the arrays of a checkpoint, or a part of them, and compares their digests.

    Args:
      folder: Where the checkpoints are.
      found: The checkpoint.
      state: Shapes, types and shardings of what to read.

    Raises:
      DamagedError: If an array is lost, or is not the one that was saved.
      IncompatibleError: If the checkpoint holds no such arrays; the message names them.
      UserError: If the storage fails.
    """
    path = _absolute(folder) / str(found.step)
    wanted = _by_name(state)
    theirs = {name: x for name, x in found.types.items() if name in wanted}
    if differ := harness.differences(theirs, _types(wanted)):
        raise IncompatibleError(f"{path} holds other arrays: {_some_of(differ)}.")
    handler, args = ocp.PyTreeCheckpointHandler(), _restore_arrays(wanted)
    with _agreeing_on_damage(path):
        arrays = handler.restore(path / "state", args=args)
        for name, like in wanted.items():
            _check_alike(name, arrays.get(name), like)
    # Each host adds up its part of the digests, and each gets the same sum.
    digests = digest.digests({name: arrays[name] for name in wanted})
    if differ := [name for name in wanted if digests[name] != found.digests[name]]:
        raise DamagedError(f"{path} is damaged ({differ[0]} is not what was saved)")
    return _like(state, arrays)


def _find(folder: epath.Path, step: int) -> Found:
    """Reads what a checkpoint says of itself.

    Raises:
      DamagedError: If it is not what was saved, or is that of another step.
      IncompatibleError: If it has no digests, or another program wrote it.
      UserError: If the storage fails.
    """
    path = folder / str(step)
    handler = ocp.JsonCheckpointHandler()
    with _agreeing_on_damage(path):
        _check_items(path)
        run = handler.restore(path / "run")
        is_whole = isinstance(run, dict) and run.get("sha256") == _sha256(run)
        _check_fields(path, run, is_whole=is_whole)
        if not is_whole:
            raise DamagedError("run is not what was saved")
        if run["step"] != step:
            raise DamagedError(f"it was saved as that of step {run['step']}")
    progress = Progress(*(run[name] for name in Progress._fields))
    return Found(step, run["config"], run["types"], run["digests"], progress)


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


@contextlib.contextmanager
def _agreeing_on_damage(path: epath.Path) -> Iterator[None]:
    """Raises a DamagedError, on all hosts or none, if reading a checkpoint finds it damaged.

    Raises:
      UserError: If the storage fails. That may be over at the next start, so it is no damage. Not
        even an I/O error is: a network file system that was away for a moment raises the same one
        as a failing disk.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        is_lost = storage.is_absence(error) and path.parent.exists()
        if storage.is_fault(error) and not is_lost:
            raise UserError(
                f"{path} cannot be read: {storage.in_a_line(error)}. It may be whole; when the "
                "cause is mended, the same command works. To do without it, move it away."
            ) from error
        if not is_lost and not _is_damage(error):
            raise
        failure = error
    if not _everywhere(failure is None):
        cause = storage.in_a_line(failure) if failure else "another host cannot read it"
        raise DamagedError(f"{path} is damaged ({cause})") from failure


def _is_damage(error: Exception) -> bool:
    """Returns whether an error in reading tells of altered files, and not of a bug.

    Altered files make Orbax, and the packages it reads by, raise errors of any type: one flipped
    bit may lead to an AttributeError. So what counts is not the type but whether Orbax was reading.
    """
    if isinstance(error, DamagedError):
        return True
    # No content of a file leads to one of these.
    others = (UserError, ImportError, NameError, MemoryError, jax.errors.JaxRuntimeError)
    return storage.is_raised_in("orbax", error) and not isinstance(error, others)


def _sha256(run: Mapping[str, Any]) -> str:
    """Returns the digest of all fields but that of the digest itself."""
    others = {name: value for name, value in run.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _some_of(differences: Sequence[str]) -> str:
    more = f"; and {len(differences) - 8} more" if len(differences) > 8 else ""
    return f"{'; '.join(differences[:8])}{more}"


def _steps(folder: epath.Path) -> list[int]:
    """Returns the steps in a folder, damaged ones too."""
    return [found.step for found in ocp.path.step.standard_name_format().find_all(folder)]


def _absolute(folder: epath.PathLike) -> epath.Path:
    """As Orbax wants it; to resolve a bucket would make a folder of its name here."""
    path = epath.Path(folder).expanduser()
    return path if "://" in str(path) else path.resolve()


def _restore_arrays(arrays: dict[str, Any]) -> ocp.args.PyTreeRestore:
    restore_args = ocp.checkpoint_utils.construct_restore_args(arrays)
    return ocp.args.PyTreeRestore(arrays, restore_args=restore_args, partial_restore=True)


def _like(state: State, arrays: Mapping[str, Any]) -> State:
    return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in _by_name(state)])


def _by_name(state: Any) -> dict[str, Any]:
    """Returns ``{"params.head.kernel": array, ...}``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _types(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
