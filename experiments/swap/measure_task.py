"""Scores of models whose attention is swapped: at once, and after some steps of fine-tuning."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx
from ml_collections import ConfigDict

from experiments.harness import resumable, train_state, trials
from experiments.swap import training
from experiments.swap.methods import attentions, available, baselines
from experiments.swap.swapping import record, swapped
from experiments.swap.training import Task

SWAP = 2  # Purpose of a PRNG key, after those of ``training``.


class Swaps:
    """The models of all seeds of a task, and their scores, kept in pieces.

    Args:
      name: Name of the task and of its section of the config.
      task: Model and data.
      config: Section of the config.
      pieces: Pieces of the run.
    """

    def __init__(self, name: str, task: Task, config: ConfigDict, pieces: resumable.Pieces):
        self.name, self.task, self.config, self.pieces = name, task, config, pieces
        self._trainer, _ = train_state.make_optimizer(config, b2=config.b2)
        self._tuner = optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.adam(config.tuned_learning_rate, b2=config.b2),
        )
        self.model = functools.lru_cache(maxsize=1)(self._model)
        self._inputs = functools.lru_cache(maxsize=1)(self._recorded)

    def _model(self, seed: int) -> nnx.Module:
        """Returns the model trained with softmax attention."""

        def compute() -> np.ndarray:
            model = training.initial_model(self.task, seed)
            milestones = (self.config.num_steps,)
            [trained] = training.train(
                self.task, model, self._trainer, seed=seed, first_step=0, milestones=milestones
            )
            return training.parameters(trained)

        vector = self.pieces.get(f"{self.name}-model-{seed}", compute)
        return training.with_parameters(self.task, vector)

    def _recorded(self, seed: int) -> list[Any]:
        """Returns what enters attention for the inputs to fit on."""
        inputs = jnp.asarray(self.task.fit_inputs)
        return record(self.model(seed), self.task.logits, inputs)[0]

    def swapped(self, name: str, num_features: int | None, seed: int) -> nnx.Module:
        """Returns the model with another attention; see ``methods.attentions``, or "softmax"."""
        if name == "softmax":
            return self.model(seed)
        prng_key = jax.random.fold_in(jax.random.key(seed), SWAP)
        layers = self._inputs(seed)
        attends = attentions(name, num_features, prng_key, layers, self.config)
        return swapped(self.model(seed), attends)

    def score(self, name: str, num_features: int | None, seed: int) -> float:
        """Returns the score of ``swapped`` without fine-tuning."""

        def compute() -> np.ndarray:
            return np.array(training.evaluate(self.task, self.swapped(name, num_features, seed)))

        which = name if num_features is None else f"swap-{name}-{num_features}"
        return float(self.pieces.get(f"{self.name}-{which}-{seed}", compute))

    def tuned(self, method: str, seed: int) -> np.ndarray:
        """Returns scores and spreads after each number of steps, ``[milestones, 1 + layers]``.

        The method ``"softmax"`` trains the model on as it is.
        """

        def compute() -> np.ndarray:
            model = self.swapped(method, self.config.tuned_features, seed)
            milestones = training.train(
                self.task,
                model,
                self._tuner,
                seed=seed,
                first_step=self.config.num_steps,
                milestones=self.config.tuned_steps,
            )
            return np.array(
                [
                    [training.evaluate(self.task, one), *training.spread(self.task, one)]
                    for one in milestones
                ]
            )

        return self.pieces.get(f"{self.name}-tuned-{method}-{seed}", compute)


def run(name: str, task: Task, config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section of a task of the results.

    Args:
      name: Name of the task and of its section of the config.
      task: Model and data.
      config: The whole config.
      pieces: Pieces of the run.
    """
    ours = config[name]
    swaps = Swaps(name, task, ours, pieces)
    bandwidth, exact_keys = ours.get("bandwidth"), ours.get("exact_keys")
    scores: dict[str, list[float]] = {one: [] for one in ("softmax", *baselines(bandwidth))}
    names = available(config.methods, bandwidth, exact_keys)
    methods: dict[str, dict[str, list[float]]] = {method: {} for method in names}
    tuned_names = ("softmax", *available(config.tuned_methods, bandwidth, exact_keys))
    tuned: dict[str, list[np.ndarray]] = {one: [] for one in tuned_names}
    for seed in tqdm.tqdm(config.seeds, desc=name, dynamic_ncols=True):
        for one, kept in scores.items():
            kept.append(swaps.score(one, None, seed))
        for method, by_size in methods.items():
            for m in ours.num_features:
                by_size.setdefault(str(m), []).append(swaps.score(method, m, seed))
        for method, rows in tuned.items():
            rows.append(swaps.tuned(method, seed))
    exact = np.array(scores["softmax"])
    return {
        "baselines": {one: _summary(np.array(kept), exact) for one, kept in scores.items()},
        "methods": {
            method: {m: _summary(np.array(kept), exact) for m, kept in by_size.items()}
            for method, by_size in methods.items()
        },
        "steps": list(ours.tuned_steps),
        "tuned_features": ours.tuned_features,
        "tuned": {one: _tuned_summary(np.stack(rows), exact) for one, rows in tuned.items()},
        "seconds": pieces.seconds(f"{name}-*"),
    }


def _summary(scores: np.ndarray, exact: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns the mean score over seeds, and the mean difference from softmax of the same seed."""
    return {"score": trials.summary(scores), "difference": trials.summary(scores - exact)}


def _tuned_summary(rows: np.ndarray, exact: np.ndarray) -> list[dict[str, Any]]:
    """Returns the summary after each number of steps.

    Args:
      rows: Scores and spreads of ``Swaps.tuned``, ``[seeds, milestones, 1 + layers]``.
      exact: Score with softmax attention of each seed, without fine-tuning.
    """
    return [
        _summary(row[:, 0], exact)
        | {
            "spread": trials.summary(row[:, 1:].mean(axis=1)),
            "spread_by_layer": row[:, 1:].mean(axis=0).tolist(),
        }
        for row in np.moveaxis(rows, 1, 0)
    ]
