"""The keys just beyond a device's own, from the devices beside it, where they share a length."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from simrf_jax.attention.across_devices import Axes, shift
from simrf_jax.attention.layout import Inputs
from simrf_jax.attention.masks import run_numbers


def with_halo(
    inputs: Inputs, segment_ids: jax.Array | None, axes: Axes, *, bandwidth: int, is_causal: bool
) -> tuple[Inputs, int]:
    """Adds the keys of other devices that are within the bandwidth of a query here.

    Args:
      inputs: This device's.
      segment_ids: This device's, ``[..., T]``, or None.
      axes: What shards the length.
      bandwidth: How far a query sees.
      is_causal: Whether it sees back only.

    Returns:
      The inputs with more keys, and how many of them are before this device's.
    """
    length, size = inputs.key.shape[1], jax.lax.axis_size(axes)
    before = min(bandwidth, (size - 1) * length)
    after = 0 if is_causal else before

    def widen(x: jax.Array) -> jax.Array:
        earlier, later = _beyond(x, axes, before, 1), _beyond(x, axes, after, -1)
        return jnp.concatenate([*reversed(earlier), x, *later], axis=1)

    runs = None
    if segment_ids is not None:
        # All that lies between two positions of the stretch is in it: it tells their segments.
        ids = widen(jnp.reshape(segment_ids, inputs.key.shape[:2]))
        runs = run_numbers(ids, ids.shape[:1], ids.shape[1], ids.shape[1])
    position = jnp.arange(-before, length + after) + jax.lax.axis_index(axes) * length
    # The rest came around the end.
    exists = ((position >= 0) & (position < size * length))[None, :, None]
    wide = dataclasses.replace(
        inputs,
        key=widen(inputs.key.astype(inputs.value.dtype)),  # Products are in this type anyway.
        value=widen(inputs.value),
        key_log_weights=jnp.where(exists, widen(inputs.key_log_weights), -jnp.inf),
        runs=runs,
    )
    return wide, before


def _beyond(x: jax.Array, axes: Axes, reach: int, step: int) -> list[jax.Array]:
    """As many positions before this device's (step 1) or after them (-1), device by device."""
    length, pieces = x.shape[1], []
    for start in range(0, reach, length):
        count = min(length, reach - start)
        nearest = x[:, length - count :] if step == 1 else x[:, :count]
        pieces.append(shift(nearest, axes, step * (start // length + 1)))
    return pieces
