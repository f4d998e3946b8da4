"""The models and data of the other experiments: vision transformers, and the language model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.char_lm import corpus
from experiments.char_lm.model import CharLM
from experiments.swap.training import Batch, Task
from experiments.vit.data import in_memory
from simrf_jax.models import ViT, ViTConfig


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


def language_task(config: ConfigDict) -> Task:
    """Returns the model of ``experiments.char_lm`` with softmax attention, scored by its bits.

    Args:
      config: Section ``char_lm`` of the config.
    """
    text = corpus.load()
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
