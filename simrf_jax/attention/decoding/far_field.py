"""Causal random-feature attention token by token, from a state that does not grow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention.causal import causal_attention, check_chunk_size
from simrf_jax.attention.decoding.batch import check_step, check_whole, flatten, unflatten
from simrf_jax.attention.layout import lay_out_with_features
from simrf_jax.attention.state import (
    AttentionState,
    empty_state,
    key_features,
    merge,
    spoil,
    summarise,
    with_ones,
)
from simrf_jax.features import FeatureMap
from simrf_jax.projections import Projection, as_projection


def init_state(
    projection: Projection | None,
    *,
    batch: tuple[int, ...] = (),
    num_key_heads: int,
    value_dim: int,
    head_dim: int | None = None,
    feature_map: FeatureMap = "positive",
    dtype: DTypeLike = jnp.float32,
) -> AttentionState:
    """The state before the first token.

    Args:
      projection: W, as ``random_feature_attention`` takes it.
      batch: Leading shape.
      num_key_heads: Number K of key heads.
      value_dim: Width D of the values.
      head_dim: Width H of the keys; by default that of the projection.
      feature_map: As ``random_feature_attention``.
      dtype: Of the queries, keys and values to come. The state itself is float32 at least.

    Returns:
      A state of ``[*batch, K, num_features, D + 1]`` sums and as many maxima, for ``append`` and
      ``step``. A pytree: it goes through jit, scan and checkpoints.

    Raises:
      TypeError: If a number is not an integer or dtype is not floating.
      ValueError: If a number is below 1, or head_dim is missing or does not fit the projection.

    Example:
      >>> import jax, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> state = simrf_jax.decoding.init_state(w, batch=(2,), num_key_heads=8, value_dim=64)
      >>> state.sums.shape, state.maxima.shape
      ((2, 8, 130, 65), (2, 8, 130))
    """
    if head_dim is None:
        if projection is None:
            raise ValueError("head_dim must be given where there is no projection to tell it.")
        head_dim = as_projection(projection).shape[-1]
    sizes = {"num_key_heads": num_key_heads, "value_dim": value_dim, "head_dim": head_dim}
    heads, width, dim = (checks.positive_int(name, size) for name, size in sizes.items())
    batch = checks.lead_shape("batch", batch)
    dtype = checks.floating_dtype("dtype", dtype)
    key = jnp.zeros((*batch, 0, heads, dim), dtype)
    value = jnp.zeros((*batch, 0, heads, width), dtype)
    inputs, maps, _ = lay_out_with_features(key, key, value, projection, feature_map=feature_map)
    return unflatten(empty_state(inputs, maps), batch)


def append(
    state: AttentionState,
    key: ArrayLike,
    value: ArrayLike,
    projection: Projection | None,
    *,
    feature_map: FeatureMap = "positive",
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
) -> AttentionState:
    """The state with more keys, of any number.

    Args:
      state: Of ``init_state``, ``append`` or ``step``.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      projection: W; the same for all keys of a state.
      feature_map: As ``random_feature_attention``, and so the others; always the same for a state.
      mask: Of the new keys, broadcastable to ``[..., K, 1, S]``.
      bias: Likewise.
      scale: As ``random_feature_attention``.
      key_value_seq_lengths: Of the new keys.

    Returns:
      The new state, of the same shapes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not fit each other or the state, or devices share the length.

    Example:
      >>> import jax, simrf_jax
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 10, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> state = simrf_jax.decoding.init_state(w, num_key_heads=8, value_dim=64)
      >>> state = simrf_jax.decoding.append(state, k, v, w)
    """
    check_whole(key=key, value=value)
    inputs, maps, _ = lay_out_with_features(
        jnp.asarray(key)[..., :0, :, :],
        key,
        value,
        projection,
        feature_map=feature_map,
        mask=mask,
        bias=bias,
        scale=scale,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    batch = jnp.shape(key)[:-3]
    before = flatten(state, jax.eval_shape(lambda: empty_state(inputs, maps)), batch)
    keys, spoils = key_features(maps, inputs.key, inputs.key_log_weights)
    new = spoil(summarise(keys, with_ones(inputs.value)), jnp.any(spoils, axis=1))
    return unflatten(merge(before, new), batch)


def step(
    state: AttentionState,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projection: Projection | None,
    *,
    feature_map: FeatureMap = "positive",
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, AttentionState]:
    """Attends to a state and, causally, to the tokens after it.

    One token at a time this is decoding, in time and memory that do not depend on how many there
    were; with a whole prompt it is the prefill, by the parallel form. Both give the numbers of
    ``random_feature_attention(..., is_causal=True)`` of all tokens.

    Args:
      state: Of ``init_state``, ``append`` or ``step``.
      query: ``[..., T, N, H]``.
      key: ``[..., T, K, H]``.
      value: ``[..., T, K, D]``.
      projection: W; the same for all keys of a state.
      feature_map: As ``random_feature_attention``, and so the others; always the same for a state.
      mask: Of the new keys, broadcastable to ``[..., N, 1, T]``; the same for query heads that
        share a key head.
      bias: Likewise.
      scale: As ``random_feature_attention``.
      query_seq_lengths: As ``random_feature_attention``.
      key_value_seq_lengths: Of the new keys.
      chunk_size: As ``random_feature_attention``.

    Returns:
      The output ``[..., T, N, D]`` and the new state, of the same shapes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not fit each other or the state, devices share the length, or the
        mask or the bias differ between heads that share keys.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> state = simrf_jax.decoding.init_state(w, num_key_heads=8, value_dim=64)
      >>> out, state = simrf_jax.decoding.step(state, q, k, v, w)
      >>> out.shape
      (1, 8, 64)
    """
    check_whole(query=query, key=key, value=value)
    inputs, maps, restore = lay_out_with_features(
        query,
        key,
        value,
        projection,
        feature_map=feature_map,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    check_step(inputs.query, inputs.key, jnp.shape(key)[-2])
    batch = jnp.shape(query)[:-3]
    # Merged with the state of no keys, it varies over the devices of shard_map as the tokens do.
    empty = empty_state(inputs, maps)
    before = merge(empty, flatten(state, empty, batch))
    out, after = causal_attention(inputs, maps, before, chunk_size=check_chunk_size(chunk_size))
    return restore(out), unflatten(after, batch)
