"""Reports of the attention of all layers of an NNX model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from simrf_jax._src.integrations.flax_report import ModelReport, add_call, report_of_calls
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.calibration import call_model
from simrf_jax._src.integrations.nnx.observers import find_adapters, observing
from simrf_jax._src.integrations.nnx.variables import Observer


def attention_report(
    model: nnx.Module,
    batch: Any,
    *,
    call: Callable[[Any, Any], Any] | None = None,
    relative_error: float = 0.1,
) -> ModelReport:
    """Compares the attention of all layers of a model with softmax attention, on a batch.

    Each ``RandomFeatureAttention`` records its queries, keys and values, which are then compared as
    in ``simrf_jax.attention_report``. Time and memory are quadratic in the length: use a small
    batch. Padding does not count; see ``calibrate``. Layers of ``FMMAttention`` are omitted,
    because they do not estimate softmax attention alone.

    Args:
      model: A model that holds adapters. Its mode is not changed: call ``model.eval()`` first if it
        has dropout.
      batch: A batch of the model's inputs.
      call: Function ``call(model, batch)`` that calls the model, by default ``model(batch)``.
      relative_error: Relative squared error of the kernel for ``features_needed``.

    Returns:
      A dict with a named tuple for each adapter, by its path in the model; it prints as a table. A
      stack of layers has one for each, such as ``"blocks.attention.attention_fn[2]"``. The fields
      have one number for each query head, averaged over the batch.

      - ``relative_error``, ``output_error``, ``row_sum_mean``, ``effective_rank`` and
        ``softmax_effective_rank``, as in ``simrf_jax.attention_report``;
      - ``mean_squared_distance``: Mean of :math:`|x + y|^2` over all queries x and keys y of the
        batch, multiplied by the root of the scale. The variance of a positive feature grows like
        the exponential of this number;
      - ``features_needed``: Number of balanced features with iid rows needed for the requested
        relative squared error; see ``simrf_jax.selection.required_features``. It may be infinite;
      - ``num_features``: Number of random features of the layer, an integer; 0 for a map that
        needs no W.

    Raises:
      TypeError: If relative_error is not a number.
      ValueError: If no adapter is a ``RandomFeatureAttention``, an adapter decodes, saw no tokens
        or a mask that it cannot honor, or relative_error is not positive.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention, attention_report
      >>> rngs = nnx.Rngs(0)
      >>> adapter = RandomFeatureAttention(2, 8, 16, rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=adapter, rngs=rngs)
      >>> report = attention_report(attention, jax.random.normal(rngs(), (2, 50, 16)))
      >>> report["attention_fn"].relative_error.shape
      (2,)
    """
    adapters = find_adapters(
        model,
        "report on",
        having=lambda _: True,
        missing="The model has no RandomFeatureAttention to report on.",
    )
    calls = {path: Observer((), after=add_call) for path in adapters}
    with observing(adapters, calls):
        _ = (call or call_model)(model, batch)
    seen = [(".".join(map(str, path)), get_value(own)) for path, own in calls.items()]
    return report_of_calls(seen, relative_error)
