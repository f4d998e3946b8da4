"""Replacement of softmax attention by random-feature attention in an existing model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from flax import linen as nn
from flax import nnx

from simrf_jax._src.integrations import flax_attention
from simrf_jax._src.integrations.flax_versions import static
from simrf_jax._src.integrations.nnx.adapter import Adapter
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention

# Returns the attention function of a layer, given its adapter.
Wrap: TypeAlias = Callable[[RandomFeatureAttention], nnx.Module]


@dataclasses.dataclass(frozen=True)
class Swap:
    """The layers of a model whose attention was replaced.

    Attributes:
      layers: The layers, by their paths in the model, such as ``"blocks.0.attention"``.
      before: The previous attention of each layer.
      after: The attention that replaced it: the adapter, or the module that wraps it.
      adapters: The adapter of each layer.
    """

    layers: dict[str, nnx.MultiHeadAttention]
    before: dict[str, Callable[..., Any]]
    after: dict[str, Callable[..., Any]]
    adapters: dict[str, RandomFeatureAttention]

    def __repr__(self) -> str:
        # Not the layers, which print all of their parameters.
        lines = [
            f"  {path}: {getattr(one, '__name__', type(one).__name__)} -> {self.adapters[path]!r}"
            for path, one in self.before.items()
        ]
        return "\n".join(["Swap of attention:", *lines])

    @classmethod
    def make(
        cls,
        layers: dict[str, nnx.MultiHeadAttention],
        adapters: dict[str, RandomFeatureAttention],
        wrap: Wrap | None,
    ) -> Swap:
        """Gives each layer its adapter, in place, and returns the swap."""
        before = {path: layer.attention_fn for path, layer in layers.items()}
        after: dict[str, Callable[..., Any]] = {
            path: adapter if wrap is None else wrap(adapter) for path, adapter in adapters.items()
        }
        for path, attention in after.items():
            if not isinstance(attention, nnx.Module):
                raise TypeError(
                    f"wrap must return an nnx.Module, which holds the adapter of the layer {path}, "
                    f"got {attention!r}."
                )
        for path, layer in layers.items():
            _put(layer, after[path])
        return cls(layers, before, after, adapters)

    def undo(self) -> None:
        """Restores the previous attention of each layer.

        Raises:
          ValueError: If the attention of a layer has been changed again, for example by a later
            swap, or was restored already.
        """
        for path, layer in self.layers.items():
            if layer.attention_fn is not self.after[path]:
                raise ValueError(
                    f"The layer {path} must still have the attention of the swap, got "
                    f"{layer.attention_fn!r}; undo a later swap first, and each swap once."
                )
        for path, layer in self.layers.items():
            _put(layer, self.before[path])


def swap_attention(
    model: nnx.Module,
    num_features: int | None,
    *,
    where: Callable[[str, nnx.MultiHeadAttention], bool] | None = None,
    wrap: Wrap | None = None,
    rngs: nnx.Rngs,
    **options: Any,
) -> Swap:
    """Replaces the softmax attention of a model by random-feature attention, in place.

    Each ``nnx.MultiHeadAttention`` gets a ``RandomFeatureAttention`` with its own W as its
    ``attention_fn``. No parameter changes. Call it again with another ``where`` to give some
    layers other options. To fit the features of a trained model, swap with
    ``feature_map="calibrated"`` and call ``calibrate``.

    Args:
      model: A model with ``nnx.MultiHeadAttention`` layers.
      num_features: Number of features of each head; see ``RandomFeatureAttention``.
      where: Function of the path and the layer that returns True for layers to change; None for
        all.
      wrap: Function of an adapter that returns an ``nnx.Module`` to be the ``attention_fn``, for
        layers whose own does more than attend, such as rotate queries and keys. None for the
        adapter itself.
      rngs: Source of the keys for W.
      **options: Other keywords of ``RandomFeatureAttention``, such as ``feature_map``,
        ``exact_bandwidth`` or ``is_causal``, which models that pass causal masks need. Create the
        optimizer of learned features after the swap.

    Returns:
      The swap: ``layers`` has the changed layers by path, and ``undo()`` reverts it.

    Raises:
      TypeError: If an option is unknown or of a wrong type, where is not a function, the model is a
        Linen module, or wrap does not return a module.
      ValueError: If no layer is found, an option does not fit a layer, several layers are stacked
        in one, a layer decodes or, without ``model.eval()``, drops out attention weights, or its
        attention function is not Flax's and there is no ``wrap``. The model is then unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import swap_attention
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(
      ...     nnx.Linear(8, 32, rngs=rngs), nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
      ... )
      >>> x = jnp.ones((2, 10, 8))
      >>> before = model(x)
      >>> swap = swap_attention(model, 64, rngs=rngs)
      >>> list(swap.layers)
      ['layers.1']
      >>> bool(jnp.all(model(x) == before))
      False
      >>> swap.undo()
      >>> bool(jnp.all(model(x) == before))
      True
    """
    if isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nnx.Module, got the Linen module {type(model).__name__}; for Linen "
            "models there is simrf_jax.integrations.linen.swap_attention."
        )
    flax_attention.check_options(RandomFeatureAttention, options, where)
    found = {
        ".".join(map(str, path)) or "itself": module
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.MultiHeadAttention)
    }
    layers = {path: layer for path, layer in found.items() if where is None or where(path, layer)}
    if not layers:
        raise ValueError(
            f"model must have an nnx.MultiHeadAttention{' where asked' if found else ''}, got "
            f"{', '.join(found) if found else 'none'}. Where a model calls attention itself, let "
            "it call a RandomFeatureAttention instead."
        )
    adapters = {
        path: _adapter(path, layer, num_features, wrap is not None, rngs, options)
        for path, layer in layers.items()
    }
    return Swap.make(layers, adapters, wrap)


def _adapter(
    path: str,
    layer: nnx.MultiHeadAttention,
    num_features: int | None,
    has_wrap: bool,
    rngs: nnx.Rngs,
    options: dict[str, Any],
) -> RandomFeatureAttention:
    """Returns the adapter for a layer."""
    attention_fn = layer.attention_fn
    is_known = attention_fn is nnx.dot_product_attention or isinstance(attention_fn, Adapter)
    if not is_known and not has_wrap:
        raise ValueError(
            f"The layer {path} must attend by nnx.dot_product_attention, got {attention_fn!r}, "
            "which may do more than attend; pass wrap, which does this with an adapter."
        )
    if layer.dropout_rate and not layer.deterministic:
        raise ValueError(
            f"The layer {path} must have dropout_rate=0, got dropout_rate={layer.dropout_rate}: "
            "there are no attention weights to drop out. Before the swap, call model.eval(), or to "
            "train the model, set layer.dropout_rate = 0."
        )
    if layer.decode:
        raise ValueError(
            f"The layer {path} must have decode=False, got True: an adapter that decodes keeps its "
            "own cache. Set layer.decode = False before the swap."
        )
    shape = layer.key.kernel.shape
    if len(shape) != 3:
        raise ValueError(
            f"The layer {path} must be one layer, got a stack with keys of shape {shape}; make the "
            "adapters where the layers are made."
        )
    return RandomFeatureAttention(*shape[1:], num_features, rngs=rngs, **options)


def _put(layer: nnx.MultiHeadAttention, attention: Any) -> None:
    # Flax must know which attentions hold arrays: the attribute may have held none before.
    is_module = isinstance(attention, nnx.Module)
    layer.attention_fn = nnx.data(attention) if is_module else static(attention)
