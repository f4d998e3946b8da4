"""Language models that are trained for equal time, by the median time of their training steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.char_lm import corpus
from experiments.harness import resumable, timing, train_state
from experiments.recall import kinds, library
from experiments.swap import training
from experiments.swap.training import Task
from simrf_jax.integrations.nnx import calibrate


def run(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Times and trains what ``pieces`` lack, and returns the section of the results.

    The cores are shared with other programs, so a model is trained for a number of steps: the
    budget of seconds, divided by the median time of a step. Steps of all models are timed in turn.

    Args:
      config: The whole config.
      pieces: Pieces of the run.

    Returns:
      Facts of the text, and for each context and attention, the times of steps in milliseconds,
      the numbers of steps, and for each seed, the bits per character after each of them.

    Raises:
      UserError: If ``pieces`` has models of another text.
    """
    ours, text = config.equal_time, library.load()
    pieces.check_text("equal_time", text.sha256)
    contexts: dict[str, Any] = {}
    for context in config.contexts:
        tasks = {name: make_task(text, ours, name, context) for name in ours.attentions}
        times = pieces.get(f"equal_time-{context}", measure, tasks, ours)
        contexts[str(context)] = {}
        for (name, task), row in zip(tasks.items(), times, strict=True):
            milestones = steps_to_evaluate(ours, float(np.median(row)))
            bits = {}
            for seed in config.seeds:
                piece = f"equal_time-{context}-{name}-{seed}"
                kept = pieces.get(piece, train, task, ours, milestones, seed=seed)
                bits[str(seed)] = kept.tolist()
            contexts[str(context)][name] = {
                "milliseconds": np.percentile(row, [25, 50, 75]).tolist(),
                "steps": milestones,
                "bits": bits,
            }
    return {
        "text": {
            "sha256": text.sha256,
            "train": len(text.train),
            "validation": min(len(text.validation), ours.validation_tokens),
        },
        "contexts": contexts,
    }


def steps_to_evaluate(config: ConfigDict, milliseconds: float) -> list[int]:
    """Returns ascending numbers of steps, of which the last fill the seconds of the config."""
    total = max(config.num_evaluations, int(1e3 * config.seconds / milliseconds))
    return [total * part // config.num_evaluations for part in range(1, config.num_evaluations + 1)]


def measure(tasks: dict[str, Task], config: ConfigDict) -> np.ndarray:
    """Returns the milliseconds of training steps of all tasks, ``[tasks, rounds]``."""

    def stepper(task: Task) -> Callable[[int], Any]:
        milestones = tuple(range(1, config.timed_rounds + 2))
        models = start(task, config, milestones, seed=0)
        return lambda round_: nnx.state(next(models))

    candidates = {name: stepper(task) for name, task in tasks.items()}
    return np.stack([*timing.alternate(candidates, config.timed_rounds).values()])


def train(task: Task, config: ConfigDict, milestones: list[int], *, seed: int) -> np.ndarray:
    """Returns bits per character of the validation text after each number of steps."""
    models = start(task, config, tuple(milestones), seed=seed)
    return np.array([training.evaluate(task, model) for model in models])


def start(task: Task, config: ConfigDict, milestones: tuple[int, ...], *, seed: int) -> Any:
    """Returns an iterator that trains a model, and yields it after each number of steps."""
    optimizer = _optimizer(config.to_json(), milestones[-1])
    model = training.initial_model(task, seed)
    return training.train(task, model, optimizer, seed=seed, first_step=0, milestones=milestones)


@functools.cache  # An optimizer of its own would compile a program for each seed.
def _optimizer(config: str, num_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of a run, given its config as JSON and its length."""
    rate = ConfigDict(json.loads(config))
    rate.num_steps = max(num_steps, rate.warmup_steps + 1)  # A few timed steps only warm up.
    return train_state.make_optimizer(rate, b2=rate.b2)[0]


def make_task(text: corpus.Text, config: ConfigDict, attention: str, context: int) -> Task:
    """Returns the task of a language model, whose features start calibrated to training text."""
    batch_size = max(1, config.batch_tokens // context)
    sizes = {"context": context, "batch_size": batch_size, "test_batch_size": 1}
    sizes |= {"num_fit": batch_size, "model": config.model}
    shown = text._replace(validation=text.validation[: config.validation_tokens + 1])
    task = training.language_task(shown, ConfigDict(sizes))
    make_model = functools.partial(
        kinds.make_model,
        len(text.alphabet),
        attention,
        num_features=config.num_features,
        exact_keys=config.exact_keys,
        bandwidth=config.bandwidth,
        **config.model,
    )

    def make_calibrated(rngs: nnx.Rngs) -> nnx.Module:
        model = make_model(rngs=rngs)
        if attention != "softmax":
            calibrate(model, [jnp.asarray(task.fit_inputs)])
        return model

    return task._replace(make_model=make_calibrated)
