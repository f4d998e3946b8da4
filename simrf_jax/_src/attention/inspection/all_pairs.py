"""Attention weights of all pairs of tokens: those that random features estimate, and softmax's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from simrf_jax._src.attention.estimator import Estimator, HeadMaps
from simrf_jax._src.attention.inputs.call import Call, Inputs
from simrf_jax._src.attention.random_features.exact_keys import SharedKeys
from simrf_jax._src.attention.random_features.kept_keys import kept_pairs, key_ranks
from simrf_jax._src.attention.random_features.state import exp_in_units, largest, or_zero
from simrf_jax._src.features import LogFeatures

# Above it, no significant term of a sum of feature products underflows.
LEAST_PRODUCT = 1e-30


class KernelRows(NamedTuple):
    """An unnormalized attention matrix, kernel * exp(log_scale), in range at any scale.

    Attributes:
      kernel: ``[*batch, N, T, S]``.
      log_scale: ``[*batch, N, T, 1]``.
    """

    kernel: Float[Array, "*batch N T S"]
    log_scale: Float[Array, "*batch N T 1"]

    def plus(self, other: KernelRows) -> KernelRows:
        """Returns the sum of two matrices, whose ranges may differ by any factor."""
        parts = (self, other)
        # Rows of zeros have no scale.
        is_empty = (jnp.all(part.kernel == 0, axis=-1, keepdims=True) for part in parts)
        scales = [
            jnp.where(empty, -jnp.inf, part.log_scale)
            for empty, part in zip(is_empty, parts, strict=True)
        ]
        shift = jnp.maximum(*scales)
        one, another = (
            exp_in_units(scale, shift, part.kernel)
            for part, scale in zip(parts, scales, strict=True)
        )
        return KernelRows(one + another, or_zero(shift))

    def row_sums(self) -> Float[Array, "*batch N T 1"]:
        """Returns sums of the kernel, ``[*batch, N, T, 1]``; exactly zero if nothing is visible."""
        return jnp.sum(self.kernel, axis=-1, keepdims=True)

    def weights(self) -> Float[Array, "*batch N T S"]:
        """Returns attention weights ``[*batch, N, T, S]``, whose rows sum to one or are zeros."""
        total = self.row_sums()
        nothing = total == 0
        return jnp.where(nothing, 0, self.kernel / jnp.where(nothing, 1, total))


def kernel_rows(estimator: Estimator, call: Call) -> tuple[KernelRows, KernelRows]:
    """Returns the kernel of all pairs that random features estimate, and the softmax kernel.

    In the band, if there is one, the estimate is the softmax kernel.
    """
    inputs, features = estimator.lay_out(call, scaled=True)
    log_weights = _log_weights(inputs, call.is_causal)
    exact = _softmax_rows(inputs, log_weights)
    near = are_exact(estimator, inputs, features, is_causal=call.is_causal)
    if near is None:
        estimated = _estimated_rows(inputs, features, log_weights)
    else:
        far_rows = _estimated_rows(inputs, features, jnp.where(near, -jnp.inf, log_weights))
        near_rows = _softmax_rows(inputs, jnp.where(near, log_weights, -jnp.inf))
        estimated = far_rows.plus(near_rows)

    def heads_first(x: Float[Array, "B T K G keys"]) -> Float[Array, "*batch N T keys"]:
        return jnp.swapaxes(inputs.outputs(x, dtype=x.dtype), -3, -2)

    return jax.tree.map(heads_first, (estimated, exact))


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


def log_kernels(
    estimator: Estimator, call: Call
) -> tuple[Float[Array, "*batch N T S"], Float[Array, "*batch N T S"]]:
    """Returns logarithms of the kernel that positive features estimate, and of the softmax kernel.

    Both are the softmax kernel at pairs with exact weights. They are minus infinity at hidden keys
    and in all rows beyond the lengths of queries, and NaN in rows of queries that are not finite or
    see a key that is not.

    Raises:
      ValueError: If features may be negative.
    """
    inputs, features = estimator.lay_out(call, scaled=True)
    log_weights = _log_weights(inputs, call.is_causal)
    log_weights = jnp.where(inputs.real[..., None], log_weights, -jnp.inf)
    queries, poisoned = features.queries(inputs.query)
    keys, nonfinite = features.keys(inputs.key, jnp.zeros_like(inputs.key_log_weights))
    if queries.values is not None:
        raise ValueError(
            "distillation_loss needs positive features, got feature_map="
            f"{type(estimator.feature_map).__name__}, whose features may be negative."
        )
    near = are_exact(estimator, inputs, features, is_causal=call.is_causal)
    visible = log_weights > -jnp.inf
    seen = nonfinite.mT[:, None, :, None] & visible
    if near is not None:  # Features are not used there.
        seen &= ~near
    lost = poisoned | ~inputs.finite | jnp.any(seen | jnp.isnan(log_weights), axis=-1)
    estimated = _log_feature_products(queries, keys) + queries.log_scale
    logits = _logits(inputs)
    if near is not None:
        estimated = jnp.where(near, logits, estimated)

    def heads_first(x: Float[Array, "B T K G S"]) -> Float[Array, "*batch N T S"]:
        x = jnp.where(visible, x + log_weights, -jnp.inf)
        x = jnp.where(lost[..., None] & inputs.real[..., None], jnp.nan, x)
        out = x.reshape(*inputs.batch, x.shape[1], x.shape[2] * x.shape[3], x.shape[4])
        return jnp.swapaxes(out if inputs.is_batched else out[0], -3, -2)

    return heads_first(estimated), heads_first(logits)


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
def _feature_products(
    queries: LogFeatures, keys: LogFeatures, log_weights: Float[Array, "B T K 1 S"]
) -> KernelRows:
    """Returns phi(q) . phi(k) for all pairs, ``[B, T, K, G, S]``."""
    # [B, K, 1, S, num_features], for all queries of a key head.
    keys = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2)[:, :, None], keys)

    @jax.checkpoint  # So gradients hold the features of one query's pairs at a time, too.
    def row(one: tuple[LogFeatures, Float[Array, "B K 1 S"]]) -> KernelRows:
        query, log_weights = one
        log_weights = log_weights[..., None]
        exponent = query.exponent[..., None, :] + keys.exponent
        visible = log_weights > -jnp.inf
        exponent = jnp.where(visible, exponent + log_weights, -jnp.inf)
        shift = largest(exponent, axis=(-2, -1))
        phi = exp_in_units(exponent, shift, keys.values)
        if query.values is not None:
            phi = phi * query.values[..., None, :]
        return KernelRows(jnp.sum(phi, axis=-1), or_zero(shift[..., 0]))

    by_query = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (queries, log_weights))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), jax.lax.map(row, by_query))


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

    return jax.lax.cond(jnp.all(is_exact), of_products, lambda: _log_feature_sums(queries, keys))


def _log_feature_sums(queries: LogFeatures, keys: LogFeatures) -> Float[Array, "B T K G S"]:
    """Returns ``_log_feature_products`` by a log-sum-exp over features for each pair."""
    exponents = jnp.moveaxis(keys.exponent, 1, 2)[:, :, None]  # [B, K, 1, S, num_features].

    @jax.checkpoint  # So gradients hold the features of one query's pairs at a time, too.
    def row(query: Float[Array, "B K G num_features"]) -> Float[Array, "B K G S"]:
        return jax.nn.logsumexp(query[..., None, :] + exponents, axis=-1)

    return jnp.moveaxis(jax.lax.map(row, jnp.moveaxis(queries.exponent, 1, 0)), 0, 1)


def _estimated_rows(
    inputs: Inputs, features: HeadMaps, log_weights: Float[Array, "B T K 1 S"]
) -> KernelRows:
    queries, poisoned = features.queries(inputs.query)
    # The log weights of a key differ between queries here, so they are added for each query.
    keys, nonfinite = features.keys(inputs.key, jnp.zeros_like(inputs.key_log_weights))
    seen = nonfinite.mT[:, None, :, None] & (log_weights > -jnp.inf)
    rows = _feature_products(queries, keys, log_weights)
    poisoned = poisoned[..., None] | jnp.any(seen | jnp.isnan(log_weights), axis=-1, keepdims=True)
    # Replace whole rows: other entries of a row would get NaN gradients, which reach other tokens.
    kernel = jnp.where(poisoned, jnp.nan, rows.kernel)
    return KernelRows(kernel, rows.log_scale + queries.log_scale)


def _softmax_rows(inputs: Inputs, log_weights: Float[Array, "B T K 1 S"]) -> KernelRows:
    logits = jnp.where(log_weights > -jnp.inf, _logits(inputs) + log_weights, -jnp.inf)
    shift = largest(logits, axis=-1)
    poisoned = jnp.any(jnp.isnan(log_weights), axis=-1, keepdims=True)
    kernel = jnp.where(poisoned, jnp.nan, exp_in_units(logits, shift))
    return KernelRows(kernel, or_zero(shift))


def _logits(inputs: Inputs) -> Float[Array, "B T K G S"]:
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("btkgh,bskh->btkgs", inputs.query, inputs.key, precision=highest)
