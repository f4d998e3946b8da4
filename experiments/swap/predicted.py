"""Predicted and measured errors of attention: to random keys, and to those of the encoder."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from ml_collections import ConfigDict

import simrf_jax
from experiments.harness import resumable, trials
from experiments.swap.measure_encoder import EncoderSwaps
from experiments.swap.methods import METHODS, draw_heads
from experiments.swap.swapping import Inputs, head_errors
from simrf_jax import feature_maps, selection, theory
from simrf_jax._src.features import FeatureMap, as_feature_map
from simrf_jax._src.projections import Coupling, Norms, ProjectionLike
from simrf_jax._src.theory.arguments import ClosedFormCoupling


class Case(NamedTuple):
    """Features whose error has a closed form.

    Attributes:
      label: Name in tables and figures.
      coupling: Coupling of the rows of W.
      norms: Law of the row norms.
      is_optimal: True for optimal positive features, False for positive ones.
    """

    label: str
    coupling: ClosedFormCoupling
    norms: Norms = "chi"
    is_optimal: bool = False

    def parameter(self, length: float, dim: int) -> float:
        """Returns A for queries and keys of one length in random directions."""
        return float(theory.optimal_parameter(2 * length**2, dim)) if self.is_optimal else 0.0


CASES = {
    "iid": Case("iid", "iid"),
    "orthogonal": Case("orthogonal", "orthogonal"),
    "simplex": Case("simplex", "simplex"),
    "simplex_optimal": Case("simplex, optimal positive", "simplex", is_optimal=True),
    "cross_polytope": Case("cross-polytope", "cross_polytope"),
    "cross_polytope_shared": Case("cross-polytope, shared norms", "cross_polytope", "shared"),
    "cross_polytope_optimal": Case(
        "cross-polytope, optimal positive", "cross_polytope", is_optimal=True
    ),
}


class Tokens(NamedTuple):
    """Queries ``[T, 1, dim]`` and keys ``[S, 1, dim]`` of length 1, and values ``[S, 1, dim]``."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def draw_tokens(config: ConfigDict, seed: int) -> Tokens:
    """Draws queries and keys in random directions, and normal values."""
    rng = np.random.default_rng(seed)
    shapes = [(count, 1, config.dim) for count in (config.num_queries, config.num_keys)]
    query, key, value = (rng.normal(size=shape) for shape in (*shapes, shapes[1]))
    unit_query, unit_key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    return Tokens(unit_query, unit_key, value)


def predict(tokens: Tokens, case: Case, config: ConfigDict) -> np.ndarray:
    """Returns the predicted relative squared error of the outputs for each length."""

    def at_length(length: float) -> float:
        [error] = selection.attention_error(
            length * tokens.query,
            length * tokens.key,
            tokens.value,
            config.num_features,
            coupling=case.coupling,
            norms=case.norms,
            parameter=case.parameter(length, config.dim),
            scale=1.0,
        )
        return error

    return np.array([at_length(length) for length in config.lengths])


def measure(tokens: Tokens, case: Case, config: ConfigDict, prng_key: jax.Array) -> np.ndarray:
    """Returns the mean relative squared error over draws of W for each length."""
    lengths = np.array(config.lengths)
    parameters = np.array([case.parameter(length, config.dim) for length in lengths])
    arrays = jax.tree.map(jnp.float32, (tokens, lengths, parameters))
    prng_keys = jax.random.split(prng_key, config.num_draws)
    errors = _errors(prng_keys, *arrays, case=case, num_features=config.num_features)
    return np.float64(errors).mean(axis=0)


@functools.partial(jax.jit, static_argnames=("case", "num_features"))
def _errors(
    prng_keys: jax.Array,
    tokens: Tokens,
    lengths: jax.Array,
    parameters: jax.Array,
    *,
    case: Case,
    num_features: int,
) -> jax.Array:
    """Returns the errors of each draw and each length, ``[draws, lengths]``."""
    query, key, value = tokens

    def at_length(w: ProjectionLike, length: jax.Array, parameter: jax.Array) -> jax.Array:
        q, k = length * query, length * key
        feature_map = feature_maps.OptimalPositive(parameter) if case.is_optimal else "positive"
        out = simrf_jax.random_feature_attention(q, k, value, w, scale=1.0, feature_map=feature_map)
        exact = jax.nn.dot_product_attention(q, k, value, scale=1.0)
        return jnp.sum(jnp.square(out - exact)) / jnp.sum(jnp.square(exact))

    def one(prng_key: jax.Array) -> jax.Array:
        law: dict[str, Any] = {"coupling": case.coupling, "norms": case.norms}
        w = simrf_jax.draw_projection(prng_key, num_features, query.shape[-1], **law)
        return jax.vmap(at_length, in_axes=(None, 0, 0))(w, lengths, parameters)

    return jax.lax.map(one, prng_keys, batch_size=20)


def run(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``predicted`` of the results."""
    ours = config.predicted

    def compute(case: Case, seed: int) -> np.ndarray:
        tokens = draw_tokens(ours, seed)
        return np.stack(
            [predict(tokens, case, ours), measure(tokens, case, ours, jax.random.key(seed))]
        )

    cases: dict[str, list[dict[str, Any]]] = {}
    for name, case in tqdm.tqdm(CASES.items(), desc="predicted", dynamic_ncols=True):
        kept = [pieces.get(f"predicted-{name}-{s}", compute, case, s) for s in config.seeds]
        cases[name] = [
            {
                "predicted": trials.summary(predicted),
                "measured": trials.summary(measured),
                "ratio": trials.summary(measured / predicted),
            }
            for predicted, measured in np.stack(kept, axis=-1).swapaxes(0, 1)
        ]
    return {
        "lengths": list(ours.lengths),
        "num_features": ours.num_features,
        "cases": cases,
        "seconds": pieces.seconds("predicted-*"),
    }


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
    predicted = selection.attention_error(
        query, key, value, num_features, coupling=chosen.coupling, features=fitted
    )
    arrays = jax.random.split(prng_key, num_draws), *test[:3], as_feature_map(fitted)
    options = {"coupling": chosen.coupling, "num_features": num_features}
    return np.stack([predicted, mean_errors(*arrays, **options)])


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


def run_heads(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Measures what ``pieces`` lack, and returns the section ``predicted_heads`` of the results.

    Raises:
      UserError: If the model is not there, or there are too few texts.
    """
    ours, swaps = config.predicted_heads, EncoderSwaps(config, pieces)

    def compute(method: str, num_features: int, seed: int) -> np.ndarray:
        subject, errors = swaps.subject(seed), []
        options = {"num_features": num_features, "num_draws": ours.num_draws}
        for layer, (fit, test) in enumerate(zip(subject.fit, subject.test, strict=True)):
            prng_key = jax.random.fold_in(jax.random.key(seed), layer)
            some = some_queries(test, ours.num_queries)
            errors.append(compare(prng_key, method, fit, some, **options))
        return np.concatenate(errors, axis=1)

    errors: dict[tuple[str, int], list[np.ndarray]] = {}
    for seed in tqdm.tqdm(config.seeds, desc="predicted_heads", dynamic_ncols=True):
        for method, m in itertools.product(PREDICTED, ours.num_features):
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
