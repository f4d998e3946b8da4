"""Distillation of all learned features of a Linen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def distillation_loss(
    model: nn.Module,
    variables: Mapping[str, Any],
    batch: Any,
    *,
    call: Callable[..., Any] = nn.Module.apply,
) -> jax.Array:
    """Returns the loss of the learned features of a model, the mean over its adapters.

    The adapters are those made with ``feature_map="learned"``. Each compares the attention weights
    of its features with the softmax weights of the queries and keys that it gets; see
    ``simrf_jax.distillation_loss``. These have no gradient, so that of the loss is zero for all
    parameters of the model but those of the features. Call ``calibrate`` first, which moves the
    features to where the data are.

    Args:
      model: A model that holds adapters. ``nn.scan`` over layers and ``nn.vmap`` need
        ``"calibration": 0`` and ``"distillation": 0`` in their ``variable_axes``.
      variables: Variables of the model, with the collections ``params`` and ``calibration``.
      batch: A batch of the model's inputs.
      call: ``call(model, variables, batch, mutable=[...])`` returns the output and the changed
        collections, by default ``model.apply``.

    Returns:
      One number in float32 at least.

    Raises:
      ValueError: If no adapter has learned features, one decodes, or a call has segments or a mask
        with a query axis.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import RandomFeatureAttention, distillation_loss
      >>> adapter = RandomFeatureAttention(16, feature_map="learned")
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=adapter)
      >>> x = 2 * jax.random.normal(jax.random.key(0), (2, 50, 16))
      >>> variables = attention.init(jax.random.key(1), x)
      >>> grads = jax.grad(lambda v: distillation_loss(attention, v, x))(variables)
      >>> grads["params"]["attention_fn"]["query_rows"].shape
      (2, 16, 8)

    References:
      Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry
      (ICLR 2024), https://arxiv.org/abs/2402.04347
    """
    zeros = _zeros(variables.get("params", {}))
    if not zeros:
        raise ValueError(
            "The variables have no learned features: make the model's RandomFeatureAttention(...) "
            'with feature_map="learned", and call init.'
        )
    _, updates = call(model, {**variables, "distillation": zeros}, batch, mutable=["distillation"])
    losses = jax.tree.leaves(updates["distillation"])
    return jnp.mean(jnp.stack([jnp.mean(loss) for loss in losses]))


def _zeros(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a collection ``distillation`` with a loss for each adapter with learned features."""
    zeros: dict[str, Any] = {}
    for name, node in params.items():
        if name == "query_rows":
            zeros["loss"] = jnp.zeros(node.shape[:-3])  # One for each of a stack of layers.
        elif isinstance(node, Mapping) and (inner := _zeros(node)):
            zeros[name] = inner
    return zeros
