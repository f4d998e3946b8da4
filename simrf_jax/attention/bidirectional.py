"""Bidirectional random-feature attention, exact at any scale of its inputs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from simrf_jax.attention.contraction import contract
from simrf_jax.features import LogFeatures


def bidirectional_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_map: Callable[[jax.Array], LogFeatures],
    key_map: Callable[[jax.Array], LogFeatures],
    key_log_weights: jax.Array | None,
) -> jax.Array:
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
      query: ``[B, T, K, G, H]``, already scaled, in the type to compute logits in. K is the number
        of key heads, G the queries' heads for each of them.
      key: ``[B, S, K, H]``, likewise.
      value: ``[B, S, K, D]`` in the type to contract in.
      query_map: Maps ``[B, T, K, G, H]`` to features ``[B, T, K, G, num_features]``.
      key_map: Maps ``[B, S, K, H]`` to features ``[B, S, K, num_features]``.
      key_log_weights: ``[1 or B, S, 1 or K]`` to add to the keys' log features, or None.

    Returns:
      ``[B, T, K, G, D]`` in the logits' type; zeros where no key is visible.
    """
    if key_log_weights is not None:
        # Padding may hold anything, NaN too, and 0 * NaN is not 0.
        visible = key_log_weights[..., None] > -jnp.inf
        key, value = jnp.where(visible, key, 0), jnp.where(visible, value, 0)
    queries, keys = query_map(query), key_map(key)
    log_keys = keys.exponent + keys.log_scale
    if key_log_weights is not None:
        log_keys += key_log_weights[..., None]

    key_max = _max(log_keys, axis=1)
    # A query's log_scale cancels. A feature that is zero for all keys is dropped here too, or it
    # could set the shift of those that matter.
    logits = queries.exponent + key_max[:, :, :, None, :]
    query_features = _signed_exp(logits - _finite(_max(logits, axis=-1)), queries.values)
    key_features = _signed_exp(log_keys - _finite(key_max), keys.values)

    # One more column of values, all ones, sums the denominator along with the numerator.
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    state = contract("bskm,bskd->bkmd", key_features, value)
    summed = contract("btkgm,bkmd->btkgd", query_features, state.astype(value.dtype))
    numerator, denominator = summed[..., :-1], summed[..., -1:]
    nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
    return jnp.where(nothing, 0, numerator / jnp.where(nothing, 1, denominator))


def _max(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))


def _finite(shift: jax.Array) -> jax.Array:
    """A shift of 0 where there is nothing above minus infinity."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def _signed_exp(exponent: jax.Array, values: jax.Array | None) -> jax.Array:
    phi = jnp.exp(exponent)
    return phi if values is None else phi * values
