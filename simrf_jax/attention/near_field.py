"""The near field: exact softmax attention to the keys nearby, in time linear in the length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.attention.blocks import Blocks, cut
from simrf_jax.attention.contraction import contract
from simrf_jax.attention.layout import check_shapes
from simrf_jax.attention.masks import key_log_weights, within_lengths


def banded_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bandwidth: int,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    block_size: int | None = None,
) -> jax.Array:
    r"""Softmax attention to the keys at most ``bandwidth`` positions away, and to no others.

    .. math::
        \operatorname{Near}(Q, K, V)_t =
            \frac{\sum_{|t - s| \le k} e^{\text{scale} \, q_t \cdot k_s + b_s} v_s}
                 {\sum_{|t - s| \le k} e^{\text{scale} \, q_t \cdot k_s + b_s}}

    with k the bandwidth and b the bias; positions count from 0 in queries and keys. It is the band
    of ``jax.nn.dot_product_attention``, whose layout, defaults and mask meaning it has, in time and
    memory :math:`O(T k)`: blocks of queries attend to the keys around them. FMMformers add it to a
    far field, ``random_feature_attention``, each normalised by itself.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      bandwidth: k, at least 0. Query t attends to the keys from t - k to t + k.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, True to attend. It must be the same for
        all queries: have a query axis of size 1, or be a NumPy array that is constant along it.
      bias: Added to the logits; of the same shapes, with the same condition.
      scale: Multiplies the logits; by default :math:`1/\sqrt H`.
      is_causal: Query t attends to the keys from t - k to t.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      segment_ids: Integers ``[..., T]``, for self-attention (T = S): of several sequences packed
        into one, each attends to itself. What may hold NaN belongs in a mask or beyond the lengths.
      block_size: Queries in a block; by default the bandwidth, but at least 32. Each block copies
        ``block_size + 2 bandwidth`` keys: short blocks take memory, long ones time.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and the softmax are float32 at least;
      products of bfloat16 inputs accumulate in float32. Queries that see no key get zeros.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not match, bandwidth, scale or block_size is out of range, or the
        mask or the bias may differ between queries.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1_000, 12, 64))
      >>> simrf_jax.banded_attention(q, k, v, bandwidth=32).shape
      (2, 1000, 12, 64)

    References:
      Nguyen et al., FMMformer (NeurIPS 2021), near-field attention.
    """
    arrays = {"query": query, "key": key, "value": value}
    query, key, value = (checks.floating(name, x) for name, x in arrays.items())
    check_shapes(query, key, value)
    bandwidth = checks.integer("bandwidth", bandwidth)
    if bandwidth < 0:
        raise ValueError(f"bandwidth must be at least 0, got {bandwidth}.")
    blocks = cut(query.shape[-3], key.shape[-3], bandwidth, is_causal, block_size)
    if scale is None:
        scale = key.shape[-1] ** -0.5
    checks.scalar("scale", scale)
    if unbatched := query.ndim == 3:
        # As jax.nn: a batch of one, to which masks and lengths may have an axis.
        query, key, value = query[None], key[None], value[None]
        query_seq_lengths, key_value_seq_lengths = (
            None if x is None else jnp.atleast_1d(x)
            for x in (query_seq_lengths, key_value_seq_lengths)
        )
        segment_ids = None if segment_ids is None else jnp.atleast_2d(segment_ids)
    out = _attend(
        query,
        key,
        value,
        scale,
        blocks,
        mask=mask,
        bias=bias,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )
    return out[0] if unbatched else out


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: ArrayLike,
    blocks: Blocks,
    *,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> jax.Array:
    """Hides what is hidden in ``[*batch, length, heads, dim]``, and attends."""
    *batch, query_length, num_heads, _ = query.shape
    key_length, num_key_heads = key.shape[-3:-1]
    compute = jnp.promote_types(query.dtype, jnp.float32)
    log_weights = key_log_weights(
        mask,
        bias,
        key_value_seq_lengths,
        batch=tuple(batch),
        num_heads=num_heads,
        query_length=query_length,
        key_length=key_length,
        dtype=compute,
    )
    if log_weights is None:
        log_weights = jnp.zeros((*batch, 1, key_length), compute)
    if log_weights.shape[-2] not in (1, num_key_heads):
        # A key that is hidden from one head only is another key to the others.
        key, value = (jnp.repeat(x, num_heads // num_key_heads, axis=-2) for x in (key, value))
    segments = None
    if segment_ids is not None:
        segments = _segments(segment_ids, (*batch, query_length), key_length)
    # Padding may hold anything, NaN too, and 0 * NaN is not 0.
    visible = log_weights.mT[..., None] > -jnp.inf
    key, value = jnp.where(visible, key, 0), jnp.where(visible, value, 0)
    real = None
    if query_seq_lengths is not None:
        real = within_lengths("query_seq_lengths", query_seq_lengths, tuple(batch), query_length)
        real = real[..., None, None]
        query = jnp.where(real, query, 0)
    out = _softmax_in_blocks(query, key, value, scale, log_weights, segments, blocks)
    return out if real is None else jnp.where(real, out, 0)


def _softmax_in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: ArrayLike,
    log_weights: jax.Array,
    segments: jax.Array | None,
    blocks: Blocks,
) -> jax.Array:
    """Attends with log weights ``[*batch, 1 or K, S]``; the bare mathematics."""
    *batch, query_length, num_heads, dim = query.shape
    num_key_heads, axis = key.shape[-2], len(batch)
    dtype, compute = query.dtype, log_weights.dtype
    narrow = jnp.bfloat16 if dtype == jnp.bfloat16 else compute
    query = query.reshape(*query.shape[:-2], num_key_heads, num_heads // num_key_heads, dim)
    query = blocks.of_queries(query.astype(compute), axis)
    key, value = (blocks.of_keys(x.astype(narrow), axis) for x in (key, value))
    # [*batch, num_blocks, 1 or K, 1, 1, width]
    weights = blocks.of_keys(log_weights.mT, axis, -jnp.inf).mT[..., None, None, :]

    logits = contract("...tkgh,...skh->...kgts", query, key) * jnp.asarray(scale, compute)
    visible = (weights > -jnp.inf) & blocks.band.reshape((1,) * (axis + 3) + blocks.band.shape)
    if segments is not None:
        of_queries, of_keys = blocks.of_queries(segments, axis), blocks.of_keys(segments, axis)
        same = of_queries[..., :, None] == of_keys[..., None, :]
        visible &= same[..., None, None, :, :]
    probabilities = _softmax(jnp.where(visible, logits + weights, -jnp.inf))
    out = contract("...kgts,...skd->...tkgd", probabilities, value)
    out = out.reshape(*batch, blocks.num_blocks * blocks.size, num_heads, value.shape[-1])
    return jax.lax.slice_in_dim(out, 0, query_length, axis=axis).astype(dtype)


def _softmax(logits: jax.Array) -> jax.Array:
    """Zeros where all logits are minus infinity, without the NaN of jax.nn.softmax on the way."""
    # The least finite number is a shift too.
    least = float(jnp.finfo(logits.dtype).min)
    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True, initial=least)
    weights = jnp.exp(logits - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _segments(segment_ids: ArrayLike, expected: tuple[int, ...], key_length: int) -> jax.Array:
    segments = jnp.asarray(segment_ids)
    if not jnp.issubdtype(segments.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got {segments.dtype.name}.")
    if key_length != expected[-1]:
        raise ValueError(
            "segment_ids are for self-attention, with as many keys as queries, got "
            f"{expected[-1]} queries and {key_length} keys."
        )
    if segments.shape != expected:
        raise ValueError(
            f"segment_ids must be [batch..., length] = {expected}, got shape {segments.shape}."
        )
    return segments
