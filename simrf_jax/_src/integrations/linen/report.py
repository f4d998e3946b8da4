"""Reports of the attention of all layers of a Linen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
from flax.traverse_util import flatten_dict

from simrf_jax._src.integrations.flax_report import ModelReport, report_of_calls
from simrf_jax._src.integrations.linen.adapter import apply


def attention_report(
    model: nn.Module,
    variables: Mapping[str, Any],
    batch: Any,
    *,
    call: Callable[..., Any] = apply,
    relative_error: float = 0.1,
) -> ModelReport:
    """Compares the attention of all layers of a model with softmax attention, on a batch.

    Each ``RandomFeatureAttention`` records its queries, keys and values, which are then compared as
    in ``simrf_jax.attention_report``. Time and memory are quadratic in the length: use a small
    batch. Padding does not count; see ``calibrate``. Layers of ``FMMAttention`` are omitted,
    because they do not estimate softmax attention alone.

    Args:
      model: A model that holds adapters. ``nn.scan`` over layers and ``nn.vmap`` need
        ``"attention_calls": 0`` in their ``variable_axes``.
      variables: Variables of the model.
      batch: A batch of the model's inputs.
      call: ``call(model, variables, batch, mutable=[...])`` returns the output and the changed
        collections, by default ``model.apply``.
      relative_error: Relative squared error of the kernel for ``features_needed``.

    Returns:
      A dict with a named tuple for each adapter, by its path in the model; it prints as a table. A
      stack of layers has one for each, such as ``"layers.attention.attention_fn[2]"``. The fields
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
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import RandomFeatureAttention, attention_report
      >>> adapter = RandomFeatureAttention(16)
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=adapter)
      >>> x = jax.random.normal(jax.random.key(0), (2, 50, 16))
      >>> variables = attention.init(jax.random.key(1), x)
      >>> report = attention_report(attention, variables, x)
      >>> report["attention_fn"].relative_error.shape
      (2,)
    """
    _, updates = call(model, variables, batch, mutable=["attention_calls"])
    drawn, seen = (
        flatten_dict(x.get(name, {}))
        for x, name in ((variables, "random_features"), (updates, "attention_calls"))
    )
    calls = {".".join(place[:-1]): () for place in drawn if place[-1] == "projection"}
    calls |= {".".join(place[:-1]): one for place, one in seen.items()}
    if not calls:
        raise ValueError("The model has no RandomFeatureAttention to report on.")
    return report_of_calls([*calls.items()], relative_error)
