"""Decoding token by token: the empty state, steps that answer queries, and appending keys."""

from __future__ import annotations

from typing import SupportsIndex

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
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    in_units_of,
    largest,
    state_of,
    with_ones,
)


def empty_state(estimator: Estimator, call: Call) -> AttentionState | ExactBandState:
    """Returns the state before any tokens, for tokens like those of a call."""
    _check_keys(estimator)
    inputs, features = estimator.lay_out(call)
    batch = call.key.shape[:-3]
    far = unflatten(AttentionState.empty(inputs, features), batch)
    if estimator.exact_bandwidth is None:
        return far
    return ExactBandState(unflatten(empty_window(inputs, estimator.exact_bandwidth), batch), far)


def _check_keys(estimator: Estimator) -> None:
    """Raises ``ValueError`` if there are exact keys, which a state does not hold."""
    if estimator.exact_keys is not None:
        raise ValueError(
            "exact_keys are for whole sequences: the state of decoding holds no single keys. "
            "exact_bandwidth has a state."
        )


def check_state(estimator: Estimator, state: AttentionState | ExactBandState, call: Call) -> None:
    """Raises if a state has another band or none, or the new tokens do not fit it."""
    _check_keys(estimator)
    check_tokens(call)
    bandwidth = estimator.exact_bandwidth
    check_kind(state, AttentionState if bandwidth is None else ExactBandState)
    if bandwidth is not None and isinstance(state, ExactBandState):
        check_bandwidth(state.near, bandwidth)


@jax.named_scope("random_feature_attention_step")
def step(
    estimator: Estimator, state: AttentionState | ExactBandState, call: Call
) -> tuple[Float[Array, "*batch T N D"], AttentionState | ExactBandState]:
    """Attends to a state and, causally, to new tokens."""
    if isinstance(state, ExactBandState):
        return _step_with_band(estimator, state, call)
    inputs, features = estimator.lay_out(call)
    check_step(call, inputs)
    batch = call.query.shape[:-3]
    before = _flat_sums(state, inputs, features, batch)
    if _is_one(call.query.shape[-3]):
        out, after = attend_to_next(inputs, features, before)
    else:
        read, after = causal_attention(inputs, features, before, chunk_size=estimator.chunk_size)
        out = read.outputs()
    return inputs.outputs(out), unflatten(after, batch)


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
    return fields.outputs(out), _after(seen, far, length, batch)


def _is_one(length: SupportsIndex) -> bool:
    """Returns whether a length is known to be one; symbolic ones, of jax.export, are not."""
    return isinstance(length, int) and length == 1


@jax.named_scope("random_feature_attention_append")
def append(
    estimator: Estimator, state: AttentionState | ExactBandState, call: Call
) -> AttentionState | ExactBandState:
    """Returns the state with more keys."""
    if isinstance(state, ExactBandState):
        return _append_with_band(estimator, state, call)
    inputs, features = estimator.lay_out(call)
    batch = call.key.shape[:-3]
    before = _flat_sums(state, inputs, features, batch)
    return unflatten(before.merge(state_of(inputs, features)), batch)


def _append_with_band(estimator: Estimator, state: ExactBandState, call: Call) -> ExactBandState:
    """Returns the state with more keys, which push equally many out of the window."""
    inputs, features = estimator.lay_out(call)
    batch, length = call.key.shape[:-3], inputs.key.shape[1]
    seen, before = _flat(state, inputs, features, batch)
    leaving = seen.part(slice(length)).put_into(inputs)
    leaving = leaving.clean(scaled=True, fill_with_tokens=not features.feature_map.is_finite)
    return _after(seen, before.merge(state_of(leaving, features)), length, batch)


def _flat_sums(
    state: AttentionState, inputs: Inputs, features: HeadMaps, batch: Shape
) -> AttentionState:
    """Returns the sums of a state with one leading axis, if they fit the keys and values."""
    # Merging with an empty state gives it the same varying mesh axes as the tokens.
    empty = AttentionState.empty(inputs, features)
    return empty.merge(flatten(state, empty, batch))


def _flat(
    state: ExactBandState, inputs: Inputs, features: HeadMaps, batch: Shape
) -> tuple[Window, AttentionState]:
    """Returns the keys of a window followed by new ones, and the sums over the keys before."""
    bandwidth = state.near.key.shape[-3]
    expected = jax.eval_shape(lambda: empty_window(inputs, bandwidth))
    near = flatten(state.near, expected, batch)
    return near.followed_by(inputs), _flat_sums(state.far, inputs, features, batch)


def _after(seen: Window, far: AttentionState, length: int, batch: Shape) -> ExactBandState:
    """Returns the state after ``length`` new keys, which pushed that many out of the window."""
    near = seen.part(slice(length, None))
    return ExactBandState(unflatten(near, batch), unflatten(far, batch))


def attend_to_next(
    inputs: Inputs, features: HeadMaps, state: AttentionState
) -> tuple[Float[Array, "B 1 K G D"], AttentionState]:
    """Lets one query for each sequence attend to a state and to the key at its own position.

    ``causal_attention`` reads the keys before a query separately from its own key, because later
    keys must not reach it. Here no key is later, so the query reads the new state, and the sums
    pass through memory once.

    Args:
      inputs: One query and one key for each sequence.
      features: Their feature maps.
      state: State of the keys before.

    Returns:
      The outputs in the logits' type, and the state of all keys.
    """
    state, poisoned = state.split_poisoned()
    keys, nonfinite = features.keys(inputs.key, inputs.key_log_weights)
    queries, no_features = features.queries(inputs.query)
    value = with_ones(inputs.value)
    maxima = jnp.maximum(state.maxima, jnp.squeeze(largest(keys.exponent, axis=1), 1))
    phi = jnp.squeeze(in_units_of(maxima, keys), 1)
    sums = state.in_units_of(maxima) + phi[..., None] * value[:, 0, :, None]
    state, poisoned = AttentionState(sums, maxima), poisoned | nonfinite[:, 0]
    out = state.read(queries, value.dtype).outputs()
    out = jnp.where((no_features | poisoned[:, None, :, None])[..., None], jnp.nan, out)
    return out, state.poison(poisoned)
