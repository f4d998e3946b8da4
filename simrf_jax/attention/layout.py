"""The layout of queries, keys and values: that of ``jax.nn.dot_product_attention``."""

from __future__ import annotations

import jax


def check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Accepts ``[..., T, N, H]``, ``[..., S, K, H]``, ``[..., S, K, D]`` of one type, N = K G."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(f"query, key and value must be [..., length, heads, dim], got {shapes}.")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "query, key and value must have one dtype, got "
            f"{query.dtype.name}, {key.dtype.name} and {value.dtype.name}."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value must have the same batch shape, got {shapes}.")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must have the same length and heads, got {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, got {shapes}.")
    num_heads, num_key_heads = query.shape[-2], key.shape[-2]
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of that of key heads, got {num_heads} "
            f"and {num_key_heads}."
        )
