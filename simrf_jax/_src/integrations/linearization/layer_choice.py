"""The choice of features, band and exact keys for the attention of one layer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax._src.attention import ExactKeys, RandomFeatureMechanism
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inspection.all_pairs import log_kernels, score_ranks
from simrf_jax._src.attention.inspection.distillation import mean_cross_entropy
from simrf_jax._src.attention.inspection.exact_pairs import ExactPairs, head_errors
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_attention import Request
from simrf_jax._src.integrations.flax_drawing import in_pairs
from simrf_jax._src.integrations.flax_report import SeenCall
from simrf_jax._src.integrations.linearization.kept_results import KeptResults
from simrf_jax._src.projections import DrawOptions, ProjectionLike


class Option(NamedTuple):
    """The sizes of a layer's attention, by the keywords of ``RandomFeatureAttention``."""

    num_features: int
    exact_bandwidth: int | None
    exact_keys: int | ExactKeys | tuple[int, ...] | None

    def in_order(self, *, is_causal: bool) -> Option:
        """Returns the option for causal or packed attention: only the former chooses some keys."""
        if not isinstance(self.exact_keys, int):
            return self
        keys = ExactKeys(self.exact_keys, by="score") if is_causal else None
        return self._replace(exact_keys=keys)

    def num_exact_keys(self) -> int:
        """Returns the number of exact keys that a query sees."""
        if isinstance(self.exact_keys, ExactKeys):
            return int(self.exact_keys.count)
        return self.exact_keys if isinstance(self.exact_keys, int) else len(self.exact_keys or ())


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The attention that ``linearize`` chose for one layer; ``linearize`` documents the fields."""

    num_features: int
    exact_bandwidth: int | None
    exact_keys: int | ExactKeys | tuple[int, ...] | None
    is_learned: bool
    operations: float
    relative_error: float
    standard_error: float
    is_reached: bool
    far_share: np.ndarray
    softmax_far_share: np.ndarray

    def bound(self) -> float:
        """Returns the mean error plus one standard error."""
        return self.relative_error + self.standard_error

    def exact_options(self) -> dict[str, Any]:
        """Returns the band and the exact keys, by the keywords of ``RandomFeatureAttention``."""
        return {"exact_bandwidth": self.exact_bandwidth, "exact_keys": self.exact_keys}


class Candidate(NamedTuple):
    """The features of an option, and what is known of them.

    Attributes:
      projection: W, with rows in pairs; None for learned features, which have their own rows.
      feature_map: The fitted or learned map of all key heads.
      choice: The sizes and the error.
    """

    projection: ProjectionLike | None
    feature_map: Calibrated | Learned
    choice: LayerChoice


def share_out(
    judged: Mapping[str, Sequence[Candidate]], exact: Mapping[str, float], budget: float
) -> dict[str, Candidate]:
    """Returns a candidate for each layer, which together keep within the budget.

    All layers start with their cheapest candidate. As long as the budget allows, the layer whose
    error falls most for each further operation takes a better one.

    Args:
      judged: The candidates of each layer, the cheapest first.
      exact: Operations of exact attention in each layer.
      budget: Most operations of all layers, relative to exact attention; infinity for no limit.
    """
    taken = {path: candidates[0] for path, candidates in judged.items()}
    while True:
        left = budget * sum(exact.values()) - sum(
            one.choice.operations * exact[path] for path, one in taken.items()
        )
        gains = {}
        for path, candidates in judged.items():
            now = taken[path].choice
            for number, (*_, then) in enumerate(candidates):
                cost = (then.operations - now.operations) * exact[path]
                gain = now.bound() - then.bound()
                if gain > 0 and cost <= left:
                    gains[path, number] = gain / cost if cost > 0 else np.inf
        if not gains:
            return taken
        path, number = max(gains, key=lambda place: gains[place])
        taken[path] = judged[path][number]


class _Ranked(NamedTuple):
    """A call, and the ranks by score of its keys if some option keeps keys by score."""

    request: Request
    ranks: jax.Array | None

    @classmethod
    def of(cls, request: Request, scorer: Calibrated | None) -> _Ranked:
        """Returns the call with the ranks by a calibration's scores, which all options share."""
        return cls(request, None if scorer is None else _ranks(scorer, request))


@dataclasses.dataclass(frozen=True)
class Layer:
    """The calls of a layer's attention in a model with exact attention.

    Attributes:
      draw_options: The options with which W is drawn, in pairs of rows.
      is_shared: True for one W of all heads.
      calibration: The fit to queries and keys of the fitting batches.
      fit: Calls to learn from.
      test: Calls of held-out batches.
      relative_error: The error to reach; None to find the best.
      kept: Errors and learned features of options, from this run and earlier ones.
    """

    draw_options: DrawOptions
    is_shared: bool
    calibration: Calibrated
    fit: Sequence[SeenCall]
    test: Sequence[SeenCall]
    relative_error: float | None
    kept: KeptResults

    def choose(
        self,
        options: Iterable[Option],
        most: float,
        num_steps: int,
        optimizer: Any,
        keys: Iterator[jax.Array],
    ) -> list[Candidate]:
        """Returns the options judged, those with the fewest operations first.

        The last is the first that reaches the error, if any does.

        Args:
          options: Sizes to try.
          most: Most operations relative to exact attention.
          num_steps: Number of steps that learn the features of an option whose calibrated features
            do not reach the error.
          optimizer: The ``optax.GradientTransformation`` of these steps.
          keys: PRNG keys: the first for the order of the calls to learn from, then one for each W.

        Raises:
          ValueError: If there are too few sequences to judge on or their outputs are not finite.
        """
        judged: list[Candidate] = []
        costs = self.costs(options)
        by_score = any(isinstance(option.exact_keys, ExactKeys) for option, _ in costs)
        fit, test = (
            [_Ranked.of(one.request, self.calibration if by_score else None) for one in calls]
            for calls in (self.fit, self.test)
        )
        order = next(keys)
        for option, cost in costs:
            if cost > most:
                break
            w = self._draw(next(keys), option.num_features)
            judged.append(self._judge(test, option, cost, w, self.calibration))
            misses = self.relative_error is None or not judged[-1].choice.is_reached
            if num_steps and misses:
                learned = self._learn(fit, w, option, num_steps, optimizer, order)
                judged.append(self._judge(test, option, cost, None, learned))
            if self.relative_error is not None and judged[-1].choice.is_reached:
                break
        return judged

    def costs(self, options: Iterable[Option]) -> list[tuple[Option, float]]:
        """Returns the options that this layer can take, and their costs, cheapest first."""
        calls = [seen.request.call for seen in self.test]
        if not all(map(has_one_length, calls)):
            options = [option for option in options if option.exact_bandwidth is None]
        if any(call.in_order() for call in calls):
            # The choice of some keys by all queries would look ahead, or into other segments.
            is_causal = all(call.is_causal for call in calls)
            options = [option.in_order(is_causal=is_causal) for option in options]
        exact = [exact_operations(call) for call in calls]
        costs = {
            option: float(np.average([operations(option, one) for one in calls], weights=exact))
            for option in options
        }
        return sorted(costs.items(), key=lambda item: item[1])

    def exact_operations(self) -> float:
        """Returns the multiplications of exact attention in all held-out calls."""
        return sum(exact_operations(seen.request.call) for seen in self.test)

    def _draw(self, prng_key: jax.Array, num_features: int) -> ProjectionLike:
        """Draws W for each head, or one for all."""
        num_heads, dim = self.calibration.query_mean.shape
        if self.is_shared:
            return self.draw_options.draw(prng_key, num_features, dim)
        each = jax.random.split(prng_key, num_heads)
        return jax.vmap(lambda one: self.draw_options.draw(one, num_features, dim))(each)

    def _judge(
        self,
        test: Sequence[_Ranked],
        option: Option,
        cost: float,
        w: ProjectionLike | None,
        feature_map: Calibrated | Learned,
    ) -> Candidate:
        """Returns features with their error in a layer of an option's sizes."""
        mechanism = RandomFeatureMechanism(
            in_pairs(w, feature_map, self.draw_options), feature_map=feature_map
        )
        measure = functools.partial(_measure, mechanism, test, option)
        found = self.kept.recall(f"error of {option}", (mechanism, test), measure)
        error, spread = float(found["relative_error"]), float(found["standard_error"])
        choice = LayerChoice(
            *option,
            is_learned=isinstance(feature_map, Learned),
            operations=cost,
            relative_error=error,
            standard_error=spread,
            is_reached=self.relative_error is None or error + spread <= self.relative_error,
            far_share=found["far_share"],
            softmax_far_share=found["softmax_far_share"],
        )
        return Candidate(w, feature_map, choice)

    def _learn(
        self,
        fit: Sequence[_Ranked],
        w: Any,
        option: Option,
        num_steps: int,
        optimizer: Any,
        prng_key: jax.Array,
    ) -> Learned:
        """Returns learned features, which start as the calibrated ones of W."""
        # The second row of each pair is the negative of the first.
        learned = Learned.start(w[..., ::2, :], self.calibration)
        mechanism = RandomFeatureMechanism(None, feature_map=learned)
        pairs = ExactPairs.of(option.exact_bandwidth, option.exact_keys)
        rows = {name: getattr(learned, name) for name in Learned.axes_of_one}
        state = optimizer.init(rows)
        numbers = np.asarray(jax.random.randint(prng_key, (num_steps,), 0, len(fit)))

        def learn() -> dict[str, jax.Array]:
            learning = rows, state
            for number in numbers:
                learning = _step(*learning, mechanism, fit[number], pairs, optimizer=optimizer)
            return learning[0]

        # The optimizer's numbers, such as its rates, are in its program and not in its state. Those
        # of an inner jit would be neither in the text of the program nor among its constants.
        with jax.disable_jit():
            step = jax.make_jaxpr(optimizer.update)(rows, state, rows)
        inputs = (mechanism, state, step.consts, numbers, fit)
        found = self.kept.recall(f"features learned for {option} by {step}", inputs, learn)
        return dataclasses.replace(learned, **jax.tree.map(jnp.asarray, found))


def most_operations(
    layers: Mapping[str, Layer],
    exact: Mapping[str, float],
    options: Sequence[Option],
    budget: float,
) -> dict[str, float]:
    """Returns the operations that each layer may take if all others take their cheapest option.

    Raises:
      ValueError: If the cheapest options of all layers take more than the budget.
    """
    cheapest = {path: layer.costs(options)[0][1] for path, layer in layers.items()}
    total, least = sum(exact.values()), sum(cheapest[path] * exact[path] for path in layers)
    if least > budget * total:
        raise ValueError(
            f"budget must allow the cheapest options, which take {least / total:.3g} times the "
            f"operations of exact attention, got {budget}."
        )
    left = budget * total - least
    return {path: cheapest[path] + left / exact[path] for path in layers}


def operations(option: Option, call: Call) -> float:
    """Returns the multiplications of a call, relative to those of exact attention.

    Exact attention multiplies each query with each key that it sees, and each weight with a value.
    Features take a product with W, half of it because rows come in pairs, and one with the values,
    for each query and each key.
    """
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    dim, value_dim = call.key.shape[-1], call.value.shape[-1]
    position, bandwidth, last = np.arange(length), option.exact_bandwidth, _last_keys(call)
    eligible = last + 1  # Number of keys among which a query's exact ones are.
    if isinstance(option.exact_keys, ExactKeys) and bandwidth is not None:
        eligible = np.clip(position - bandwidth, 0, key_length)
    num_exact = np.sum(np.minimum(option.num_exact_keys(), eligible))
    if bandwidth is not None:
        in_band = np.minimum(position + bandwidth, last) - np.maximum(position - bandwidth, 0) + 1
        num_exact += np.sum(np.maximum(in_band, 0))
    of_features = (length + key_length) * option.num_features * (dim / 2 + value_dim)
    return float((num_exact + of_features / (dim + value_dim)) / np.sum(last + 1))


def has_one_length(call: Call) -> bool:
    """Returns True if there are as many keys as queries, which a band needs."""
    return call.query.shape[-3] == call.key.shape[-3]


def exact_operations(call: Call) -> float:
    """Returns the multiplications of exact attention in a call."""
    *batch, _, heads, dim = call.query.shape
    width = dim + call.value.shape[-1]
    return float(math.prod(batch) * heads * width * np.sum(_last_keys(call) + 1))


def _last_keys(call: Call) -> np.ndarray:
    """Returns the position of the last key that each query sees."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    every = np.full(length, key_length - 1)
    return np.minimum(np.arange(length), every) if call.is_causal else every


def _measure(
    mechanism: RandomFeatureMechanism, test: Iterable[_Ranked], option: Option
) -> dict[str, Any]:
    """Returns the error and the far shares of features, with the band and keys of an option."""
    pairs = ExactPairs.of(option.exact_bandwidth, option.exact_keys)
    errors, far, num_queries = [], np.zeros(()), np.zeros(())
    for request, ranks in test:
        *logs, counts = _log_kernels(mechanism, request)
        found = head_errors(*logs, request.call.value, counts, pairs, ranks)
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        num_heads = found.counts.sum(axis=-1)
        mean = found.relative_error.sum(axis=-1) / np.maximum(num_heads, 1)
        errors.append(mean[num_heads > 0])
        batch = tuple(range(found.counts.ndim - 1))
        shares = (found.far_sum.sum(axis=batch), found.softmax_far_sum.sum(axis=batch))
        far, num_queries = far + np.array(shares), num_queries + found.num_queries.sum(batch)
    every = np.concatenate(errors)
    if len(every) < 2:
        raise ValueError(
            "held_out must have two sequences or more whose outputs are not all zeros, for a "
            f"standard error, got {len(every)}."
        )
    if not np.isfinite(every).all():
        raise ValueError("Attention outputs of held_out must be finite, got others.")
    far_share, softmax_far_share = far / np.maximum(num_queries, 1)
    return {
        "relative_error": every.mean(),
        "standard_error": every.std(ddof=1) / len(every) ** 0.5,
        "far_share": far_share,
        "softmax_far_share": softmax_far_share,
    }


@jax.jit
def _log_kernels(
    mechanism: RandomFeatureMechanism, request: Request
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ``log_kernels`` of a call, ``[..., N, T, S]``, and False at queries of padding."""
    counts, _ = flax_calibration.real_tokens(request)
    estimated, exact, _, log_scale = log_kernels(mechanism, request.call)
    return estimated + log_scale, exact, counts


@jax.jit
def _ranks(scorer: Calibrated, request: Request) -> jax.Array:
    """Returns the ranks by score of a call's keys."""
    no_rows = jnp.zeros((2, request.call.key.shape[-1]))
    keys = ExactKeys(1, by="score")
    mechanism = RandomFeatureMechanism(no_rows, feature_map=scorer, exact_keys=keys)
    return score_ranks(mechanism, request.call)


@functools.partial(jax.jit, static_argnames="optimizer")
def _step(
    rows: dict[str, jax.Array],
    state: Any,
    mechanism: RandomFeatureMechanism,
    ranked: _Ranked,
    pairs: ExactPairs,
    *,
    optimizer: Any,
) -> tuple[dict[str, jax.Array], Any]:
    """Returns the parameters of learned features, and the optimizer's state, after a step."""
    start: Any = mechanism.feature_map
    request, ranks = ranked

    def loss(rows: dict[str, jax.Array]) -> jax.Array:
        own = dataclasses.replace(mechanism, feature_map=dataclasses.replace(start, **rows))
        estimated, exact, counts = _log_kernels(own, request)
        near = pairs.among(estimated, counts, request.call.key.shape[-2], ranks)
        return mean_cross_entropy(jnp.where(near, exact, estimated), exact, counts[..., None, :])

    updates, state = optimizer.update(jax.grad(loss)(rows), state, rows)
    return jax.tree.map(jnp.add, rows, updates), state
