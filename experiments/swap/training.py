"""Models that attention is swapped in, their data, and their training: from scratch, and on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.char_lm import corpus
from experiments.char_lm.model import CharLM
from experiments.swap.swapping import mean_squared_sum, record
from experiments.vit.data import in_memory
from simrf_jax.models import ViT, ViTConfig

PARAMS, DROPOUT = range(2)  # Purposes of PRNG keys, which are folded in.

# Returns logits, given a model, its inputs, and a PRNG key of dropout or None for no dropout.
Apply = Callable[[nnx.Module, jax.Array, jax.Array | None], jax.Array]
# Returns the score of each example, given logits and targets.
Score = Callable[[jax.Array, jax.Array], jax.Array]
Batch = tuple[np.ndarray, np.ndarray]


class Task(NamedTuple):
    """A model, the data to train and to test it on, and how to score it.

    Attributes:
      make_model: Function of PRNG streams that makes the model with softmax attention.
      apply: See ``Apply``.
      score: See ``Score``.
      train_batches: Function of a seed that returns a function of a step, which returns inputs and
        targets.
      fit_inputs: Inputs from the training data, to fit feature maps on.
      test_inputs: Every input to test on.
      test_targets: Their targets.
      test_batch_size: Number of inputs to evaluate at a time.
    """

    make_model: Callable[[nnx.Rngs], nnx.Module]
    apply: Apply
    score: Score
    train_batches: Callable[[int], Callable[[int], Batch]]
    fit_inputs: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    test_batch_size: int

    def logits(self, model: nnx.Module, inputs: jax.Array) -> jax.Array:
        """Returns the logits of a model that drops nothing."""
        return self.apply(model, inputs, None)


def evaluate(task: Task, model: nnx.Module) -> float:
    """Returns the mean score on all the test inputs."""
    graphdef, state = nnx.split(model)
    options = {"graphdef": graphdef, "apply": task.apply, "score": task.score}
    scores = []
    for start in range(0, len(task.test_inputs), task.test_batch_size):
        part = slice(start, start + task.test_batch_size)
        examples = task.test_inputs[part], task.test_targets[part]
        scores.append(_scores(state, *examples, **options))
    return float(np.mean(np.concatenate(scores)))


@functools.partial(jax.jit, static_argnames=("graphdef", "apply", "score"))
def _scores(
    state: nnx.State,
    inputs: jax.Array,
    targets: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    apply: Apply,
    score: Score,
) -> jax.Array:
    return score(apply(nnx.merge(graphdef, state), inputs, None), targets)


def spread(task: Task, model: nnx.Module) -> np.ndarray:
    """Returns the mean of |x + y|^2 in each layer on the first test inputs, ``[depth]``."""
    layers, _ = record(model, task.logits, jnp.asarray(task.test_inputs[: task.test_batch_size]))
    return np.array([jnp.mean(mean_squared_sum(layer)) for layer in layers])


def train(
    task: Task,
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    first_step: int,
    milestones: tuple[int, ...],
) -> Iterator[nnx.Module]:
    """Trains the parameters of a model, and yields it after each of some numbers of steps.

    Projections and feature maps are no parameters: they stay as they are. The rows of learned
    features are parameters, and are trained with the others.

    Args:
      task: Data of the model.
      model: Model with any attention.
      optimizer: Optimizer in the state of its first step. Pass the same object for all models, as
        each compiles a program of its own.
      seed: Seed of the batches and of dropout.
      first_step: Number of the first batch.
      milestones: Ascending numbers of steps, counted from here; 0 yields the model as it is.
    """
    graphdef, params, *rest = nnx.split(model, nnx.Param, ...)
    batches, opt_state = task.train_batches(seed), optimizer.init(params)
    prng_key = jax.random.fold_in(jax.random.key(seed), DROPOUT)
    options = {"graphdef": graphdef, "apply": task.apply, "optimizer": optimizer}
    done = 0
    for milestone in milestones:
        for step in range(first_step + done, first_step + milestone):
            arrays = (*batches(step), jax.random.fold_in(prng_key, step))
            params, opt_state = _train_step(params, opt_state, rest, *arrays, **options)
        done = milestone
        yield nnx.merge(graphdef, params, *rest)


@functools.partial(jax.jit, static_argnames=("graphdef", "apply", "optimizer"))
def _train_step(
    params: nnx.State,
    opt_state: optax.OptState,
    rest: list[nnx.State],
    inputs: jax.Array,
    targets: jax.Array,
    prng_key: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    apply: Apply,
    optimizer: optax.GradientTransformation,
) -> tuple[nnx.State, optax.OptState]:
    def mean_loss(params: nnx.State) -> jax.Array:
        logits = apply(nnx.merge(graphdef, params, *rest), inputs, prng_key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    updates, opt_state = optimizer.update(jax.grad(mean_loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def initial_model(task: Task, seed: int) -> nnx.Module:
    """Returns the model before training."""
    return task.make_model(nnx.Rngs(params=jax.random.fold_in(jax.random.key(seed), PARAMS)))


def parameters(model: nnx.Module) -> np.ndarray:
    """Returns all parameters in one vector."""
    return np.asarray(jax.flatten_util.ravel_pytree(nnx.state(model, nnx.Param))[0])


def with_parameters(task: Task, vector: np.ndarray) -> nnx.Module:
    """Returns the model with softmax attention and the parameters that a vector holds."""
    model = initial_model(task, 0)
    _, unravel = jax.flatten_util.ravel_pytree(nnx.state(model, nnx.Param))
    nnx.update(model, unravel(jnp.asarray(vector)))
    return model


def task(name: str, config: ConfigDict) -> Task:
    """Returns the task of a name, which is that of its section of the config."""
    if name == "char_lm":
        return language_task(corpus.load(), config.char_lm)
    # The digits come with scikit-learn.
    return vision_task(name, config[name], "" if name == "digits" else config.data_dir)


def vision_task(dataset: str, config: ConfigDict, data_dir: str) -> Task:
    """Returns a ViT of ``experiments.vit`` with softmax attention, scored by its accuracy.

    Args:
      dataset: A name of ``in_memory.DATASETS``.
      config: Section of that name of the config.
      data_dir: The folder that holds the data set, unless it comes with a package.

    Raises:
      UserError: If the data set is not there, or is damaged.
    """
    data = in_memory.load(dataset, data_dir)
    height, width, channels = data.train.images.shape[1:]
    shape = ViTConfig(
        image_size=(height, width),
        channels=channels,
        num_classes=data.num_classes,
        pooling="average",
        attention="exact",
        dtype="float32",
        **config.model,
    )

    def train_batches(seed: int) -> Callable[[int], Batch]:
        augment = {"shift": config.shift, "flip": config.flip}
        batches = in_memory.train_batches(
            data.train, batch_size=config.batch_size, seed=seed, **augment
        )

        def batch(step: int) -> Batch:
            drawn = batches[step]
            return drawn["image"], drawn["label"]

        return batch

    fit = next(in_memory.eval_batches(data.train, config.num_fit))
    test = next(in_memory.eval_batches(data.test, len(data.test.labels)))
    return Task(
        make_model=lambda rngs: ViT(shape, rngs=rngs),
        apply=_classify,
        score=_is_right,
        train_batches=train_batches,
        fit_inputs=fit["image"],
        test_inputs=test["image"],
        test_targets=test["label"],
        test_batch_size=config.test_batch_size,
    )


def _classify(model: nnx.Module, images: jax.Array, prng_key: jax.Array | None) -> jax.Array:
    return model(images, rngs=None if prng_key is None else nnx.Rngs(dropout=prng_key))


def _is_right(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def language_task(text: corpus.Text, config: ConfigDict) -> Task:
    """Returns the model of ``experiments.char_lm`` with softmax attention, scored by its bits.

    Args:
      text: Text to train and to test on.
      config: Section ``char_lm`` of the config.
    """
    windows = corpus.windows(text.validation, config.context)
    unused: dict[str, Any] = {"num_features": 1, "coupling": "iid", "bandwidth": 0}
    make_model = functools.partial(
        CharLM, len(text.alphabet), attention="softmax", **unused, **config.model
    )

    sizes = {"batch_size": config.batch_size, "context": config.context}

    def train_batches(seed: int) -> Callable[[int], Batch]:
        def batch(step: int) -> Batch:
            drawn = corpus.train_batch(text.train, **sizes, seed=seed, step=step)
            return drawn[:, :-1], drawn[:, 1:]

        return batch

    return Task(
        make_model=lambda rngs: make_model(rngs=rngs),
        apply=_predict,
        score=_bits,
        train_batches=train_batches,
        fit_inputs=corpus.windows(text.train, config.context)[: config.num_fit, :-1],
        test_inputs=windows[:, :-1],
        test_targets=windows[:, 1:],
        test_batch_size=config.test_batch_size,
    )


def _predict(model: nnx.Module, indices: jax.Array, prng_key: jax.Array | None) -> jax.Array:
    del prng_key  # The language model has no dropout.
    return model(indices)


def _bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the bits per character of each window."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses, axis=-1) / np.log(2)
