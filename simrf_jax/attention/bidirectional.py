"""Bidirectional random-feature attention, exact at any scale of its inputs."""

from __future__ import annotations

import jax

from simrf_jax.attention.across_devices import Axes, merge_over
from simrf_jax.attention.layout import Inputs
from simrf_jax.attention.state import (
    log_key_features,
    normalise,
    read,
    summarise,
    visible_only,
    with_ones,
)


def bidirectional_attention(inputs: Inputs, *, axes: Axes = ()) -> jax.Array:
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
      inputs: As ``lay_out_with_features`` makes them; without segments.
      axes: Mesh axes that shard the keys, inside ``shard_map``.

    Returns:
      ``[B, T, K, G, D]`` in the logits' type; zeros where no key is visible.
    """
    key, value = visible_only(inputs.key, inputs.value, inputs.key_log_weights)
    keys = log_key_features(inputs.key_map(key), inputs.key_log_weights)
    state = summarise(keys, with_ones(value))
    if axes:
        state = merge_over(state, axes)
    return normalise(read(state, inputs.query_map(inputs.query), value.dtype))
