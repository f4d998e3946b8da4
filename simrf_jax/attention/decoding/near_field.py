"""Causal attention to the keys nearby token by token, from a window of the last keys."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention.blocks import cut
from simrf_jax.attention.decoding.batch import (
    check_kind,
    check_step,
    check_whole,
    flatten,
    unflatten,
)
from simrf_jax.attention.layout import Inputs, lay_out
from simrf_jax.attention.near_field import attend_in_blocks


class Window(NamedTuple):
    """The last keys and values, as many as the bandwidth k.

    Attributes:
      key: ``[..., k, K, H]``.
      value: ``[..., k, K, D]``.
      log_weights: ``[..., k, K]``, what masks and biases said of the keys; minus infinity where one
        is hidden or has not come yet, NaN where one was not finite.
    """

    key: jax.Array
    value: jax.Array
    log_weights: jax.Array


def init_window(
    *,
    bandwidth: int,
    batch: tuple[int, ...] = (),
    num_key_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: DTypeLike = jnp.float32,
) -> Window:
    """The window before the first token.

    Args:
      bandwidth: How many of the last keys each query sees beside its own; at least 0.
      batch: Leading shape.
      num_key_heads: Number K of key heads.
      head_dim: Width H of the keys.
      value_dim: Width D of the values.
      dtype: Of the queries, keys and values to come.

    Returns:
      A window for ``window_step``. A pytree: it goes through jit, scan and checkpoints.

    Raises:
      TypeError: If a number is not an integer or dtype is not floating.
      ValueError: If a number is out of range.

    Example:
      >>> import simrf_jax
      >>> window = simrf_jax.decoding.init_window(
      ...     bandwidth=32, batch=(2,), num_key_heads=8, head_dim=64, value_dim=64
      ... )
      >>> window.key.shape
      (2, 32, 8, 64)
    """
    bandwidth = checks.integer("bandwidth", bandwidth, least=0)
    sizes = {"num_key_heads": num_key_heads, "head_dim": head_dim, "value_dim": value_dim}
    heads, dim, width = (checks.positive_int(name, size) for name, size in sizes.items())
    batch = checks.lead_shape("batch", batch)
    dtype = checks.floating_dtype("dtype", dtype)
    key = jnp.zeros((*batch, 0, heads, dim), dtype)
    value = jnp.zeros((*batch, 0, heads, width), dtype)
    return unflatten(_empty(lay_out(key, key, value)[0], bandwidth), batch)


def window_step(
    window: Window,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
) -> tuple[jax.Array, Window]:
    """Attends to a window and, causally, to the tokens after it.

    One token at a time or a whole prompt: both give the numbers of
    ``banded_attention(..., is_causal=True)`` of all tokens.

    Args:
      window: Of ``init_window`` or ``window_step``.
      query: ``[..., T, N, H]``.
      key: ``[..., T, K, H]``.
      value: ``[..., T, K, D]``.
      mask: Of the new keys, broadcastable to ``[..., N, 1, T]``; the same for query heads that
        share a key head.
      bias: Likewise.
      scale: As ``banded_attention``.
      query_seq_lengths: As ``banded_attention``.
      key_value_seq_lengths: Of the new keys.

    Returns:
      The output ``[..., T, N, D]`` and the new window, of the same shapes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not fit each other or the window, devices share the length, or the
        mask or the bias differ between heads that share keys.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 64))
      >>> window = simrf_jax.decoding.init_window(
      ...     bandwidth=32, num_key_heads=8, head_dim=64, value_dim=64
      ... )
      >>> out, window = simrf_jax.decoding.window_step(window, q, k, v)
      >>> out.shape
      (1, 8, 64)
    """
    check_whole(query=query, key=key, value=value)
    inputs, restore = lay_out(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=1.0,  # As banded_attention.
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    check_step(inputs.query, inputs.key, jnp.shape(key)[-2])
    batch = jnp.shape(query)[:-3]
    check_kind(window, Window)
    bandwidth = jnp.shape(window.key)[-3]
    before = flatten(window, jax.eval_shape(lambda: _empty(inputs, bandwidth)), batch)
    seen = jax.tree.map(_join, before, _as_window(inputs))
    length = inputs.query.shape[1]
    blocks = cut(length, bandwidth + length, bandwidth, True, None, history=bandwidth)
    inputs = dataclasses.replace(
        inputs, key=seen.key, value=seen.value, key_log_weights=seen.log_weights
    )
    out = attend_in_blocks(inputs, blocks, scale)
    after = jax.tree.map(lambda x: x[:, length:], seen)
    return restore(out), unflatten(after, batch)


def _as_window(inputs: Inputs) -> Window:
    """Returns the keys as the near field takes them."""
    return Window(inputs.key.astype(inputs.value.dtype), inputs.value, inputs.key_log_weights)


def _join(before: jax.Array, new: jax.Array) -> jax.Array:
    sharding = jax.typeof(new).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        # The first window is whole on every device.
        before = jax.sharding.reshard(before, sharding)
    return jnp.concatenate([before, new], axis=1)


def _empty(inputs: Inputs, bandwidth: int) -> Window:
    """Hidden zeros."""
    (batch, _, *heads), width = inputs.key.shape, inputs.value.shape[-1]
    key = jnp.zeros((batch, bandwidth, *heads), inputs.value.dtype)
    value = jnp.zeros((*key.shape[:-1], width), inputs.value.dtype)
    return Window(key, value, jnp.full(key.shape[:-1], -jnp.inf, inputs.key.dtype))
