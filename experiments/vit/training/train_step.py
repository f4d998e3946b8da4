"""A training step on one screen, an evaluation step, and the program that compiles them.

The functions of a step are pure: ``train_step`` computes the loss, its gradient, the update by the
optimizer and the metrics. ``build_program`` makes a config's model and jits its functions on a
mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.harness import train_state
from experiments.harness.train_state import TrainState
from experiments.vit.config import model_config
from experiments.vit.metrics import diagnostics
from experiments.vit.training import sharding
from simrf_jax.models import ViT, ViTConfig

# The number of the draw of dropout masks, after those of train_state.
DROPOUT = 2

Metrics = dict[str, jax.Array]


def train_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
) -> tuple[TrainState, Metrics]:
    """Takes one step of the optimizer on the mean loss of a batch.

    Args:
      state: State before the step.
      batch: Images and labels, ``[batch, ...]``.
      graphdef: The ViT without its arrays.
      optimizer: Transformation of gradients into updates.
      num_microbatches: Number of equal parts of the batch whose gradients are computed in turn.

    Returns:
      The next state and the metrics of the step.
    """
    key = jax.random.fold_in(jax.random.fold_in(state.key, DROPOUT), state.step)
    keys = jax.random.split(key, num_microbatches) if num_microbatches > 1 else key[None]

    def loss_fn(
        params: nnx.State, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params, state.projections, state.calibrations)
        logits = model(batch["image"], rngs=nnx.Rngs(dropout=dropout_key))
        losses, right = score(logits, batch["label"])
        return losses.mean(), right.mean()

    (loss, accuracy), grads = sharding.mean_over_microbatches(
        functools.partial(jax.value_and_grad(loss_fn, has_aux=True), state.params), batch, keys
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": loss, "accuracy": accuracy, "gradient_norm": optax.tree.norm(grads)}


def eval_step(
    model: tuple[nnx.State, ...], batch: dict[str, jax.Array], *, graphdef: nnx.GraphDef
) -> Metrics:
    """Returns the sums over a batch of the losses, the correct predictions and the weights."""
    logits = nnx.merge(graphdef, *model)(batch["image"])
    losses, right = score(logits, batch["label"])
    weight = batch["weight"]
    return {
        "loss": jnp.sum(losses * weight),
        "accuracy": jnp.sum(right * weight),
        "weight": jnp.sum(weight),
    }


def score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the losses ``[batch]``, and whether each prediction is correct.

    Args:
      logits: Logits ``[batch, classes]``.
      labels: Classes ``[batch]``, or soft labels ``[batch, classes]``, as mixup returns them.
    """
    if labels.ndim == 1:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        losses = optax.softmax_cross_entropy(logits, labels)
        labels = labels.argmax(-1)
    return losses, logits.argmax(-1) == labels


def evaluation_means(sums: Iterable[Metrics], *, name: str) -> dict[str, float]:
    """Returns ``{name}_loss`` and ``{name}_accuracy`` from the sums of ``eval_step``.

    Args:
      sums: Sums of ``eval_step``, a batch each.
      name: Name of the images, ``test`` or ``held_out``.
    """
    batches = list(sums)
    total = {what: sum(float(s[what]) for s in batches) for what in batches[0]}
    return {f"{name}_{what}": total[what] / total["weight"] for what in ("loss", "accuracy")}


class Program(NamedTuple):
    """The model of a run and its jitted functions, which run inside ``jax.set_mesh(mesh)``.

    Attributes:
      mesh: Mesh of the devices.
      model: Shape of the ViT.
      graphdef: The ViT without its arrays.
      schedule: Learning rate as a function of the step.
      state: Shapes, types and shardings of the ``TrainState``.
      init: Returns the state before the first step.
      redraw: Takes a state, which is donated, and returns it with the projections of its step.
      calibrate: Takes a state, which is donated, and images; returns it with calibrated features
        that fit the images.
      train_step: Takes a state, which is donated, and a batch; returns the next state and metrics.
      eval_step: Takes ``TrainState.model`` and a batch; returns sums over the batch.
      diagnose: Takes ``TrainState.model``, the key of the run and images; returns
        ``diagnostics.measure``. None where there is nothing to diagnose.
    """

    mesh: Mesh
    model: ViTConfig
    graphdef: nnx.GraphDef
    schedule: optax.Schedule
    state: TrainState
    init: jax.stages.Wrapped
    redraw: jax.stages.Wrapped
    calibrate: jax.stages.Wrapped
    train_step: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped
    diagnose: jax.stages.Wrapped | None

    @property
    def has_projections(self) -> bool:
        """Returns whether there is anything to redraw."""
        return self.model.attention != "exact"


def build_program(config: ConfigDict, mesh: Mesh, *, channels: int, num_classes: int) -> Program:
    """Builds the program of a config; nothing is compiled or drawn yet.

    Args:
      config: Config with all the fields of ``experiments.vit.config.FIELDS``.
      mesh: Mesh of ``sharding.make_mesh``, of devices that need not be there.
      channels: Number of channels of the images.
      num_classes: Number of classes of the labels.

    Raises:
      UserError: If the mesh does not divide the heads, the MLPs, the width or the tokens.
    """
    model = dataclasses.replace(
        model_config(config, channels=channels, num_classes=num_classes),
        batch_axis=sharding.BATCH[0],
        head_axis="tensor",
        sequence_axis="sequence" if mesh.shape["sequence"] > 1 else None,
    )
    sharding.check_model(mesh, model)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: ViT(model, rngs=nnx.Rngs(0))))
    optimizer, schedule = train_state.make_optimizer(
        config, b1=config.b1, b2=config.b2, eps=config.eps
    )

    def init() -> TrainState:
        make_model = functools.partial(ViT, model)
        return train_state.init_state(jax.random.key(config.seed), make_model, optimizer)

    redraw = functools.partial(
        train_state.redraw, interval=config.redraw_interval, stacked=model.scan, mesh=mesh
    )
    calibrate = functools.partial(train_state.calibrate, graphdef=graphdef)
    shapes = jax.eval_shape(init)
    shardings = sharding.state_shardings(shapes, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    step = functools.partial(
        train_step,
        graphdef=graphdef,
        optimizer=optimizer,
        num_microbatches=config.num_microbatches,
    )
    evaluate = functools.partial(eval_step, graphdef=graphdef)
    diagnose = functools.partial(
        diagnostics.measure,
        graphdef=graphdef,
        num_images=config.diagnostics.images,
        num_redraws=config.diagnostics.redraws,
    )
    diagnosed = config.diagnostics.images and model.attention != "exact"
    return Program(
        mesh=mesh,
        model=model,
        graphdef=graphdef,
        schedule=schedule,
        state=jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings),
        init=jax.jit(init, out_shardings=shardings),
        redraw=jax.jit(redraw, out_shardings=shardings, donate_argnums=0),
        calibrate=jax.jit(calibrate, out_shardings=shardings, donate_argnums=0),
        train_step=jax.jit(step, out_shardings=(shardings, replicated), donate_argnums=0),
        eval_step=jax.jit(evaluate, out_shardings=replicated),
        diagnose=jax.jit(diagnose, out_shardings=replicated) if diagnosed else None,
    )
