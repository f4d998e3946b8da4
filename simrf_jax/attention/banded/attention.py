"""The near field: exact softmax attention to the keys nearby, in time linear in the length."""

from __future__ import annotations

import functools
from typing import SupportsIndex

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax import checks
from simrf_jax.attention.banded.exchange import attend_over_devices
from simrf_jax.attention.banded.softmax import attend_in_windows, cut
from simrf_jax.attention.inputs.arguments import Arguments
from simrf_jax.attention.inputs.masks import Lengths, Mask
from simrf_jax.attention.inputs.sharding import find_shards


def banded_attention(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    value: Float[ArrayLike, "*batch S K D"],
    *,
    bandwidth: SupportsIndex,
    mask: Mask | None = None,
    bias: Float[ArrayLike, " ..."] | None = None,
    scale: Real[ArrayLike, ""] | None = None,
    is_causal: bool | np.bool_ = False,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    segment_ids: Integer[ArrayLike, "... T"] | None = None,
    block_size: SupportsIndex | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
) -> Float[Array, "*batch T N D"]:
    r"""Returns softmax attention to the keys at most ``bandwidth`` positions away.

    .. math::
        \operatorname{Near}(Q, K, V)_t =
            \frac{\sum_{|t - s| \le k} e^{\text{scale} \, q_t \cdot k_s + b_s} v_s}
                 {\sum_{|t - s| \le k} e^{\text{scale} \, q_t \cdot k_s + b_s}}

    with k the bandwidth and b the bias; positions count from 0 in queries and keys. It is the band
    of ``jax.nn.dot_product_attention``, whose layout, defaults and mask meaning it has, in time and
    memory :math:`O(T k)`: blocks of queries attend to the keys around them. FMMformers add a far
    field to it, ``random_feature_attention``, and normalise each field by itself.

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
      is_causal: True if query t attends only to the keys from t - k to t.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      segment_ids: Integers ``[..., T]``, for self-attention (T = S): of several sequences packed
        into one, each attends to itself. Neighbours with equal ids belong to one segment.
      block_size: Queries in a block; by default the bandwidth, but at least 32. Each block copies
        ``block_size + 2 bandwidth`` keys. Short blocks need more memory, long ones more time.
      sequence_axis: The mesh axis, or a tuple of them, that shards the length, for as many keys as
        queries; see ``random_feature_attention``. Each device sends its neighbours the keys within
        the bandwidth of the border between them, and no others.

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
      Nguyen et al., FMMformer: Efficient and Flexible Transformers via Decomposed Near-field and
      Far-field Attention (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """
    bandwidth = checks.integer("bandwidth", bandwidth, least=0)
    is_causal = checks.boolean("is_causal", is_causal)
    if block_size is not None:
        block_size = checks.positive_int("block_size", block_size)
    arguments = Arguments.of(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )
    axes = checks.axis_names("sequence_axis", sequence_axis)
    if axes or arguments.explicit_axes(in_order=True):
        find_shards(arguments, axes, in_order=True)  # Raises if lengths do not fit.
        if arguments.key.shape[-3] > 0:  # Without keys there is nothing to exchange.
            return attend_over_devices(
                arguments, axes, bandwidth=bandwidth, is_causal=is_causal, block_size=block_size
            )
    return _attend(arguments, bandwidth=bandwidth, is_causal=is_causal, block_size=block_size)


@functools.partial(jax.jit, static_argnames=("bandwidth", "is_causal", "block_size"), inline=True)
def _attend(
    arguments: Arguments, *, bandwidth: int, is_causal: bool, block_size: int | None
) -> Float[Array, "*batch T N D"]:
    """Attends to tokens that are all on one device."""
    inputs = arguments.lay_out(scaled=False)
    lengths = (inputs.query.shape[1], inputs.key.shape[1])
    blocks = cut(*lengths, bandwidth, is_causal, block_size)
    return inputs.outputs(attend_in_windows(inputs, blocks))
