"""Distillation of all learned features of an NNX model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from simrf_jax._src.integrations.flax_distillation import Losses, add_loss, mean_loss
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.calibration import call_model
from simrf_jax._src.integrations.nnx.observers import find_adapters, observing
from simrf_jax._src.integrations.nnx.variables import Observer


# There are no keyword-only arguments, because nnx.grad does not support them.
def distillation_loss(
    model: nnx.Module, batch: Any, call: Callable[[Any, Any], Any] | None = None
) -> jax.Array:
    """Returns the loss of the learned features of a model, averaged over adapters and their calls.

    The adapters are those created with ``feature_map="learned"``. Each compares the attention
    weights of its features with the softmax weights of its queries and keys; see
    ``simrf_jax.distillation_loss``. Padding does not count; see ``calibrate``. The arguments of
    attention have no gradient, so the gradient of the loss is zero for all parameters of the model
    except those of the features. Call ``calibrate`` first, which moves the features to where the
    data are. Then train only the ``LearnedRows``, as the example does. With ``wrt=nnx.Param``, an
    optimizer that decays weights would also shrink all others.

    Args:
      model: A model that holds adapters. Its mode is not changed: call ``model.eval()`` first if it
        has dropout.
      batch: A batch of the model's inputs.
      call: Function ``call(model, batch)`` that calls the model, by default ``model(batch)``.

    Returns:
      One number, at least in float32.

    Raises:
      ValueError: If no adapter has learned features, or an adapter decodes or saw no call. Where
        the number of calls is traced, the loss of an adapter without calls is NaN.

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
    adapters = find_adapters(
        model,
        "distill",
        having=lambda adapter: adapter.learned is not None,
        missing="The model has no learned features: make its RandomFeatureAttention(...) with "
        'feature_map="learned".',
    )
    losses = {
        path: Observer(Losses.empty(adapter.stack_shape()), after=add_loss)
        for path, adapter in adapters.items()
    }
    with observing(adapters, losses):
        _ = (call or call_model)(model, batch)
    return mean_loss(get_value(own) for own in losses.values())
