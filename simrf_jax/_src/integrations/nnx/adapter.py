"""The base class of the NNX adapters: it reads Flax's calls and keeps the cache."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import reprlib
from jax.typing import DTypeLike

from simrf_jax._src import checks
from simrf_jax._src.attention import Mechanism
from simrf_jax._src.features import FeatureMap, as_feature_map
from simrf_jax._src.integrations import flax_attention, flax_repr
from simrf_jax._src.integrations.flax_attention import AttentionFn, Request
from simrf_jax._src.integrations.flax_versions import get_value, set_value
from simrf_jax._src.integrations.nnx.variables import FeatureMapState

# A representation shows these attributes only if they differ from these values.
_SWITCHES = {
    "shared": False,
    "is_causal": False,
    "masks": "keys",
    "decode": False,
    "sequence_axis": None,
    "batch_axis": None,
    "head_axis": None,
    "implementation": None,
    "exact_bandwidth": None,
    "exact_keys": None,
}


class Adapter(AttentionFn, nnx.Module):
    """An attention mechanism with its cache, which Flax calls as an ``attention_fn``."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        shared: bool,
        is_causal: bool,
        masks: flax_attention.Masks,
        decode: bool,
        sequence_axis: str | tuple[str, ...] | None,
    ):
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.head_dim = checks.positive_int("head_dim", head_dim)
        self.shared = shared
        self.is_causal = is_causal
        self.masks: flax_attention.Masks = masks
        self.decode = decode
        self.sequence_axis = sequence_axis
        self.cache: nnx.Cache | None = nnx.data(None)
        flax_attention.check_fields(self)

    @abc.abstractmethod
    def mechanism(self, num_heads: int) -> Mechanism:
        """Returns the attention of ``num_heads`` query heads, with its arrays."""

    @abc.abstractmethod
    def stack_shape(self) -> tuple[int, ...]:
        """Returns the leading shape of a stack of layers, ``()`` for one layer."""

    @abc.abstractmethod
    def _draws(self) -> dict[str, Any]:
        """Returns the features and the draw options of W for display."""

    def __nnx_repr__(self) -> Iterator[reprlib.Object | reprlib.Attr]:
        yield reprlib.Object(type=type(self), same_line=True)
        switches = {name: value for name, value in vars(self).items() if name in _SWITCHES}
        fields = {"num_heads": self.num_heads, "head_dim": self.head_dim, **self._draws()}
        for name, value in flax_repr.shown_fields(fields | switches, _SWITCHES).items():
            yield reprlib.Attr(name, value, use_raw_value=True)

    def _check_sizes(self, num_key_heads: int, head_dim: int) -> None:
        """Raises ``ValueError`` if the keys of a call have other heads."""
        if (num_key_heads, head_dim) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"This adapter is for keys of {self.num_heads} heads of dim {self.head_dim}, got "
                f"{num_key_heads} heads of {head_dim}."
            )

    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> Mechanism:
        """Returns the attention of ``num_heads`` query heads, with its arrays."""
        del num_key_heads, head_dim
        return self.mechanism(num_heads)

    def _step(self, mechanism: Mechanism, request: Request) -> jax.Array:
        """Attends to the tokens in the cache and those of a call, and updates the cache."""
        if self.cache is None:
            raise ValueError(
                "decode=True needs a cache: call init_cache(input_shape) first, or "
                "view(model, only=type(adapter), decode=True, batch_size=batch)."
            )
        out, state = flax_attention.step(mechanism, get_value(self.cache), request)
        set_value(self.cache, state)
        return out

    def init_cache(
        self,
        input_shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
        *,
        value_dim: int | None = None,
    ) -> None:
        """Empties the cache: sets the state before the first token.

        Args:
          input_shape: ``[..., length, features]`` of inputs to Flax's attention, as for its own
            ``init_cache``. Only the axes before the length matter.
          dtype: Type of the queries, keys and values to come.
          value_dim: Width of the values, by default ``head_dim``.

        Raises:
          TypeError: If dtype is not floating or input_shape is not a tuple of integers.
          ValueError: If input_shape has fewer than two axes, a size is negative or value_dim is
            below 1.
        """
        shape = checks.lead_shape("input_shape", input_shape)
        if len(shape) < 2:
            raise ValueError(f"input_shape must be [..., length, features], got {input_shape}.")
        self._start(shape[:-2], dtype, value_dim)

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike = jnp.float32,
    ) -> None:
        """Sets the attributes of a view that ``view`` creates.

        Args:
          decode: True to decode, False to attend to whole sequences; None for no change.
          batch_size: Leading shape of the tokens, one integer or a tuple of them, for a new and
            empty cache; without it a view shares the cache of its original.
          cache_dtype: Type of the queries, keys and values to come.

        Raises:
          TypeError: If decode is not boolean, a size is not an integer or cache_dtype is not
            floating.
          ValueError: If a size is negative.
        """
        if decode is not None:
            self.decode = checks.boolean("decode", decode)
        if batch_size is not None:
            if not isinstance(batch_size, tuple | list):
                batch_size = (checks.integer("batch_size", batch_size, least=0),)
            self._start(checks.lead_shape("batch_size", batch_size), cache_dtype, None)

    def _start(self, batch: tuple[int, ...], dtype: DTypeLike, value_dim: int | None) -> None:
        leaves, treedef = jax.tree.flatten(self.mechanism(self.num_heads))

        def init(leaves: list[Any]) -> Any:
            return jax.tree.unflatten(treedef, leaves).init(
                batch=batch,
                num_key_heads=self.num_heads,
                head_dim=self.head_dim,
                value_dim=self.head_dim if value_dim is None else value_dim,
                dtype=dtype,
            )

        # Unlike arrays, numbers in a feature map have no axis for the layers of a stack.
        axes = [0 if jnp.ndim(leaf) else None for leaf in leaves]
        for _ in self.stack_shape():
            init = jax.vmap(init, in_axes=(axes,))
        self.cache = nnx.Cache(init(leaves))


def features_key(rngs: nnx.Rngs) -> jax.Array:
    """Returns a key from the stream ``features``, or the default stream, or ``params``.

    Raises:
      TypeError: If these are no ``nnx.Rngs``.
      ValueError: If there is no such stream.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be an nnx.Rngs, such as nnx.Rngs(0), got {rngs!r}.")
    for name in ("features", "default", "params"):
        if name in rngs:
            return rngs[name]()
    raise ValueError(
        "rngs needs a stream for the draw of W: features, a default stream or params, got "
        f"{', '.join(rngs) or 'none'}."
    )


def as_state(maps: Any) -> Any:
    """Returns a feature map, or a tuple of them, as an attribute whose arrays are state.

    The arrays are copies, because a training step may donate the state, and the caller owns the
    maps. Numbers in place of arrays are state only beside an array.
    """
    each = maps if isinstance(maps, tuple) else (maps,)
    # Names and functions have no leaves.
    leaves = jax.tree.leaves([one for one in each if isinstance(one, FeatureMap)])
    if leaves and isinstance(maps, tuple):
        maps = tuple(map(as_feature_map, maps))
    if not any(hasattr(leaf, "dtype") for leaf in leaves):
        return nnx.data(maps) if leaves else maps
    own = jax.tree.map(lambda x: jnp.array(x) if hasattr(x, "dtype") else x, maps)
    return FeatureMapState(own)


def in_state(maps: Any) -> Any:
    """Returns the feature maps of an attribute that ``as_state`` returned."""
    return get_value(maps) if isinstance(maps, nnx.Variable) else maps
