"""Distillation of all learned features of a Linen model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from simrf_jax._src.integrations.flax_distillation import Losses, mean_loss
from simrf_jax._src.integrations.linen.adapter import apply
from simrf_jax._src.integrations.linen.random_features import PARAMETERS


def distillation_loss(
    model: nn.Module,
    variables: Mapping[str, Any],
    batch: Any,
    *,
    call: Callable[..., Any] = apply,
) -> jax.Array:
    """Returns the loss of the learned features of a model, averaged over adapters and their calls.

    The adapters are those created with ``feature_map="learned"``. Each compares the attention
    weights of its features with the softmax weights of its queries and keys; see
    ``simrf_jax.distillation_loss``. Padding does not count; see ``calibrate``. The arguments of
    attention have no gradient, so the gradient of the loss is zero for all parameters of the model
    except those of the features. Call ``calibrate`` first, which moves the features to where the
    data are. Then train only the parameters of ``learned_rows``, as the example does, because an
    optimizer that decays weights would also shrink all others.

    Args:
      model: A model that holds adapters. ``nn.scan`` over layers and ``nn.vmap`` need
        ``"calibration": 0`` and ``"distillation": 0`` in their ``variable_axes``.
      variables: Variables of the model, with the collections ``params`` and ``calibration``.
      batch: A batch of the model's inputs.
      call: ``call(model, variables, batch, mutable=[...])`` returns the output and the changed
        collections, by default ``model.apply``.

    Returns:
      One number, at least in float32.

    Raises:
      ValueError: If no adapter has learned features, or an adapter decodes or saw no call. Where
        the number of calls is traced, the loss of an adapter without calls is NaN.

    Example:
      >>> import jax, optax
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import (
      ...     RandomFeatureAttention, distillation_loss, learned_rows
      ... )
      >>> adapter = RandomFeatureAttention(16, feature_map="learned")
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=adapter)
      >>> x = 2 * jax.random.normal(jax.random.key(0), (2, 50, 16))
      >>> variables = attention.init(jax.random.key(1), x)
      >>> transforms = {True: optax.adamw(1e-2), False: optax.set_to_zero()}
      >>> optimizer = optax.partition(transforms, learned_rows)
      >>> def loss_of(params):
      ...     return distillation_loss(attention, {**variables, "params": params}, x)
      >>> loss, grads = jax.value_and_grad(loss_of)(variables["params"])
      >>> state = optimizer.init(variables["params"])
      >>> updates, state = optimizer.update(grads, state, variables["params"])
      >>> bool(loss_of(optax.apply_updates(variables["params"], updates)) < loss)
      True

    References:
      Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry
      (ICLR 2024), https://arxiv.org/abs/2402.04347
    """
    empty = {
        (*place[:-1], "loss"): Losses.empty(x.shape[:-3])  # One for each of a stack of layers.
        for place, x in flatten_dict(variables.get("params", {})).items()
        if place[-1] == "query_rows"
    }
    if not empty:
        raise _no_learned_features()
    given = {**variables, "distillation": unflatten_dict(empty)}
    _, updates = call(model, given, batch, mutable=["distillation"])
    return mean_loss(flatten_dict(updates["distillation"]).values())


def learned_rows(params: Mapping[str, Any]) -> Any:
    """Returns a mask: True at each parameter of learned features, False at all others.

    ``optax.partition({True: optax.adamw(1e-2), False: optax.set_to_zero()}, learned_rows)`` trains
    only these parameters. ``optax.masked`` does not freeze the others: their gradients remain as
    updates, which ``optax.apply_updates`` adds.

    Args:
      params: The collection ``params`` of a model's variables, or its gradient.

    Returns:
      A pytree of the structure of ``params``.

    Raises:
      ValueError: If there is no parameter of learned features.

    Example:
      >>> import jax.numpy as jnp
      >>> from simrf_jax.integrations.linen import learned_rows
      >>> learned_rows({"dense": {"kernel": jnp.ones(2)}, "map": {"key_rows": jnp.ones(2)}})
      {'dense': {'kernel': False}, 'map': {'key_rows': True}}
    """

    def is_learned(path: tuple[Any, ...], _: Any) -> bool:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        return bool(names) and names[-1] in PARAMETERS

    mask = jax.tree_util.tree_map_with_path(is_learned, params)
    if not any(jax.tree.leaves(mask)):
        raise _no_learned_features()
    return mask


def _no_learned_features() -> ValueError:
    return ValueError(
        "The variables have no learned features: make the model's RandomFeatureAttention(...) "
        'with feature_map="learned", and call init.'
    )
