"""Replacement of softmax attention by random-feature attention in a Linen model."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from flax.core import freeze
from flax.traverse_util import flatten_dict

from simrf_jax._src.integrations import flax_attention
from simrf_jax._src.integrations.linen.adapter import Adapter
from simrf_jax._src.integrations.linen.random_features import (
    RandomFeatureAttention,
    check_without_sizes,
)

_SWAP = "simrf_jax.swap_attention"  # A flag of scopes.


class Rule(NamedTuple):
    """The adapter for some layers; see ``swap_attention``."""

    num_features: int | None
    where: Callable[[str, nn.MultiHeadDotProductAttention], bool] | None
    options: Mapping[str, Any]
    adapter: type[RandomFeatureAttention] = RandomFeatureAttention


class SwappedAttention(nn.Module):
    """A model whose softmax attention is replaced by random-feature attention in each call.

    ``swap_attention`` makes it.

    Attributes:
      swapped_model: The model; its parameters are in the same places as without the replacement.
        It may have no submodule with the name of this field, which Flax reserves.
      rules: The adapters; a layer takes the first whose ``where`` is None or returns True.
    """

    swapped_model: nn.Module
    rules: tuple[Rule, ...]

    def setup(self) -> None:
        """Shares the scope of the model, which keeps the places of all variables.

        The scopes get a flag, so that ``nn.jit`` does not take a layer for that of another swap.
        """
        nn.share_scope(self, self.swapped_model)
        scope: Any = self.scope
        scope.flags = freeze({**scope.flags, _SWAP: (scope.path, _number(self.rules))})
        _move_below(scope, self.swapped_model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with random-feature attention."""
        return self._call_method("__call__", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns a public method of the model, which attends by random features too."""
        of_model = inspect.getattr_static(type(vars(self).get("swapped_model")), name, None)
        if name.startswith("_") or not inspect.isfunction(of_model):
            return super().__getattr__(name)

        def call(self: SwappedAttention, *args: Any, **kwargs: Any) -> Any:
            return self._call_method(name, *args, **kwargs)

        return types.MethodType(call, self)

    def _call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the model with random-feature attention."""
        if self.scope is None:
            raise ValueError("A swapped model is called by init or apply, or after bind.")
        found = []
        scope: Any = self.scope
        own_swap = scope.flags[_SWAP]

        def swap(
            next_function: Callable[..., Any],
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            context: Any,
        ) -> Any:
            layer = context.module
            is_call = context.method_name == "__call__"
            if not is_call or not isinstance(layer, nn.MultiHeadDotProductAttention):
                return next_function(*args, **kwargs)
            of_layer: Any = layer.scope
            if of_layer.flags.get(_SWAP, own_swap) != own_swap:  # A part has its own swap.
                return next_function(*args, **kwargs)
            is_below = layer.path[: len(self.path)] == self.path
            path = ".".join(layer.path[len(self.path) if is_below else 0 :]) or "itself"
            rules = (rule for rule in self.rules if rule.where is None or rule.where(path, layer))
            if (rule := next(rules, None)) is None:
                return next_function(*args, **kwargs)
            found.append(path)
            flax_attention.check_sowing(kwargs.get("sow_weights", False))
            if isinstance(layer.attention_fn, Adapter):  # The changed layer is intercepted again.
                return next_function(*args, **kwargs)
            _check(path, layer)
            # Without a parent, Flax stores its variables below the layer.
            adapter = rule.adapter(rule.num_features, parent=None, **rule.options)
            return layer.clone(attention_fn=adapter, parent=of_layer)(*args, **kwargs)

        with nn.intercept_methods(swap):
            out = getattr(self.swapped_model, name)(*args, **kwargs)
        # Other methods need not attend, and nn.jit may have traced all layers before.
        if name == "__call__" and not found and not self._has_adapters():
            raise ValueError(
                "model must call an nn.MultiHeadDotProductAttention for which where is None or "
                "returns True, got none. Where a model calls attention itself, let it call a "
                "RandomFeatureAttention instead."
            )
        return out

    def _has_adapters(self) -> bool:
        """Returns whether some adapter has variables."""
        return any("attention_fn" in place for place in flatten_dict(dict(self.variables)))


def _number(rules: tuple[Rule, ...]) -> int:
    """Returns a number that no other rules get; equal rules share theirs if they can be hashed."""
    try:
        return _number_of_hashable(rules)
    except TypeError:  # An option has arrays.
        return next(_NUMBERS)


_NUMBERS = itertools.count()


# The cache keeps the functions of the rules alive. Others could get their places in memory, and
# with these their hashes.
@functools.lru_cache(maxsize=256)
def _number_of_hashable(rules: tuple[Rule, ...]) -> int:
    del rules
    return next(_NUMBERS)


def _move_below(scope: Any, module: Any) -> None:
    """Completes ``nn.share_scope``: modules in fields of a module get paths below its new scope."""
    for child in module._state.children.values():
        inner: Any = getattr(child, "scope", None)  # Children may be other things than modules.
        if inner is not None and inner.parent is scope:
            inner.path = inner.debug_path = (*scope.path, inner.name)
            inner.flags = scope.flags
            _move_below(inner, child)


def swap_attention(
    model: nn.Module,
    num_features: int | None,
    *,
    where: Callable[[str, nn.MultiHeadDotProductAttention], bool] | None = None,
    **options: Any,
) -> SwappedAttention:
    """Returns a model with random-feature attention in place of softmax attention.

    Each ``nn.MultiHeadDotProductAttention`` that the model calls gets a ``RandomFeatureAttention``
    with its own W as its ``attention_fn``. Parameters keep their names and places, so those of the
    trained model fit. The other collections, such as ``random_features`` with W, come from
    ``init``. The result is a Linen module: it can be jitted, and ``calibrate``,
    ``distillation_loss`` and ``attention_report`` take it as their model. The original is not
    changed. Layers that have an adapter keep it, and so do swapped models that are parts of the
    model. Swap a swapped model again to give the layers that the first swap leaves out other
    options.

    The result has the public methods of the model by name, as in ``apply(..., method="encode")``,
    but not its properties. Layers inside ``nn.scan`` or ``nn.vmap`` need the collections of
    ``RandomFeatureAttention`` in their ``variable_axes``.

    Args:
      model: A model that calls ``nn.MultiHeadDotProductAttention`` layers.
      num_features: Number of features of each head; see ``RandomFeatureAttention``.
      where: Function of the path and the layer that returns True for layers to change; None for
        all. The path is such as ``"encoder.layer_0.attention"``.
      **options: Other keywords of ``RandomFeatureAttention``, such as ``feature_map``,
        ``exact_bandwidth`` or ``is_causal``, which models that pass causal masks need.

    Returns:
      The model, whose field ``swapped_model`` is the original.

    Raises:
      TypeError: If an option is unknown or of a wrong type, where is not a function, or the model
        is not a Linen module.
      ValueError: If an option has no such value. When called, if the model calls no layer, an
        option does not fit a layer, a layer decodes, or its attention function is not Flax's and
        may do more, such as rotate queries and keys.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import swap_attention
      >>> model = nn.Sequential([nn.Dense(32), nn.MultiHeadDotProductAttention(num_heads=4)])
      >>> x = jnp.ones((2, 10, 8))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> swapped = swap_attention(model, 64)
      >>> variables = {**swapped.init(jax.random.key(1), x), "params": params}
      >>> variables["random_features"]["layers_1"]["attention_fn"]["projection"].shape
      (4, 64, 8)
      >>> swapped.apply(variables, x).shape
      (2, 10, 32)
    """
    check_linen(model, "swap_attention")
    flax_attention.check_options(RandomFeatureAttention, options, where)
    check_without_sizes(RandomFeatureAttention(num_features, parent=None, **options))
    return with_rules(model, Rule(num_features, where, freeze(options)))


def check_linen(model: Any, name: str) -> None:
    """Raises ``TypeError`` for a model that is no Linen module, for a function that NNX has too."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a flax.linen.Module, got {type(model).__name__}; for NNX models there "
            f"is simrf_jax.integrations.nnx.{name}."
        )


def with_rules(model: nn.Module, *rules: Rule) -> SwappedAttention:
    """Returns a model that follows rules, after those that it follows already."""
    if isinstance(model, SwappedAttention):
        return SwappedAttention(model.swapped_model, (*model.rules, *rules))
    return SwappedAttention(model, rules)


def _check(path: str, layer: nn.MultiHeadDotProductAttention) -> None:
    """Raises ``ValueError`` if the attention of a layer cannot be replaced."""
    if layer.attention_fn is not nn.dot_product_attention:
        raise ValueError(
            f"The layer {path} must attend by nn.dot_product_attention, got "
            f"{layer.attention_fn!r}, which may do more than attend; put a RandomFeatureAttention "
            "there by hand."
        )
    if layer.decode:
        raise ValueError(
            f"The layer {path} must have decode=False, got True: an adapter that decodes keeps its "
            "own cache."
        )
