"""Trains a ViT: one linear loop, sharded by ``jax.jit``, on one host or many."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.harness import config_fields
from experiments.harness.mistakes import UserError
from experiments.harness.train_state import TrainState
from experiments.vit.config import check_config
from experiments.vit.data import pipeline, stream
from experiments.vit.metrics import diagnostics, flops, log, meter
from experiments.vit.metrics.bar import Bar
from experiments.vit.metrics.mirror import Mirror
from experiments.vit.metrics.profiling import Profile
from experiments.vit.training import hosts, sharding
from experiments.vit.training.checkpoint_contents import Progress
from experiments.vit.training.checkpoint_manager import Checkpoints, is_best
from experiments.vit.training.due import calibrates, due_after, redraws
from experiments.vit.training.folders import Folders
from experiments.vit.training.hosts import Preemption
from experiments.vit.training.train_step import Metrics, Program, build_program, evaluation_means


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Trains, evaluates, and leaves its results in ``workdir``.

    Args:
      config: Config with all the fields of ``experiments.vit.config.FIELDS``.
      workdir: A folder without a run in it, or with one that was stopped, which goes on from its
        last checkpoint; made if needed. It gets ``config.json``, ``metrics.csv``, ``tensorboard``,
        ``checkpoints`` and ``profile`` while training, and at the end ``results.json`` and
        ``curves.png``.

    Returns:
      Content of ``results.json``.

    Raises:
      IncompatibleError: If the checkpoints are of another config; the message names what differs.
      SystemExit: After SIGTERM: with code 0 when a checkpoint is saved, with a message if the run
        keeps none.
      UserError: If the config is not right, or not the same on all hosts; another run is training
        in workdir or into the folder of the checkpoints; workdir holds a run that is finished, kept
        no checkpoints, or is of another config; the data is not there or damaged; checkpoints or
        results cannot be kept; or a loss or a gradient is not finite, and the message names the
        step. Any other error is a bug.
    """
    check_config(config)
    workdir = pathlib.Path(workdir)
    log.refuse_bucket(workdir)
    hosts.check_same("config", _of_all_hosts(config))
    with Folders(workdir, checkpoint_folder(config, workdir)) as folders:
        hosts.on_first(lambda: _refuse_used(workdir, config))
        return _train(config, folders)


def _of_all_hosts(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields that must be the same on all hosts: all but where and how they read."""
    fields = config_fields.flatten(json.loads(config.to_json_best_effort()))
    return {k: v for k, v in fields.items() if k not in ("data_dir", "num_workers")}


def checkpoint_folder(config: ConfigDict, workdir: pathlib.Path) -> str | pathlib.Path | None:
    """Returns where the run keeps its checkpoints, or None if it is to keep none."""
    if not config.checkpoint.interval:
        return None
    return config.checkpoint.folder or workdir / "checkpoints"


def _refuse_used(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Refuses a workdir with another run or a finished one, of which it adds what is missing."""
    log.draw_missing_curves(workdir)
    try:
        log.refuse_used(workdir, config)
    except UserError:
        if log.is_finished(workdir, config):
            mirror_results(workdir, config)
        raise


def mirror_results(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Copies what ``config.mirror`` lacks; raises ``UserError`` if it cannot be written."""
    with Mirror(workdir, config.mirror, writes=True) as mirror:
        mirror.finish()


def _train(config: ConfigDict, folders: Folders) -> dict[str, Any]:
    """Trains in folders that are locked."""
    # Check everything that can be checked before anything is written.
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(
        mesh, batch_size=config.batch_size, num_microbatches=config.num_microbatches
    )
    eval_batch_size = sharding.round_up(config.eval_batch_size, mesh)

    # Open the data, and build the model and the optimizer.
    rows = sharding.rows_of_host(mesh, config.batch_size, eval_batch_size)
    inputs = pipeline.load(config, eval_batch_size=eval_batch_size, rows=rows)
    diagnostics.check_images(config.diagnostics.images, inputs.num_held_out or inputs.num_test)
    program = build_program(config, mesh, channels=inputs.channels, num_classes=inputs.num_classes)

    run = Run(config, folders, program, inputs, eval_batch_size)
    with jax.set_mesh(mesh):
        results = run.results(run.train_past_bad_batches())
    if jax.process_index() == 0:  # Only the first host writes.
        folders.check_workdir()
        log.finish(folders.workdir, results)
        mirror_results(folders.workdir, config)
    return results


class NotFiniteError(UserError):
    """A loss or the norm of a gradient is not finite.

    Attributes:
      batches: The batches to skip when the run goes back; empty if it must end.
    """

    def __init__(self, message: str, batches: range = range(0)):
        super().__init__(message)
        self.batches = batches


class Finished(NamedTuple):
    """A run that has taken its last step.

    Attributes:
      rows: Rows of the log.
      seconds: Seconds that all the steps took.
      skipped: Numbers of the batches that were skipped.
    """

    rows: list[dict[str, float]]
    seconds: float
    skipped: range


class Run(NamedTuple):
    """The parts of a run that do not change while it trains.

    Attributes:
      config: Config of the run.
      folders: Its folders, which are locked.
      program: Its model and jitted functions.
      inputs: Its images.
      eval_batch_size: Images of an evaluation batch, over all devices.
    """

    config: ConfigDict
    folders: Folders
    program: Program
    inputs: pipeline.Input
    eval_batch_size: int

    def train_past_bad_batches(self) -> Finished:
        """Trains, and goes back once if batches make the loss or a gradient not finite.

        All hosts have the same metrics, so they go back together.
        """
        with contextlib.ExitStack() as stack:
            try:
                return self.train(stack)
            except NotFiniteError as error:
                if not error.batches:
                    raise
                bad = error.batches
                warnings.warn(
                    f"{error} The run goes back to its last checkpoint, if there is one, and skips "
                    f"the batches of the steps {bad[0] + 1} to {bad[-1] + 1}.",
                    stacklevel=2,
                )
        with contextlib.ExitStack() as stack:
            return self.train(stack, skip=bad)

    def train(self, stack: contextlib.ExitStack, skip: range = range(0)) -> Finished:
        """Trains from the newest checkpoint, or from the start, to the last step.

        Args:
          stack: Holds what is open while the run trains.
          skip: Batches to leave out.
        """
        config, program = self.config, self.program
        is_first, workdir = jax.process_index() == 0, self.folders.workdir
        checkpoints = found = None
        if (folder := self.folders.checkpoints) is not None:
            checkpoints = Checkpoints(folder, config, keep=config.checkpoint.keep)
            found = stack.enter_context(checkpoints).restore(program.state)
        state, progress = found or (program.init(), Progress([], 0.0, {"step": 0}))
        first_step = int(state.step)
        batches = stream.Batches(
            self.inputs.train_part,
            num_steps=config.num_steps,
            num_workers=config.num_workers,
            num_parts=self.inputs.num_parts,
        )
        batches.set_state(progress.data)
        stack.enter_context(batches)
        if skip:
            batches.skip(skip)
        bar = stack.enter_context(Bar(config.num_steps, first_step, shows=is_first))
        if found:
            bar.write(f"Goes on after step {first_step}.")
        elif (workdir / "metrics.csv").exists():
            bar.write("There is no checkpoint to go on from; the run starts over.")
        metrics_log = stack.enter_context(
            log.Log(workdir, config, self._columns(), progress.rows, writes=is_first)
        )
        mirror = stack.enter_context(Mirror(workdir, config.mirror, writes=is_first))
        profile = stack.enter_context(Profile(workdir / "profile", **config.profile))
        preemption = stack.enter_context(Preemption())
        operations = config.batch_size * flops.train_flops(program.model)
        window = meter.Meter(meter.Speed(config.batch_size, operations, flops.peak(program.mesh)))
        start = time.perf_counter() - progress.seconds
        for step in range(first_step, config.num_steps):
            profile.before(step)
            if program.has_projections and redraws(config, step):
                state = program.redraw(state)
            batch = sharding.global_batch(next(batches), program.mesh, config.batch_size)
            if calibrates(config, step):
                state = program.calibrate(state, batch["image"])
            # A batch or a state that is still on the host raises here; it would cost every step.
            with (
                jax.profiler.StepTraceAnnotation("train", step_num=step),
                jax.transfer_guard("disallow"),
            ):
                state, metrics = program.train_step(state, batch)
            window.add(metrics)
            profile.after(step, metrics)
            done = step + 1
            due = due_after(config, done, stopping=preemption.reached(done))
            if not due.row:
                continue

            row, each = window.read(done, float(program.schedule(step)))
            finite = all(math.isfinite(x) for values in each.values() for x in values.values())
            if due.evaluation and finite:
                row |= self.evaluate(state, is_last=done == config.num_steps)
                for name in ("held_out_loss", "test_loss"):
                    if name in row:
                        each[name.replace("_", " ")] = {done: row[name]}
            self.folders.check_workdir()
            metrics_log.write(row)
            for what, values in each.items():
                check_finite(what, values, config, workdir, batches.skipped)
            best = due.evaluation and is_best(metrics_log.rows)
            if checkpoints and (due.checkpoint or best):
                seconds = time.perf_counter() - start
                progress = Progress(metrics_log.rows, seconds, batches.get_state())
                self.folders.check_checkpoints()
                checkpoints.save(done, state, progress)
            if due.evaluation or due.checkpoint:
                mirror.start()
            if due.stop:
                stop(bar, done, checkpoints)
            bar.update(row)
            window.restart()
        return Finished(metrics_log.rows, time.perf_counter() - start, batches.skipped)

    def evaluate(self, state: TrainState, *, is_last: bool) -> dict[str, float]:
        """Measures loss and accuracy, and the diagnostics on the first images.

        The images are those that are held out, and after the last step those of the test set too. A
        run that holds out none is measured on the test set each time.
        """
        if self.inputs.held_out_batches is None:
            return self._measure(self.inputs.eval_batches(), state, "test")
        held_out = self._measure(self.inputs.held_out_batches(), state, "held_out")
        if not is_last:
            return held_out
        return self._measure(self.inputs.eval_batches(), state, "test", diagnoses=False) | held_out

    def _measure(
        self, batches: Iterable[stream.Batch], state: TrainState, name: str, diagnoses: bool = True
    ) -> dict[str, float]:
        program, measured = self.program, dict[str, float]()
        sums: list[Metrics] = []
        for part in batches:
            batch = sharding.global_batch(part, program.mesh, self.eval_batch_size)
            if diagnoses and program.diagnose is not None and not sums:
                arrays = program.diagnose(state.model, state.key, batch["image"])
                measured = diagnostics.row(arrays)
            sums.append(program.eval_step(state.model, batch))
        return evaluation_means(sums, name=name) | measured

    def _columns(self) -> tuple[str, ...]:
        held_out = log.HELD_OUT_COLUMNS if self.config.held_out else ()
        model, diagnoses = self.program.model, self.program.diagnose is not None
        return log.COLUMNS + held_out + (diagnostics.columns(model.depth) if diagnoses else ())

    def results(self, run: Finished) -> dict[str, Any]:
        """Returns the content of ``results.json``."""
        program, inputs = self.program, self.inputs
        speeds = [row["images_per_second"] for row in run.rows]
        mesh, params = program.mesh, jax.tree.leaves(program.state.params)
        return {
            **{name: run.rows[-1][name] for name in ("test_loss", "test_accuracy")},
            "steps": self.config.num_steps,
            "seconds": run.seconds,
            "skipped_batches": len(run.skipped),
            "images_per_second": float(np.median(speeds[1:] or speeds)),  # The first row compiles.
            "train_flops_per_image": flops.train_flops(program.model),
            "num_parameters": sum(math.prod(x.shape) for x in params),
            "num_train": inputs.num_train,
            "num_held_out": inputs.num_held_out,
            "num_test": inputs.num_test,
            "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
            "jax": jax.__version__,
            "config": json.loads(self.config.to_json_best_effort()),
        }


def stop(bar: Bar, done: int, checkpoints: Checkpoints | None) -> NoReturn:
    """Ends the program after SIGTERM, with code 0 if nothing is lost."""
    if checkpoints is None:
        raise SystemExit(f"Stopped by SIGTERM after step {done}; the run kept no checkpoints.")
    checkpoints.wait()
    bar.write(f"Stopped by SIGTERM after step {done}; the same command goes on there.")
    raise SystemExit(0)


def check_finite(
    what: str,
    values: Mapping[int, float],
    config: ConfigDict,
    workdir: pathlib.Path,
    skipped: range,
) -> None:
    """Refuses to go on from what is not finite; ``values`` are those of steps."""
    for step, value in values.items():
        if not math.isfinite(value):
            of_training = what in meter.OF_STEPS
            may_go_back = of_training and config.checkpoint.interval and not skipped
            raise NotFiniteError(
                f"The {what} is {value} at step {step} of {config.num_steps}; the metrics up to "
                f"there are in {workdir / 'metrics.csv'}.",
                range(step - 1, max(values)) if may_go_back else range(0),
            )
