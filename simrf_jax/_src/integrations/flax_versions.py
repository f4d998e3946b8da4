"""Parts of Flax NNX whose names differ between the versions that the library supports.

Nothing else in the library checks the version. When setup.cfg requires flax>=0.12.4, Flax's own
names can replace these.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

_HAS_METHODS = hasattr(nnx.Variable, "get_value")  # Since flax 0.12.1.
_HAS_STATIC = hasattr(nnx, "static")  # Since flax 0.12.
_HAS_VIEW = hasattr(nnx, "view")  # Since flax 0.12.4.


def get_value(variable: nnx.Variable) -> Any:
    """Returns the value of a variable, which may be any pytree."""
    return variable.get_value() if _HAS_METHODS else variable.value


def set_value(variable: nnx.Variable, value: Any) -> None:
    """Sets the value of a variable, which may be any pytree."""
    if _HAS_METHODS:
        variable.set_value(value)
    else:
        variable.value = value


def static(value: Any) -> Any:
    """Wraps a value without arrays for an attribute that may have held arrays."""
    return nnx.static(value) if _HAS_STATIC else value


def view(model: nnx.Module, *, only: Any = ..., **attributes: Any) -> Any:
    """Returns a copy of a model that shares its variables, with other attributes in some modules.

    This is ``nnx.view``, with a fallback for Flax before 0.12.4.

    Args:
      model: A model that holds adapters.
      only: An NNX filter for the modules, such as ``RandomFeatureAttention``; by default all
        modules with a ``set_view``.
      **attributes: Arguments of ``set_view`` of these modules.

    Raises:
      TypeError: If ``set_view`` refuses the type of an attribute.
      ValueError: If ``set_view`` refuses an attribute.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention, view
      >>> rngs = nnx.Rngs(0)
      >>> adapter = RandomFeatureAttention(8, 64, 130, rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=adapter, rngs=rngs)
      >>> decoder = view(attention, only=RandomFeatureAttention, decode=True, batch_size=2)
      >>> decoder(jnp.ones((2, 1, 512))).shape
      (2, 1, 512)
    """
    if _HAS_VIEW:
        return nnx.view(model, only=only, **attributes)
    chosen = nnx.All(only)
    copy = nnx.merge(*nnx.split(model))
    for path, node in list(nnx.iter_graph(copy)):
        if hasattr(node, "set_view") and chosen(path, node):
            node.set_view(**attributes)
    return copy
