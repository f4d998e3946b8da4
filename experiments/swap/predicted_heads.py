"""Predicted and measured errors of attention to the queries and keys of the sentence encoder."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from ml_collections import ConfigDict

import simrf_jax
from experiments.harness import resumable
from experiments.swap.measure_encoder import EncoderSwaps
from experiments.swap.methods import METHODS, draw_heads
from experiments.swap.swapping import Inputs, head_errors
from simrf_jax import theory
from simrf_jax.features import FeatureMap, as_feature_map
from simrf_jax.projections import Coupling

# Methods whose error has a closed form. That of a calibrated map is for iid rows.
PREDICTED = ("positive_iid", "positive_simplex", "calibrated_iid")


def some_queries(layer: Inputs, num_queries: int) -> Inputs:
    """Returns the inputs of the first text, with evenly spaced queries and all keys."""
    query, key, value = (x[:1] for x in layer[:3])
    places = np.linspace(0, query.shape[1] - 1, num_queries).round().astype(int)
    return Inputs(query[:, places], key, value, is_causal=False)


def compare(
    prng_key: jax.Array,
    method: str,
    fit: Inputs,
    test: Inputs,
    *,
    num_features: int,
    num_draws: int,
) -> np.ndarray:
    """Returns the predicted and the measured error of each head of a layer, ``[2, heads]``.

    Args:
      prng_key: Typed PRNG key of the draws.
      method: One of ``PREDICTED``.
      fit: Inputs to fit on.
      test: Inputs of one text.
      num_features: Number of features.
      num_draws: Number of draws of W to measure with.
    """
    chosen: Any = METHODS[method]
    fitted = chosen.fit(fit, None)
    query, key, value = (np.asarray(x[0]) for x in test[:3])
    predicted = theory.attention_error(
        query,
        key,
        value,
        num_features,
        coupling=chosen.coupling,
        features=fitted,
    )
    measured = mean_errors(
        jax.random.split(prng_key, num_draws),
        *test[:3],
        as_feature_map(fitted),
        coupling=chosen.coupling,
        num_features=num_features,
    )
    return np.stack([predicted, measured])


@functools.partial(jax.jit, static_argnames=("coupling", "num_features"))
def mean_errors(
    prng_keys: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    feature_map: FeatureMap,
    *,
    coupling: Coupling,
    num_features: int,
) -> jax.Array:
    """Returns the relative squared error of each head, the mean over draws of W, ``[heads]``."""
    inputs = Inputs(query, key, value, is_causal=False)
    heads, dim = key.shape[-2:]

    def one(prng_key: jax.Array) -> jax.Array:
        w = draw_heads(prng_key, heads, num_features, dim, coupling)
        attend = functools.partial(
            simrf_jax.random_feature_attention, projection=w, feature_map=feature_map
        )
        return head_errors(inputs, attend)

    return jnp.mean(jax.lax.map(one, prng_keys), axis=0)


def run(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``predicted_heads`` of the results.

    Raises:
      UserError: If the model is not there, or there are too few texts.
    """
    ours, swaps = config.predicted_heads, EncoderSwaps(config, pieces)

    def compute(method: str, num_features: int, seed: int) -> np.ndarray:
        subject = swaps.subject(seed)
        errors = [
            compare(
                jax.random.fold_in(jax.random.key(seed), layer),
                method,
                fit,
                some_queries(test, ours.num_queries),
                num_features=num_features,
                num_draws=ours.num_draws,
            )
            for layer, (fit, test) in enumerate(zip(subject.fit, subject.test, strict=True))
        ]
        return np.concatenate(errors, axis=1)

    errors: dict[tuple[str, int], list[np.ndarray]] = {}
    for seed in tqdm.tqdm(config.seeds, desc="predicted_heads", dynamic_ncols=True):
        for method in PREDICTED:
            for m in ours.num_features:
                name = f"predicted_heads-{method}-{m}-{seed}"
                piece = pieces.get(name, compute, method, m, seed)
                errors.setdefault((method, m), []).append(piece)
    methods: dict[str, dict[str, dict[str, list[float]]]] = {method: {} for method in PREDICTED}
    for (method, m), each_seed in errors.items():
        predicted, measured = np.concatenate(each_seed, axis=1).tolist()
        methods[method][str(m)] = {"predicted": predicted, "measured": measured}
    return {
        "num_queries": ours.num_queries,
        "methods": methods,
        "seconds": pieces.seconds("predicted_heads-*"),
    }
