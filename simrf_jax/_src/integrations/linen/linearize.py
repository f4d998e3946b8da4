"""Conversion of a trained Linen model to random-feature attention, in one call."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import freeze
from flax.traverse_util import flatten_dict, unflatten_dict

from simrf_jax._src import checks
from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import flax_attention, flax_calibration
from simrf_jax._src.integrations.flax_report import SeenCall, add_call
from simrf_jax._src.integrations.linearization.layer_choice import Candidate
from simrf_jax._src.integrations.linearization.search import (
    ALL_TOKENS,
    Report,
    Search,
    check_chosen,
)
from simrf_jax._src.integrations.linen.adapter import apply
from simrf_jax._src.integrations.linen.projection import boxed
from simrf_jax._src.integrations.linen.random_features import (
    PARAMETERS,
    RandomFeatureAttention,
    check_without_sizes,
)
from simrf_jax._src.integrations.linen.swap import Rule, check_linen, with_rules
from simrf_jax._src.projections import DrawOptions

_CALLS = "recorded_calls"  # Collection in which the layers record their calls.


@dataclasses.dataclass(frozen=True, repr=False)
class Linearization(Report):
    """The choices of ``linearize`` for a model, which documents the fields; prints as a table."""

    model: nn.Module
    variables: Mapping[str, Any]


def linearize(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    held_out: Iterable[Any],
    *,
    key: jax.Array,
    relative_error: float | None = None,
    budget: float | None = None,
    num_features: Sequence[int] = (32, 64, 128, 256),
    exact_bandwidth: Sequence[int | None] = (16,),
    exact_keys: Sequence[int | tuple[int, ...] | None] = (8, 32),
    num_steps: int = 0,
    optimizer: Any = None,
    where: Callable[[str, nn.MultiHeadDotProductAttention], bool] | None = None,
    call: Callable[..., Any] = apply,
    progress: Callable[[list[str]], Iterable[str]] = iter,
    folder: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Linearization:
    """Returns a trained model without softmax attention, with a choice of features for each layer.

    The function records and fits the queries and keys of each ``nn.MultiHeadDotProductAttention``
    that the model calls, and chooses its features, band and exact keys, as
    ``simrf_jax.integrations.nnx.linearize`` does and explains. The given model and its variables do
    not change. The new model attends like one from ``swap_attention``. Its variables are those of
    the given model, together with W, the calibration and the learned rows of each layer. Layers
    that have an adapter keep it. ``nn.scan`` and ``nn.vmap`` over layers are not supported.

    Args:
      model: A model that calls ``nn.MultiHeadDotProductAttention`` layers.
      variables: Variables of the trained model.
      batches: Batches of the model's inputs to fit and to learn from.
      held_out: Other batches, to judge on, with two sequences or more. Errors on the kind of data
        that the features were fitted to say little about other kinds.
      key: A typed PRNG key, for W and for the steps.
      relative_error: The largest relative error of a layer, or None for the smallest possible.
      budget: The most multiplications of all layers together relative to those of their exact
        attention at the length of the held-out batches, or None for no limit.
      num_features: Even numbers of features of each head to try.
      exact_bandwidth: Bandwidths to try; None stands for no band, which cross-attention with other
        numbers of keys than of queries needs.
      exact_keys: Numbers of exact keys, or tuples of their positions, to try; None stands for none.
      num_steps: Number of steps to learn the features of an option, each on one of the batches; 0
        for calibrated features only.
      optimizer: An ``optax.GradientTransformation`` for these steps.
      where: Function of the path and the layer that returns True for layers to change; None for
        all.
      call: ``call(model, variables, batch)`` returns the output, and with the keyword ``mutable``
        also the changed collections, by default ``model.apply``. It is compiled by ``jax.jit``. For
        a model with dropout, pass one that turns it off, such as ``lambda model, variables, batch,
        **options: model.apply(variables, batch, deterministic=True, **options)``.
      progress: Function such as ``tqdm.tqdm`` that gets the list of the layers' paths, returns an
        iterable of them, and may show how many are done.
      folder: Folder of files, or None. A call that is repeated after an interruption reads from
        there what it had computed; see ``simrf_jax.integrations.nnx.linearize``.
      **options: Other keywords of ``RandomFeatureAttention``, such as ``masks`` or ``is_causal``,
        which models that pass causal masks need.

    Returns:
      A record that prints as a table, with the fields ``model`` and ``variables``, the new ones,
      and ``layers``, ``relative_error``, ``operations``, ``output_error`` and ``output_cosine`` as
      in ``simrf_jax.integrations.nnx.linearize``. ``model.init`` makes variables of the same
      structure, for example to restore a checkpoint.

    Raises:
      TypeError: If an option is unknown or of a wrong type, ``linearize`` chooses it itself, or the
        model is not a Linen module.
      ValueError: If neither ``relative_error`` nor ``budget`` is given, a number is out of range,
        there is nothing to fit, to judge or to try, an option does not fit a layer, a layer cannot
        be swapped (see ``swap_attention``) or recorded, ``folder`` is a file, or a file in it is
        damaged.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import linearize
      >>> model = nn.MultiHeadDotProductAttention(num_heads=4)
      >>> x = list(jax.random.normal(jax.random.key(0), (4, 2, 50, 32)))  # Yours.
      >>> variables = model.init(jax.random.key(1), x[0])
      >>> report = linearize(
      ...     model, variables, x[:2], x[2:], relative_error=0.05, key=jax.random.key(2)
      ... )
      >>> report.layers["itself"].is_reached  # print(report) shows the choice and its error.
      True
      >>> report.model.apply(report.variables, x[0]).shape
      (2, 50, 32)
    """
    check_linen(model, "linearize")
    check_chosen(options)
    flax_attention.check_options(RandomFeatureAttention, options, where)
    check_without_sizes(RandomFeatureAttention(1, parent=None, **options))
    flax_calibration.check_batches(batches)
    flax_calibration.check_batches(held_out, "held_out")
    checks.typed_key(key)
    search = Search(
        relative_error=relative_error,
        budget=budget,
        num_features=num_features,
        exact_bandwidth=exact_bandwidth,
        exact_keys=exact_keys,
        num_steps=num_steps,
        optimizer=optimizer,
        progress=progress,
        folder=folder,
    )
    held_out = list(held_out)
    exact = jax.jit(functools.partial(call, model))
    before = [exact(variables, batch) for batch in held_out]
    exact_options = freeze({**options, "exact_bandwidth": ALL_TOKENS})
    recorder = with_rules(model, Rule(2, where, exact_options, _Recorder))
    recording = jax.jit(functools.partial(call, recorder, mutable=[_CALLS]))
    recorded = search.record(lambda batch: _calls(recording(variables, batch)), batches, held_out)
    keys = (jax.random.fold_in(key, number) for number in itertools.count())
    chosen = search.choose(recorded, options, keys)
    rules, flat = [], flatten_dict(dict(variables))
    for path, one in chosen.candidates.items():
        rules.append(_rule(path, one, chosen.draw_options, options))
        adapter = (*(() if path == "itself" else path.split(".")), "attention_fn")
        # An earlier conversion may have left variables of other features.
        flat = {place: x for place, x in flat.items() if place[1 : len(adapter) + 1] != adapter}
        flat |= _variables(adapter, one, chosen.draw_options)
    linearized, variables = with_rules(model, *rules), unflatten_dict(flat)
    attend = jax.jit(functools.partial(call, linearized))
    after = [attend(variables, batch) for batch in held_out]
    fields = search.report(chosen, after, before)
    report = Linearization(**fields, model=linearized, variables=variables)
    report.warn()
    return report


class _Recorder(RandomFeatureAttention):
    """An adapter that records its calls; its band has all tokens, so that W changes nothing."""

    def _key(self) -> jax.Array:
        return jax.random.key(0)

    def _drawn(self, name: str, draw: Callable[[], Any]) -> Any:
        del name
        return draw().unbox()

    def _observe(self, request: flax_attention.Request, mechanism: RandomFeatureMechanism) -> None:
        if not self.is_mutable_collection(_CALLS):
            raise ValueError(
                f"The calls of the layer {'.'.join(self.path[:-1])} cannot be recorded. Layers in "
                "nn.scan and nn.vmap are not supported: swap_attention and calibrate take them. "
                "Elsewhere, call must pass its keyword mutable on to apply."
            )
        seen: nn.Variable[Any] = self.variable(_CALLS, "calls", tuple)
        seen.value = add_call(seen.value, request, mechanism)


@dataclasses.dataclass(frozen=True)
class _At:
    """The layer at a path."""

    path: str

    def __call__(self, path: str, layer: nn.MultiHeadDotProductAttention) -> bool:
        del layer
        return path == self.path


def _rule(
    path: str, candidate: Candidate, draw_options: DrawOptions, options: dict[str, Any]
) -> Rule:
    """Returns the rule that gives a layer the sizes of a candidate."""
    size, chosen = candidate.choice.num_features, candidate.choice.exact_options()
    if isinstance(candidate.feature_map, Learned):
        size = candidate.feature_map.query_rows.shape[-2]
        chosen |= {"feature_map": "learned"}
    else:
        drawn = {"coupling": draw_options.coupling, "norms": draw_options.norms}
        chosen |= {"feature_map": "calibrated", **drawn}
    return Rule(size, _At(path), freeze({**options, **chosen}))


def _variables(
    adapter: tuple[str, ...], candidate: Candidate, draw_options: DrawOptions
) -> dict[tuple[str, ...], Any]:
    """Returns the variables of an adapter by their places, which begin with the collection."""
    feature_map = candidate.feature_map
    if isinstance(feature_map, Learned):
        places = {("params", *adapter, name): getattr(feature_map, name) for name in PARAMETERS}
        return places | {("calibration", *adapter, "feature_map"): feature_map.calibration}
    return {
        ("random_features", *adapter, "projection"): boxed(candidate.projection, draw_options),
        ("calibration", *adapter, "feature_map"): feature_map,
    }


def _calls(returned: Any) -> dict[str, tuple[SeenCall, ...]]:
    """Returns the calls of each layer, from what a call of the model returned."""
    if not isinstance(returned, tuple) or not isinstance(returned[-1], Mapping):
        raise ValueError(
            "call must return the output and the changed collections if it gets mutable, as "
            f"model.apply does, got {type(returned).__name__}."
        )
    found = dict(_layers(returned[-1].get(_CALLS, {})))
    if not found:
        raise ValueError(
            "model must call an nn.MultiHeadDotProductAttention that has no adapter and for which "
            "where is None or returns True, got none."
        )
    for path, seen in found.items():
        if any(one.request.call.query.ndim - 3 != one.batch_ndim for one in seen):
            raise ValueError(
                f"The layer {path} must be one layer, got a stack of nn.scan or nn.vmap."
            )
    return found


def _layers(
    collection: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, tuple[SeenCall, ...]]]:
    """Yields the path of each layer, and the calls of its adapter."""
    for name, node in collection.items():
        if "." in name or name == "itself":
            raise ValueError(
                f"No module may have a dot in its name or be called itself, got {name}."
            )
        if name == "attention_fn" and "calls" in node:
            yield ".".join(path) or "itself", node["calls"]
        else:
            yield from _layers(node, (*path, name))
