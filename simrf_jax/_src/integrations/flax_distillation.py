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

    Nothing in the call has a gradient, and queries of padding do not count; see ``add_moments``.
    """
    if not isinstance(mechanism.feature_map, Learned):
        return losses
    call = jax.lax.stop_gradient(request.call)
    if request.real is None:
        counts = flax_calibration.real_tokens(request)[0][..., None]
    else:  # It may differ between heads.
        counts = jnp.asarray(request.real[..., 0])
    query = jnp.where(counts[..., None], call.query, 0)  # Padding may hold anything.
    call = dataclasses.replace(call, query=query, value=call.key)
    loss = loss_of(mechanism, call, counts.mT)
    loss = jnp.where(request.is_valid(), loss, jnp.nan)
    return Losses(losses.total + loss, losses.num_calls + 1)


def mean_loss(adapters: Iterable[Losses]) -> jax.Array:
    """Returns the mean over adapters of the mean loss of their calls.

    It is NaN if an adapter has no calls, and their number is traced.

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
        num_calls = jnp.where(has_calls, losses.num_calls, 1).astype(losses.total.dtype)
        of_one_call = losses.total / num_calls
        means.append(jnp.mean(jnp.where(has_calls, of_one_call, jnp.nan)))
    return jnp.mean(jnp.stack(means))
