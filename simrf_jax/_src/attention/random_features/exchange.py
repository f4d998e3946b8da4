"""Random-feature attention over a sharded sequence: devices exchange running sums, never keys.

States are a monoid, so a device needs only the merged state of other devices' keys: those of all
devices if attention is bidirectional, those of the devices before it if it is causal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from simrf_jax._src.attention.banded.exchange import widen, with_halo
from simrf_jax._src.attention.estimator import Estimator, HeadMaps
from simrf_jax._src.attention.inputs.call import Axes, Call, Inputs
from simrf_jax._src.attention.inputs.sharding import (
    Shards,
    check_whole,
    from_earlier_device,
    over_devices,
)
from simrf_jax._src.attention.random_features.causal import (
    causal_attention,
    packed_attention,
    stretch,
)
from simrf_jax._src.attention.random_features.exact_band import Fields
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    state_of,
)


def attend_over_devices(
    estimator: Estimator, call: Call, shards: Shards
) -> Float[Array, "*batch T N D"]:
    """Attends over lengths that mesh axes shard.

    Args:
      estimator: W, the feature map and options.
      call: The whole call, or that of the device inside ``shard_map``.
      shards: Mesh axes that shard the lengths.
    """

    def check(call: Call, estimator: Estimator) -> Any:
        inputs, features = estimator.lay_out(call, scaled=True)
        return features.queries(inputs.query), AttentionState.empty(inputs, features)

    check_whole(check, call, estimator)

    def attend(call: Call, estimator: Estimator) -> Float[Array, "*batch T N D"]:
        part, chunk_size = shards.part(call), estimator.chunk_size
        inputs, features = estimator.lay_out(part)
        if estimator.exact_bandwidth is not None:
            return _attend_with_band(
                part,
                inputs,
                features,
                shards.axes,
                bandwidth=estimator.exact_bandwidth,
                chunk_size=chunk_size,
            )
        if not call.in_order():
            state = merge_over(state_of(inputs, features), shards.axes)
            state, poisoned = state.split_poisoned()
            readout = state.read(features.queries(inputs.query), poisoned, inputs.value.dtype)
            return inputs.outputs(readout.outputs())
        ids = part.segment_ids
        before = state_beyond(inputs, features, ids, shards.axes, 1)
        if call.is_causal:
            read, _ = causal_attention(inputs, features, before, chunk_size=chunk_size)
        else:
            after = state_beyond(inputs, features, ids, shards.axes, -1)
            read = packed_attention(inputs, features, before, after, chunk_size=chunk_size)
        return inputs.outputs(read.readout.outputs())

    return over_devices(attend, shards, call, estimator)


def _attend_with_band(
    call: Call,
    inputs: Inputs,
    features: HeadMaps,
    axes: Axes,
    *,
    bandwidth: int,
    chunk_size: int,
) -> Float[Array, "*batch T N D"]:
    """Attends to a band of keys exactly, and to the other keys of all devices by features.

    Each device needs the keys that ``Fields`` pairs with its queries, so devices exchange the keys
    within the bandwidth of a border.
    """
    is_causal = call.is_causal
    wide, history = with_halo(
        inputs, call.segment_ids, axes, bandwidth=bandwidth, is_causal=is_causal
    )
    fields = Fields.of(
        wide, features.feature_map, bandwidth=bandwidth, is_causal=is_causal, history=history
    )
    length, halo = inputs.key.shape[1], wide.key.shape[1] - inputs.key.shape[1]
    ids = None
    if call.segment_ids is not None:
        ids = jnp.reshape(call.segment_ids, inputs.key.shape[:2])
        ids = widen(ids, axes, history, halo - history)

    def outer_state(keys: Inputs, start: int, step: int) -> AttentionState:
        of_keys = None if ids is None else stretch(ids, start, length, None)
        return state_beyond(keys, features, of_keys, axes, step)

    before = outer_state(fields.earlier, history - bandwidth, 1)
    after = None if fields.later is None else outer_state(fields.later, history + bandwidth, -1)
    out, _ = fields.attend(features, before, after, chunk_size=chunk_size)
    return fields.earlier.outputs(out)


@jax.named_scope("merge_states_over_devices")
def merge_over(state: AttentionState, axes: Axes) -> AttentionState:
    """Returns the state of the keys of all devices, by a maximum and one sum in its units."""
    if not axes:  # A sum over no axes fails next to manual axes (jax 0.10.2).
        return state
    maxima = jax.lax.pmax(jax.lax.stop_gradient(state.maxima), axes)
    return AttentionState(jax.lax.psum(state.in_units_of(maxima), axes), maxima)


@jax.named_scope("pass_states_between_devices")
def state_beyond(
    inputs: Inputs,
    features: HeadMaps,
    segment_ids: Integer[Array, "... S"] | None,
    axes: Axes,
    step: int,
) -> AttentionState:
    """Returns the state of the keys of all devices before this one (step 1) or after it (-1).

    Args:
      inputs: Inputs of this device.
      features: Feature maps.
      segment_ids: Segment ids of this device's keys, or None. On other devices, only keys of a
        segment that continues here count.
      axes: Mesh axes that shard the length.
      step: 1 or -1.
    """
    segments = inputs.segments
    if segment_ids is None or segments is None:
        return _exclusive_scan(ScanElement(state_of(inputs, features), None), axes, step).state
    segment_ids = jnp.reshape(segment_ids, segments.shape)
    begin, end = (0, -1) if step == 1 else (-1, 0)
    from_there = from_earlier_device(segment_ids[:, end], axes, step)
    continues = (from_there == segment_ids[:, begin]) & _has_source(axes, step)
    stops = (segments[:, begin] != segments[:, end]) | ~continues
    leaves = jnp.equal(segments, segments[:, end, None])[..., None]
    log_weights = jnp.where(leaves, inputs.key_log_weights, -jnp.inf)
    state = state_of(dataclasses.replace(inputs, key_log_weights=log_weights), features)
    return _exclusive_scan(ScanElement(state, stops), axes, step).state.where(continues)


class ScanElement(NamedTuple):
    """The effect of consecutive devices on the state that passes through them.

    Attributes:
      state: State of those of their keys that devices after them see.
      stops: ``[B]``, True where a segment begins on them, so that nothing from before passes
        through; None without segments.
    """

    state: AttentionState
    stops: Bool[Array, " B"] | None

    def then(self, following: ScanElement) -> ScanElement:
        """Returns the effect of these devices and then the following ones; associative."""
        if self.stops is None or following.stops is None:
            return ScanElement(self.state.merge(following.state), None)
        state = self.state.where(~following.stops).merge(following.state)
        return ScanElement(state, self.stops | following.stops)

    def where(self, condition: Bool[Array, ""]) -> ScanElement:
        """Returns an element that adds nothing unless ``condition``, one Boolean, is True."""
        every = jnp.broadcast_to(condition, self.state.maxima.shape[:1])
        return ScanElement(
            self.state.where(every), None if self.stops is None else self.stops & every
        )


def _exclusive_scan(element: ScanElement, axes: Axes, step: int) -> ScanElement:
    """Runs an exclusive scan over the devices, in a logarithmic number of rounds."""
    incoming, through = element.where(jnp.array(False)), element
    distance = step
    while abs(distance) < jax.lax.axis_size(axes):
        earlier = jax.tree.map(
            functools.partial(from_earlier_device, axes=axes, by=distance), through
        )
        earlier = earlier.where(_has_source(axes, distance))
        incoming, through = earlier.then(incoming), earlier.then(through)
        distance *= 2
    return incoming


def _has_source(axes: Axes, by: int) -> Bool[Array, ""]:
    """Returns whether a shift brings a value from a device ``by`` earlier, not around the end."""
    source = jax.lax.axis_index(axes) - by
    return (source >= 0) & (source < jax.lax.axis_size(axes))
