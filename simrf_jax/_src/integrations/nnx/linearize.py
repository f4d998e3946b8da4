"""Conversion of a trained model to random-feature attention, in one call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from simrf_jax._src import checks
from simrf_jax._src.attention import ExactKeys
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_calibration import LOGGER
from simrf_jax._src.integrations.flax_report import SeenCall, check_seen
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.adapter import features_key
from simrf_jax._src.integrations.nnx.calibration import compiled_call
from simrf_jax._src.integrations.nnx.kept_results import KeptResults
from simrf_jax._src.integrations.nnx.layer_choice import (
    Candidate,
    Layer,
    LayerChoice,
    Option,
    most_operations,
    share_out,
)
from simrf_jax._src.integrations.nnx.observers import AttentionCalls, observing
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.swap import Swap, Wrap, swap_attention

_ALL_TOKENS = 2**30  # An exact band this wide is softmax attention.
_CHOSEN = ("feature_map", "coupling", "norms", "decode")  # Options that the function sets itself.


@dataclasses.dataclass(frozen=True)
class Linearization:
    """The choices of ``linearize`` for a model, which documents the fields; prints as a table."""

    layers: dict[str, LayerChoice]
    relative_error: float | None
    operations: float
    output_error: float
    output_cosine: float
    swap: Swap

    def __repr__(self) -> str:
        width = max(map(len, ("layer", *self.layers)))
        titles = ("features", "band", "keys", "fit", "cost", "error", "far", "softmax far")
        lines = [f"{'layer':<{width}}" + _row(titles)]
        lines += [f"{path:<{width}}" + _row(_cells(one)) for path, one in self.layers.items()]
        lines.append(self._cost())
        lines.append(
            f"Output of the model: relative squared error {self.output_error:.3g}, cosine "
            f"{self.output_cosine:.4f}."
        )
        return "\n".join([*lines, *self._missed()])

    def _cost(self) -> str:
        return f"Attention takes {self.operations:.3g} times the operations of exact attention."

    def _missed(self) -> list[str]:
        """Returns a sentence about the layers that do not reach the requested error, if any."""
        missed = [path for path, one in self.layers.items() if not one.is_reached]
        if not missed:
            return []
        return [
            f"{len(missed)} of {len(self.layers)} layers do not reach the relative error "
            f"{self.relative_error:g} with any option that was tried: {', '.join(missed)}."
        ]


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


def linearize(
    model: nnx.Module,
    batches: Iterable[Any],
    held_out: Iterable[Any],
    *,
    relative_error: float | None = None,
    budget: float | None = None,
    num_features: Sequence[int] = (32, 64, 128, 256),
    exact_bandwidth: Sequence[int | None] = (16,),
    exact_keys: Sequence[int | tuple[int, ...] | None] = (8, 32),
    num_steps: int = 0,
    optimizer: Any = None,
    where: Callable[[str, nnx.MultiHeadAttention], bool] | None = None,
    wrap: Wrap | None = None,
    call: Callable[[Any, Any], Any] | None = None,
    progress: Callable[[list[str]], Iterable[str]] = iter,
    folder: str | os.PathLike[str] | None = None,
    rngs: nnx.Rngs,
    **options: Any,
) -> Linearization:
    r"""Replaces the softmax attention of a trained model, with a choice of features for each layer.

    The function calls the model with all batches, records the queries, keys and values of each
    ``nnx.MultiHeadAttention``, and fits calibrated features to those of ``batches``. For each
    layer, it then tries all combinations of ``num_features``, ``exact_bandwidth`` and
    ``exact_keys``, those with the fewest operations first, on the ``held_out`` batches, and chooses
    the first whose relative error is at most ``relative_error``. With a ``budget``, all layers
    start with the cheapest combination, and the layer whose error falls most for each further
    operation takes a better one, until no better one is left that the budget allows. The relative
    error of a head is

    .. math:: \sum_t |\hat o_t - o_t|^2 \Big/ \sum_t |o_t|^2

    for the outputs o of exact attention and those of features with the same inputs. The mean over
    heads and sequences plus one standard error must reach the requested error. If no option does,
    the layer gets the one with the smallest error, and a warning and the report say so. With
    ``num_steps``, an option whose calibrated features do not reach the error is tried again with
    features learned by distillation, before options with more operations. Finally, each layer gets
    its adapter in place, as by ``swap_attention``.

    Bidirectional attention chooses a number of ``exact_keys`` by all queries. Causal attention must
    not, so such layers choose it by score, ``ExactKeys(number, by="score")``. Packed bidirectional
    attention can do neither: it treats a number as None, but accepts positions. A layer that is
    causal in only some calls must have positions or None.

    Queries, keys and values of all layers for the held-out batches, and with ``num_steps`` for all
    batches, are in memory together, and so are the ranks by score of all pairs of tokens of a
    causal layer. The report compares all pairs of tokens of a batch: use small batches. Equal
    arguments and keys give equal results. The logger ``simrf_jax`` reports each layer at level
    INFO. Most of the time goes to the choices, of which ``progress=tqdm.tqdm`` shows a bar.

    Args:
      model: A model with ``nnx.MultiHeadAttention`` layers. Its mode is not changed: call
        ``model.eval()`` first if it has dropout.
      batches: Batches of the model's inputs to fit and to learn from.
      held_out: Other batches, to judge on, with two sequences or more. Errors on the kind of data
        that the features were fitted to say little about other kinds.
      relative_error: The largest relative error of a layer, or None for the smallest possible.
      budget: The most multiplications of all layers together relative to those of their exact
        attention at the length of the held-out batches, or None for no limit.
      num_features: Numbers of features of each head to try.
      exact_bandwidth: Bandwidths to try; None stands for no band.
      exact_keys: Numbers of exact keys, or tuples of their positions, to try; None stands for none.
      num_steps: Number of steps to learn the features of an option, each on one of the batches; 0
        for calibrated features only.
      optimizer: An ``optax.GradientTransformation`` for these steps, such as
        ``optax.adam(optax.cosine_decay_schedule(0.1, num_steps))``.
      where: Function of the path and the layer that returns True for layers to change; None for
        all.
      wrap: Function of an adapter that returns the ``attention_fn``, for layers whose own does more
        than attend; see ``swap_attention``.
      call: Function ``call(model, batch)`` that calls the model, by default ``model(batch)``. It is
        compiled by ``nnx.jit``.
      progress: Function such as ``tqdm.tqdm`` that gets the list of the layers' paths, returns an
        iterable of them, and may show how many are done.
      folder: Folder of files with the errors and the learned features of the options, or None. A
        call with equal arguments, and with new ``rngs`` of the same seed, reads what an earlier
        call had computed, even if that was interrupted. Results of other data, models, options,
        optimizers or seeds are kept next to them. A file is found only if the model computes the
        same queries, keys and values, bit for bit. Use another folder for another version of the
        library.
      rngs: Source of the keys for W and for the steps.
      **options: Other keywords of ``RandomFeatureAttention``, such as ``masks`` or ``is_causal``,
        which models that pass causal masks need.

    Returns:
      A record that prints as a table, with the fields

      - ``layers``: The choice for each layer, by its path in the model; see below.
      - ``relative_error``: The requested error of each layer, or None.
      - ``operations``: Multiplications of all layers, relative to those of exact attention at the
        same length, without those that choose exact keys.
      - ``output_error``: Squared error of the model's outputs on the held-out batches, divided by
        their squared norm. Outputs are all floating arrays that the model returns. NaN if there are
        none or all are zeros, as is the cosine.
      - ``output_cosine``: Mean cosine of the vectors along the last axis of the outputs to those
        before.
      - ``swap``: The swap of the layers; ``swap.undo()`` restores the model.

      The choice for a layer has the fields

      - ``num_features``: Number of features of each head.
      - ``exact_bandwidth``: Distance over which queries see keys exactly, or None.
      - ``exact_keys``: Number of keys that all queries see exactly, a tuple of their positions, or
        None; ``ExactKeys`` in causal attention, whose queries see the best keys before them.
      - ``is_learned``: True if the features were learned, False if they are calibrated.
      - ``operations``: Multiplications, relative to those of exact attention at the same length,
        without those that choose exact keys.
      - ``relative_error``: Squared error of the outputs divided by their squared norm, given exact
        inputs, as the mean over heads and sequences.
      - ``standard_error``: Its standard error over sequences.
      - ``is_reached``: True if the mean plus one standard error is at most the requested error, or
        none was requested.
      - ``far_share``: ``[N]``, the part of each head's attention weights that belongs to keys of
        the far field, which features estimate; the mean over queries.
      - ``softmax_far_share``: ``[N]``, the part of the softmax weights at the same keys.

    Raises:
      TypeError: If an option is unknown or of a wrong type, or ``linearize`` chooses it itself.
      ValueError: If neither ``relative_error`` nor ``budget`` is given, a number is out of range,
        there is nothing to fit, to judge or to try, an option does not fit a layer, a layer cannot
        be swapped (see ``swap_attention``), ``folder`` is a file, or a file in it is damaged. The
        model is then unchanged.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import linearize
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
      >>> x = list(jax.random.normal(rngs(), (4, 2, 50, 32)))  # Yours: data for each purpose.
      >>> report = linearize(model, x[:2], x[2:], relative_error=0.05, rngs=rngs)
      >>> report.layers["itself"].is_reached  # print(report) shows the choice and its error.
      True
      >>> report.output_cosine > 0.95
      True
      >>> report.swap.undo()

    References:
      Zhang et al., LoLCATs: On Low-Rank Linearizing of Large Language Models (ICLR 2025),
      https://arxiv.org/abs/2410.10254
    """
    if relative_error is None and budget is None:
        raise ValueError("linearize needs a relative_error to reach, or a budget, got neither.")
    for name, number in (("relative_error", relative_error), ("budget", budget)):
        if number is not None:
            checks.scalar(name, number, sign="positive")
    checks.integer("num_steps", num_steps, least=0)
    if (num_steps == 0) != (optimizer is None):
        raise ValueError(
            f"num_steps and optimizer belong together, got num_steps={num_steps} and "
            f"optimizer={optimizer!r}."
        )
    if taken := [name for name in _CHOSEN if name in options]:
        raise TypeError(f"linearize chooses {', '.join(taken)} itself, got {options[taken[0]]!r}.")
    tried = _options(num_features, exact_bandwidth, exact_keys)
    for given in (batches, held_out):
        flax_calibration.check_batches(given)
    kept = KeptResults.in_folder(folder)
    compiled, held_out = compiled_call(call), list(held_out)
    before = [compiled(model, batch) for batch in held_out]
    recording = swap_attention(
        model, 2, where=where, wrap=wrap, rngs=rngs, exact_bandwidth=_ALL_TOKENS, **options
    )
    try:
        record = functools.partial(_record, compiled, model, recording.adapters)
        calibrations, fit = _fit(recording.adapters, map(record, batches), keep=num_steps > 0)
        test = _joined(recording.adapters, map(record, held_out))
    finally:
        recording.undo()
    for path in recording.adapters:
        _check_order(path, (*fit[path], *test[path]), tried)
    layers = {
        path: Layer(
            functools.partial(
                RandomFeatureAttention, one.num_heads, one.head_dim, rngs=rngs, **options
            ),
            calibrations[path],
            fit[path],
            test[path],
            relative_error,
            kept,
        )
        for path, one in recording.adapters.items()
    }
    limit = math.inf if budget is None else budget
    exact = {path: layer.exact_operations() for path, layer in layers.items()}
    most, judged = most_operations(layers, exact, tried, limit), {}
    for path in progress([*layers]):
        prng_key = features_key(rngs)
        judged[path] = layers[path].choose(tried, most[path], num_steps, optimizer, prng_key)
        _log(path, judged[path], len(judged), len(layers))
    chosen = share_out(judged, exact, limit)
    adapters = {path: one.adapter for path, one in chosen.items()}
    choices = {path: one.choice for path, one in chosen.items()}
    costs = [one.operations for one in choices.values()]
    operations = float(np.average(costs, weights=list(exact.values())))
    swap = Swap.make(recording.layers, adapters, wrap)
    after = [compiled(model, batch) for batch in held_out]
    report = Linearization(choices, relative_error, operations, *_compare(after, before), swap)
    for sentence in report._missed():
        cost = f" {report._cost()}" if operations > 1 else ""
        warnings.warn(sentence + cost, stacklevel=2)
    return report


def _options(
    num_features: Sequence[int],
    exact_bandwidth: Sequence[int | None],
    exact_keys: Sequence[int | tuple[int, ...] | None],
) -> list[Option]:
    """Returns all combinations of the sizes to try."""
    sizes = {
        "num_features": num_features,
        "exact_bandwidth": exact_bandwidth,
        "exact_keys": exact_keys,
    }
    for name, values in sizes.items():
        if not isinstance(values, Sequence):
            raise TypeError(f"{name} must be a sequence of values to try, got {values!r}.")
    if wrong := [keys for keys in exact_keys if isinstance(keys, ExactKeys)]:
        raise TypeError(
            "exact_keys must have numbers, tuples of positions or None, got "
            f"{wrong[0]!r}; causal layers choose a number of keys by score by themselves."
        )
    keys = [
        checks.positive_int("exact_keys", one) if isinstance(one, int | np.integer) else one
        for one in exact_keys
    ]
    tried = [*itertools.starmap(Option, itertools.product(num_features, exact_bandwidth, keys))]
    if not tried:
        raise ValueError("num_features, exact_bandwidth and exact_keys must have a value each.")
    return tried


def _record(
    compiled: Callable[[Any, Any], Any],
    model: nnx.Module,
    adapters: dict[str, RandomFeatureAttention],
    batch: Any,
) -> dict[str, tuple[SeenCall, ...]]:
    """Returns the calls of each adapter for a batch."""
    calls = {path: AttentionCalls(()) for path in adapters}
    with observing(adapters, calls):
        compiled(model, batch)
    found = {path: get_value(own) for path, own in calls.items()}
    for path, seen in found.items():
        check_seen(path, seen)
    return found


def _fit(
    adapters: dict[str, RandomFeatureAttention],
    recorded: Iterable[dict[str, tuple[SeenCall, ...]]],
    *,
    keep: bool,
) -> tuple[dict[str, Calibrated], dict[str, tuple[SeenCall, ...]]]:
    """Returns the calibration of each layer, and the calls if they are to be kept."""
    sums = {
        path: flax_calibration.no_moments(Calibrated.identity(one.num_heads, one.head_dim))
        for path, one in adapters.items()
    }
    kept: dict[str, tuple[SeenCall, ...]] = dict.fromkeys(adapters, ())
    for calls in flax_calibration.logged(recorded):
        for path, seen in calls.items():
            for one in seen:
                sums[path] = flax_calibration.add_moments(sums[path], one.request)
            if keep:
                kept[path] += seen
    fitted = {
        path: flax_calibration.fit_stack(own, center=True, balance=True, tilt="log")
        for path, own in sums.items()
    }
    return fitted, kept


def _joined(
    adapters: dict[str, RandomFeatureAttention], recorded: Iterable[dict[str, tuple[SeenCall, ...]]]
) -> dict[str, tuple[SeenCall, ...]]:
    """Returns the calls of each layer for all batches."""
    batches = list(recorded)
    if not batches:
        raise ValueError("held_out must have two sequences or more, got none.")
    return {path: tuple(one for calls in batches for one in calls[path]) for path in adapters}


def _check_order(path: str, calls: Iterable[SeenCall], options: Iterable[Option]) -> None:
    """Raises ``ValueError`` for a number of exact keys if only some calls are causal."""
    numbers = [one.exact_keys for one in options if isinstance(one.exact_keys, int)]
    if numbers and len({seen.request.call.is_causal for seen in calls}) > 1:
        raise ValueError(
            f"The layer {path!r} is causal in some calls and not in others, which choose a number "
            "of exact keys differently. Such layers need exact_keys that are positions or None, "
            f"got {numbers[0]}; where excludes them."
        )


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
