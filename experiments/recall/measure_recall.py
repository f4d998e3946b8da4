"""Accuracy of associative recall: each model is trained on more and more pairs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.harness import resumable, train_state
from experiments.recall import kinds, pairs
from experiments.swap import training
from experiments.swap.training import Batch, Task

SHORT = 8  # Numbers of pairs up to this one have sequences of one length.
# Seeds of sequences that end the training, and of others; no seed of a run is as large.
VALIDATION_SEED, TEST_SEED = 2**32, 2**32 + 1


class Case(NamedTuple):
    """Sizes of a model and its task.

    Attributes:
      attention: Name in ``kinds.LABELS``.
      num_pairs: Number N of pairs.
      num_features: Number m of features of a head, or 0 for softmax attention. Exact keys that
        replace features count.
      exact_keys: Number of exact keys of a head.
    """

    attention: str
    num_pairs: int
    num_features: int
    exact_keys: int

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Returns the numbers of pairs of the training, and those of as long sequences.

        The numbers double up to N. There are two lengths only, as each is a program to compile.
        """
        powers = [2**power for power in range(1, self.num_pairs.bit_length())]
        first = min(SHORT, self.num_pairs)
        return [(size, first if size <= first else self.num_pairs) for size in powers]


def cases(config: ConfigDict) -> dict[str, Case]:
    """Returns the cases by name; half of the features give way where exact keys replace them."""
    found = []
    sizes = itertools.product(config.num_pairs, config.attentions, config.num_features)
    for n, attention, m in sizes:
        if attention == "softmax":
            found.append(Case(attention, n, 0, 0))
        elif kinds.KINDS[attention].keys == "on_top":
            found += [Case(attention, n, m, keys) for keys in config.exact_keys]
        else:
            found.append(Case(attention, n, m, m // 2 if kinds.KINDS[attention].keys else 0))
    return {"-".join(map(str, case)): case for case in found}


def run(config: ConfigDict, pieces: resumable.Pieces) -> list[dict[str, Any]]:
    """Trains what ``pieces`` lack, and returns the section of the results.

    Args:
      config: The whole config.
      pieces: Pieces of the run.

    Returns:
      For each case, its fields, and for each seed, the accuracy, the number of steps, and the
      number of pairs of the last of them.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {**case._asdict(), "runs": {}} for name, case in cases(config).items()
    }
    optimizers = Optimizers.of(config.recall)
    for seed, (name, case) in itertools.product(config.seeds, cases(config).items()):
        kept = pieces.get(
            f"recall-{name}-{seed}", train, config.recall, case, optimizers, seed=seed
        )
        names = "accuracy", "steps", "trained"
        rows[name]["runs"][str(seed)] = dict(zip(names, kept.tolist(), strict=True))
    return [*rows.values()]


class Optimizers(NamedTuple):
    """The optimizers of all runs; each compiles its own program.

    Attributes:
      early: Optimizer before the last number of pairs. Its learning rate hardly falls.
      last: Optimizer of the last number of pairs.
    """

    early: optax.GradientTransformation
    last: optax.GradientTransformation

    @classmethod
    def of(cls, config: ConfigDict) -> Optimizers:
        """Returns the optimizers of the section ``recall`` of the config."""
        rates = (ConfigDict(config.to_dict() | {"num_steps": n}) for n in (10**6, config.num_steps))
        return cls(*(train_state.make_optimizer(rate, b2=config.b2)[0] for rate in rates))


def train(config: ConfigDict, case: Case, optimizers: Optimizers, *, seed: int) -> np.ndarray:
    """Trains one model, with more pairs as soon as it has learned the number before.

    A run ends at N pairs, or at the first number of pairs that it fails to learn.

    Args:
      config: Section ``recall`` of the config.
      case: Sizes.
      optimizers: Optimizers, the same object for all runs.
      seed: Seed of parameters, projections and batches.

    Returns:
      Accuracy on sequences of N pairs that had no part in ending the training, number of steps, and
      number of pairs of the last.
    """
    stage = case.stages[0]

    def train_batches(seed: int) -> Callable[[int], Batch]:
        def batch(step: int) -> Batch:
            size, padded = stage
            fitting = min(config.batch_size, config.batch_tokens // (3 * padded))
            return draw(config, (seed, step), max(1, fitting), size, padded)

        return batch

    task = make_task(config, case, train_batches)
    most = config.num_steps * len(case.stages)
    milestones = (*range(config.eval_interval, most + 1, config.eval_interval),)
    model, total = training.initial_model(task, seed), 0
    start = functools.partial(training.train, task, seed=seed, milestones=milestones)
    models = start(model, optimizers.early, first_step=0)
    for stage in case.stages:  # The batches are those of the stage.
        size, padded = stage
        is_last = size == case.num_pairs
        if is_last:
            models = start(model, optimizers.last, first_step=total)
        enough = config.learned_at if is_last else config.go_on_at
        accuracy, done = 0.0, 0
        while accuracy < enough and done < config.num_steps:
            model = next(models)
            done += config.eval_interval
            accuracy = evaluate(config, task, model, VALIDATION_SEED, size, padded)
        total += done
        if accuracy < config.failed_below:
            break
    accuracy = evaluate(config, task, model, TEST_SEED, case.num_pairs, case.num_pairs)
    return np.array([accuracy, total, size])


def draw(
    config: ConfigDict, seed: tuple[int, ...], num_sequences: int, num_pairs: int, padded: int
) -> Batch:
    """Returns sequences as long as those of ``padded`` pairs, a function of the seed."""
    return pairs.draw(
        np.random.default_rng(seed),
        num_sequences=num_sequences,
        num_pairs=num_pairs,
        num_keys=config.num_keys,
        num_values=config.num_values,
        num_repeats=padded // num_pairs,
    )


def evaluate(
    config: ConfigDict, task: Task, model: nnx.Module, seed: int, num_pairs: int, padded: int
) -> float:
    """Returns the accuracy on held-out sequences of a number of pairs."""
    inputs, targets = draw(config, (seed, num_pairs), config.test_sequences, num_pairs, padded)
    return training.evaluate(task._replace(test_inputs=inputs, test_targets=targets), model)


def make_task(
    config: ConfigDict, case: Case, train_batches: Callable[[int], Callable[[int], Batch]]
) -> Task:
    """Returns the task of a model; its test sequences depend on the number of pairs."""
    make_model = functools.partial(
        kinds.make_model,
        config.num_keys + config.num_values,
        case.attention,
        num_features=case.num_features,
        exact_keys=case.exact_keys,
        bandwidth=config.bandwidth,
        **config.model,
    )
    empty = np.zeros((0, 0), np.int32)
    return Task(
        make_model=lambda rngs: make_model(rngs=rngs),
        apply=answer,
        score=is_right,
        train_batches=train_batches,
        fit_inputs=empty,
        test_inputs=empty,
        test_targets=empty,
        test_batch_size=config.test_sequences,
    )


def answer(model: Any, tokens: jax.Array, prng_key: jax.Array | None) -> jax.Array:
    """Returns the logits of the queries, which are the last third of the tokens."""
    del prng_key  # The model has no dropout.
    return model(tokens)[:, -(tokens.shape[1] // 3) :]


def is_right(logits: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the share of right answers of each sequence."""
    return jnp.mean(jnp.argmax(logits, axis=-1) == values, axis=-1)
