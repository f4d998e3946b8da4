"""Trains a ViT: one linear loop, sharded by ``jax.jit``."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import simrf_jax
from experiments.vit import config as config_lib
from experiments.vit import input as input_lib
from experiments.vit import report, stream
from simrf_jax.integrations.nnx import RandomProjection
from simrf_jax.models import ViT, ViTConfig


class TrainState(NamedTuple):
    """All that training changes, and the key it never does.

    Attributes:
      step: Steps done.
      key: Typed PRNG key of the run; every draw is a function of it, the step and a name.
      params: ``nnx.Param`` state of the model.
      projections: ``RandomProjection`` state of the model; empty for exact attention.
      opt_state: The optimiser's.
    """

    step: jax.Array
    key: jax.Array
    params: nnx.State
    projections: nnx.State
    opt_state: optax.OptState


# Which draw a key is for: fold_in(state.key, one of these).
PARAMS, PROJECTIONS, DROPOUT = range(3)


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


def make_optimizer(
    config: ml_collections.ConfigDict,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW with clipped gradients, and its learning rate as a function of the step."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps
    )

    def kernels(params: Any) -> Any:
        """Biases, norms and the position embedding do not decay."""
        return jax.tree.map_with_path(
            lambda path, _: "kernel" in jax.tree_util.keystr(path), params
        )

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            config.b1,
            config.b2,
            config.eps,
            weight_decay=config.weight_decay,
            mask=kernels,
        ),
    )
    return optimizer, schedule


def init_state(
    key: jax.Array, model_config: ViTConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state before the first step; projections are still to be drawn by ``redraw``."""
    rngs = nnx.Rngs(
        params=jax.random.fold_in(key, PARAMS), features=jax.random.fold_in(key, PROJECTIONS)
    )
    model = ViT(model_config, rngs=rngs)
    params, projections = nnx.state(model, nnx.Param), nnx.state(model, RandomProjection)
    return TrainState(jnp.zeros((), jnp.int32), key, params, projections, optimizer.init(params))


def redraw(state: TrainState, *, model_config: ViTConfig, interval: int) -> TrainState:
    """The state with the projections that belong to its step."""
    key = jax.random.fold_in(state.key, PROJECTIONS)
    projections = simrf_jax.redraw_projections(
        simrf_jax.redraw_key(key, state.step, interval=interval),
        state.projections,
        coupling=model_config.attention,
        block=model_config.block,
    )
    return state._replace(projections=projections)


def score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Losses ``[batch]``, and whether the largest logit is that of the label.

    Labels are classes ``[batch]``, or soft, ``[batch, classes]``, as mixup leaves them.
    """
    if labels.ndim == 1:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        losses = optax.softmax_cross_entropy(logits, labels)
        labels = labels.argmax(-1)
    return losses, logits.argmax(-1) == labels


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
        losses, right = score(logits, batch["label"])
        return losses.mean(), right.mean()

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
    losses, right = score(logits, batch["label"])
    weight = batch["weight"]
    return {
        "loss": jnp.sum(losses * weight),
        "accuracy": jnp.sum(right * weight),
        "weight": jnp.sum(weight),
    }


def train(config: ml_collections.ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Trains, evaluates, and leaves its results in ``workdir``.

    Args:
      config: All the fields of ``experiments.vit.config.FIELDS``.
      workdir: A folder without a run in it; made if needed. It gets ``config.json``,
        ``metrics.csv`` while training, and at the end ``results.json`` and ``curves.png``.

    Returns:
      What is in ``results.json``.

    Raises:
      FileExistsError: If workdir holds a run.
      FileNotFoundError: If the data is not there.
      FloatingPointError: If the loss is not finite; the message names the step.
      TypeError, ValueError: If the config is not right.
    """
    # Check everything that can be checked before anything is written.
    config_lib.check(config)
    workdir = pathlib.Path(workdir)
    report.refuse_used(workdir)
    mesh = make_mesh(config.mesh.data)
    if config.batch_size % mesh.size:
        raise ValueError(
            f"config.batch_size must be a multiple of the {mesh.size} devices, "
            f"got {config.batch_size}."
        )
    # Evaluation pads its batches anyway.
    eval_batch_size = -(-config.eval_batch_size // mesh.size) * mesh.size

    # Data.
    host = stream.Host(jax.process_index(), jax.process_count())
    inputs = input_lib.load(config, eval_batch_size=eval_batch_size, host=host)
    batches = stream.Batches(
        inputs.train_batch, num_steps=config.num_steps, num_workers=config.num_workers
    )

    # Model, optimiser and their state, replicated over the mesh.
    model_config = ViTConfig(
        image_size=(config.image_size, config.image_size),
        channels=inputs.channels,
        num_classes=inputs.num_classes,
        **config.model,
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: ViT(model_config, rngs=nnx.Rngs(0))))
    optimizer, schedule = make_optimizer(config)
    replicated = NamedSharding(mesh, PartitionSpec())
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    jit_init = jax.jit(
        functools.partial(init_state, model_config=model_config, optimizer=optimizer),
        out_shardings=replicated,
    )
    jit_redraw = jax.jit(
        functools.partial(redraw, model_config=model_config, interval=config.redraw_interval),
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
        sums = [
            jit_eval_step(state, jax.device_put(batch, sharded)) for batch in inputs.eval_batches()
        ]
        total = {name: sum(float(s[name]) for s in sums) for name in sums[0]}
        return {f"test_{name}": total[name] / total["weight"] for name in ("loss", "accuracy")}

    # Train.
    log = report.Log(workdir, config)
    has_projections = model_config.attention != "exact"
    pending: list[dict[str, jax.Array]] = []
    speeds: list[float] = []
    start = row_start = time.perf_counter()
    test: dict[str, float] = {}
    with log, batches, tqdm.tqdm(total=config.num_steps, unit="step", dynamic_ncols=True) as bar:
        for step in range(config.num_steps):
            due = step == 0 or (config.redraw_interval and step % config.redraw_interval == 0)
            if has_projections and due:
                state = jit_redraw(state)
            batch = jax.device_put(next(batches), sharded)
            state, metrics = jit_train_step(state, batch)
            pending.append(metrics)
            done = step + 1
            last = done == config.num_steps
            evaluating = last or done % config.eval_interval == 0
            if not (evaluating or done % config.log_interval == 0):
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
            speeds.append(row["images_per_second"])
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
    results = {
        **test,
        "steps": config.num_steps,
        "seconds": seconds,
        "images_per_second": float(np.median(speeds[1:] or speeds)),  # The first row compiles.
        "num_parameters": num_parameters,
        "num_train": inputs.num_train,
        "num_test": inputs.num_test,
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
