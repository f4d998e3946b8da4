"""Banded attention over a sharded sequence: devices exchange the keys next to their borders."""

from __future__ import annotations

import dataclasses
import functools
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Shaped

from simrf_jax._src.attention.banded.softmax import attend_in_windows, cut
from simrf_jax._src.attention.inputs.call import Axes, Call, Inputs
from simrf_jax._src.attention.inputs.masks import segment_numbers
from simrf_jax._src.attention.inputs.sharding import (
    Shards,
    check_whole,
    from_earlier_device,
    over_devices,
)


@functools.partial(jax.jit, static_argnames=("shards", "bandwidth", "block_size"), inline=True)
def attend_over_devices(
    call: Call, shards: Shards, bandwidth: int, block_size: SupportsIndex | None
) -> Float[Array, "*batch T N D"]:
    """Attends over lengths that mesh axes shard.

    Args:
      call: The whole call, or that of the device inside ``shard_map``.
      shards: Mesh axes that shard the lengths.
      bandwidth: Distance over which a query sees keys.
      block_size: Queries in a block; None for a default.
    """

    def check(call: Call) -> Inputs:
        inputs = call.lay_out(scaled=False)
        cut(inputs.query.shape[1], inputs.key.shape[1], bandwidth, call.is_causal, block_size)
        return inputs

    check_whole(check, call)

    def attend(call: Call) -> Float[Array, "*batch T N D"]:
        part, is_causal = shards.part(call), call.is_causal
        inputs, history = with_halo(
            part.lay_out(scaled=False),
            part.segment_ids,
            shards.axes,
            bandwidth=bandwidth,
            is_causal=is_causal,
        )
        lengths = (inputs.query.shape[1], inputs.key.shape[1])
        blocks = cut(*lengths, bandwidth, is_causal, block_size, history)
        return inputs.outputs(attend_in_windows(inputs, blocks))

    return over_devices(attend, shards, call)


@jax.named_scope("exchange_halo")
def with_halo(
    inputs: Inputs,
    segment_ids: Integer[Array, "... T"] | None,
    axes: Axes,
    *,
    bandwidth: int,
    is_causal: bool,
) -> tuple[Inputs, int]:
    """Adds the keys of other devices that are within the bandwidth of a query here.

    Args:
      inputs: Inputs of this device.
      segment_ids: Segment ids of this device, ``[..., T]``, or None.
      axes: Mesh axes that shard the length.
      bandwidth: Distance over which a query sees keys.
      is_causal: True if queries see no later keys.

    Returns:
      The inputs with more keys, and how many of these come before this device's own keys.
    """
    length, size = inputs.key.shape[1], jax.lax.axis_size(axes)
    before = min(bandwidth, (size - 1) * length)
    after = 0 if is_causal else before

    def wider(x: Shaped[Array, "B length *rest"]) -> Shaped[Array, "B _ *rest"]:
        return widen(x, axes, before, after)

    segments = None
    if segment_ids is not None:
        # The halo is contiguous, so segments can be numbered within it.
        ids = wider(jnp.reshape(segment_ids, inputs.key.shape[:2]))
        segments = segment_numbers(ids, ids.shape[:1], ids.shape[1], ids.shape[1])
    position = jnp.arange(-before, length + after) + jax.lax.axis_index(axes) * length
    # Positions beyond the ends have wrapped around.
    exists = ((position >= 0) & (position < size * length))[None, :, None]
    wide = dataclasses.replace(
        inputs,
        key=wider(inputs.key.astype(inputs.value.dtype)),  # Products are in this type anyway.
        value=wider(inputs.value),
        key_log_weights=jnp.where(exists, wider(inputs.key_log_weights), -jnp.inf),
        segments=segments,
    )
    return wide, before


def widen(
    x: Shaped[Array, "B length *rest"], axes: Axes, before: int, after: int
) -> Shaped[Array, "B {before}+length+{after} *rest"]:
    """Adds positions of earlier and later devices, wrapping around at the ends."""
    earlier, later = _beyond(x, axes, before, 1), _beyond(x, axes, after, -1)
    return jnp.concatenate([*reversed(earlier), x, *later], axis=1)


def _beyond(
    x: Shaped[Array, "B length *rest"], axes: Axes, reach: int, step: int
) -> list[Shaped[Array, "B _ *rest"]]:
    """Returns ``reach`` positions before this device's (step 1) or after them (-1), by device."""
    length, pieces = x.shape[1], []
    for start in range(0, reach, length):
        count = min(length, reach - start)
        nearest = x[:, length - count :] if step == 1 else x[:, :count]
        pieces.append(from_earlier_device(nearest, axes, step * (start // length + 1)))
    return pieces
