"""The protocol of attention mechanisms: all tokens at once, or token by token."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, SupportsIndex, TypeVar, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Shaped

from simrf_jax._src import checks
from simrf_jax._src.attention.inputs.call import (
    Call,
    Inputs,
    Options,
    StepOptions,
    check_keywords,
)
from simrf_jax._src.attention.inputs.masks import Shape

State = TypeVar("State")


@runtime_checkable
class NamedArrays(Protocol):
    """A named tuple of arrays."""

    @property
    def _fields(self) -> tuple[str, ...]:
        """Names of the arrays."""

    def __iter__(self) -> Iterator[Shaped[Array, " ..."]]:
        """Returns the arrays one by one."""


Arrays = TypeVar("Arrays", bound=NamedArrays)


class Mechanism(abc.ABC, Generic[State]):
    """An attention mechanism with its parameters, such as a projection or a bandwidth.

    ``RandomFeatureMechanism``, ``Band`` and ``Blend`` are mechanisms. Each is a small pytree: it
    goes through ``jit``, and its arrays have gradients. Decoding is causal. Its state has a fixed
    size and is a pytree too. A prompt of any length, followed by single tokens, gives the same
    numbers as ``attend(..., is_causal=True)`` on all of them.

    A new mechanism defines ``attend_to``, ``init_for`` and ``step_to``, which take a ``Call``, and
    ``in_order`` if positions matter in every call.
    """

    def attend(
        self,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        **options: Unpack[Options],
    ) -> Float[Array, "*batch T N D"]:
        """Attends to all tokens at once.

        Args:
          query: ``[..., T, N, H]``.
          key: ``[..., S, K, H]``.
          value: ``[..., S, K, D]``.
          **options: ``mask``, ``bias``, ``scale``, ``is_causal``, ``query_seq_lengths``,
            ``key_value_seq_lengths`` and ``segment_ids``; see ``random_feature_attention``.

        Returns:
          ``[..., T, N, D]``.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not match, or the mechanism does not support the call.
        """
        return self.attend_to(Call.of(query, key, value, **options))

    def init(
        self,
        *,
        batch: Sequence[SupportsIndex] = (),
        num_key_heads: SupportsIndex,
        head_dim: SupportsIndex,
        value_dim: SupportsIndex,
        dtype: DTypeLike = jnp.float32,
    ) -> State:
        """Returns the state before the first token.

        Args:
          batch: Leading shape.
          num_key_heads: Number K of key heads.
          head_dim: Width H of the keys.
          value_dim: Width D of the values.
          dtype: Type of the queries, keys and values to come. Sums are at least float32.

        Raises:
          TypeError: If a number is not an integer or dtype is not floating.
          ValueError: If a number is below 1, or does not fit what the mechanism holds.
        """
        sizes = {"num_key_heads": num_key_heads, "head_dim": head_dim, "value_dim": value_dim}
        heads, dim, width = (checks.positive_int(name, size) for name, size in sizes.items())
        lead = checks.lead_shape("batch", batch)
        dtype = checks.floating_dtype("dtype", dtype)
        key = jnp.zeros((*lead, 0, heads, dim), dtype)
        return self.init_for(Call(key, key, jnp.zeros((*lead, 0, heads, width), dtype)))

    def step(
        self,
        state: State,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch T K H"],
        value: Float[ArrayLike, "*batch T K D"],
        **options: Unpack[StepOptions],
    ) -> tuple[Float[Array, "*batch T N D"], State]:
        """Attends to a state and, causally, to new tokens.

        With one token at a time this is decoding, in time and memory that do not depend on the
        number of earlier tokens. With a whole prompt it is the prefill, in parallel.

        Args:
          state: State of the tokens before.
          query: ``[..., T, N, H]``.
          key: ``[..., T, K, H]``.
          value: ``[..., T, K, D]``.
          **options: ``mask`` of the new keys, broadcastable to ``[..., N, 1, T]``, and ``bias`` of
            the same shapes, both the same for all heads if query heads share key heads; ``scale``,
            ``query_seq_lengths`` and ``key_value_seq_lengths``; see ``random_feature_attention``.

        Returns:
          The output ``[..., T, N, D]`` and the new state, of the same shapes.

        Raises:
          TypeError: If a dtype is wrong, or the state is of another kind.
          ValueError: If shapes do not fit each other or the state, devices share the length, or the
            mask or the bias differ between heads that share keys.
        """
        check_keywords("step", options, StepOptions.__optional_keys__)
        return self.step_to(state, Call.of(query, key, value, is_causal=True, **options))

    @abc.abstractmethod
    def attend_to(self, call: Call) -> Float[Array, "*batch T N D"]:
        """Returns the attention of a call; see ``attend``."""

    @abc.abstractmethod
    def init_for(self, call: Call) -> State:
        """Returns the state before any tokens, for tokens like those of a call; see ``init``."""

    @abc.abstractmethod
    def step_to(self, state: State, call: Call) -> tuple[Float[Array, "*batch T N D"], State]:
        """Returns the attention of new tokens, and the state with them; see ``step``.

        The call is always causal.
        """

    def in_order(self, call: Call) -> bool:
        """Returns whether positions matter, so that queries and keys must be aligned."""
        return call.in_order()


def check_tokens(call: Call) -> None:
    """Raises ``ValueError`` if new tokens of a state have segments or a sharded length."""
    if call.segment_ids is not None:
        raise ValueError(
            "segment_ids are for whole sequences: the state of decoding, such as the cache of an "
            "adapter with decode=True, holds one sequence in each row of the batch."
        )
    if axes := call.explicit_axes(in_order=True):
        raise ValueError(
            "Decoding takes tokens whose length is not sharded, got one sharded over the mesh "
            f"axis {', '.join(map(repr, axes))}; jax.reshard them."
        )


def check_step(call: Call, inputs: Inputs) -> None:
    """Raises ``ValueError`` if keys and queries differ in number, or key heads were split."""
    query_length, key_length = call.query.shape[-3], call.key.shape[-3]
    if query_length != key_length:
        raise ValueError(
            "A decoding step needs equal numbers of keys and queries, got "
            f"{key_length} and {query_length}."
        )
    num_key_heads = call.key.shape[-2]
    if inputs.key.shape[2] != num_key_heads:
        raise ValueError(
            "In decoding, mask and bias must have a head axis of size 1 if query heads share key "
            f"heads, got one for each of {inputs.key.shape[2]} query heads, and {num_key_heads} "
            "key heads."
        )


def flatten(state: Arrays, expected: Arrays, batch: Shape) -> Arrays:
    """Returns a state with one leading axis, if it fits the keys and values.

    Args:
      state: A named tuple of arrays ``[*batch, ...]``.
      expected: A state that fits, in arrays or shapes ``[math.prod(batch), ...]``.
      batch: Leading shape.

    Raises:
      TypeError: If the state is of another kind, or has other dtypes.
      ValueError: If the state has other shapes.
    """
    check_kind(state, type(expected))
    shapes = [(*batch, *x.shape[1:]) for x in expected]
    given = [jnp.shape(x) for x in state]
    if given != shapes:
        raise ValueError(
            f"state must have {_named(expected, shapes)} for these keys and values, got "
            f"{_named(expected, given)}."
        )
    dtypes = [x.dtype for x in expected]
    given_dtypes = [x.dtype for x in state]
    if given_dtypes != dtypes:
        raise TypeError(
            f"state must have {_named(expected, dtypes)} for these keys and values, got "
            f"{_named(expected, given_dtypes)}; make it with their dtype."
        )
    return jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), state)


def unflatten(state: State, batch: Shape) -> State:
    """Returns a state with the leading shape of the tokens."""
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), state)


def check_kind(state: object, kind: type) -> None:
    """Raises ``TypeError`` if a state is of another kind."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be of type {kind.__name__}, got {type(state).__name__}.")


def _named(state: NamedArrays, values: Sequence[object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(state._fields, values, strict=True))
