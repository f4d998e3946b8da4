"""Decoding token by token: the empty state, steps that answer queries, and appending keys."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.attention.banded.window import Window, check_bandwidth, empty_window
from simrf_jax._src.attention.estimator import Estimator, HeadMaps
from simrf_jax._src.attention.inputs.call import Call, Inputs
from simrf_jax._src.attention.inputs.masks import Shape
from simrf_jax._src.attention.mechanism import (
    check_kind,
    check_step,
    check_tokens,
    flatten,
    unflatten,
)
from simrf_jax._src.attention.random_features.causal import causal_attention
from simrf_jax._src.attention.random_features.exact_band import ExactBandState, Fields
from simrf_jax._src.attention.random_features.kept_keys import (
    Division,
    ExactKeysState,
    KeptKeys,
    attend_with_kept_keys,
    check_count,
)
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    Readout,
    exp_in_units,
    largest,
    state_of,
    with_ones,
)

# Sums over keys, alone or next to exact keys.
FarState: TypeAlias = AttentionState | ExactKeysState
State: TypeAlias = FarState | ExactBandState


def empty_state(estimator: Estimator, call: Call) -> State:
    """Returns the state before any tokens, for tokens like those of a call."""
    _check_keys(estimator)
    inputs, features = estimator.lay_out(call)
    batch, choice = call.key.shape[:-3], estimator.exact_keys
    far: FarState = AttentionState.empty(inputs, features)
    if choice is not None:
        far = ExactKeysState.empty(inputs, features, choice.count)
    if estimator.exact_bandwidth is None:
        return unflatten(far, batch)
    return unflatten(ExactBandState(empty_window(inputs, estimator.exact_bandwidth), far), batch)


def _check_keys(estimator: Estimator) -> None:
    """Raises ``ValueError`` if there are exact keys that only whole sequences have."""
    choice = estimator.exact_keys
    if choice is not None and (choice.positions is not None or choice.by == "mass"):
        raise ValueError(
            "Decoding chooses exact keys by scores of the keys, exact_keys=ExactKeys(count, "
            'by="score"); positions and masses are for whole sequences.'
        )


def check_state(estimator: Estimator, state: State, call: Call) -> None:
    """Raises if a state has another band or other keys, or the new tokens do not fit it."""
    _check_keys(estimator)
    check_tokens(call)
    bandwidth, far = estimator.exact_bandwidth, state
    if bandwidth is not None:
        check_kind(state, ExactBandState)
    if bandwidth is not None and isinstance(state, ExactBandState):
        check_bandwidth(state.near, bandwidth)
        far = state.far
    choice = estimator.exact_keys
    check_kind(far, AttentionState if choice is None else ExactKeysState)
    if choice is not None and isinstance(far, ExactKeysState):
        check_count(far.kept, choice.count)


@jax.named_scope("random_feature_attention_step")
def step(
    estimator: Estimator, state: State, call: Call
) -> tuple[Float[Array, "*batch T N D"], State]:
    """Attends to a state and, causally, to new tokens."""
    if isinstance(state, ExactBandState):
        return _step_with_band(estimator, state, call)
    inputs, features = estimator.lay_out(call)
    check_step(call, inputs)
    batch, length = call.query.shape[:-3], call.query.shape[-3]
    before, chunk_size = _flat_far(state, inputs, features, batch), estimator.chunk_size
    after: FarState
    if isinstance(before, ExactKeysState):
        readout, after = attend_with_kept_keys(inputs, features, before, chunk_size=chunk_size)
    elif isinstance(length, int) and length == 1:  # Symbolic lengths, of jax.export, may be more.
        readout, after = attend_to_next(inputs, features, before)
    else:
        read, after = causal_attention(inputs, features, before, chunk_size=chunk_size)
        readout = read.readout
    return inputs.outputs(readout.outputs()), unflatten(after, batch)


def _step_with_band(
    estimator: Estimator, state: ExactBandState, call: Call
) -> tuple[Float[Array, "*batch T N D"], ExactBandState]:
    """Attends to the band and to the sums over the keys that have left it."""
    inputs, features = estimator.lay_out(call)
    check_step(call, inputs)
    batch, length = call.query.shape[:-3], inputs.query.shape[1]
    seen, before = _flat(state, inputs, features, batch)
    bandwidth = seen.key.shape[1] - length
    fields = Fields.of(
        seen.put_into(inputs),
        features.feature_map,
        bandwidth=bandwidth,
        is_causal=True,
        history=bandwidth,
    )
    out, far = fields.attend(features, before, None, chunk_size=estimator.chunk_size)
    return fields.earlier.outputs(out), _after(seen, far, length, batch)


@jax.named_scope("random_feature_attention_append")
def append(estimator: Estimator, state: State, call: Call) -> State:
    """Returns the state with more keys."""
    if isinstance(state, ExactBandState):
        return _append_with_band(estimator, state, call)
    inputs, features = estimator.lay_out(call)
    batch = call.key.shape[:-3]
    before = _flat_far(state, inputs, features, batch)
    return unflatten(_with_more(before, inputs, features, estimator.chunk_size), batch)


def _with_more(before: FarState, inputs: Inputs, features: HeadMaps, chunk_size: int) -> FarState:
    """Returns a state with more keys."""
    if isinstance(before, AttentionState):
        return before.merge(state_of(inputs, features))
    divided = Division.of(
        inputs, None, features, before.kept, chunk_size=chunk_size, with_own_key=True
    )
    return ExactKeysState(divided.kept, before.far.merge(state_of(divided.far, features)))


def _append_with_band(estimator: Estimator, state: ExactBandState, call: Call) -> ExactBandState:
    """Returns the state with more keys, which push equally many out of the window."""
    inputs, features = estimator.lay_out(call)
    batch, length = call.key.shape[:-3], inputs.key.shape[1]
    seen, before = _flat(state, inputs, features, batch)
    leaving = seen.part(slice(length)).put_into(inputs)
    leaving = leaving.clean(scaled=True, fill_with_tokens=not features.feature_map.is_finite)
    far = _with_more(before, leaving, features, estimator.chunk_size)
    return _after(seen, far, length, batch)


def _flat_far(state: FarState, inputs: Inputs, features: HeadMaps, batch: Shape) -> FarState:
    """Returns a state with one leading axis, if it fits the keys and values."""
    sums = state.far if isinstance(state, ExactKeysState) else state
    # Merging with an empty state gives it the same varying mesh axes as the tokens.
    empty = AttentionState.empty(inputs, features)
    sums = empty.merge(flatten(sums, empty, batch))
    if isinstance(state, AttentionState):
        return sums
    room = KeptKeys.empty(inputs, state.kept.score.shape[-2])
    kept = flatten(state.kept, room, batch)
    # Merging with no keys does the same: their scores are minus infinity, and the rest is zeros.
    kept = KeptKeys(
        kept.key + room.key,
        kept.value + room.value,
        kept.log_weights + room.log_weights,
        jnp.maximum(kept.score, room.score),
    )
    return ExactKeysState(kept, sums)


def _flat(
    state: ExactBandState, inputs: Inputs, features: HeadMaps, batch: Shape
) -> tuple[Window, FarState]:
    """Returns the keys of a window followed by new ones, and the sums over the keys before."""
    bandwidth = state.near.key.shape[-3]
    expected = jax.eval_shape(lambda: empty_window(inputs, bandwidth))
    near = flatten(state.near, expected, batch)
    return near.followed_by(inputs), _flat_far(state.far, inputs, features, batch)


def _after(seen: Window, far: FarState, length: int, batch: Shape) -> ExactBandState:
    """Returns the state after ``length`` new keys, which pushed that many out of the window."""
    return unflatten(ExactBandState(seen.part(slice(length, None)), far), batch)


def attend_to_next(
    inputs: Inputs, features: HeadMaps, state: AttentionState
) -> tuple[Readout, AttentionState]:
    """Lets one query for each sequence attend to a state and to the key at its own position.

    ``causal_attention`` reads the keys before a query separately from its own key, because later
    keys must not reach it. Here no key is later, so the query reads the new state, and the sums
    pass through memory once.

    Args:
      inputs: One query and one key for each sequence.
      features: Their feature maps.
      state: State of the keys before.

    Returns:
      The sums that the queries read, and the state of all keys.
    """
    state, poisoned = state.split_poisoned()
    keys, nonfinite = features.keys(inputs.key, inputs.key_log_weights)
    queries = features.queries(inputs.query)
    value = with_ones(inputs.value)
    maxima = jnp.maximum(state.maxima, jnp.squeeze(largest(keys.exponent, axis=1), 1))
    phi = jnp.squeeze(exp_in_units(keys.exponent, maxima[:, None], keys.values), 1)
    sums = state.in_units_of(maxima) + phi[..., None] * value.astype(phi.dtype)[:, 0, :, None]
    state, poisoned = AttentionState(sums, maxima), poisoned | nonfinite[:, 0]
    return state.read(queries, poisoned, value.dtype), state.poison(poisoned)
