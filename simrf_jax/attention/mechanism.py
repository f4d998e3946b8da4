"""The protocol of attention mechanisms: all tokens at once, and the same token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, SupportsIndex, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer, Real, Shaped

from simrf_jax import checks
from simrf_jax.attention.inputs.arguments import Arguments, Inputs, axes_of_length
from simrf_jax.attention.inputs.masks import Lengths, Mask, Shape, Unchecked

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


@runtime_checkable
class Mechanism(Protocol[State]):
    """A way to attend, with all that it holds, such as a projection or a bandwidth.

    ``RandomFeatures``, ``Band`` and ``Blend`` are mechanisms. Each is a small pytree: it goes
    through ``jit``, and its arrays have gradients. Decoding is causal. Its state has a fixed size
    and is a pytree too; a prompt of any length and tokens one by one give the numbers of
    ``attend(..., is_causal=True)`` of all of them.
    """

    def attend(
        self,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        is_causal: bool | np.bool_ = False,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
        segment_ids: Integer[ArrayLike, "... T"] | None = None,
    ) -> Float[Array, "*batch T N D"]:
        """Attends to all tokens at once; returns ``[..., T, N, D]``."""

    def init(
        self,
        *,
        batch: Sequence[SupportsIndex] = (),
        num_key_heads: SupportsIndex,
        head_dim: SupportsIndex,
        value_dim: SupportsIndex,
        dtype: DTypeLike = jnp.float32,
    ) -> State:
        """Returns the state before the first token."""

    def step(
        self,
        state: State,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch T K H"],
        value: Float[ArrayLike, "*batch T K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
    ) -> tuple[Float[Array, "*batch T N D"], State]:
        """Attends to a state and, causally, to new tokens; returns outputs and the next state."""


def no_tokens(
    *,
    batch: Sequence[SupportsIndex],
    num_key_heads: SupportsIndex,
    head_dim: SupportsIndex,
    value_dim: SupportsIndex,
    dtype: DTypeLike,
) -> Arguments:
    """Returns tokens of length 0, from which a mechanism makes its first state.

    Raises:
      TypeError: If a number is not an integer or dtype is not floating.
      ValueError: If a number is below 1.
    """
    sizes = {"num_key_heads": num_key_heads, "head_dim": head_dim, "value_dim": value_dim}
    heads, dim, width = (checks.positive_int(name, size) for name, size in sizes.items())
    lead = checks.lead_shape("batch", batch)
    dtype = checks.floating_dtype("dtype", dtype)
    key = jnp.zeros((*lead, 0, heads, dim), dtype)
    return Arguments(key, key, jnp.zeros((*lead, 0, heads, width), dtype))


def new_tokens(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    value: Float[ArrayLike, "*batch S K D"],
    *,
    mask: Unchecked | None,
    bias: Unchecked | None,
    scale: Real[ArrayLike, ""] | None,
    query_seq_lengths: Unchecked | None,
    key_value_seq_lengths: Unchecked | None,
) -> Arguments:
    """Returns the arguments of one step of decoding.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not fit each other, or devices share the length.
    """
    arguments = Arguments.of(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    for x in (arguments.query, arguments.key, arguments.value):
        if axes := axes_of_length(x):
            raise ValueError(
                "Decoding takes tokens whose length is not sharded, got one sharded over the mesh "
                f"axis {', '.join(map(repr, axes))}; jax.reshard them."
            )
    return arguments


def check_step(arguments: Arguments, inputs: Inputs) -> None:
    """Raises ``ValueError`` if there are not as many keys as queries, or key heads were split."""
    query_length, key_length = arguments.query.shape[-3], arguments.key.shape[-3]
    if query_length != key_length:
        raise ValueError(
            "A step of decoding takes as many keys as queries, got "
            f"{key_length} and {query_length}."
        )
    num_key_heads = arguments.key.shape[-2]
    if inputs.key.shape[2] != num_key_heads:
        raise ValueError(
            "In decoding, mask and bias must be the same for the query heads that share a key "
            f"head, got one for each of {inputs.key.shape[2]} query heads, and {num_key_heads} key "
            "heads."
        )


def flatten(state: Arrays, expected: Arrays, batch: Shape) -> Arrays:
    """Returns a state with one leading axis, if it fits the keys and values.

    Args:
      state: A named tuple of arrays ``[*batch, ...]``.
      expected: A state that fits, in arrays or shapes ``[math.prod(batch), ...]``.
      batch: Leading shape.

    Raises:
      TypeError: If it is another kind of state, or has other dtypes.
      ValueError: If it has other shapes.
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


def unflatten(state: Arrays, batch: Shape) -> Arrays:
    """Returns a state with the leading shape of the tokens."""
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), state)


def check_kind(state: object, kind: type) -> None:
    """Raises ``TypeError`` if a state is of another kind."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be of type {kind.__name__}, got {type(state).__name__}.")


def _named(state: NamedArrays, values: Sequence[object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(state._fields, values, strict=True))
