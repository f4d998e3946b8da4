"""Training of one model: compiled functions that all seeds share, and the training loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx
from ml_collections import ConfigDict

from experiments.char_lm.corpus import Text, encode, train_batch, windows
from experiments.char_lm.model import CharLM
from experiments.harness import train_state
from experiments.harness.mistakes import UserError
from experiments.harness.train_state import TrainState

# Purpose of a PRNG key, after those of train_state.
SAMPLE = 2


class Program(NamedTuple):
    """Compiled functions of one kind of attention.

    Attributes:
      init: Function of a key that returns the state before the first step.
      redraw: Function of a state that returns it with the projections that belong to its step.
      calibrate: Function of a state and characters ``[batch, context]`` that returns it with
        features that are calibrated to them; None if the model has no such features.
      calibrates_once: True if the features learn from the first step on.
      train_step: Function of a state and characters ``[batch, context + 1]`` that returns the next
        state and the loss in nats.
      evaluate: Function of a state and characters ``[windows, context + 1]`` that returns the mean
        loss.
      sample: Function of a state and a prompt that returns the prompt and its continuation,
        ``[context]`` characters.
    """

    init: Callable[[jax.Array], TrainState]
    redraw: Callable[[TrainState], TrainState]
    calibrate: Callable[[TrainState, np.ndarray], TrainState] | None
    calibrates_once: bool
    train_step: Callable[[TrainState, np.ndarray], tuple[TrainState, jax.Array]]
    evaluate: Callable[[TrainState, np.ndarray], jax.Array]
    sample: Callable[[TrainState, np.ndarray], jax.Array]


def make_program(config: ConfigDict, attention: str, vocabulary_size: int) -> Program:
    """Returns the functions for one kind of attention; each compiles when first called."""
    make_model = functools.partial(
        CharLM, vocabulary_size, attention=attention, **config.model.to_dict()
    )
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(rngs=nnx.Rngs(0))))
    optimizer, _ = train_state.make_optimizer(config, b2=config.b2)

    def mean_loss(params: nnx.State, state: TrainState, batch: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params, state.projections, state.calibrations)
        logits = model(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(state.params, state, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    def evaluate(state: TrainState, batch: jax.Array) -> jax.Array:
        def window_loss(window: jax.Array) -> jax.Array:
            return mean_loss(state.params, state, window[None])

        return jax.lax.map(window_loss, batch, batch_size=config.batch_size).mean()

    def sample(state: TrainState, prompt: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, *state.model)
        key = jax.random.fold_in(state.key, SAMPLE)

        def write_next(position: jax.Array, indices: jax.Array) -> jax.Array:
            logits = model(indices[None])[0, position] / config.temperature
            drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
            return indices.at[position + 1].set(drawn)

        # The model is causal, so characters that are not written yet do not matter.
        indices = jnp.pad(prompt, (0, config.context - len(prompt)))
        return jax.lax.fori_loop(len(prompt) - 1, config.context - 1, write_next, indices)

    init = functools.partial(train_state.init_state, make_model=make_model, optimizer=optimizer)
    redraw = functools.partial(train_state.redraw, interval=config.redraw_interval)
    calibrate = functools.partial(train_state.calibrate, graphdef=graphdef)
    has_calibration = bool(jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)).calibrations))
    return Program(
        jax.jit(init),
        jax.jit(redraw, donate_argnums=0),
        jax.jit(calibrate, donate_argnums=0) if has_calibration else None,
        attention == "band_learned",
        jax.jit(train_step, donate_argnums=0),
        jax.jit(evaluate),
        jax.jit(sample),
    )


def train(
    program: Program, text: Text, config: ConfigDict, *, seed: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Trains a model and samples text from it.

    Args:
      program: Functions that ``make_program`` returned.
      text: Text that ``corpus.load`` returned.
      config: Config with the fields of ``char_lm.FIELDS``.
      seed: Seed of parameters, projections, batches and the sampled text.
      name: Name of the run in the progress bar and in errors.

    Returns:
      Validation losses in nats, ``[num_steps // eval_interval]``, and the sampled characters,
      ``[context]``.

    Raises:
      UserError: If a validation loss is not finite.
    """
    state = program.init(jax.random.key(seed))
    validation = windows(text.validation, config.context)
    losses: list[float] = []

    sizes = {"batch_size": config.batch_size, "context": config.context}
    batch = functools.partial(train_batch, text.train, **sizes, seed=seed)
    for step in tqdm.trange(config.num_steps, desc=name, unit="step", dynamic_ncols=True):
        if config.redraw_interval and step % config.redraw_interval == 0:
            state = program.redraw(state)
        is_due = step == 0 if program.calibrates_once else step % config.calibrate_interval == 0
        if program.calibrate and is_due:
            # A fit to the batch of this step would tell the model about later characters.
            state = program.calibrate(state, batch(step=config.num_steps + step)[:, :-1])
        state, _ = program.train_step(state, batch(step=step))
        if (step + 1) % config.eval_interval == 0:
            losses.append(float(program.evaluate(state, validation)))
            if not math.isfinite(losses[-1]):
                raise UserError(
                    f"The validation loss of {name} is {losses[-1]} at step {step + 1}."
                )
    sample = program.sample(state, encode(config.prompt, text.alphabet))
    return np.array(losses), np.asarray(sample)
