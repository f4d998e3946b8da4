"""The near field: exact softmax attention to the keys nearby, in time linear in the length."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.attention.across_devices import Axes
from simrf_jax.attention.blocks import Blocks, cut
from simrf_jax.attention.halo import with_halo
from simrf_jax.attention.layout import Inputs, lay_out
from simrf_jax.attention.sequence_parallel import attend_in_parts
from simrf_jax.attention.state import contract


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
    sequence_axis: str | tuple[str, ...] | None = None,
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
      scale: Multiplies the logits, one finite number of either sign; by default
        :math:`1/\sqrt H`.
      is_causal: Query t attends to the keys from t - k to t.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      segment_ids: Integers ``[..., T]``, for self-attention (T = S): of several sequences packed
        into one, each attends to itself. A segment is a run of equal ids.
      block_size: Queries in a block; by default the bandwidth, but at least 32. Each block copies
        ``block_size + 2 bandwidth`` keys: short blocks take memory, long ones time.
      sequence_axis: The mesh axis, or a tuple of them, that shards the length, for as many keys as
        queries; as ``random_feature_attention``. Devices send the keys within the bandwidth of
        their borders to those beside them, and no others.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and the softmax are float32 at least;
      products of bfloat16 inputs accumulate in float32. Queries that see no key get zeros; those
      that see a key or value which is not finite get NaN, as in ``random_feature_attention``.

    Raises:
      TypeError: If a dtype is wrong, or is_causal neither True nor False.
      ValueError: If shapes do not match, bandwidth or block_size is out of range, scale is not
        finite, or the mask or the bias may differ between queries; if sequence_axis is no axis of a
        mesh, its devices do not divide the length, or there are other keys than queries there.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1_000, 12, 64))
      >>> simrf_jax.banded_attention(q, k, v, bandwidth=32).shape
      (2, 1000, 12, 64)

    References:
      Nguyen et al., FMMformer (NeurIPS 2021), near-field attention.
    """
    query, key, value = (
        checks.floating(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    attend = functools.partial(
        _attend,
        bandwidth=checks.integer("bandwidth", bandwidth, least=0),
        is_causal=checks.boolean("is_causal", is_causal),
        block_size=block_size,
    )
    return attend_in_parts(
        attend,
        sequence_axis,
        in_order=True,
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )


def _attend(
    *,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bandwidth: int,
    is_causal: bool,
    block_size: int | None,
    scale: ArrayLike | None = None,
    axes: Axes = (),
    **options: Any,
) -> jax.Array:
    """Attention on one device, or inside ``shard_map`` that of its part of the length."""
    # The logits are scaled: bfloat16 queries and keys would be rounded again.
    inputs, restore = lay_out(query, key, value, scale=1.0, **options)
    history = 0
    if axes:
        segment_ids = options.get("segment_ids")
        inputs, history = with_halo(
            inputs, segment_ids, axes, bandwidth=bandwidth, is_causal=is_causal
        )
    lengths = (inputs.query.shape[1], inputs.key.shape[1])
    blocks = cut(*lengths, bandwidth, is_causal, block_size, history)
    return restore(attend_in_blocks(inputs, blocks, scale))


def attend_in_blocks(inputs: Inputs, blocks: Blocks, scale: ArrayLike | None) -> jax.Array:
    """Each query attends to the keys of its window that are in the band, ``[B, T, K, G, D]``."""
    if scale is None:
        scale = inputs.query.shape[-1] ** -0.5
    checks.scalar("scale", scale)
    compute, narrow = inputs.query.dtype, inputs.value.dtype
    query = blocks.of_queries(inputs.query, 1)
    key, value = blocks.of_keys(inputs.key.astype(narrow), 1), blocks.of_keys(inputs.value, 1)
    # [B, num_blocks, K, 1, 1, width]
    weights = blocks.of_keys(inputs.key_log_weights, 1, -jnp.inf).mT[:, :, :, None, None]
    seen = _in_band(blocks, inputs.runs, inputs.query.shape[1])
    products, scale = contract("bntkgh,bnskh->bnkgts", query, key), jnp.asarray(scale, compute)
    finite = jnp.isfinite(products * scale)
    logits = jnp.where(finite, products, 0) * scale  # 0 * inf would reach the scale's gradient.
    visible = seen & (weights > -jnp.inf) & finite
    probabilities = _softmax(jnp.where(visible, logits + weights, -jnp.inf))
    out = contract("bnkgts,bnskd->bntkgd", probabilities, value)
    spoils = jnp.isnan(weights) | (~finite & (weights > -jnp.inf))
    spoiled = jnp.any(seen & spoils, axis=-1)  # [B, num_blocks, K, G, size]
    out = jnp.where(jnp.moveaxis(spoiled, -1, 2)[..., None], jnp.nan, out)
    out = out.reshape(out.shape[0], blocks.num_blocks * blocks.size, *out.shape[3:])
    return out[:, : inputs.query.shape[1]]


def _in_band(blocks: Blocks, runs: jax.Array | None, length: int) -> jax.Array:
    """Returns ``[1 or B, num_blocks or 1, 1, 1, size, width]``, True where a query sees a key.

    Args:
      blocks: Queries and their windows of keys.
      runs: Segments of the keys, ``[B, S]``, or None.
      length: Number of queries.
    """
    band = jnp.asarray(blocks.band)[None, None, None, None]
    if runs is None:
        return band
    here = runs[:, blocks.history :][:, :length]
    of_queries, of_keys = blocks.of_queries(here, 1), blocks.of_keys(runs, 1)
    same = of_queries[:, :, :, None] == of_keys[:, :, None, :]
    return band & same[:, :, None, None]


def _softmax(logits: jax.Array) -> jax.Array:
    """Zeros where all logits are minus infinity, without the NaN of jax.nn.softmax on the way."""
    # The least finite number is a shift too.
    least = float(jnp.finfo(logits.dtype).min)
    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True, initial=least)
    weights = jnp.exp(logits - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)
