"""Bidirectional random-feature attention, exact at any scale of its inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from simrf_jax.attention.across_devices import Axes, merge_over
from simrf_jax.attention.layout import HeadMaps, Inputs
from simrf_jax.attention.state import (
    key_features,
    normalise,
    query_features,
    read,
    split_spoiled,
    spoil,
    summarise,
    with_ones,
)


def bidirectional_attention(inputs: Inputs, maps: HeadMaps, *, axes: Axes = ()) -> jax.Array:
    r"""Every query attends to all keys.

    .. math::
        o_t = \frac{\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i} v_s}
                   {\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i}}

    with :math:`a_{ti}` the exponents of the queries, :math:`\kappa_{si}` those of the keys (scale
    and log weights included), :math:`c_i = \max_s \kappa_{si}` and :math:`b_t = \max_i (a_{ti} +
    c_i)`; values of signed maps stand as factors before the exponentials. Both shifts cancel, so
    this is the estimator itself; nothing overflows, and for a positive map the denominator is at
    least 1 wherever a query and a visible key have a feature in common: no epsilon.

    Args:
      inputs: Queries, keys and values without segments.
      maps: Their feature maps.
      axes: Mesh axes that shard the keys, inside ``shard_map``.

    Returns:
      ``[B, T, K, G, D]`` in the logits' type; zeros where no key is visible.
    """
    keys, spoils = key_features(maps, inputs.key, inputs.key_log_weights)
    state, spoiled = summarise(keys, with_ones(inputs.value)), jnp.any(spoils, axis=1)
    if axes:
        state, spoiled = split_spoiled(merge_over(spoil(state, spoiled), axes))
    queries, no_features = query_features(maps, inputs.query)
    out = normalise(read(state, queries, inputs.value.dtype))
    # Last, for NaN before it would reach the gradients of W: 0 * NaN is not 0.
    return jnp.where((no_features | spoiled[:, None, :, None])[..., None], jnp.nan, out)
