"""Softmax over the keys of a band, query block by query block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from simrf_jax.attention.banded.windows import QueryBlocks
from simrf_jax.attention.inputs.arguments import Inputs, contract


@jax.named_scope("banded_attention")
def attend_in_windows(inputs: Inputs, blocks: QueryBlocks) -> Float[Array, "B T K G D"]:
    """Lets each query attend to the keys of its window that are in the band.

    Args:
      inputs: Queries and keys that are not scaled. The logits are, because bfloat16 queries and
        keys would be rounded again.
      blocks: Blocks of queries and their windows of keys.

    Returns:
      ``[B, T, K, G, D]`` in the logits' type; zeros where no key is visible.
    """
    narrow = inputs.value.dtype
    query = blocks.of_queries(inputs.query)
    key, value = blocks.of_keys(inputs.key.astype(narrow)), blocks.of_keys(inputs.value)
    # [B, num_blocks, K, 1, 1, width]
    weights = blocks.of_keys(inputs.key_log_weights, -jnp.inf).mT[:, :, :, None, None]
    seen = _in_band(blocks, inputs.segments, inputs.query.shape[1])
    products = contract("bntkgh,bnskh->bnkgts", query, key)
    finite = jnp.isfinite(products * inputs.scale)
    # 0 * inf would reach the gradient of the scale.
    logits = jnp.where(finite, products, 0) * inputs.scale
    visible = seen & (weights > -jnp.inf) & finite
    probabilities = _softmax(jnp.where(visible, logits + weights, -jnp.inf))
    out = contract("bnkgts,bnskd->bntkgd", probabilities, value)
    spoils = jnp.isnan(weights) | (~finite & (weights > -jnp.inf))
    spoiled = jnp.any(seen & spoils, axis=-1)  # [B, num_blocks, K, G, size]
    out = jnp.where(jnp.moveaxis(spoiled, -1, 2)[..., None], jnp.nan, out)
    out = out.reshape(out.shape[0], blocks.num_blocks * blocks.size, *out.shape[3:])
    return out[:, : inputs.query.shape[1]]


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


def _softmax(logits: Float[Array, "*batch S"]) -> Float[Array, "*batch S"]:
    """Returns softmax weights: zeros where all logits are minus infinity, and no NaN on the way."""
    # The least finite number is a shift too.
    least = float(jnp.finfo(logits.dtype).min)
    shift = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True, initial=least)
    weights = jnp.exp(logits - shift)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)
