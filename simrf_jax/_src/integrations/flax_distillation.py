"""Distillation for both Flax APIs: the loss of the learned features of an adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from simrf_jax._src import checks
from simrf_jax._src.attention import RandomFeatureMechanism
from simrf_jax._src.attention.inspection.distillation import loss_of
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import flax_calibration
from simrf_jax._src.integrations.flax_attention import Request


class Losses(NamedTuple):
    """The sum of the losses of an adapter's calls, and their number; or of a stack of layers."""

    total: jax.Array
    num_calls: jax.Array | np.ndarray

    @classmethod
    def empty(cls, lead: tuple[int, ...]) -> Losses:
        """Returns the losses of no calls, for a stack of layers of a leading shape."""
        return cls(jnp.zeros(lead), np.zeros(lead, int))


def add_loss(losses: Losses, request: Request, mechanism: RandomFeatureMechanism) -> Losses:
    """Adds the ``distillation_loss`` of a call, if its features are learned.

    Queries and keys have no gradient, and those of padding do not count; see ``add_moments``.

    Raises:
      ValueError: If the call has segments or a factored mask.
    """
    if not isinstance(mechanism.feature_map, Learned):
        return losses
    call = request.call
    if call.segment_ids is not None or request.real is not None:
        raise ValueError(
            "Distillation reads attention masks of the keys and sequence lengths, got segment_ids "
            "or a mask with a query axis. Give it batches of one sequence in each row."
        )
    query, key = jax.lax.stop_gradient((call.query, call.key))
    counts, _ = flax_calibration.real_tokens(request)
    query = jnp.where(counts[..., None, None], query, 0)  # Padding may hold anything.
    loss = loss_of(mechanism, dataclasses.replace(call, query=query, key=key, value=key), counts)
    loss = jnp.where(request.is_valid(), loss, jnp.nan)
    return Losses(losses.total + loss, losses.num_calls + 1)


def mean_loss(adapters: Iterable[Losses]) -> jax.Array:
    """Returns the mean loss of some adapters; NaN if one has no calls, and their number is traced.

    Raises:
      ValueError: If the number is known to be 0.
    """
    means = []
    for losses in adapters:
        has_calls = losses.num_calls > 0
        if not checks.is_traced(has_calls) and not np.all(has_calls):
            raise ValueError(
                "An adapter with learned features saw no call: call the whole model. A lifted "
                "transformation around it must pass its loss on: nn.scan and nn.vmap by "
                "distillation in their variable_axes, nnx.scan and nnx.vmap by an axis of the "
                "layers that is not None."
            )
        means.append(jnp.mean(jnp.where(has_calls, losses.total, jnp.nan)))
    return jnp.mean(jnp.stack(means))
