"""Errors of the sentence encoder with swapped attention: of each head, and of its embeddings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from ml_collections import ConfigDict

from examples import hugging_face
from experiments.harness import resumable, trials
from experiments.swap import encoder, texts
from experiments.swap.methods import attentions, baselines
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


def prepare(model: encoder.Encoder, drawn: texts.Texts) -> Subject:
    """Returns what the encoder computes for texts to fit on and others to test on."""
    fit_inputs, _ = record(model, _embed, jnp.asarray(drawn.fit))
    tokens = jnp.asarray(drawn.test)
    test_inputs, embeddings = record(model, _embed, tokens)
    return Subject(model, fit_inputs, tokens, test_inputs, embeddings)


def _embed(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def measure(subject: Subject, attentions: list[Attention]) -> Errors:
    """Returns the errors of the attentions of all layers."""
    pairs = zip(subject.test, attentions, strict=True)
    heads = np.stack([head_errors(inputs, attention) for inputs, attention in pairs])
    embeddings = _embed(swapped(subject.model, attentions), subject.tokens)
    return Errors(heads, np.asarray(hugging_face.cosines(embeddings, subject.embeddings)))


def packed_errors(
    make_subject: Callable[[], Subject], name: str, m: int | None, seed: int, config: ConfigDict
) -> np.ndarray:
    """Returns the errors of an attention in place of softmax; see ``methods.attentions``.

    They are those of all heads and then those of all texts, in one array.
    """
    subject = make_subject()
    errors = measure(subject, attentions(name, m, jax.random.key(seed), subject.fit, config))
    return np.concatenate([errors.heads.ravel(), errors.cosines])


class EncoderSwaps:
    """The texts of all seeds, and the errors of attentions for them, kept in pieces.

    Args:
      config: The whole config.
      pieces: Pieces of the run.
    """

    def __init__(self, config: ConfigDict, pieces: resumable.Pieces):
        self.config, self.model_dir, self.pieces = config.encoder, config.model_dir, pieces
        self._loaded = functools.cache(self._load)
        self.subject = functools.lru_cache(maxsize=1)(self._prepare)

    def _load(self) -> tuple[encoder.Encoder, np.ndarray]:
        """Returns the encoder and all texts."""
        tokenizer = encoder.load_tokenizer(encoder.find("tokenizer.json", self.model_dir))
        model = encoder.load_model(encoder.find("model.safetensors", self.model_dir))
        return model, hugging_face.load_texts(tokenizer, self.config.length)

    def _prepare(self, seed: int) -> Subject:
        """Returns what the encoder computes for the texts of a seed."""
        model, all_texts = self._loaded()
        num_fit, num_test = self.config.num_fit_texts, self.config.num_test_texts
        drawn = texts.split(all_texts, num_fit=num_fit, num_test=num_test, seed=seed)
        return prepare(model, drawn)

    def spreads(self, seed: int) -> np.ndarray:
        """Returns the mean |x + y|^2 of each layer, ``[layers]``."""

        def compute() -> np.ndarray:
            return np.array([jnp.mean(mean_squared_sum(one)) for one in self.subject(seed).test])

        return self.pieces.get(f"encoder-spread-{seed}", compute)

    def errors(self, name: str, m: int | None, seed: int) -> np.ndarray:
        """Returns ``packed_errors`` of an attention for the texts of a seed."""
        piece = f"encoder-{name}-{seed}" if m is None else f"encoder-{name}-{m}-{seed}"
        make_subject = functools.partial(self.subject, seed)
        return self.pieces.get(piece, packed_errors, make_subject, name, m, seed, self.config)


def run(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``encoder`` of the results.

    Raises:
      UserError: If the model is not there, or there are too few texts.
    """
    ours = config.encoder
    swaps = EncoderSwaps(config, pieces)
    summarize = functools.partial(summary, num_texts=ours.num_test_texts)
    methods: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in config.methods}
    fixed: dict[str, list[np.ndarray]] = {name: [] for name in baselines(ours.bandwidth)}
    layers = []
    for seed in tqdm.tqdm(config.seeds, desc="encoder", dynamic_ncols=True):
        layers.append(swaps.spreads(seed))
        for name, kept in fixed.items():
            kept.append(swaps.errors(name, None, seed))
        for method, by_size in methods.items():
            for m in ours.num_features:
                by_size.setdefault(str(m), []).append(swaps.errors(method, m, seed))
    return {
        "mean_squared_sum": np.mean(layers, axis=0).tolist(),
        "baselines": {name: summarize(kept) for name, kept in fixed.items()},
        "methods": {
            method: {m: summarize(kept) for m, kept in by_size.items()}
            for method, by_size in methods.items()
        },
        "seconds": pieces.seconds("encoder-*"),
    }


def summary(kept: list[np.ndarray], num_texts: int) -> dict[str, dict[str, float]]:
    """Returns the means over heads and over texts, with their standard errors over the seeds.

    Args:
      kept: ``packed_errors`` for each seed, or several in the rows of one array.
      num_texts: Number of texts to test on.
    """
    parts = {"error": slice(-num_texts), "cosine": slice(-num_texts, None)}
    return {
        name: trials.summary(np.array([values[..., part].ravel().mean() for values in kept]))
        for name, part in parts.items()
    }
