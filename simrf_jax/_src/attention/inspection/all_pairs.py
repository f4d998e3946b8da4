"""Attention weights of all pairs of tokens: those that random features estimate, and softmax's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from simrf_jax._src.attention.estimator import Estimator, HeadMaps
from simrf_jax._src.attention.inputs.call import Call, Inputs, unequal_features
from simrf_jax._src.attention.random_features.exact_keys import SharedKeys
from simrf_jax._src.attention.random_features.kept_keys import kept_pairs, key_ranks
from simrf_jax._src.attention.random_features.state import exp_in_units, largest, or_zero
from simrf_jax._src.features import LogFeatures

# Above it, no significant term of a sum of feature products underflows.
LEAST_PRODUCT = 1e-30


class LogKernels(NamedTuple):
    """Logarithms of the kernels of all pairs, minus infinity where a key is hidden.

    Attributes:
      estimated: Logarithms of the kernel that features estimate, without ``log_scale``.
      exact: Logarithms of the softmax kernel.
      sign: Sign of the estimate; None if features are positive.
      log_scale: Term of ``estimated`` that all pairs of a query share.
    """

    estimated: Float[Array, "*batch N T S"]
    exact: Float[Array, "*batch N T S"]
    sign: Float[Array, "*batch N T S"] | None
    log_scale: Float[Array, "*batch N T 1"]


def normalized(
    logs: Float[Array, "*batch N T S"], sign: Float[Array, "*batch N T S"] | None = None
) -> tuple[
    Float[Array, "*batch N T S"], Float[Array, "*batch N T 1"], Float[Array, "*batch N T 1"]
]:
    """Returns weights, whose rows sum to one or are zeros, with row sums in units of e^shift."""
    shift = largest(logs, axis=-1)
    kernel = exp_in_units(logs, shift, sign)
    total = jnp.sum(kernel, axis=-1, keepdims=True)
    return jnp.where(total == 0, 0, kernel / jnp.where(total == 0, 1, total)), total, or_zero(shift)


def are_exact(
    estimator: Estimator, inputs: Inputs, features: HeadMaps, *, is_causal: bool
) -> Bool[Array, "#B T #K 1 S"] | None:
    """Returns a mask of the pairs of queries and keys with exact weights, if there are any."""
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    near = None
    if estimator.exact_bandwidth is not None:
        distances = jnp.abs(jnp.arange(length)[:, None] - jnp.arange(key_length)[None])
        near = (distances <= estimator.exact_bandwidth)[None, :, None, None]
    choice = estimator.exact_keys
    if choice is None or key_length == 0:
        return near
    if choice.keeps(is_causal=is_causal):
        delay = 0 if estimator.exact_bandwidth is None else estimator.exact_bandwidth + 1
        of_keys = kept_pairs(key_ranks(inputs, features), choice.count, delay)
        of_keys = jnp.swapaxes(of_keys, 1, 2)[:, :, :, None]
    else:
        exact = SharedKeys.of(inputs, features, choice)
        of_keys = exact.among(inputs.key).mT[:, None, :, None]
        of_keys = jnp.broadcast_to(of_keys, (of_keys.shape[0], length, *of_keys.shape[2:]))
    return of_keys if near is None else of_keys | near


def log_kernels(estimator: Estimator, call: Call, *, pair_by_pair: bool = False) -> LogKernels:
    """Returns logarithms of the kernel that features estimate, and of the softmax kernel.

    Both are the softmax kernel at pairs with exact weights. They are minus infinity at hidden keys
    and in all rows beyond the lengths of queries, and NaN in rows of queries that are not finite or
    see a key that is not.

    Raises:
      ValueError: If explicit mesh axes shard the length, or features may be negative and it does
        not go pair by pair.
    """
    if axes := call.explicit_axes(in_order=True):
        raise ValueError(
            "All pairs of tokens are compared, so no explicit mesh axis may shard the length, got "
            f"{axes}; use jax.sharding.reshard."
        )
    inputs, features = estimator.lay_out(call, scaled=True)
    log_weights = _log_weights(inputs, call.is_causal)
    log_weights = jnp.where(inputs.real[..., None], log_weights, -jnp.inf)
    queries, poisoned = features.queries(inputs.query)
    keys, nonfinite = features.keys(inputs.key, jnp.zeros_like(inputs.key_log_weights))
    near = are_exact(estimator, inputs, features, is_causal=call.is_causal)
    visible = log_weights > -jnp.inf
    seen = nonfinite.mT[:, None, :, None] & visible
    if near is not None:  # Features are not used there.
        seen &= ~near
    lost = poisoned | ~inputs.finite | jnp.any(seen | jnp.isnan(log_weights), axis=-1)
    if pair_by_pair:  # No key has an influence on the rounding of another one's pairs.
        estimated, sign = _log_feature_sums(queries, keys)
    elif queries.values is None:
        estimated, sign = _log_feature_products(queries, keys), None
    else:
        raise ValueError(
            "distillation_loss needs positive features, got feature_map="
            f"{type(estimator.feature_map).__name__}, whose features may be negative."
        )
    scale = queries.log_scale  # Apart: it is large, and rounding it would cost all weights digits.
    logits = jnp.einsum(
        "btkgh,bskh->btkgs", inputs.query, inputs.key, precision=jax.lax.Precision.HIGHEST
    )
    if near is not None:
        estimated = jnp.where(near, logits - scale, estimated)
        sign = None if sign is None else jnp.where(near, 1, sign)

    def heads_first(x: Float[Array, "B T K G S"]) -> Float[Array, "*batch N T S"]:
        out = x.reshape(*inputs.batch, x.shape[1], x.shape[2] * x.shape[3], x.shape[4])
        return jnp.swapaxes(out if inputs.is_batched else out[0], -3, -2)

    def weighted(x: Float[Array, "B T K G S"]) -> Float[Array, "*batch N T S"]:
        x = jnp.where(visible, x + log_weights, -jnp.inf)
        return heads_first(jnp.where(lost[..., None] & inputs.real[..., None], jnp.nan, x))

    sign, scale = jax.tree.map(heads_first, (sign, scale))
    return LogKernels(weighted(estimated), weighted(logits), sign, scale)


def score_ranks(estimator: Estimator, call: Call) -> Float[Array, "*batch K T S"]:
    """Returns the ranks by score of the keys up to each query, for an estimator that scores keys.

    They count from 0, and are infinite for keys that the query does not see.
    """
    inputs, features = estimator.lay_out(call, scaled=True)
    ranks = key_ranks(inputs, features)
    return ranks.reshape(*inputs.batch, *ranks.shape[1:]) if inputs.is_batched else ranks[0]


def _log_weights(inputs: Inputs, is_causal: bool) -> Float[Array, "B T K 1 S"]:
    """Returns the terms to add to the logits, ``[B, T, K, 1, S]``.

    Minus infinity hides a key from a query; NaN marks a visible key that is not finite, which turns
    the query's row into NaN.
    """
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    weights = inputs.key_log_weights.mT[:, None, :, None]
    weights = jnp.broadcast_to(weights, (weights.shape[0], length, *weights.shape[2:]))
    if is_causal:
        past = jnp.tri(length, key_length, dtype=bool)[None, :, None, None]
        weights = jnp.where(past, weights, -jnp.inf)
    if inputs.segments is not None:
        together = inputs.segments[:, :, None] == inputs.segments[:, None]
        weights = jnp.where(together[:, :, None, None], weights, -jnp.inf)
    return weights


@jax.jit
def _log_feature_products(queries: LogFeatures, keys: LogFeatures) -> Float[Array, "B T K G S"]:
    """Returns the logarithm of phi(q) . phi(k) for all pairs, without the scale of the queries.

    One matrix product computes all pairs, each feature in units of its largest key, unless some
    pair would underflow.
    """
    maxima = largest(keys.exponent, axis=1)
    logits = queries.exponent + maxima[:, :, :, None]
    shift = or_zero(largest(logits, axis=-1))
    products = jnp.einsum(
        "btkgm,bskm->btkgs",
        jnp.exp(logits - shift),
        exp_in_units(keys.exponent, maxima),
        precision=jax.lax.Precision.HIGHEST,
    )
    # A vector whose features are all zero has kernel zero with all others.
    has_none = (jnp.all(phi.exponent == -jnp.inf, axis=-1) for phi in (queries, keys))
    of_queries, of_keys = has_none
    is_exact = products > LEAST_PRODUCT
    is_exact |= of_queries[..., None] | of_keys.mT[:, None, :, None]

    def of_products() -> Float[Array, "B T K G S"]:
        is_some = products > 0
        return jnp.where(is_some, jnp.log(jnp.where(is_some, products, 1)) + shift, -jnp.inf)

    return jax.lax.cond(jnp.all(is_exact), of_products, lambda: _log_feature_sums(queries, keys)[0])


@jax.jit
def _log_feature_sums(
    queries: LogFeatures, keys: LogFeatures
) -> tuple[Float[Array, "B T K G S"], Float[Array, "B T K G S"]]:
    """Returns logarithms and signs of products, by a log-sum-exp over features for each pair."""
    # [B, K, 1, S, num_features], for all queries of a key head.
    keys = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2)[:, :, None], keys)

    @jax.checkpoint  # So gradients hold the features of one query's pairs at a time, too.
    def row(
        query: LogFeatures,
    ) -> tuple[Float[Array, "B K G S"], Float[Array, "B K G S"]]:
        exponent = query.exponent[..., None, :] + keys.exponent
        shift = largest(exponent, axis=-1)
        values = None
        if query.values is not None and keys.values is not None:
            if query.values.shape[-1] != keys.values.shape[-1]:
                raise unequal_features(query.values.shape[-1], keys.values.shape[-1])
            values = query.values[..., None, :] * keys.values
        total = jnp.sum(exp_in_units(exponent, shift, values), axis=-1)
        is_some = total != 0
        logs = jnp.log(jnp.abs(jnp.where(is_some, total, 1))) + or_zero(shift[..., 0])
        return jnp.where(is_some, logs, -jnp.inf), jnp.sign(total)

    rows = jax.lax.map(row, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), queries))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), rows)
