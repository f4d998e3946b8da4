"""Distillation for both Flax APIs: the loss of the learned features of one adapter."""

from __future__ import annotations

from typing import SupportsIndex

import jax
import jax.numpy as jnp

from simrf_jax.attention import distillation_loss
from simrf_jax.features.learned import Learned
from simrf_jax.integrations.flax_attention import Call


def loss_of_call(call: Call, learned: Learned, exact_bandwidth: SupportsIndex | None) -> jax.Array:
    """Returns the ``distillation_loss`` of the queries and keys of a call, which have no gradient.

    Raises:
      ValueError: If the call has segments or a factored mask.
    """
    if call.segment_ids is not None or call.real is not None:
        raise ValueError(
            "Distillation reads attention masks of the keys and sequence lengths, got segment_ids "
            "or a mask with a query axis. Give it batches of one sequence in each row."
        )
    query, key = jax.lax.stop_gradient((call.query, call.key))
    loss = distillation_loss(
        query,
        key,
        None,
        feature_map=learned,
        mask=call.mask,
        bias=call.bias,
        scale=call.scale,
        is_causal=call.is_causal,
        query_seq_lengths=call.query_seq_lengths,
        key_value_seq_lengths=call.key_value_seq_lengths,
        exact_bandwidth=exact_bandwidth,
    )
    for valid in call.valid:
        loss = jnp.where(jnp.all(valid), loss, jnp.nan)
    return loss
