"""Attention over a length that devices share: states of keys travel, the keys stay where they are.

States are a monoid (``state.py``), so a device needs of the others only what their keys add up to:
the sum of all states if attention is bidirectional, the states before its own if it is causal.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from simrf_jax.attention.causal import split_length
from simrf_jax.attention.layout import HeadMaps, Inputs
from simrf_jax.attention.state import (
    AttentionState,
    empty_state,
    hide,
    in_units_of,
    keep,
    key_features,
    merge,
    spoil,
    summarise,
    with_ones,
)

SUMMARY_CHUNK = 1024  # Keys whose features are in memory at a time, of each device.

# Names of mesh axes, bound inside shard_map.
Axes: TypeAlias = tuple[str, ...]


def merge_over(state: AttentionState, axes: Axes) -> AttentionState:
    """The state of the keys of all devices: a maximum, and one sum in its units."""
    maxima = jax.lax.pmax(jax.lax.stop_gradient(state.maxima), axes)
    return AttentionState(jax.lax.psum(in_units_of(state, maxima), axes), maxima)


def states_around(
    inputs: Inputs,
    maps: HeadMaps,
    segment_ids: jax.Array | None,
    axes: Axes,
    *,
    is_causal: bool,
) -> tuple[AttentionState, AttentionState]:
    """States of the keys before this device's and, unless causal, of those after them.

    Args:
      inputs: This device's.
      maps: Feature maps.
      segment_ids: This device's, ``[..., T]``, or None. Of other devices only the keys of a segment
        that goes on here count.
      axes: What shards the length.
      is_causal: Whether the keys after do not matter; the second state is empty then.
    """
    nothing = empty_state(inputs, maps)
    runs = inputs.runs
    if segment_ids is None or runs is None:
        return _flow(Passage(_state_of(inputs, maps, None), None), axes, 1).state, nothing
    segment_ids, several = jnp.reshape(segment_ids, runs.shape), runs[:, -1] > 0
    first, last = segment_ids[:, 0], segment_ids[:, -1]
    goes_on = (shift(last, axes, 1) == first) & _has_source(axes, 1)
    ends = _state_of(inputs, maps, jnp.equal(runs, runs[:, -1:]))
    before = keep(_flow(Passage(ends, several | ~goes_on), axes, 1).state, goes_on)
    if is_causal:
        return before, nothing
    goes_on = (shift(first, axes, -1) == last) & _has_source(axes, -1)
    begins = _state_of(inputs, maps, jnp.equal(runs, 0))
    after = keep(_flow(Passage(begins, several | ~goes_on), axes, -1).state, goes_on)
    return before, after


class Passage(NamedTuple):
    """What a stretch of devices adds to the state that flows through it.

    Attributes:
      state: Of the keys that are seen beyond the stretch.
      stops: ``[B]``, True where a segment begins in it and nothing from before goes through; None
        without segments.
    """

    state: AttentionState
    stops: jax.Array | None


def _then(first: Passage, second: Passage) -> Passage:
    """The passage through one stretch and the next; associative."""
    if first.stops is None or second.stops is None:
        return Passage(merge(first.state, second.state), None)
    state = merge(keep(first.state, ~second.stops), second.state)
    return Passage(state, first.stops | second.stops)


def _nothing_unless(passage: Passage, where: jax.Array) -> Passage:
    state, stops = passage
    every = jnp.broadcast_to(where, state.maxima.shape[:1])
    return Passage(keep(state, every), None if stops is None else stops & every)


def _flow(passage: Passage, axes: Axes, step: int) -> Passage:
    """The exclusive scan over devices, in as many rounds as the logarithm of their number."""
    incoming, through = _nothing_unless(passage, jnp.array(False)), passage
    distance = step
    while abs(distance) < jax.lax.axis_size(axes):
        # That of as many devices as the distance.
        earlier = jax.tree.map(lambda x, by=distance: shift(x, axes, by), through)
        earlier = _nothing_unless(earlier, _has_source(axes, distance))
        incoming, through = _then(earlier, incoming), _then(earlier, through)
        distance *= 2
    return incoming


def shift(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """What the device that many before has, around the end."""
    size = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, (i + by) % size) for i in range(size)])


def _has_source(axes: Axes, by: int) -> jax.Array:
    """Whether what a shift brings is from a device that many before, not around the end."""
    source = jax.lax.axis_index(axes) - by
    return (source >= 0) & (source < jax.lax.axis_size(axes))


class Keys(NamedTuple):
    """Keys as ``Inputs`` has them, and which of them count, ``[B, S]``; None for all."""

    key: jax.Array
    value: jax.Array
    log_weights: jax.Array
    visible: jax.Array | None


def _state_of(inputs: Inputs, maps: HeadMaps, visible: jax.Array | None) -> AttentionState:
    """The state of this device's keys, those where ``visible``, ``[B, S]``, is True."""

    def more(state: AttentionState, chunk: Keys) -> tuple[AttentionState, None]:
        keys, spoils = key_features(maps, chunk.key, chunk.log_weights)
        if chunk.visible is not None:
            keys, spoils = hide(keys, chunk.visible), spoils & chunk.visible[..., None]
        here = spoil(summarise(keys, with_ones(chunk.value)), jnp.any(spoils, axis=1))
        return merge(state, here), None

    length = inputs.key.shape[1]
    split = functools.partial(split_length, size=min(SUMMARY_CHUNK, max(length, 1)))
    chunks = Keys(
        split(inputs.key, fill=None),
        split(inputs.value, fill=0),
        split(inputs.key_log_weights, fill=-jnp.inf),
        None if visible is None else split(visible, fill=False),
    )
    body = jax.checkpoint(more, prevent_cse=False)
    return jax.lax.scan(body, empty_state(inputs, maps), chunks)[0]
