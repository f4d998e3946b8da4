"""Attention with every pair of tokens written out: what random features estimate, and softmax's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax.attention.masks import key_log_weights, within_lengths
from simrf_jax.features import LogFeatureMap, LogFeatures
from simrf_jax.projections import StructuredProjection


class Heads(NamedTuple):
    """What attention is computed from, heads before lengths and each query head with its own keys.

    Attributes:
      query: ``[*batch, N, T, H]``, times the square root of the scale, zero where it sees no key.
      key: ``[*batch, N, S, H]``, likewise, zero where no query sees it.
      log_weights: ``[*batch, N, T, S]`` to add to the logits, minus infinity where hidden.
    """

    query: jax.Array
    key: jax.Array
    log_weights: jax.Array


class KernelRows(NamedTuple):
    """An un-normalised attention matrix, kernel * exp(log_scale), in range at any scale.

    Attributes:
      kernel: ``[*batch, N, T, S]``.
      log_scale: ``[*batch, N, T, 1]``.
    """

    kernel: jax.Array
    log_scale: jax.Array

    def row_sums(self) -> jax.Array:
        """Of the kernel alone, ``[*batch, N, T, 1]``; zero, exactly, where nothing is visible."""
        return jnp.sum(self.kernel, axis=-1, keepdims=True)

    def weights(self) -> jax.Array:
        """Attention weights ``[*batch, N, T, S]``: rows sum to one, or are zeros."""
        total = self.row_sums()
        nothing = total == 0
        return jnp.where(nothing, 0, self.kernel / jnp.where(nothing, 1, total))


def by_heads(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    scale: ArrayLike | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    dtype: jnp.dtype,
) -> Heads:
    """Lays out ``[*batch, T, N, H]`` and ``[*batch, S, K, H]``, with what each query sees."""
    *leading, query_length, num_heads, dim = query.shape
    key_length, num_key_heads = key.shape[-3:-1]
    batch = tuple(leading)
    log_weights = key_log_weights(
        mask,
        bias,
        key_value_seq_lengths,
        batch=batch,
        num_heads=num_heads,
        query_length=query_length,
        key_length=key_length,
        dtype=dtype,
    )
    pairs = (*batch, num_heads, query_length, key_length)
    if log_weights is None:
        log_weights = jnp.zeros(pairs, dtype)
    else:
        log_weights = jnp.broadcast_to(log_weights[..., None, :], pairs)
    if is_causal:
        past = jnp.tri(query_length, key_length, dtype=bool)
        log_weights = jnp.where(jnp.broadcast_to(past, pairs), log_weights, -jnp.inf)
    if query_seq_lengths is not None:
        real = within_lengths("query_seq_lengths", query_seq_lengths, batch, query_length)
        log_weights = jnp.where(real[..., None, :, None], log_weights, -jnp.inf)

    key = jnp.repeat(key, num_heads // num_key_heads, axis=-2)
    root = jnp.sqrt(jnp.asarray(dim**-0.5 if scale is None else scale, dtype))
    query, key = (jnp.swapaxes(x, -3, -2).astype(dtype) * root for x in (query, key))
    # Padding may hold anything, NaN too: it must not reach the gradients.
    visible = log_weights > -jnp.inf
    query = jnp.where(visible.any(axis=-1)[..., None], query, 0)
    key = jnp.where(visible.any(axis=-2)[..., None], key, 0)
    return Heads(query, key, log_weights)


def estimated_rows(
    heads: Heads,
    projection: jax.Array | StructuredProjection | None,
    maps: tuple[LogFeatureMap, LogFeatureMap],
) -> KernelRows:
    """phi(q) . phi(k) for all pairs, with W ``[num_features, H]`` or one for each key head."""
    num_heads, axis = heads.query.shape[-3], None
    if projection is not None and projection.ndim == 3:
        groups, axis = num_heads // projection.shape[0], 0
        projection = jax.tree.map(lambda w: jnp.repeat(w, groups, axis=0), projection)
    queries, keys = (
        jax.vmap(log_features, in_axes=(-3, axis), out_axes=-3)(x, projection)
        for log_features, x in zip(maps, (heads.query, heads.key), strict=True)
    )
    return _feature_products(queries, keys, heads.log_weights)


@jax.jit
def _feature_products(
    queries: LogFeatures, keys: LogFeatures, log_weights: jax.Array
) -> KernelRows:
    log_keys = keys.exponent + keys.log_scale
    key_values = 1.0 if keys.values is None else keys.values

    @jax.checkpoint  # Gradients, too, hold the features of all pairs for one query at a time.
    def row(one: tuple[LogFeatures, jax.Array]) -> KernelRows:
        query, log_weights = one
        exponent = query.exponent[..., None, :] + log_keys  # [*batch, N, S, num_features]
        visible = log_weights[..., None] > -jnp.inf
        exponent = jnp.where(visible, exponent + log_weights[..., None], -jnp.inf)
        shift = _finite_max(exponent, axis=(-2, -1))
        phi = jnp.exp(exponent - shift) * key_values
        if query.values is not None:
            phi *= query.values[..., None, :]
        return KernelRows(jnp.sum(phi, axis=-1), shift[..., 0])

    by_query = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), (queries, log_weights))
    rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2), jax.lax.map(row, by_query))
    return KernelRows(rows.kernel, rows.log_scale + queries.log_scale)


def softmax_rows(heads: Heads) -> KernelRows:
    """exp(q . k) for all pairs."""
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("...th,...sh->...ts", heads.query, heads.key, precision=highest)
    visible = heads.log_weights > -jnp.inf
    logits = jnp.where(visible, logits + heads.log_weights, -jnp.inf)
    shift = _finite_max(logits, axis=-1)
    return KernelRows(jnp.exp(logits - shift), shift)


def _finite_max(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """A shift before exponentials: 0 where there is nothing above minus infinity."""
    largest = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))
    return jnp.where(largest == -jnp.inf, 0, largest)
