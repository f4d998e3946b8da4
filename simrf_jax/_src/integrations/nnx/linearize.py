"""Conversion of a trained NNX model to random-feature attention, in one call."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax import nnx

from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_report import SeenCall, add_call
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.linearization.layer_choice import Candidate
from simrf_jax._src.integrations.linearization.search import (
    ALL_TOKENS,
    Report,
    Search,
    check_chosen,
)
from simrf_jax._src.integrations.nnx.adapter import features_key
from simrf_jax._src.integrations.nnx.calibration import compiled_call
from simrf_jax._src.integrations.nnx.observers import observing
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.swap import Swap, Wrap, swap_attention
from simrf_jax._src.integrations.nnx.variables import Observer, RandomProjection
from simrf_jax._src.projections import DrawOptions


@dataclasses.dataclass(frozen=True, repr=False)
class Linearization(Report):
    """The choices of ``linearize`` for a model, which documents the fields; prints as a table."""

    swap: Swap


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
      num_features: Even numbers of features of each head to try.
      exact_bandwidth: Bandwidths to try; None stands for no band, which cross-attention with other
        numbers of keys than of queries needs.
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
        their squared norm. Outputs are all floating arrays that the model returns, also where the
        tokens are padding. NaN if there are none or all are zeros, as is the cosine.
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
    check_chosen(options)
    flax_calibration.check_batches(batches)
    flax_calibration.check_batches(held_out, "held_out")
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
    compiled, held_out = compiled_call(call), list(held_out)
    before = [compiled(model, batch) for batch in held_out]
    recording = swap_attention(
        model, 2, where=where, wrap=wrap, rngs=rngs, exact_bandwidth=ALL_TOKENS, **options
    )
    try:
        record = functools.partial(_record, compiled, model, recording.adapters)
        recorded = search.record(record, batches, held_out)
    finally:
        recording.undo()
    chosen = search.choose(recorded, options, iter(lambda: features_key(rngs), None))
    adapters = {
        path: _adapter(recording.adapters[path], one, chosen.draw_options, rngs, options)
        for path, one in chosen.candidates.items()
    }
    swap = Swap.make(recording.layers, adapters, wrap)
    after = [compiled(model, batch) for batch in held_out]
    report = Linearization(**search.report(chosen, after, before), swap=swap)
    report.warn()
    return report


def _adapter(
    recording: RandomFeatureAttention,
    candidate: Candidate,
    draw_options: DrawOptions,
    rngs: nnx.Rngs,
    options: dict[str, Any],
) -> RandomFeatureAttention:
    """Returns an adapter with the features of a candidate, for the layer of another adapter."""
    adapter = RandomFeatureAttention(
        recording.num_heads,
        recording.head_dim,
        None,
        feature_map=candidate.feature_map,
        rngs=rngs,
        **candidate.choice.exact_options(),
        **options,
    )
    if candidate.projection is not None:
        adapter.projection = RandomProjection(candidate.projection, draw_options=draw_options)
    return adapter


def _record(
    compiled: Callable[[Any, Any], Any],
    model: nnx.Module,
    adapters: dict[str, RandomFeatureAttention],
    batch: Any,
) -> dict[str, tuple[SeenCall, ...]]:
    """Returns the calls of each adapter for a batch."""
    calls = {path: Observer((), after=add_call) for path in adapters}
    with observing(adapters, calls):
        compiled(model, batch)
    return {path: get_value(own) for path, own in calls.items()}
