"""The attention of FMMformers token by token: a window and a state for each feature map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from simrf_jax.attention.decoding.batch import check_kind
from simrf_jax.attention.decoding.far_field import init_state, step
from simrf_jax.attention.decoding.near_field import Window, init_window, window_step
from simrf_jax.attention.fmm import blend, check_feature_maps
from simrf_jax.attention.state import AttentionState
from simrf_jax.features import FeatureMap
from simrf_jax.projections import Projection


class FMMState(NamedTuple):
    """What FMM attention knows of the tokens it has seen.

    Attributes:
      near: The window of the near field.
      far: The state of each feature map of the far field.
    """

    near: Window
    far: tuple[AttentionState, ...]


def init_fmm_state(
    projections: Sequence[Projection | None],
    *,
    bandwidth: int,
    batch: tuple[int, ...] = (),
    num_key_heads: int,
    head_dim: int,
    value_dim: int,
    feature_maps: Sequence[FeatureMap] = ("positive",),
    dtype: DTypeLike = jnp.float32,
) -> FMMState:
    """The state before the first token.

    Args:
      projections: As ``fmm_attention``, and so the others.
      bandwidth: How many of the last keys the near field keeps.
      batch: Leading shape.
      num_key_heads: Number K of key heads.
      head_dim: Width H of the keys.
      value_dim: Width D of the values.
      feature_maps: As ``fmm_attention``.
      dtype: Of the queries, keys and values to come.

    Returns:
      A state for ``fmm_step``, of a size that does not depend on the number of tokens.

    Raises:
      TypeError: If a number is not an integer or dtype is not floating.
      ValueError: As ``init_state`` and ``init_window``; if there is not one projection for each
        feature map.

    Example:
      >>> import jax, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> state = simrf_jax.decoding.init_fmm_state(
      ...     (w,), bandwidth=32, num_key_heads=8, head_dim=64, value_dim=64
      ... )
      >>> state.near.key.shape, state.far[0].sums.shape
      ((32, 8, 64), (8, 130, 65))
    """
    check_feature_maps(projections, feature_maps)
    sizes: dict[str, Any] = {
        "batch": batch,
        "num_key_heads": num_key_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": dtype,
    }
    near = init_window(bandwidth=bandwidth, **sizes)
    far = (
        init_state(projection, feature_map=feature_map, **sizes)
        for projection, feature_map in zip(projections, feature_maps, strict=True)
    )
    return FMMState(near, tuple(far))


def fmm_step(
    state: FMMState,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projections: Sequence[Projection | None],
    *,
    near_weight: ArrayLike = 1.0,
    far_weights: ArrayLike = 1.0,
    feature_maps: Sequence[FeatureMap] = ("positive",),
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, FMMState]:
    """Attends to a state and, causally, to the tokens after it.

    One token at a time or a whole prompt: both give the numbers of
    ``fmm_attention(..., is_causal=True)`` of all tokens.

    Args:
      state: Of ``init_fmm_state`` or ``fmm_step``.
      query: ``[..., T, N, H]``.
      key: ``[..., T, K, H]``.
      value: ``[..., T, K, D]``.
      projections: As ``fmm_attention``, and so the others; always the same for a state.
      near_weight: As ``fmm_attention``.
      far_weights: As ``fmm_attention``.
      feature_maps: As ``fmm_attention``.
      mask: Of the new keys, broadcastable to ``[..., N, 1, T]``; the same for query heads that
        share a key head.
      bias: Likewise.
      scale: As ``fmm_attention``.
      query_seq_lengths: As ``fmm_attention``.
      key_value_seq_lengths: Of the new keys.
      chunk_size: As ``fmm_attention``.

    Returns:
      The output ``[..., T, N, D]`` and the new state, of the same shapes.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not fit each other or the state.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> state = simrf_jax.decoding.init_fmm_state(
      ...     (w,), bandwidth=32, num_key_heads=8, head_dim=64, value_dim=64
      ... )
      >>> out, state = simrf_jax.decoding.fmm_step(state, q, k, v, (w,))
      >>> out.shape
      (1, 8, 64)
    """
    check_feature_maps(projections, feature_maps)
    check_kind(state, FMMState)
    if len(state.far) != len(feature_maps):
        raise ValueError(
            f"state must be of {len(feature_maps)} feature maps, got one of {len(state.far)}."
        )
    options = {
        "mask": mask,
        "bias": bias,
        "scale": scale,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    near, window = window_step(state.near, query, key, value, **options)
    steps = [
        step(
            before,
            query,
            key,
            value,
            projection,
            feature_map=feature_map,
            chunk_size=chunk_size,
            **options,
        )
        for before, projection, feature_map in zip(
            state.far, projections, feature_maps, strict=True
        )
    ]
    far = [out for out, _ in steps]
    out = blend(near, far, near_weight, far_weights)
    return out, FMMState(window, tuple(after for _, after in steps))
