"""Distillation for both Flax APIs: the loss of the learned features of an adapter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.attention.inspection.distillation import loss_of
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations.flax_attention import Request


def add_loss(total: jax.Array, request: Request, mechanism: RandomFeatureMechanism) -> jax.Array:
    """Adds the ``distillation_loss`` of a call, if its features are learned.

    Queries and keys have no gradient.

    Raises:
      ValueError: If the call has segments or a factored mask.
    """
    if not isinstance(mechanism.feature_map, Learned):
        return total
    call = request.call
    if call.segment_ids is not None or request.real is not None:
        raise ValueError(
            "Distillation reads attention masks of the keys and sequence lengths, got segment_ids "
            "or a mask with a query axis. Give it batches of one sequence in each row."
        )
    query, key = jax.lax.stop_gradient((call.query, call.key))
    call = dataclasses.replace(call, query=query, key=key, value=key)
    loss = loss_of(mechanism, call)
    for valid in request.valid:
        loss = jnp.where(jnp.all(valid), loss, jnp.nan)
    return total + loss
