"""The near field: exact softmax attention to nearby keys, in time linear in the length."""

from __future__ import annotations

import dataclasses
import functools
from typing import SupportsIndex

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax._src import checks
from simrf_jax._src.attention.banded.exchange import attend_over_devices
from simrf_jax._src.attention.banded.softmax import attend_in_windows, cut
from simrf_jax._src.attention.banded.window import Window, check_bandwidth, empty_window
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inputs.masks import Lengths, Mask
from simrf_jax._src.attention.inputs.sharding import find_shards
from simrf_jax._src.attention.mechanism import (
    Mechanism,
    check_kind,
    check_step,
    check_tokens,
    flatten,
    unflatten,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Band(Mechanism[Window]):
    """Banded attention with a bandwidth.

    Attributes:
      bandwidth: Distance k, at least 0. Query t attends to the keys from t - k to t + k.
      block_size: Queries in a block; None for a default. See ``banded_attention``.
      sequence_axis: Mesh axis, or a tuple of them, that shards the length in ``attend``; see
        ``banded_attention``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> band = simrf_jax.Band(4)
      >>> whole = band.attend(q, k, v, is_causal=True)
      >>> window = band.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> window.key.shape
      (4, 8, 64)
      >>> prompt, window = band.step(window, q[:9], k[:9], v[:9])
      >>> token, window = band.step(window, q[9:], k[9:], v[9:])
      >>> bool(abs(token - whole[9:]).max() < 1e-5)
      True
    """

    bandwidth: SupportsIndex = dataclasses.field(metadata={"static": True})
    block_size: SupportsIndex | None = dataclasses.field(default=None, metadata={"static": True})
    sequence_axis: str | tuple[str, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks.integer("bandwidth", self.bandwidth, least=0)
        if self.block_size is not None:
            checks.positive_int("block_size", self.block_size)
        checks.axis_names("sequence_axis", self.sequence_axis)

    def in_order(self, call: Call) -> bool:
        """Returns True: each query has its own band."""
        return call.in_order(int(self.bandwidth))

    def attend_to(self, call: Call) -> Float[Array, "*batch T N D"]:
        """Returns ``banded_attention`` of a call."""
        axes = checks.axis_names("sequence_axis", self.sequence_axis)
        if axes or call.explicit_axes(in_order=True):
            shards = find_shards(call, axes, in_order=True)
            if call.key.shape[-3] > 0:  # Without keys, devices have nothing to exchange.
                return attend_over_devices(call, shards, int(self.bandwidth), self.block_size)
        return _attend(self, call)

    def init_for(self, call: Call) -> Window:
        """Returns the window before tokens like those of a call."""
        window = empty_window(call.lay_out(scaled=False), int(self.bandwidth))
        return unflatten(window, call.key.shape[:-3])

    def step_to(self, state: Window, call: Call) -> tuple[Float[Array, "*batch T N D"], Window]:
        """Attends to a window and, causally, to new tokens."""
        check_tokens(call)
        check_kind(state, Window)
        check_bandwidth(state, int(self.bandwidth))
        return _step(self, state, call)


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

    with k the bandwidth and b the bias; positions count from 0 in queries and keys. It equals
    ``jax.nn.dot_product_attention(..., local_window_size=k)`` and has the same layout, defaults and
    meaning of masks. It takes time and memory :math:`O(T k)`: blocks of queries attend to the keys
    around them. FMMformers add a far field to it, ``random_feature_attention``, and normalize each
    field separately.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      bandwidth: k, at least 0. Query t attends to the keys from t - k to t + k.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, True to attend. It must be the same for
        all queries: have a query axis of size 1, or be a NumPy array that is constant along it.
      bias: Added to the logits; same shapes and condition as the mask.
      scale: Multiplies the logits, one finite number of either sign; by default
        :math:`1/\sqrt H`.
      is_causal: True if query t attends only to the keys from t - k to t.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      segment_ids: Integers ``[..., T]``, for self-attention (T = S) of sequences packed into one:
        each attends only to itself. Neighbors with equal ids belong to one segment.
      block_size: Queries in a block; by default the bandwidth, but at least 32. Each block copies
        ``block_size + 2 bandwidth`` keys. Short blocks need more memory, long ones more time.
      sequence_axis: The mesh axis, or a tuple of them, that shards the length; queries and keys
        must have the same length. See ``random_feature_attention``. Each device sends its neighbors
        only the keys within the bandwidth of their border.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and the softmax are float32 at least; products
      of bfloat16 inputs accumulate in float32. Queries that see no key get zeros; those that see a
      key or value that is not finite get NaN, as in ``random_feature_attention``.

    Raises:
      TypeError: If a dtype is wrong, or is_causal is neither True nor False.
      ValueError: If shapes do not match, bandwidth or block_size is out of range, scale is not
        finite, or the mask or the bias may differ between queries; if sequence_axis is not an axis
        of a mesh, its devices do not divide the length, or queries and keys then differ in length.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1_000, 12, 64))
      >>> simrf_jax.banded_attention(q, k, v, bandwidth=32).shape
      (2, 1000, 12, 64)

    References:
      Nguyen et al., FMMformer: Efficient and Flexible Transformers via Decomposed Near-field and
      Far-field Attention (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """
    band = Band(bandwidth, block_size, sequence_axis)
    return band.attend(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )


@functools.partial(jax.jit, inline=True)
def _attend(band: Band, call: Call) -> Float[Array, "*batch T N D"]:
    """Attends to tokens that are all on one device."""
    inputs = call.lay_out(scaled=False)
    lengths = (inputs.query.shape[1], inputs.key.shape[1])
    blocks = cut(*lengths, int(band.bandwidth), call.is_causal, band.block_size)
    return inputs.outputs(attend_in_windows(inputs, blocks))


@functools.partial(jax.jit, inline=True)
def _step(band: Band, state: Window, call: Call) -> tuple[Float[Array, "*batch T N D"], Window]:
    """Attends to a window and, causally, to new tokens."""
    inputs, bandwidth = call.lay_out(scaled=False), int(band.bandwidth)
    check_step(call, inputs)
    batch, length = call.query.shape[:-3], inputs.query.shape[1]
    before = flatten(state, jax.eval_shape(lambda: empty_window(inputs, bandwidth)), batch)
    seen = before.followed_by(inputs)
    blocks = cut(length, bandwidth + length, bandwidth, True, band.block_size, bandwidth)
    out = inputs.outputs(attend_in_windows(seen.put_into(inputs), blocks))
    return out, unflatten(seen.part(slice(length, None)), batch)
