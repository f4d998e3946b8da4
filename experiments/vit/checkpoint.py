"""Checkpoints by Orbax: asynchronous, sharded, whole or absent; the last ones and the best."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import absl.logging
import jax
import ml_collections
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from experiments import harness
from experiments.hosts import everywhere as _everywhere
from experiments.mistakes import UserError
from experiments.vit import config as config_lib

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


class IncompatibleError(UserError):
    """A checkpoint is that of another run."""


def quiet() -> None:
    """Keeps a program's standard error free of what Orbax, TensorStore and asyncio say of a save.

    Of a save that fails each of them prints pages, some of them when the program ends;
    ``Checkpoints`` raises the error. Orbax's other errors stay.
    """
    absl.logging.get_absl_handler().addFilter(_is_news)
    hook = sys.unraisablehook

    def pass_on(unraisable: sys.UnraisableHookArgs) -> None:
        # TensorStore reports each write to asyncio's loop, which the first failure has ended.
        if str(unraisable.exc_value) != "Event loop is closed":
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
    ``state``, the arrays by name, and ``run``, the config, the names and shapes, and the progress.

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
        best = BestN(get_metric_fn=_accuracy, n=1)
        options = ocp.CheckpointManagerOptions(
            best_fn=_accuracy,  # Without it the metrics would not be written.
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            cleanup_tmp_directories=True,
        )
        try:
            self._folder = _absolute(folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_access()
            self._pass_over_half_written()
            multihost_utils.sync_global_devices("half-written checkpoints are passed over")
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # Each kind of storage has errors of its own.
            raise UserError(f"Checkpoints cannot be kept in {folder}: {error}") from error

    def __enter__(self) -> Checkpoints:
        """Is closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all is on disk; if that fails too, the first error is the one to see."""
        try:
            with contextlib.suppress(*([] if kind is None else [UserError])):
                self.wait()
        finally:
            with contextlib.suppress(Exception):  # What a save failed with is raised once more.
                self._manager.close()

    def save(self, step: int, state: Any, progress: Progress) -> None:
        """Starts to save, after the last save is done; the state may be donated at once.

        Raises:
          UserError: If this or the last save failed. All checkpoints before them are whole.
        """
        arrays = _by_name(state)
        run = {
            "config": self._config,
            "shapes": _shapes(arrays),
            **progress._asdict(),
            "rows": list(progress.rows),  # It is written while more come.
        }
        items = {"state": ocp.args.PyTreeSave(arrays), "run": ocp.args.JsonSave(run)}
        metrics = {k: v for k, v in progress.rows[-1].items() if k == "test_accuracy"}
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)
        except Exception as error:
            raise self._not_saved(error) from error

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          UserError: If it failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_saved(error) from error

    def restore(self, state: State) -> tuple[State, Progress] | None:
        """Reads the newest checkpoint that is whole.

        Those that are not are set aside with a warning.

        Args:
          state: Shapes, types and shardings; the arrays go to these, whatever theirs were.

        Returns:
          The state and the progress, or None if there is no checkpoint.

        Raises:
          IncompatibleError: If it is of another config, or of arrays of other shapes; the message
            names what differs.
          UserError: If there are checkpoints, and none can be read.
        """
        damaged: list[int] = []
        failure: Exception | None = None
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored = None
            try:
                restored = self._restore(step, state)
            except PermissionError as error:
                raise UserError(f"{self._folder / str(step)} cannot be read: {error}") from error
            except (IncompatibleError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as error:  # Whatever a part that is missing or cut off leads to.
                failure = error
            readable = _everywhere(restored is not None)
            if restored is None or not readable:
                damaged.append(step)
                continue
            for later in damaged:
                self._set_aside(later)
            multihost_utils.sync_global_devices("damaged checkpoints are set aside")
            self._manager.reload()
            return restored
        if damaged or any(self._folder.glob("*.damaged")):
            raise UserError(
                f"No checkpoint in {self._folder} can be read. To start over, delete it."
            ) from failure
        return None

    def _restore(self, step: int, state: State) -> tuple[State, Progress]:
        read = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        arrays = _by_name(state)
        self._check_compatible(step, read["run"], arrays)
        items = ocp.args.Composite(state=_restore_arrays(arrays))
        found = self._manager.restore(step, args=items)["state"]
        progress = Progress(*(read["run"][name] for name in Progress._fields))
        return _like(state, found), progress

    def _check_compatible(self, step: int, run: dict[str, Any], arrays: dict[str, Any]) -> None:
        differ = config_lib.differences(run["config"], self._config)
        differ += harness.differences(run["shapes"], _shapes(arrays))
        if differ:
            more = f"; and {len(differ) - 8} more" if len(differ) > 8 else ""
            raise IncompatibleError(
                f"{self._folder / str(step)} is a checkpoint of another run: "
                f"{'; '.join(differ[:8])}{more}. Give another --workdir, or the config of that run."
            )

    def _set_aside(self, step: int) -> None:
        """Renames a checkpoint, so that it neither counts as one nor stands in the way."""
        path = self._folder / str(step)
        aside = self._folder / f"{step}.damaged"
        warnings.warn(f"{path} is damaged; it is passed over, and now {aside}.", stacklevel=3)
        if jax.process_index() == 0:
            if aside.exists():
                aside.rmtree()
            path.rename(aside)

    def _check_access(self) -> None:
        probe = self._folder / f"access-{jax.process_index()}"
        probe.write_text("Can this folder be written?")
        multihost_utils.sync_global_devices("each host has written to the folder")
        seen = all((self._folder / f"access-{i}").exists() for i in range(jax.process_count()))
        if not _everywhere(seen):
            raise OSError("the hosts do not share it; config.checkpoint.folder says which they do.")
        probe.unlink()

    def _pass_over_half_written(self) -> None:
        """Warns of what a killed run left; Orbax would stumble over metrics that are cut off."""
        for path in self._folder.iterdir():
            if ocp.path.step.TMP_DIR_SUFFIX in path.name:
                warnings.warn(f"{path} is half-written; it is passed over.", stacklevel=3)
        for step in ocp.path.step.checkpoint_steps(self._folder):
            metrics = self._folder / str(step) / "metrics" / "metrics"
            try:
                json.loads(metrics.read_text())
            except (FileNotFoundError, ValueError):
                self._set_aside(step)

    def _not_saved(self, error: Exception) -> UserError:
        with contextlib.suppress(Exception):
            self._manager.reload()  # It has struck off what it would have deleted after the save.
        last = self._manager.latest_step()
        if last is None:
            rest = "There is no earlier one; the same command starts anew."
        else:
            rest = (
                f"That of step {last} is whole; when the cause is mended, the same command goes on "
                "from there."
            )
        cause = str(error).split(" [tensorstore_spec")[0]  # Pages of it.
        return UserError(f"A checkpoint could not be saved in {self._folder}: {cause}\n{rest}")


class Found(NamedTuple):
    """A checkpoint of a run that may be still training, and what it says of itself.

    Attributes:
      step: After which it was saved.
      config: Of its run.
      shapes: ``{"params.head.bias.value": (10,), ...}``.
      test_accuracy: At its step, or None if it was not evaluated.
    """

    step: int
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    test_accuracy: float | None


def find(folder: epath.PathLike, *, best: bool) -> Found:
    """Opens the best or the newest checkpoint, and changes nothing in the folder.

    Args:
      folder: Of the checkpoints.
      best: Whether to take that of the best test accuracy.

    Raises:
      UserError: If there is no checkpoint, it cannot be read, or best is wanted and none was
        evaluated.
    """
    with _opened(folder) as manager:
        step = manager.best_step() if best else manager.latest_step()
        if step is not None:
            items = ocp.args.Composite(run=ocp.args.JsonRestore())
            run = manager.restore(step, args=items)["run"]
            accuracy = manager.metrics(step).get("test_accuracy")
    if step is None:
        raise UserError(f"There is no checkpoint in {folder}.")
    if best and accuracy is None:
        raise UserError(f"No checkpoint in {folder} was evaluated; leave out --best.")
    # As in "float32[32, 10]".
    shapes = {k: tuple(json.loads(v[v.index("[") :])) for k, v in run["shapes"].items()}
    return Found(step, run["config"], shapes, accuracy)


def load(folder: epath.PathLike, step: int, state: State) -> State:
    """Reads a checkpoint, or a part of it.

    Args:
      folder: Of the checkpoints.
      step: Of the checkpoint.
      state: Shapes, types and shardings of what to read.

    Raises:
      UserError: If it cannot be read.
    """
    items = ocp.args.Composite(state=_restore_arrays(_by_name(state)))
    with _opened(folder) as manager:
        return _like(state, manager.restore(step, args=items)["state"])


@contextlib.contextmanager
def _opened(folder: epath.PathLike) -> Iterator[ocp.CheckpointManager]:
    """To read only."""
    options = ocp.CheckpointManagerOptions(best_fn=_accuracy, read_only=True)
    try:
        with ocp.CheckpointManager(_absolute(folder), options=options) as manager:
            yield manager
    except Exception as error:  # Each kind of storage and of damage has errors of its own.
        raise UserError(f"The checkpoints in {folder} cannot be read: {error}") from error


def _absolute(folder: epath.PathLike) -> epath.Path:
    """As Orbax wants it; to resolve a bucket would make a folder of its name here."""
    path = epath.Path(folder).expanduser()
    return path if "://" in str(path) else path.resolve()


def _restore_arrays(arrays: dict[str, Any]) -> ocp.args.PyTreeRestore:
    restore_args = ocp.checkpoint_utils.construct_restore_args(arrays)
    return ocp.args.PyTreeRestore(arrays, restore_args=restore_args, partial_restore=True)


def _like(state: State, arrays: Mapping[str, Any]) -> State:
    return jax.tree.unflatten(jax.tree.structure(state), [arrays[name] for name in _by_name(state)])


def _accuracy(metrics: Mapping[str, float]) -> float:
    return metrics.get("test_accuracy", -math.inf)  # Of a step that was not evaluated.


def _by_name(state: Any) -> dict[str, Any]:
    """Returns ``{"params.head.kernel": array, ...}``."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}
