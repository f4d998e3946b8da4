"""Distillation of all learned features of an NNX model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.observers import DistillationLoss, observing
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention


# No argument is for keywords alone, because nnx.grad takes no function that has such.
def distillation_loss(
    model: nnx.Module, batch: Any, call: Callable[[Any, Any], Any] | None = None
) -> jax.Array:
    """Returns the loss of the learned features of a model, the mean over its adapters.

    The adapters are those made with ``feature_map="learned"``. Each compares the attention weights
    of its features with the softmax weights of the queries and keys that it gets; see
    ``simrf_jax.distillation_loss``. These have no gradient, so that of the loss is zero for all
    parameters of the model but those of the features. Call ``calibrate`` first, which moves the
    features to where the data are. Then train the ``LearnedRows`` and nothing else, as the example
    does. With ``wrt=nnx.Param``, an optimizer that decays weights would also shrink all others.

    Args:
      model: A model that holds adapters. It is called as the caller left it: set it to evaluation
        first, ``model.eval()``, if it has dropout.
      batch: A batch of the model's inputs.
      call: Function of the model and a batch, which it calls the model with, by default
        ``model(batch)``.

    Returns:
      One number in float32 at least.

    Raises:
      ValueError: If no adapter has learned features, one decodes, or a call has segments or a mask
        with a query axis.

    Example:
      >>> import jax, optax
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import (
      ...     LearnedRows, RandomFeatureAttention, calibrate, distillation_loss
      ... )
      >>> rngs = nnx.Rngs(0)
      >>> adapter = RandomFeatureAttention(2, 8, 16, feature_map="learned", rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=adapter, rngs=rngs)
      >>> x = 2 * jax.random.normal(rngs(), (2, 50, 16))
      >>> calibrate(attention, [x])
      >>> optimizer = nnx.Optimizer(attention, optax.adamw(1e-2), wrt=LearnedRows)
      >>> rows = nnx.DiffState(0, LearnedRows)
      >>> loss, grads = nnx.value_and_grad(distillation_loss, argnums=rows)(attention, x)
      >>> _ = optimizer.update(attention, grads)
      >>> bool(distillation_loss(attention, x) < loss)
      True

    References:
      Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry
      (ICLR 2024), https://arxiv.org/abs/2402.04347
    """
    adapters = {
        path: node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, RandomFeatureAttention) and node.learned is not None
    }
    if not adapters:
        raise ValueError(
            "The model has no learned features: make its RandomFeatureAttention(...) with "
            'feature_map="learned".'
        )
    if any(adapter.decode for adapter in adapters.values()):
        raise ValueError("An adapter has decode=True: distil the model without it.")
    # Layers that are stacked have one loss each.
    losses = {
        path: DistillationLoss(jnp.zeros(adapter.stack_shape()))
        for path, adapter in adapters.items()
    }
    with observing(adapters, losses):
        _ = model(batch) if call is None else call(model, batch)
    return jnp.mean(jnp.stack([jnp.mean(get_value(own)) for own in losses.values()]))
