"""Banded attention as a mechanism: with its bandwidth, and token by token from the last keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax import checks, one_line
from simrf_jax.attention.banded.attention import banded_attention
from simrf_jax.attention.banded.softmax import attend_in_windows, cut
from simrf_jax.attention.inputs.arguments import Arguments, Inputs
from simrf_jax.attention.inputs.masks import Lengths, Mask
from simrf_jax.attention.mechanism import (
    check_kind,
    check_step,
    flatten,
    new_tokens,
    no_tokens,
    unflatten,
)


class Window(NamedTuple):
    """The last keys and values, as many as the bandwidth k: the state of banded attention.

    Attributes:
      key: ``[..., k, K, H]``.
      value: ``[..., k, K, D]``.
      log_weights: ``[..., k, K]``, log weights of the keys by masks and biases; minus infinity
        where one is hidden or has not come yet, NaN where one was not finite.
    """

    key: Float[Array, "*batch bandwidth K H"]
    value: Float[Array, "*batch bandwidth K D"]
    log_weights: Float[Array, "*batch bandwidth K"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    def followed_by(self, inputs: Inputs) -> Window:
        """Returns the keys ``[B, k, ...]`` and new ones after them."""
        key = inputs.key.astype(inputs.value.dtype)
        return jax.tree.map(_join, self, Window(key, inputs.value, inputs.key_log_weights))

    def put_into(self, inputs: Inputs) -> Inputs:
        """Returns inputs with these keys, ``[B, S, ...]``, in the place of theirs."""
        return dataclasses.replace(
            inputs, key=self.key, value=self.value, key_log_weights=self.log_weights
        )

    def part(self, keys: slice) -> Window:
        """Returns some of the keys ``[B, S, ...]``."""
        return Window(*(x[:, keys] for x in self))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["bandwidth", "block_size", "sequence_axis"],
)
@dataclasses.dataclass(frozen=True)
class Band:
    """Banded attention with a bandwidth.

    Attributes:
      bandwidth: Distance k, at least 0. Query t attends to the keys from t - k to t + k.
      block_size: Queries in a block; None for a default. See ``banded_attention``.
      sequence_axis: Mesh axis, or a tuple of them, that shards the length in ``attend``; see
        ``banded_attention``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> band = simrf_jax.Band(4)
      >>> whole = band.attend(q, k, v, is_causal=True)
      >>> window = band.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> window.key.shape
      (4, 8, 64)
      >>> prompt, window = band.step(window, q[:9], k[:9], v[:9])
      >>> token, window = band.step(window, q[9:], k[9:], v[9:])
      >>> bool(abs(token - whole[9:]).max() < 1e-5)
      True
    """

    bandwidth: SupportsIndex
    block_size: SupportsIndex | None = None
    sequence_axis: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.integer("bandwidth", self.bandwidth, least=0)
        if self.block_size is not None:
            checks.positive_int("block_size", self.block_size)
        checks.axis_names("sequence_axis", self.sequence_axis)

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
        """Returns ``banded_attention`` of all tokens; see there for the arguments."""
        return banded_attention(
            query,
            key,
            value,
            bandwidth=self.bandwidth,
            mask=mask,
            bias=bias,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            segment_ids=segment_ids,
            block_size=self.block_size,
            sequence_axis=self.sequence_axis,
        )

    def init(
        self,
        *,
        batch: Sequence[SupportsIndex] = (),
        num_key_heads: SupportsIndex,
        head_dim: SupportsIndex,
        value_dim: SupportsIndex,
        dtype: DTypeLike = jnp.float32,
    ) -> Window:
        """Returns the window before the first token.

        Args:
          batch: Leading shape.
          num_key_heads: Number K of key heads.
          head_dim: Width H of the keys.
          value_dim: Width D of the values.
          dtype: Type of the queries, keys and values to come.

        Raises:
          TypeError: If a number is not an integer or dtype is not floating.
          ValueError: If a number is out of range.
        """
        bandwidth = checks.integer("bandwidth", self.bandwidth, least=0)
        tokens = no_tokens(
            batch=batch,
            num_key_heads=num_key_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
        )
        return unflatten(
            empty_window(tokens.lay_out(scaled=False), bandwidth), tokens.key.shape[:-3]
        )

    def step(
        self,
        state: Window,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch T K H"],
        value: Float[ArrayLike, "*batch T K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
    ) -> tuple[Float[Array, "*batch T N D"], Window]:
        """Attends to a window and, causally, to new tokens.

        Args:
          state: Window of the tokens before.
          query: ``[..., T, N, H]``.
          key: ``[..., T, K, H]``.
          value: ``[..., T, K, D]``.
          mask: Boolean mask of the new keys, broadcastable to ``[..., N, 1, T]``; the same for
            query heads that share a key head.
          bias: Added to the logits; of the same shapes, with the same condition.
          scale: Multiplies the logits; by default ``H ** -0.5``.
          query_seq_lengths: Integers of the batch shape; outputs from there on are zero.
          key_value_seq_lengths: Integers of the batch shape; new keys from there on are hidden.

        Returns:
          The output ``[..., T, N, D]`` and the new window, of the same shapes.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not fit each other, the window or the bandwidth, devices share
            the length, or the mask or the bias differ between heads that share keys.
        """
        bandwidth = checks.integer("bandwidth", self.bandwidth, least=0)
        arguments = new_tokens(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        check_kind(state, Window)
        check_bandwidth(state, bandwidth)
        block_size = None if self.block_size is None else int(self.block_size)
        return _step(state, arguments, bandwidth=bandwidth, block_size=block_size)


@functools.partial(jax.jit, static_argnames=("bandwidth", "block_size"), inline=True)
def _step(
    state: Window, arguments: Arguments, *, bandwidth: int, block_size: int | None
) -> tuple[Float[Array, "*batch T N D"], Window]:
    """Attends to a window and, causally, to new tokens."""
    inputs = arguments.lay_out(scaled=False)
    check_step(arguments, inputs)
    batch, length = arguments.query.shape[:-3], inputs.query.shape[1]
    before = flatten(state, jax.eval_shape(lambda: empty_window(inputs, bandwidth)), batch)
    seen = before.followed_by(inputs)
    blocks = cut(length, bandwidth + length, bandwidth, True, block_size, history=bandwidth)
    out = inputs.outputs(attend_in_windows(seen.put_into(inputs), blocks))
    return out, unflatten(seen.part(slice(length, None)), batch)


def _join(
    before: Float[Array, "B bandwidth *rest"], new: Float[Array, "B T *rest"]
) -> Float[Array, "B bandwidth+T *rest"]:
    sharding = jax.typeof(new).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        # The first window is whole on every device.
        before = jax.sharding.reshard(before, sharding)
    return jnp.concatenate([before, new], axis=1)


def check_bandwidth(window: Window, bandwidth: int) -> None:
    """Raises ``ValueError`` unless a window has as many keys as the bandwidth."""
    if (given := jnp.shape(window.key)[-3]) != bandwidth:
        raise ValueError(
            f"state must be of bandwidth={bandwidth}, got one of bandwidth={given}; make a new one "
            "with init."
        )


def empty_window(inputs: Inputs, bandwidth: int) -> Window:
    """Returns a window of hidden zeros."""
    (batch, _, *heads), width = inputs.key.shape, inputs.value.shape[-1]
    key = jnp.zeros((batch, bandwidth, *heads), inputs.value.dtype)
    value = jnp.zeros((*key.shape[:-1], width), inputs.value.dtype)
    return Window(key, value, jnp.full(key.shape[:-1], -jnp.inf, inputs.key.dtype))
