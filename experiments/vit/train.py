"""Trains a ViT: one linear loop, sharded by ``jax.jit``."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pathlib
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments import training
from experiments.training import TrainState
from experiments.vit import checkpoint, data, report
from experiments.vit import config as config_lib
from experiments.vit.preemption import Preemption
from simrf_jax.models import ViT, ViTConfig

# Which draw a key is for, after those of training.
DROPOUT = 2


def make_mesh(num_devices: int) -> Mesh:
    """A mesh of one axis, ``data``; -1 takes every device.

    Raises:
      ValueError: If there are not that many devices.
    """
    devices = jax.devices()
    wanted = len(devices) if num_devices == -1 else num_devices
    if not 1 <= wanted <= len(devices):
        raise ValueError(
            f"config.mesh.data must be -1 or between 1 and the {len(devices)} devices there are, "
            f"got {num_devices}."
        )
    return jax.make_mesh((wanted,), ("data",), (AxisType.Auto,), devices=devices[:wanted])


def train_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of the optimiser on the mean loss of a batch."""
    dropout_key = jax.random.fold_in(jax.random.fold_in(state.key, DROPOUT), state.step)

    def loss_fn(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params, state.projections)
        logits = model(batch["image"], rngs=nnx.Rngs(dropout=dropout_key))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": loss, "accuracy": accuracy}


def eval_step(
    state: TrainState, batch: dict[str, jax.Array], *, graphdef: nnx.GraphDef
) -> dict[str, jax.Array]:
    """Sums over a batch of the loss, the right answers and the weights."""
    logits = nnx.merge(graphdef, state.params, state.projections)(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = logits.argmax(-1) == batch["label"]
    weight = batch["weight"]
    return {
        "loss": jnp.sum(losses * weight),
        "accuracy": jnp.sum(right * weight),
        "weight": jnp.sum(weight),
    }


def test_means(sums: Iterable[dict[str, jax.Array]]) -> dict[str, float]:
    """``test_loss`` and ``test_accuracy``, from what ``eval_step`` returns for each batch."""
    batches = list(sums)
    total = {name: sum(float(s[name]) for s in batches) for name in batches[0]}
    return {f"test_{name}": total[name] / total["weight"] for name in ("loss", "accuracy")}


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
      OSError: If checkpoints cannot be kept.
      SystemExit: With code 0, after a checkpoint was saved because of SIGTERM.
      TypeError, ValueError: If the config is not right.
    """
    # Check everything that can be checked before anything is written.
    config_lib.check(config)
    workdir = pathlib.Path(workdir)
    report.refuse_used(workdir, config)
    mesh = make_mesh(config.mesh.data)
    if config.batch_size % mesh.size:
        raise ValueError(
            f"config.batch_size must be a multiple of the {mesh.size} devices, "
            f"got {config.batch_size}."
        )
    # Evaluation pads its batches anyway.
    eval_batch_size = -(-config.eval_batch_size // mesh.size) * mesh.size

    # Data.
    dataset = data.DATASETS[config.dataset](config.data_dir)
    batches = data.train_batches(
        dataset.train, batch_size=config.batch_size, seed=config.seed, **config.augment
    )

    # Model, optimiser and their state, replicated over the mesh.
    model_config = ViTConfig(
        image_size=dataset.train.images.shape[1:3],
        channels=dataset.train.images.shape[3],
        num_classes=dataset.num_classes,
        **config.model,
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: ViT(model_config, rngs=nnx.Rngs(0))))
    optimizer, schedule = training.make_optimizer(
        config, b1=config.b1, b2=config.b2, eps=config.eps
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    jit_init = jax.jit(
        functools.partial(
            training.init_state,
            make_model=functools.partial(ViT, model_config),
            optimizer=optimizer,
        ),
        out_shardings=replicated,
    )
    jit_redraw = jax.jit(
        functools.partial(
            training.redraw,
            interval=config.redraw_interval,
            coupling=model_config.attention,
            block=model_config.block,
        ),
        in_shardings=replicated,
        out_shardings=replicated,
        donate_argnums=0,
    )
    jit_train_step = jax.jit(
        functools.partial(train_step, graphdef=graphdef, optimizer=optimizer),
        in_shardings=(replicated, sharded),
        out_shardings=replicated,
        donate_argnums=0,
    )
    jit_eval_step = jax.jit(
        functools.partial(eval_step, graphdef=graphdef),
        in_shardings=(replicated, sharded),
        out_shardings=replicated,
    )
    state = jit_init(jax.device_put(jax.random.key(config.seed), replicated))
    num_parameters = sum(x.size for x in jax.tree.leaves(state.params))

    def evaluate() -> dict[str, float]:
        batches = data.eval_batches(dataset.test, eval_batch_size)
        return test_means(jit_eval_step(state, jax.device_put(b, sharded)) for b in batches)

    # Checkpoints: go on from the newest, if there is one.
    checkpoints, preemption = None, None
    progress = checkpoint.Progress(rows=[], seconds=0.0)
    if config.checkpoint.interval:
        folder = config.checkpoint.folder or workdir / "checkpoints"
        checkpoints = checkpoint.Checkpoints(folder, config, keep=config.checkpoint.keep)
        preemption = Preemption()
        state, progress = checkpoints.restore(checkpoint.abstract(state)) or (state, progress)
    first_step = int(state.step)

    # Train.
    log = report.Log(workdir, config, progress.rows)
    has_projections = model_config.attention != "exact"
    pending: list[dict[str, jax.Array]] = []
    row_start = time.perf_counter()
    start = row_start - progress.seconds
    test: dict[str, float] = {}
    with (
        checkpoints or contextlib.nullcontext(),
        preemption or contextlib.nullcontext(),
        log,
        tqdm.tqdm(
            total=config.num_steps, initial=first_step, unit="step", dynamic_ncols=True
        ) as bar,
    ):
        for step in range(first_step, config.num_steps):
            due = step == 0 or (config.redraw_interval and step % config.redraw_interval == 0)
            if has_projections and due:
                state = jit_redraw(state)
            batch = jax.device_put(batches[step], sharded)
            state, metrics = jit_train_step(state, batch)
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
                "learning_rate": float(schedule(step)),
                "train_loss": float(np.mean([m["loss"] for m in fetched])),
                "train_accuracy": float(np.mean([m["accuracy"] for m in fetched])),
                "images_per_second": len(fetched) * config.batch_size / seconds,
            }
            for number, m in enumerate(fetched, start=done - len(fetched) + 1):
                if not math.isfinite(m["loss"]):
                    log.write(row)
                    raise _not_finite("loss", m["loss"], number, config, workdir)
            if evaluating:
                test = evaluate()
            log.write(row | (test if evaluating else {}))
            if evaluating and not math.isfinite(test["test_loss"]):
                raise _not_finite("test loss", test["test_loss"], done, config, workdir)
            if checkpoints and (saving or (evaluating and checkpoint.is_best(log.rows))):
                seconds = time.perf_counter() - start
                checkpoints.save(done, state, checkpoint.Progress(log.rows, seconds))
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
        "num_parameters": num_parameters,
        "num_train": len(dataset.train.labels),
        "num_test": len(dataset.test.labels),
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "jax": jax.__version__,
        "config": json.loads(config.to_json_best_effort()),
    }
    report.finish(workdir, results)
    return results


def _not_finite(
    what: str, value: float, step: int, config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> FloatingPointError:
    return FloatingPointError(
        f"The {what} is {value} at step {step} of {config.num_steps}; the metrics up to there are "
        f"in {workdir / 'metrics.csv'}."
    )
