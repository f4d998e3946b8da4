"""Softmax over the keys of a band: blocks of queries, and the windows of keys around them."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from simrf_jax._src.attention.inputs.call import Inputs, contract
from simrf_jax._src.attention.inputs.masks import Size

# Queries in a block. Smaller blocks take longer, even for narrower bands; see benchmarks.near_field
# --blocks.
LEAST_BLOCK = 32


class QueryBlocks(NamedTuple):
    """Blocks of queries and the windows of keys around them.

    Attributes:
      num_blocks: Number of blocks.
      size: Number of queries in each.
      history: Keys before the position of the first query.
      padding: Positions of the first window before the first key.
      width: Number of keys in a window.
      band: ``[size, width]``, True where a key is within the bandwidth of a query.
    """

    num_blocks: Size
    size: int
    history: int
    padding: int
    width: int
    band: Bool[np.ndarray, "size width"]

    def of_queries(
        self, x: Shaped[Array, "B T *rest"]
    ) -> Shaped[Array, "B {self.num_blocks} {self.size} *rest"]:
        """Splits the axis ``T`` into ``[num_blocks, size]``."""
        return _cut_length(x, 0, self.num_blocks, self.size, 0)

    def of_keys(
        self, x: Shaped[Array, "B S *rest"], fill: float = 0
    ) -> Shaped[Array, "B {self.num_blocks} {self.width} *rest"]:
        """Turns axis ``S`` into windows, ``[num_blocks, width]``, with ``fill`` beyond the ends."""
        if self.num_blocks == 1:
            return _cut_length(x, self.padding, 1, self.width, fill)
        pieces = -(-self.width // self.size)
        x = _cut_length(x, self.padding, self.num_blocks + pieces - 1, self.size, fill)
        # A window is a few consecutive blocks. Slices avoid a gather, whose gradient is a scatter.
        shifted = [jax.lax.slice_in_dim(x, i, i + self.num_blocks, axis=1) for i in range(pieces)]
        return jax.lax.slice_in_dim(jnp.concatenate(shifted, axis=2), 0, self.width, axis=2)


def cut(
    query_length: Size,
    key_length: Size,
    bandwidth: int,
    is_causal: bool,
    block_size: SupportsIndex | None = None,
    history: int = 0,
) -> QueryBlocks:
    """Cuts T queries into blocks, with the narrowest windows of S keys that contain the band.

    Args:
      query_length: Number T of queries.
      key_length: Number S of keys.
      bandwidth: Distance over which a query sees keys.
      is_causal: True if queries see no later keys.
      block_size: Queries in a block; None for a default.
      history: Keys before the position of the first query.
    """
    longest = max(bandwidth, LEAST_BLOCK) if block_size is None else int(block_size)
    size, before, after = longest, bandwidth, 0 if is_causal else bandwidth
    num_blocks = -(-query_length // size)
    if isinstance(query_length, int) and isinstance(key_length, int):  # Not symbolic.
        size = max(1, min(longest, query_length))
        num_blocks = max(1, -(-query_length // size))
        # No window needs to reach beyond the ends from everywhere.
        before = min(before, history + (num_blocks - 1) * size)
        after = min(after, max(0, key_length - history - size))
    width = before + size + after
    offset = np.arange(width)[None, :] - before - np.arange(size)[:, None]
    band = (-bandwidth <= offset) & (offset <= (0 if is_causal else bandwidth))
    return QueryBlocks(num_blocks, size, history, before - history, width, band)


def _cut_length(
    x: Shaped[Array, "B length *rest"], before: int, count: Size, size: int, fill: float
) -> Shaped[Array, "B {count} {size} *rest"]:
    """Pads the length in front and splits it into ``[count, size]``."""
    padding = [(0, 0, 0)] * x.ndim
    # Negative where the last keys are near no query.
    padding[1] = (before, count * size - before - x.shape[1], 0)
    x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    return x.reshape(x.shape[0], count, size, *x.shape[2:])


@jax.named_scope("banded_attention")
def attend_in_windows(inputs: Inputs, blocks: QueryBlocks) -> Float[Array, "B T K G D"]:
    """Lets each query attend to the keys of its window that are in the band.

    Args:
      inputs: Queries and keys that are not scaled: the scale multiplies the logits, because scaled
        bfloat16 queries and keys would be rounded again.
      blocks: Blocks of queries and their windows of keys.

    Returns:
      ``[B, T, K, G, D]`` in the logits' dtype; zeros where no key is visible.
    """
    weights, _, poisoned = _weigh(inputs, blocks)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0, 1, total)
    out = _contract(probabilities, inputs, blocks)
    return jnp.where(poisoned[..., None], jnp.nan, out)


@jax.named_scope("banded_sums")
def sum_in_windows(
    inputs: Inputs, blocks: QueryBlocks
) -> tuple[Float[Array, "B T K G columns"], Float[Array, "B T K G 1"], Bool[Array, "B T K G"]]:
    """Returns the sums that ``attend_in_windows`` divides; it documents the arguments.

    Returns:
      Numerators and denominators in units of e^shift; the shift, the least finite number where no
      key is visible; and True where a query sees a key that is not finite.
    """
    weights, shift, poisoned = _weigh(inputs, blocks)
    total, shift = (
        _in_a_row(jnp.moveaxis(x, 4, 2), inputs)
        for x in (jnp.sum(weights, axis=-1, keepdims=True), shift)
    )
    sums = jnp.concatenate([_contract(weights, inputs, blocks), total], axis=-1)
    return sums, shift, poisoned


def _weigh(
    inputs: Inputs, blocks: QueryBlocks
) -> tuple[
    Float[Array, "B num_blocks K G size width"],
    Float[Array, "B num_blocks K G size 1"],
    Bool[Array, "B T K G"],
]:
    """Returns weights of keys in units of e^shift, the shift, and a mask of poisoned queries."""
    narrow = inputs.value.dtype
    query, key = blocks.of_queries(inputs.query), blocks.of_keys(inputs.key.astype(narrow))
    # [B, num_blocks, K, 1, 1, width]
    log_weights = blocks.of_keys(inputs.key_log_weights, -jnp.inf).mT[:, :, :, None, None]
    seen = _in_band(blocks, inputs.segments, inputs.query.shape[1])
    products = contract("bntkgh,bnskh->bnkgts", query, key)
    finite = jnp.isfinite(products * inputs.scale)
    # 0 * inf would reach the gradient of the scale.
    logits = jnp.where(finite, products, 0) * inputs.scale
    visible = seen & (log_weights > -jnp.inf) & finite
    nonfinite = jnp.isnan(log_weights) | (~finite & (log_weights > -jnp.inf))
    poisoned = jnp.any(seen & nonfinite, axis=-1)  # [B, num_blocks, K, G, size]
    logits = jnp.where(visible, logits + log_weights, -jnp.inf)
    poisoned = _in_a_row(jnp.moveaxis(poisoned, 4, 2), inputs)
    # Where all logits are minus infinity, the shift is the least finite number.
    least = float(jnp.finfo(logits.dtype).min)
    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True, initial=least)
    return jnp.exp(logits - shift), shift, poisoned


def _in_band(
    blocks: QueryBlocks, segments: Integer[Array, "B S"] | None, length: int
) -> Bool[Array, "#B #num_blocks 1 1 size width"]:
    """Returns ``[1 or B, num_blocks or 1, 1, 1, size, width]``, True where a query sees a key.

    Args:
      blocks: Queries and their windows of keys.
      segments: Segments of the keys, ``[B, S]``, or None.
      length: Number of queries.
    """
    band = jnp.asarray(blocks.band)[None, None, None, None]
    if segments is None:
        return band
    here = segments[:, blocks.history :][:, :length]
    of_queries, of_keys = blocks.of_queries(here), blocks.of_keys(segments)
    same = of_queries[:, :, :, None] == of_keys[:, :, None, :]
    return band & same[:, :, None, None]


def _contract(
    weights: Float[Array, "B num_blocks K G size width"], inputs: Inputs, blocks: QueryBlocks
) -> Float[Array, "B T K G D"]:
    """Returns the sums of values with the weights of the keys in each query's window."""
    sums = contract("bnkgts,bnskd->bntkgd", weights, blocks.of_keys(inputs.value))
    return _in_a_row(sums, inputs)


def _in_a_row(
    x: Shaped[Array, "B num_blocks size *rest"], inputs: Inputs
) -> Shaped[Array, "B T *rest"]:
    """Concatenates the query blocks along the length, without padding."""
    x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
    return x[:, : inputs.query.shape[1]]
