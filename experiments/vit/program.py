"""What a run compiles: its model, its optimiser and the functions of its state, on a mesh."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import ml_collections
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments import training
from experiments.training import TrainState
from experiments.vit import diagnostics, sharding, steps
from simrf_jax.models import ViT, ViTConfig


class Program(NamedTuple):
    """The model of a run and its jitted functions; they run inside ``jax.set_mesh(mesh)``.

    Attributes:
      mesh: Where it runs.
      model: Shape of the ViT.
      graphdef: The ViT without its arrays.
      schedule: The learning rate as a function of the step.
      state: Shapes, types and shardings of the ``TrainState``.
      init: From nothing to the state before the first step.
      redraw: From a state, which is donated, to the same with the projections of its step.
      train_step: From a state, which is donated, and a batch to the next and the metrics.
      eval_step: From parameters, projections and a batch to sums over the batch.
      diagnose: From parameters, projections, the key of the run and images to ``diagnostics``; None
        where there are none.
    """

    mesh: Mesh
    model: ViTConfig
    graphdef: nnx.GraphDef
    schedule: optax.Schedule
    state: TrainState
    init: jax.stages.Wrapped
    redraw: jax.stages.Wrapped
    train_step: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped
    diagnose: jax.stages.Wrapped | None

    @property
    def has_projections(self) -> bool:
        """Whether there is anything to redraw."""
        return self.model.attention != "exact"


def build(
    config: ml_collections.ConfigDict, mesh: Mesh, *, channels: int, num_classes: int
) -> Program:
    """The program of a config; nothing is compiled or drawn yet.

    Args:
      config: All the fields of ``experiments.vit.config.FIELDS``.
      mesh: As ``sharding.make_mesh`` makes it, of devices that need not be there.
      channels: Of the images.
      num_classes: Of the labels.

    Raises:
      UserError: If the mesh does not divide the heads, the MLPs, the width or the tokens.
    """
    model = ViTConfig(
        image_size=(config.image_size, config.image_size),
        channels=channels,
        num_classes=num_classes,
        sequence_axis="sequence" if mesh.shape["sequence"] > 1 else None,
        **config.model,
    )
    sharding.check_model(mesh, model)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: ViT(model, rngs=nnx.Rngs(0))))
    optimizer, schedule = training.make_optimizer(
        config, b1=config.b1, b2=config.b2, eps=config.eps
    )

    def init() -> TrainState:
        make_model = functools.partial(ViT, model)
        return training.init_state(jax.random.key(config.seed), make_model, optimizer)

    def redraw(state: TrainState) -> TrainState:
        return training.redraw(state, interval=config.redraw_interval, stacked=model.scan)

    abstract = _with_shardings(jax.eval_shape(init), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    train_step = functools.partial(
        steps.train_step,
        graphdef=graphdef,
        optimizer=optimizer,
        num_microbatches=config.num_microbatches,
    )
    replicated = NamedSharding(mesh, PartitionSpec())
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
        state=abstract,
        init=jax.jit(init, out_shardings=shardings),
        redraw=jax.jit(redraw, out_shardings=shardings, donate_argnums=0),
        train_step=jax.jit(train_step, out_shardings=(shardings, replicated), donate_argnums=0),
        eval_step=jax.jit(
            functools.partial(steps.eval_step, graphdef=graphdef), out_shardings=replicated
        ),
        diagnose=jax.jit(diagnose, out_shardings=replicated) if diagnosed else None,
    )


def _with_shardings(shapes: Any, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        sharding.state_shardings(shapes, mesh),
    )
