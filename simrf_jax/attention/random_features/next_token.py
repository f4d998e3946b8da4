"""One step of decoding: a key joins the state, and the query at its position reads the state."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax.attention.inputs.arguments import Inputs
from simrf_jax.attention.random_features.state import (
    AttentionState,
    HeadMaps,
    in_units_of,
    largest,
    with_ones,
)


def attend_to_next(
    inputs: Inputs, features: HeadMaps, state: AttentionState
) -> tuple[Float[Array, "B 1 K G D"], AttentionState]:
    """Lets one query for each sequence attend to a state and to the key at its own position.

    ``causal_attention`` reads the keys before a query apart from its own, because later ones must
    not reach it. Here none are later, so the query reads the new state, and the sums go through
    memory once.

    Args:
      inputs: One query and one key for each sequence.
      features: Their feature maps.
      state: State of the keys before.

    Returns:
      The outputs in the logits' type, and the state of all keys.
    """
    state, spoiled = state.split_spoiled()
    keys, spoils = features.keys(inputs.key, inputs.key_log_weights)
    queries, no_features = features.queries(inputs.query)
    value = with_ones(inputs.value)
    maxima = jnp.maximum(state.maxima, jnp.squeeze(largest(keys.exponent, axis=1), 1))
    phi = jnp.squeeze(in_units_of(maxima, keys), 1)
    sums = state.in_units_of(maxima) + phi[..., None] * value[:, 0, :, None]
    state, spoiled = AttentionState(sums, maxima), spoiled | spoils[:, 0]
    out = state.read(queries, value.dtype).outputs()
    out = jnp.where((no_features | spoiled[:, None, :, None])[..., None], jnp.nan, out)
    return out, state.spoil(spoiled)
