"""What masks, biases and lengths say about the keys.

Linear attention sums over the keys once for all queries, so it can weigh or hide a key for every
query of a head, but not for one query alone. Everything it can honour is one array: a log weight
for each key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def key_log_weights(
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    *,
    batch: tuple[int, ...],
    num_heads: int,
    query_length: int,
    key_length: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Combines all that bears on the keys into log weights; hidden keys have minus infinity.

    Args:
      mask: Boolean, broadcastable to ``[*batch, heads, query_length, key_length]``, True to attend,
        the same for all queries.
      bias: Floating, of the same shapes, added to the logits.
      key_value_seq_lengths: Integers ``batch``; keys from there on are hidden.
      batch: Leading shape.
      num_heads: Number of query heads.
      query_length: Length of the queries.
      key_length: Length of the keys.
      dtype: Type of the result.

    Returns:
      Array ``[*batch, 1 or num_heads, key_length]``; zeros if all keys weigh the same.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If a shape is wrong or an array differs between the queries.
    """
    target = (*batch, num_heads, query_length, key_length)
    log_weights = jnp.zeros((*(1 for _ in batch), 1, key_length), dtype)
    if bias is not None:
        bias = _as_array(bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must be floating, got {bias.dtype.name}.")
        log_weights = per_key("bias", bias, target).astype(dtype)
    if mask is not None:
        mask = _as_array(mask)
        if mask.dtype != jnp.bool:
            raise TypeError(
                f"mask must be boolean (True to attend), got {mask.dtype.name}; "
                "pass an additive one as bias."
            )
        visible = per_key("mask", mask, target)
        log_weights = jnp.where(visible, log_weights, -jnp.inf)
    if key_value_seq_lengths is not None:
        visible = within_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, key_length)
        visible = visible[..., None, :]
        log_weights = jnp.where(visible, log_weights, -jnp.inf)
    return jnp.broadcast_to(log_weights, (*batch, *log_weights.shape[-2:]))


def within_lengths(name: str, lengths: ArrayLike, batch: tuple[int, ...], length: int) -> jax.Array:
    """True at the positions before each sequence's length; ``[*batch, length]``."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {lengths.dtype.name}.")
    if lengths.shape != batch:
        raise ValueError(f"{name} must have the batch shape {batch}, got {lengths.shape}.")
    positions = jnp.arange(length).reshape((1,) * len(batch) + (length,))
    return positions < lengths[..., None]


def run_numbers(
    segment_ids: ArrayLike, batch: tuple[int, ...], query_length: int, key_length: int
) -> jax.Array:
    """Numbers the runs of equal segment ids from 0 on; ``[*batch, length]``."""
    segment_ids = jnp.asarray(segment_ids)
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids must be integers, got {segment_ids.dtype.name}.")
    if query_length != key_length:
        raise ValueError(
            "segment_ids are for self-attention, with as many keys as queries, got "
            f"{query_length} queries and {key_length} keys."
        )
    if segment_ids.shape != (*batch, query_length):
        raise ValueError(
            f"segment_ids must be [batch..., length] = {(*batch, query_length)}, got shape "
            f"{segment_ids.shape}."
        )
    begins = segment_ids[..., 1:] != segment_ids[..., :-1]
    begins = jnp.pad(begins, [(0, 0)] * len(batch) + [(min(1, query_length), 0)])
    return jnp.cumsum(begins, axis=-1, dtype=jnp.int32)


def _as_array(x: ArrayLike) -> jax.Array | np.ndarray:
    return x if isinstance(x, jax.Array) else np.asarray(x)


def per_key(name: str, x: ArrayLike, target: tuple[int, ...]) -> jax.Array:
    """Drops the query axis of a mask or bias that is the same for all queries.

    Args:
      name: What to call it.
      x: Broadcastable to the target; maybe with batch axes of size 1 before it.
      target: ``[*batch, heads, query_length, key_length]``.

    Returns:
      ``[..., 1 or heads, key_length]``, with batch axes of size 1 where it had none.
    """
    x = _as_array(x)
    shape = (1,) * (len(target) - x.ndim) + x.shape
    if len(shape) != len(target) or any(
        have not in (1, want) for have, want in zip(shape, target, strict=True)
    ):
        raise ValueError(
            f"{name} must be broadcastable to [batch..., heads, query length, key length] = "
            f"{target}, got shape {x.shape}."
        )
    # The values of a NumPy array are known, under jit too.
    constant = isinstance(x, np.ndarray) and (x.ndim < 2 or bool((x == x[..., :1, :]).all()))
    if shape[-2] > 1 and not constant:
        raise ValueError(
            f"{name} of shape {x.shape} may differ between queries, which linear attention "
            "cannot honour: it sums over the keys once for all queries. What works: a key-padding "
            f"{name} with a query axis of size 1 ([batch..., 1, 1, key length], such as "
            f"{name}[..., :1, :] if all queries share it), is_causal, key_value_seq_lengths, "
            f"query_seq_lengths{', and factored_masks in the Flax adapters' * (name == 'mask')}."
        )
    if shape[-2] == 0:  # No queries: whatever the keys weigh.
        return jnp.ones((*shape[:-2], target[-1]), x.dtype)
    x = jnp.reshape(x, shape)[..., 0, :]
    return jnp.broadcast_to(x, (*x.shape[:-1], target[-1]))
