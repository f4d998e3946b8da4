"""Errors of the sentence encoder with swapped attention: of each head, and of its embeddings."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from experiments.harness import resumable, trials
from experiments.swap import encoder, texts
from experiments.swap.methods import METHODS, baselines
from experiments.swap.swapping import (
    Attention,
    Inputs,
    head_errors,
    mean_squared_sum,
    record,
    swapped,
)


class Subject(NamedTuple):
    """The encoder, and what it computes for the texts of one seed with softmax attention.

    Attributes:
      model: The encoder.
      fit: Inputs of the attention of each layer, for the texts to fit on.
      tokens: The texts to test on, ``[texts, length]``.
      test: Inputs of the attention of each layer, for the texts to test on.
      embeddings: Embeddings of the texts to test on, ``[texts, width]``.
    """

    model: encoder.Encoder
    fit: list[Inputs]
    tokens: jax.Array
    test: list[Inputs]
    embeddings: jax.Array


class Errors(NamedTuple):
    """Errors of one attention in all layers.

    Attributes:
      heads: Relative squared error of each head's outputs, given exact inputs, ``[layers, heads]``.
      cosines: Cosine of each text's embedding to the exact one when all layers are swapped.
    """

    heads: np.ndarray
    cosines: np.ndarray


def prepare(
    model: encoder.Encoder, all_texts: np.ndarray, config: ml_collections.ConfigDict, seed: int
) -> Subject:
    """Returns what the encoder computes for the texts of a seed."""
    fit, test = texts.split(
        all_texts, num_fit=config.num_fit_texts, num_test=config.num_test_texts, seed=seed
    )
    fit_inputs, _ = record(model, _embed, jnp.asarray(fit))
    tokens = jnp.asarray(test)
    test_inputs, embeddings = record(model, _embed, tokens)
    return Subject(model, fit_inputs, tokens, test_inputs, embeddings)


def _embed(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def measure(subject: Subject, attentions: list[Attention]) -> Errors:
    """Returns the errors of the attentions of all layers."""
    pairs = zip(subject.test, attentions, strict=True)
    heads = np.stack([head_errors(inputs, attention) for inputs, attention in pairs])
    embeddings = _embed(swapped(subject.model, attentions), subject.tokens)
    return Errors(heads, np.asarray(cosines(embeddings, subject.embeddings)))


def cosines(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosines between the rows of two arrays ``[n, width]``."""
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.sum(x * y, axis=-1) / norms


def run(config: ml_collections.ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``encoder`` of the results.

    Raises:
      UserError: If the model is not there, or there are too few texts.
    """
    ours = config.encoder

    @functools.cache
    def loaded() -> tuple[encoder.Encoder, np.ndarray]:
        tokenizer = encoder.load_tokenizer(encoder.find("tokenizer.json", config.model_dir))
        model = encoder.load_model(encoder.find("model.safetensors", config.model_dir))
        return model, texts.load(tokenizer, ours.length)

    @functools.lru_cache(maxsize=1)
    def subject(seed: int) -> Subject:
        return prepare(*loaded(), ours, seed)

    @functools.lru_cache(maxsize=1)
    def feature_maps(method: str, seed: int) -> list[Any]:
        return METHODS[method].feature_maps(subject(seed).fit)

    def get(name: str, seed: int, attentions: Any) -> Errors:
        def compute() -> np.ndarray:
            errors = measure(subject(seed), attentions())
            return np.concatenate([errors.heads.ravel(), errors.cosines])

        values = pieces.get(f"encoder-{name}-{seed}", compute)
        heads, ends = np.split(values, [len(values) - ours.num_test_texts])
        return Errors(heads, ends)

    def method_errors(method: str, num_features: int, seed: int) -> Errors:
        def attentions() -> list[Attention]:
            heads, dim = subject(seed).test[0].key.shape[-2:]
            maps = feature_maps(method, seed)
            prng_key = jax.random.key(seed)
            return METHODS[method].attentions(
                prng_key,
                maps,
                num_features,
                num_heads=heads,
                head_dim=dim,
                bandwidth=ours.bandwidth,
            )

        return get(f"{method}-{num_features}", seed, attentions)

    def baseline_errors(name: str, seed: int) -> Errors:
        attention = baselines(ours.bandwidth)[name]
        return get(name, seed, lambda: [attention] * len(subject(seed).test))

    def spreads(seed: int) -> np.ndarray:
        return np.array([jnp.mean(mean_squared_sum(layer)) for layer in subject(seed).test])

    errors: dict[str, dict[str, list[Errors]]] = {name: {} for name in config.methods}
    ends: dict[str, list[Errors]] = {name: [] for name in baselines(ours.bandwidth)}
    layers = []
    for seed in tqdm.tqdm(config.seeds, desc="encoder", dynamic_ncols=True):
        layers.append(pieces.get(f"encoder-spread-{seed}", functools.partial(spreads, seed)))
        for name, kept in ends.items():
            kept.append(baseline_errors(name, seed))
        for method, by_size in errors.items():
            for m in ours.num_features:
                by_size.setdefault(str(m), []).append(method_errors(method, m, seed))
    return {
        "mean_squared_sum": np.mean(layers, axis=0).tolist(),
        "baselines": {name: _summary(kept) for name, kept in ends.items()},
        "methods": {
            method: {m: _summary(kept) for m, kept in by_size.items()}
            for method, by_size in errors.items()
        },
        "seconds": pieces.seconds("encoder-*"),
    }


def _summary(errors: list[Errors]) -> dict[str, dict[str, float]]:
    """Returns the means over heads and texts, with their standard errors over the seeds."""
    return {
        "error": trials.summary(np.array([one.heads.mean() for one in errors])),
        "cosine": trials.summary(np.array([one.cosines.mean() for one in errors])),
    }
