"""Trains a ViT: one linear loop, sharded by ``jax.jit``, on one host or many."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
import tqdm

from experiments.training import TrainState
from experiments.vit import checkpoint, report, sharding, steps, stream
from experiments.vit import config as config_lib
from experiments.vit import input as input_lib
from experiments.vit import program as program_lib
from experiments.vit.preemption import Preemption


def train(config: ml_collections.ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Trains, evaluates, and leaves its results in ``workdir``.

    Args:
      config: All the fields of ``experiments.vit.config.FIELDS``.
      workdir: A folder without a run in it, or with one that was stopped, which goes on from its
        last checkpoint; made if needed. It gets ``config.json``, ``metrics.csv`` and
        ``checkpoints`` while training, and at the end ``results.json`` and ``curves.png``.

    Returns:
      What is in ``results.json``.

    Raises:
      FileExistsError: If workdir holds a run that is finished, kept no checkpoints, or is of
        another config.
      FileNotFoundError: If the data is not there.
      FloatingPointError: If the loss is not finite; the message names the step.
      IncompatibleError: If the checkpoints are of another config; the message names what differs.
      OSError: If checkpoints or results cannot be kept.
      RuntimeError: If a step fails.
      SystemExit: With code 0, after a checkpoint was saved because of SIGTERM.
      TypeError, ValueError: If the config is not right.
    """
    # Check everything that can be checked before anything is written.
    config_lib.check(config)
    workdir = pathlib.Path(workdir)
    is_first = jax.process_index() == 0  # Of the hosts; it alone writes.
    if is_first:
        report.refuse_used(workdir, config)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(
        mesh, batch_size=config.batch_size, num_microbatches=config.num_microbatches
    )
    eval_batch_size = sharding.round_up(config.eval_batch_size, mesh)

    # Data, model and optimiser.
    inputs = input_lib.load(
        config,
        eval_batch_size=eval_batch_size,
        rows=sharding.rows_of_host(mesh, config.batch_size, eval_batch_size),
    )
    program = program_lib.build(
        config, mesh, channels=inputs.channels, num_classes=inputs.num_classes
    )

    def evaluate(state: TrainState) -> dict[str, float]:
        batches = (sharding.global_batch(b, mesh, eval_batch_size) for b in inputs.eval_batches())
        return steps.test_means(
            program.eval_step(state.params, state.projections, b) for b in batches
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))

        # Go on from the newest checkpoint, if there is one.
        checkpoints, preemption, found = None, None, None
        if config.checkpoint.interval:
            folder = config.checkpoint.folder or workdir / "checkpoints"
            checkpoints = checkpoint.Checkpoints(folder, config, keep=config.checkpoint.keep)
            stack.enter_context(checkpoints)
            preemption = stack.enter_context(Preemption())
            found = checkpoints.restore(program.state)
        state, progress = found or (program.init(), checkpoint.Progress([], 0.0, {"step": 0}))
        first_step = int(state.step)
        batches = stack.enter_context(
            stream.Batches(
                inputs.train_batch, num_steps=config.num_steps, num_workers=config.num_workers
            )
        )
        batches.set_state(progress.data)
        log = stack.enter_context(report.Log(workdir, config, progress.rows, writes=is_first))
        bar = stack.enter_context(
            tqdm.tqdm(
                total=config.num_steps,
                initial=first_step,
                unit="step",
                dynamic_ncols=True,
                disable=not is_first,
            )
        )

        # Train.
        stack.enter_context(_beyond_the_checks())
        pending: list[steps.Metrics] = []
        row_start = time.perf_counter()
        start = row_start - progress.seconds
        test: dict[str, float] = {}
        for step in range(first_step, config.num_steps):
            due = step == 0 or (config.redraw_interval and step % config.redraw_interval == 0)
            if program.has_projections and due:
                state = program.redraw(state)
            batch = sharding.global_batch(next(batches), mesh, config.batch_size)
            state, metrics = program.train_step(state, batch)
            pending.append(metrics)
            done = step + 1
            last = done == config.num_steps
            evaluating = last or done % config.eval_interval == 0
            stopping = preemption and preemption.reached(done)
            saving = checkpoints and (last or stopping or done % config.checkpoint.interval == 0)
            if not (evaluating or saving or done % config.log_interval == 0):
                continue

            fetched = jax.device_get(pending)
            seconds = time.perf_counter() - row_start
            row = {
                "step": done,
                "learning_rate": float(program.schedule(step)),
                "train_loss": float(np.mean([m["loss"] for m in fetched])),
                "train_accuracy": float(np.mean([m["accuracy"] for m in fetched])),
                "gradient_norm": float(np.mean([m["gradient_norm"] for m in fetched])),
                "images_per_second": len(fetched) * config.batch_size / seconds,
            }
            for number, m in enumerate(fetched, start=done - len(fetched) + 1):
                if not math.isfinite(m["loss"]):
                    log.write(row)
                    raise _not_finite("loss", m["loss"], number, config, workdir)
            if evaluating:
                test = evaluate(state)
            log.write(row | (test if evaluating else {}))
            if evaluating and not math.isfinite(test["test_loss"]):
                raise _not_finite("test loss", test["test_loss"], done, config, workdir)
            if checkpoints and (saving or (evaluating and checkpoint.is_best(log.rows))):
                seconds = time.perf_counter() - start
                progress = checkpoint.Progress(log.rows, seconds, batches.get_state())
                checkpoints.save(done, state, progress)
            if checkpoints and stopping and not last:
                checkpoints.wait()
                bar.write(f"Stopped by SIGTERM after step {done}; the same command goes on there.")
                raise SystemExit(0)
            bar.set_postfix(
                loss=f"{row['train_loss']:.3f}",
                accuracy=f"{row['train_accuracy']:.3f}",
                images_s=f"{row['images_per_second']:.0f}",
                **{name: f"{value:.3f}" for name, value in test.items()},
            )
            bar.update(done - bar.n)
            pending, row_start = [], time.perf_counter()
        seconds = time.perf_counter() - start

    # Results.
    speeds = [row["images_per_second"] for row in log.rows]
    results = {
        **{name: log.rows[-1][name] for name in ("test_loss", "test_accuracy")},
        "steps": config.num_steps,
        "seconds": seconds,
        "images_per_second": float(np.median(speeds[1:] or speeds)),  # The first row compiles.
        "num_parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(program.state.params)),
        "num_train": inputs.num_train,
        "num_test": inputs.num_test,
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "jax": jax.__version__,
        "config": json.loads(config.to_json_best_effort()),
    }
    if is_first:
        report.finish(workdir, results)
    return results


@contextlib.contextmanager
def _beyond_the_checks() -> Iterator[None]:
    """Lets no failure of a step pass for a mistake in the config, whatever its type is."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError("Training failed after it had started.") from error


def _not_finite(
    what: str, value: float, step: int, config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> FloatingPointError:
    return FloatingPointError(
        f"The {what} is {value} at step {step} of {config.num_steps}; the metrics up to there are "
        f"in {workdir / 'metrics.csv'}."
    )
