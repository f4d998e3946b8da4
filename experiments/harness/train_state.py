"""The state of a training run, its optimizer, redraws and calibrations; all trainers share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

import simrf_jax
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.projections import ProjectionLike, StructuredProjection
from simrf_jax.integrations import nnx as adapters
from simrf_jax.integrations.nnx import FeatureMapState, RandomProjection


class TrainState(NamedTuple):
    """The arrays that training changes, and the PRNG key that it never changes.

    Attributes:
      step: Number of steps done.
      key: Typed PRNG key of the run; every draw is a function of it, the step and a name.
      params: ``nnx.Param`` state of the model.
      projections: ``RandomProjection`` state of the model; empty without random features.
      calibrations: ``FeatureMapState`` of the model; empty without calibrated features.
      opt_state: State of the optimizer.
    """

    step: jax.Array
    key: jax.Array
    params: nnx.State
    projections: nnx.State
    calibrations: nnx.State
    opt_state: optax.OptState

    @property
    def model(self) -> tuple[nnx.State, nnx.State, nnx.State]:
        """Returns the states of which ``nnx.merge`` makes the model."""
        return self.params, self.projections, self.calibrations


# The numbers of the draws: fold_in(state.key, one of these). A trainer's own go on from 2.
PARAMS, PROJECTIONS = range(2)


def make_optimizer(
    config: ConfigDict, **adam: float
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Makes AdamW with clipped gradients, and its learning rate as a function of the step.

    Args:
      config: Config with ``learning_rate``, ``warmup_steps``, ``num_steps``, ``clip_norm`` and
        ``weight_decay``.
      **adam: Further options of ``optax.adamw``.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps
    )

    def kernels(params: Any) -> Any:
        """Returns the mask of decay: biases, norms, embeddings and weights of fields have none."""
        return jax.tree.map_with_path(
            lambda path, _: "kernel" in jax.tree_util.keystr(path), params
        )

    adamw = optax.adamw(schedule, weight_decay=config.weight_decay, mask=kernels, **adam)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw), schedule


def init_state(
    key: jax.Array,
    make_model: Callable[..., nnx.Module],
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """Returns the state of ``make_model(rngs=...)`` before the first step.

    Its projections are the model's own, until ``redraw`` draws those of the schedule. Calibrated
    features are plain positive ones, until ``calibrate`` fits them.
    """
    rngs = nnx.Rngs(
        params=jax.random.fold_in(key, PARAMS), features=jax.random.fold_in(key, PROJECTIONS)
    )
    model = make_model(rngs=rngs)
    kinds = nnx.Param, RandomProjection, FeatureMapState
    params, projections, calibrations = nnx.state(model, *kinds)
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, key, params, projections, calibrations, optimizer.init(params))


def redraw(
    state: TrainState, *, interval: int, stacked: bool = False, mesh: Mesh | None = None
) -> TrainState:
    """Returns the state with the projections that belong to its step, drawn as the model drew them.

    Beside a calibration they are turned with its axes, which rounding may decide. So runs on other
    devices draw the same features.

    Args:
      state: State of any step.
      interval: Steps between redraws; see ``simrf_jax.redraw_key``.
      stacked: True if the projections have a leading axis of scanned layers. They are drawn like
        those of layers that are not scanned.
      mesh: Devices that draw a part each; by default every device draws all.
    """
    key = jax.random.fold_in(state.key, PROJECTIONS)
    key = simrf_jax.redraw_key(key, state.step, interval=interval)
    if not stacked:
        drawn = simrf_jax.redraw_projections(key, state.projections, mesh=mesh)
        return state._replace(projections=_turned(drawn, state.calibrations))
    layers = jax.tree.map(
        _layers, state.projections, is_leaf=lambda node: isinstance(node, StructuredProjection)
    )
    drawn = simrf_jax.redraw_projections(key, layers, mesh=mesh)
    drawn = jax.tree.map(_stack, drawn, is_leaf=lambda node: isinstance(node, list))
    return state._replace(projections=_turned(drawn, state.calibrations))


def calibrate(state: TrainState, inputs: jax.Array, *, graphdef: nnx.GraphDef) -> TrainState:
    """Returns the state with calibrated features that fit the queries and keys of some inputs.

    The model computes the queries and keys with the features that it has. Nothing is drawn, so the
    result is a function of the state and the inputs alone. The calibration turns projections.

    Args:
      state: State of any step.
      inputs: Inputs of the model.
      graphdef: The model without its arrays. It drops nothing when it is called with inputs alone.
    """
    model = nnx.merge(graphdef, *state.model)
    adapters.calibrate(model, [inputs])
    projections, calibrations = nnx.state(model, RandomProjection, FeatureMapState)
    return state._replace(projections=projections, calibrations=calibrations)


def _turned(projections: nnx.State, calibrations: nnx.State) -> nnx.State:
    """Returns new projections in the axes of the calibrations of the same adapters."""
    fits = {path[:-1]: fit.get_value() for path, fit in nnx.to_flat_state(calibrations)}

    def turn(path: tuple[Any, ...], w: nnx.Variable) -> nnx.Variable:
        if path[:-1] not in fits:
            return w
        turned = flax_calibration.turn_projection(w.get_value(), None, fits[path[:-1]])
        return w.replace(turned)

    flat = [(path, turn(path, w)) for path, w in nnx.to_flat_state(projections)]
    return nnx.from_flat_state(flat)


def _layers(stack: ProjectionLike) -> list[ProjectionLike]:
    """Returns the projections of the layers, which have the leading axis in a stack."""
    count = jax.tree.leaves(stack)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count)]


def _stack(layers: list[ProjectionLike]) -> ProjectionLike:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
