"""The search of ``linearize`` for the sizes of each layer, and its report."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax._src import checks
from simrf_jax._src.attention import ExactKeys
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_attention import check_exact_keys
from simrf_jax._src.integrations.flax_calibration import LOGGER
from simrf_jax._src.integrations.flax_report import SeenCall, check_seen
from simrf_jax._src.integrations.linearization.kept_results import KeptResults
from simrf_jax._src.integrations.linearization.layer_choice import (
    Candidate,
    Layer,
    LayerChoice,
    Option,
    has_one_length,
    most_operations,
    share_out,
)
from simrf_jax._src.projections import DrawOptions

# The calls of each layer, by its path.
Calls: TypeAlias = Mapping[str, Sequence[SeenCall]]

ALL_TOKENS = 2**30  # An exact band this wide is softmax attention.
_CHOSEN = ("feature_map", "coupling", "norms", "decode")  # Options that the function sets itself.


class Recorded(NamedTuple):
    """The calls of all layers in a model with exact attention.

    Attributes:
      calibrations: The fit to queries and keys of each layer on the fitting batches.
      fit: Calls to learn from; none without learning.
      test: Calls of held-out batches.
    """

    calibrations: Mapping[str, Calibrated]
    fit: Calls
    test: Calls


class Chosen(NamedTuple):
    """The features of each layer.

    Attributes:
      candidates: The features and their sizes, by the path of the layer.
      draw_options: The options with which each W was drawn.
      operations: Multiplications of all layers, relative to those of exact attention.
    """

    candidates: Mapping[str, Candidate]
    draw_options: DrawOptions
    operations: float


@dataclasses.dataclass(frozen=True)
class Search:
    """The sizes to try and the error to reach; ``linearize`` documents the fields.

    Raises:
      TypeError: If the sizes to try are no sequences, or ``exact_keys`` has an ``ExactKeys``.
      ValueError: If there is neither an error nor a budget, a number is out of range, there is
        nothing to try, or ``folder`` is a file.
    """

    relative_error: float | None
    budget: float | None
    num_features: Sequence[int]
    exact_bandwidth: Sequence[int | None]
    exact_keys: Sequence[int | tuple[int, ...] | None]
    num_steps: int
    optimizer: Any
    progress: Callable[[list[str]], Iterable[str]]
    folder: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        if self.relative_error is None and self.budget is None:
            raise ValueError("linearize needs a relative_error to reach, or a budget, got neither.")
        for name in ("relative_error", "budget"):
            if (number := getattr(self, name)) is not None:
                checks.scalar(name, number, sign="positive")
        checks.integer("num_steps", self.num_steps, least=0)
        if (self.num_steps == 0) != (self.optimizer is None):
            raise ValueError(
                f"num_steps and optimizer belong together, got num_steps={self.num_steps} and "
                f"optimizer={self.optimizer!r}."
            )
        if self.num_steps and not hasattr(self.optimizer, "update"):
            raise TypeError(
                f"optimizer must be an optax.GradientTransformation, got {self.optimizer!r}."
            )
        self._options()
        KeptResults.in_folder(self.folder)

    def record(
        self, record: Callable[[Any], Calls], batches: Iterable[Any], held_out: Iterable[Any]
    ) -> Recorded:
        """Calls the model with all batches, and fits calibrated features to some.

        Args:
          record: Returns the calls of each layer for a batch.
          batches: Batches to fit and to learn from.
          held_out: Batches to judge on.

        Raises:
          ValueError: If there are none, a layer has a mask that it cannot honor, or layers are
            called in some batches only or causal in some calls only.
        """
        sums: dict[str, tuple[Moments, Moments]] = {}
        fit: list[Calls] = []
        for batch in flax_calibration.logged(batches):
            calls = _checked(record(batch))
            for path, seen in calls.items():
                for one in seen:
                    sums[path] = _added(sums.get(path), one)
            if self.num_steps:
                fit.append(calls)
        calibrations = {
            path: flax_calibration.fit_stack(own, center=True, balance=True, tilt="log")
            for path, own in sums.items()
        }
        test = [_checked(record(batch)) for batch in held_out]
        if not test:
            raise ValueError("held_out must have two sequences or more, got none.")
        for calls in (*fit, *test):
            if calls.keys() != calibrations.keys():
                raise ValueError(
                    "All batches must call the same layers, got "
                    f"{', '.join(sorted(calls.keys() ^ calibrations.keys()))} in some only; where "
                    "excludes them."
                )
        recorded = Recorded(calibrations, _joined(calibrations, fit), _joined(calibrations, test))
        for path in calibrations:
            self._check_calls(path, recorded.fit[path], recorded.test[path])
        return recorded

    def choose(
        self, recorded: Recorded, options: Mapping[str, Any], keys: Iterator[jax.Array]
    ) -> Chosen:
        """Returns the features of each layer.

        Args:
          recorded: The calls of all layers.
          options: Keywords of the adapters, of which some determine how W is drawn.
          keys: PRNG keys.
        """
        kept = KeptResults.in_folder(self.folder)
        of_draws = {name: options[name] for name in ("block", "rotation") if name in options}
        draw_options = DrawOptions("cross_polytope", norms="pair", **of_draws)
        layers = {
            path: Layer(
                draw_options,
                bool(options.get("shared")),
                calibration,
                recorded.fit[path],
                recorded.test[path],
                self.relative_error,
                kept,
            )
            for path, calibration in recorded.calibrations.items()
        }
        tried, limit = self._options(), math.inf if self.budget is None else self.budget
        exact = {path: layer.exact_operations() for path, layer in layers.items()}
        most, judged = most_operations(layers, exact, tried, limit), {}
        for path in self.progress([*layers]):
            judged[path] = layers[path].choose(
                tried, most[path], self.num_steps, self.optimizer, keys
            )
            _log(path, judged[path], len(judged), len(layers))
        if judged.keys() != layers.keys():
            raise ValueError(f"progress must yield all paths it is given, got {[*judged]}.")
        candidates = share_out(judged, exact, limit)
        costs = [one.choice.operations for one in candidates.values()]
        operations = float(np.average(costs, weights=list(exact.values())))
        return Chosen(candidates, draw_options, operations)

    def _options(self) -> list[Option]:
        """Returns all combinations of the sizes to try."""
        sizes = {
            "num_features": self.num_features,
            "exact_bandwidth": self.exact_bandwidth,
            "exact_keys": self.exact_keys,
        }
        for name, values in sizes.items():
            if not isinstance(values, Sequence):
                raise TypeError(f"{name} must be a sequence of values to try, got {values!r}.")
        if wrong := [keys for keys in self.exact_keys if isinstance(keys, ExactKeys)]:
            raise TypeError(
                "exact_keys must have numbers, tuples of positions or None, got "
                f"{wrong[0]!r}; causal layers choose a number of keys by score by themselves."
            )
        features = [checks.positive_int("num_features", one) for one in self.num_features]
        if odd := [one for one in features if one % 2]:
            raise ValueError(
                f"num_features must be even, because rows of W come in pairs, got {odd[0]}."
            )
        bands = [
            one if one is None else checks.integer("exact_bandwidth", one, least=0)
            for one in self.exact_bandwidth
        ]
        keys = [
            checks.positive_int("exact_keys", one) if isinstance(one, int | np.integer) else one
            for one in self.exact_keys
        ]
        for one in keys:
            check_exact_keys(one)
        tried = [*itertools.starmap(Option, itertools.product(features, bands, keys))]
        if not tried:
            raise ValueError("num_features, exact_bandwidth and exact_keys must have a value each.")
        return tried

    def _check_calls(self, path: str, fit: Sequence[SeenCall], test: Sequence[SeenCall]) -> None:
        """Raises ``ValueError`` for calls of a layer that cannot be judged, or fit no option."""
        calls = [seen.request.call for seen in (*fit, *test)]
        if not any(seen.request.call.query.size for seen in test):
            raise ValueError("held_out must have two sequences or more, got none with tokens.")
        if None not in self.exact_bandwidth and not all(map(has_one_length, calls)):
            raise ValueError(
                f"The layer {path!r} has other numbers of keys than of queries, so it can have no "
                "band: exact_bandwidth must contain None, or where exclude the layer, got "
                f"{self.exact_bandwidth!r}."
            )
        numbers = [one for one in self.exact_keys if isinstance(one, int | np.integer)]
        if numbers and len({call.is_causal for call in calls}) > 1:
            raise ValueError(
                f"The layer {path!r} is causal in some calls and not in others, which choose a "
                "number of exact keys differently. Such layers need exact_keys that are positions "
                f"or None, got {numbers[0]}; where excludes them."
            )

    def report(self, chosen: Chosen, after: Any, before: Any) -> dict[str, Any]:
        """Returns the fields of a report, given the outputs of the model on held-out batches."""
        error, cosine = _compare(after, before)
        return {
            "layers": {path: one.choice for path, one in chosen.candidates.items()},
            "relative_error": self.relative_error,
            "operations": chosen.operations,
            "output_error": error,
            "output_cosine": cosine,
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The choices of ``linearize`` for a model, which documents the fields; prints as a table."""

    layers: dict[str, LayerChoice]
    relative_error: float | None
    operations: float
    output_error: float
    output_cosine: float

    def __repr__(self) -> str:
        width = max(map(len, ("layer", *self.layers)))
        titles = ("features", "band", "keys", "fit", "cost", "error", "far", "softmax far")
        lines = [f"{'layer':<{width}}" + _row(titles)]
        lines += [f"{path:<{width}}" + _row(_cells(one)) for path, one in self.layers.items()]
        lines.append(self.cost())
        lines.append(
            f"Output of the model: relative squared error {self.output_error:.3g}, cosine "
            f"{self.output_cosine:.4f}."
        )
        return "\n".join([*lines, *self.missed()])

    def cost(self) -> str:
        """Returns a sentence about the operations of all layers."""
        return f"Attention takes {self.operations:.3g} times the operations of exact attention."

    def missed(self) -> list[str]:
        """Returns a sentence about the layers that do not reach the requested error, if any."""
        missed = [path for path, one in self.layers.items() if not one.is_reached]
        if not missed:
            return []
        return [
            f"{len(missed)} of {len(self.layers)} layers do not reach the relative error "
            f"{self.relative_error:g} with any option that was tried: {', '.join(missed)}."
        ]

    def warn(self) -> None:
        """Warns of layers that do not reach the requested error."""
        for sentence in self.missed():
            cost = f" {self.cost()}" if self.operations > 1 else ""
            warnings.warn(sentence + cost, stacklevel=3)


def check_chosen(options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for options that ``linearize`` sets itself."""
    if taken := [name for name in _CHOSEN if name in options]:
        raise TypeError(f"linearize chooses {', '.join(taken)} itself, got {options[taken[0]]!r}.")


def _checked(calls: Calls) -> Calls:
    """Returns the calls, each of which must have a mask that its layer can honor."""
    for path, seen in calls.items():
        if not seen:
            raise ValueError(f"The model does not call the layer {path!r}; where excludes it.")
        check_seen(path, seen)
    return calls


def _added(sums: tuple[Moments, Moments] | None, seen: SeenCall) -> tuple[Moments, Moments]:
    """Returns the moments of a layer with those of another call."""
    if sums is None:
        num_heads, dim = seen.request.call.key.shape[-2:]
        sums = flax_calibration.no_moments(Calibrated.identity(num_heads, dim))
    return flax_calibration.add_moments(sums, seen.request)


def _joined(paths: Iterable[str], batches: Sequence[Calls]) -> Calls:
    """Returns the calls of each layer for all batches."""
    return {path: tuple(one for calls in batches for one in calls[path]) for path in paths}


def _row(cells: Sequence[str]) -> str:
    widths = (10, 6, 12, 12, 7, 17, 7, 13)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cells(choice: LayerChoice) -> tuple[str, ...]:
    return (
        str(choice.num_features),
        "none" if choice.exact_bandwidth is None else str(choice.exact_bandwidth),
        _shown_keys(choice.exact_keys),
        "learned" if choice.is_learned else "calibrated",
        f"{choice.operations:.2f}",
        f"{choice.relative_error:.4f} ± {choice.standard_error:.4f}",
        f"{choice.far_share.mean():.3f}",
        f"{choice.softmax_far_share.mean():.3f}",
    )


def _shown_keys(keys: int | ExactKeys | tuple[int, ...] | None) -> str:
    if isinstance(keys, tuple):
        return f"{len(keys)} given"
    if isinstance(keys, ExactKeys):
        return f"{int(keys.count)} by {keys.by}"
    return "none" if keys is None else str(keys)


def _log(path: str, judged: Sequence[Candidate], number: int, count: int) -> None:
    if LOGGER.isEnabledFor(logging.INFO):
        best = min((one.choice for one in judged), key=LayerChoice.bound)
        cells = ", ".join(" ".join(cell.split()) for cell in _cells(best))
        message = "linearize: layer %d of %d, %s: best of %d judged: %s"
        LOGGER.info(message, number, count, path, len(judged), cells)


def _compare(after: Any, before: Any) -> tuple[float, float]:
    """Returns the relative squared error of outputs, and the mean cosine of their vectors."""
    error = norm = 0.0
    cosines: list[float] = []
    for one, exact in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        if not jnp.issubdtype(jnp.result_type(exact), jnp.floating):
            continue
        x, y = (np.atleast_1d(np.asarray(output, np.float64)) for output in (one, exact))
        error, norm = error + np.sum((x - y) ** 2), norm + np.sum(y**2)
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        cosines += (np.sum(x * y, axis=-1)[lengths != 0] / lengths[lengths != 0]).tolist()
    return error / norm if norm else math.nan, float(np.mean(cosines)) if cosines else math.nan
