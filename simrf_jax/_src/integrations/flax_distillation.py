"""Distillation for both Flax APIs: the loss of the learned features of one adapter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.attention.inspection.distillation import loss_of
from simrf_jax._src.integrations.flax_attention import Request


def loss_of_call(request: Request, mechanism: RandomFeatureMechanism) -> jax.Array:
    """Returns the ``distillation_loss`` of a call, without gradients for queries and keys.

    Raises:
      ValueError: If the call has segments or a factored mask.
    """
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
    return loss
