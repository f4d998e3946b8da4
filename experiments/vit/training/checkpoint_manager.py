"""The checkpoints of a run: Orbax saves them while training goes on, sharded, whole or absent."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from ml_collections import ConfigDict
from orbax.checkpoint import checkpoint_managers

from experiments.harness import config_fields, storage
from experiments.harness.mistakes import UserError
from experiments.vit.config import config_differences
from experiments.vit.metrics import log
from experiments.vit.training import checkpoint_contents, hosts
from experiments.vit.training.checkpoint_contents import CheckpointRecord, Progress, State
from experiments.vit.training.checkpoint_damage import DamagedError, IncompatibleError


def is_best(rows: list[dict[str, float]]) -> bool:
    """Returns whether the last row is more accurate than any before; see ``log.accuracy``."""
    *before, last = (log.accuracy(row) for row in rows)
    return last > max(before, default=-math.inf)


class Checkpoints:
    """The checkpoints in a folder.

    A step is a subfolder that gets its name when it is whole (on a bucket: a mark). It holds
    ``state``, the arrays by name, and ``run``, the config, the progress, and the names, types and
    digests of the arrays.

    Args:
      folder: Folder of the checkpoints, made if needed: a path or ``gs://bucket/run``.
      config: Config of the run.
      keep: Number of latest checkpoints to keep, beside the most accurate one.

    Raises:
      UserError: If the folder cannot be read and written.
    """

    def __init__(self, folder: epath.PathLike, config: ConfigDict, *, keep: int):
        self._config = json.loads(config.to_json_best_effort())
        del self._config["checkpoint"]["folder"]  # A folder may be moved.
        self._keep, self._rows = keep, list[dict[str, float]]()  # Rows of metrics.csv.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            lightweight_initialize=True,  # It would fail on metadata that is damaged.
        )
        self._folder = checkpoint_contents.absolute(folder)
        with storage.faults(self._not_kept):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_access()
            self._delete_half_written()
            multihost_utils.sync_global_devices("half-written checkpoints are deleted")
            self._manager = ocp.CheckpointManager(self._folder, options=options)
            self._newest = max(checkpoint_contents.steps_in(self._folder), default=-1)

    def __enter__(self) -> Checkpoints:
        """Returns the checkpoints, which are closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until all is on disk; if that fails too, the first error is the one to see."""
        try:
            self.wait()
        except BaseException as error:
            with contextlib.suppress(Exception):  # It raises the error of the save once more.
                self._manager.close()
            if kind is None or not isinstance(error, Exception):
                raise
        else:
            self._manager.close()

    def save(self, step: int, state: Any, progress: Progress) -> None:
        """Starts to save, after the last save is done; the state may be donated at once.

        Raises:
          UserError: If this or the last save failed, and all checkpoints before them are whole; or
            if another run saves here too, as it can in a bucket, which has no locks.
        """
        with storage.faults(self._not_saved):
            theirs = [x for x in checkpoint_contents.steps_in(self._folder) if x > self._newest]
        if theirs:
            raise UserError(
                f"{self._folder} was taken over by another run, which has saved step {max(theirs)}."
                " This run ends, so that it writes over nothing."
            )
        self._newest = step
        arrays = checkpoint_contents.by_name(state)
        run = checkpoint_contents.run_item(step, self._config, arrays, progress)
        items = {"state": ocp.args.PyTreeSave(arrays), "run": ocp.args.JsonSave(run)}
        self._rows = run["rows"]
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
                found = checkpoint_contents.read(self._folder, step)
                self._check_compatible(found, state)
                restored = checkpoint_contents.load(self._folder, found, state)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            self._rows = found.progress.rows
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

    def should_preserve(
        self,
        checkpoints: Sequence[checkpoint_managers.PolicyCheckpointInfo],
        *,
        context: checkpoint_managers.PreservationContext,
    ) -> list[bool]:
        """Answers Orbax, which asks after each save which checkpoints to keep."""
        del context
        kept = self._kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    def _kept(self, steps: Sequence[int]) -> set[int]:
        """Returns the steps to keep, of some in ascending order: the latest and the best."""
        accuracies = {row["step"]: log.accuracy(row) for row in self._rows}
        best = max(steps, key=lambda step: (accuracies.get(step, -math.inf), step))
        return {best, *steps[-self._keep :]}

    def _check_compatible(self, found: CheckpointRecord, state: Any) -> None:
        types = checkpoint_contents.types_by_name(checkpoint_contents.by_name(state))
        differ = config_differences(found.config, self._config)
        differ += config_fields.differences(found.types, types)
        if differ:
            raise IncompatibleError(
                f"{self._folder / str(found.step)} is a checkpoint of another run: "
                f"{checkpoint_contents.some_of(differ)}. Give another --workdir, or the config of "
                "that run."
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
        for step in {*steps} - self._kept(steps):
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
        if not hosts.everywhere(seen):
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
            last = max(checkpoint_contents.steps_in(self._folder), default=None)
        if last is None:
            rest = "There is no earlier one; the same command starts anew."
        else:
            rest = (
                f"That of step {last} is whole; when the cause is mended, the same command goes on "
                "from there."
            )
        return UserError(f"A checkpoint could not be saved in {self._folder}: {cause}\n{rest}")
