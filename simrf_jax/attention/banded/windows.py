"""Blocks of queries and the windows of keys around them, by slices alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

# Queries in a block. Smaller blocks take longer, also for narrower bands; see
# benchmarks.near_field --blocks.
LEAST_BLOCK = 32


class QueryBlocks(NamedTuple):
    """Blocks of queries and the windows of keys around them.

    Attributes:
      num_blocks: Number of blocks.
      size: Queries in each.
      history: Keys before the position of the first query.
      padding: Places of the first window before the first key.
      width: Keys of the window.
      band: ``[size, width]``, True where a key is within the bandwidth of a query.
    """

    num_blocks: int
    size: int
    history: int
    padding: int
    width: int
    band: Bool[np.ndarray, "size width"]

    def of_queries(
        self, x: Shaped[Array, "B T *rest"]
    ) -> Shaped[Array, "B {self.num_blocks} {self.size} *rest"]:
        """Cuts the axis ``T`` in two, ``[num_blocks, size]``."""
        return _split(x, 0, self.num_blocks, self.size, 0)

    def of_keys(
        self, x: Shaped[Array, "B S *rest"], fill: float = 0
    ) -> Shaped[Array, "B {self.num_blocks} {self.width} *rest"]:
        """Turns the axis ``S`` into windows, ``[num_blocks, width]``, of fill beyond the ends."""
        if self.num_blocks == 1:
            return _split(x, self.padding, 1, self.width, fill)
        pieces = -(-self.width // self.size)
        x = _split(x, self.padding, self.num_blocks + pieces - 1, self.size, fill)
        # A window is a few blocks in a row: slices, where a gather would scatter its gradients.
        shifted = [jax.lax.slice_in_dim(x, i, i + self.num_blocks, axis=1) for i in range(pieces)]
        return jax.lax.slice_in_dim(jnp.concatenate(shifted, axis=2), 0, self.width, axis=2)


def cut(
    query_length: int,
    key_length: int,
    bandwidth: int,
    is_causal: bool,
    block_size: int | None = None,
    history: int = 0,
) -> QueryBlocks:
    """Cuts T queries into blocks, with the narrowest windows of S keys that hold the band.

    Args:
      query_length: Number T of queries.
      key_length: Number S of keys.
      bandwidth: Distance over which a query sees keys.
      is_causal: True if it sees no later keys.
      block_size: Queries in a block; None for a default.
      history: Keys before the position of the first query.
    """
    if block_size is None:
        block_size = max(bandwidth, LEAST_BLOCK)
    size = max(1, min(block_size, query_length))
    num_blocks = max(1, -(-query_length // size))
    # No window needs to reach beyond the ends from everywhere.
    before = min(bandwidth, history + (num_blocks - 1) * size)
    after = 0 if is_causal else min(bandwidth, max(0, key_length - history - size))
    width = before + size + after
    offset = np.arange(width)[None, :] - before - np.arange(size)[:, None]
    band = (-bandwidth <= offset) & (offset <= (0 if is_causal else bandwidth))
    return QueryBlocks(num_blocks, size, history, before - history, width, band)


def _split(
    x: Shaped[Array, "B length *rest"], before: int, count: int, size: int, fill: float
) -> Shaped[Array, "B {count} {size} *rest"]:
    """Pads the length in front and cuts it in two, ``[count, size]``."""
    padding = [(0, 0, 0)] * x.ndim
    # Negative where keys at the end are near no query.
    padding[1] = (before, count * size - before - x.shape[1], 0)
    x = jax.lax.pad(x, jnp.asarray(fill, x.dtype), padding)
    return x.reshape(x.shape[0], count, size, *x.shape[2:])
