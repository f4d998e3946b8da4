"""How attention lays its inputs out: by key heads, scaled, all that hides keys in one array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.attention.masks import key_log_weights, run_numbers, within_lengths
from simrf_jax.features import FeatureMap, LogFeatureMap, LogFeatures, log_feature_maps
from simrf_jax.projections import Projection, StructuredProjection, as_projection


class Inputs(NamedTuple):
    """What all modes of attention take; K is the number of key heads, G the queries' for each.

    Attributes:
      query: ``[B, T, K, G, H]``, scaled, in the type to compute logits in.
      key: ``[B, S, K, H]``, likewise.
      value: ``[B, S, K, D]`` in the type to contract in.
      query_map: From ``[B, T, K, G, H]`` to features.
      key_map: From ``[B, S, K, H]`` to features.
      key_log_weights: ``[1 or B, S, 1 or K]`` to add to the keys' log features, or None.
      runs: ``[B, T]``, which segment each position belongs to, counted from 0; or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_map: Callable[[jax.Array], LogFeatures]
    key_map: Callable[[jax.Array], LogFeatures]
    key_log_weights: jax.Array | None
    runs: jax.Array | None


def lay_out(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projection: Projection | None,
    *,
    feature_map: FeatureMap,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> tuple[Inputs, Callable[[jax.Array], jax.Array]]:
    """Checks the inputs of ``random_feature_attention`` and lays them out.

    Returns:
      The inputs, and what turns ``[B, T, K, G, D]`` into the output.
    """
    arrays = {"query": query, "key": key, "value": value}
    query, key, value = (checks.floating(name, x) for name, x in arrays.items())
    _check_shapes(query, key, value)
    maps = log_feature_maps(feature_map)
    w = None if projection is None else as_projection(projection)
    if w is not None:
        _check_projection(w, num_key_heads=key.shape[-2], dim=key.shape[-1])
    if scale is None:
        scale = key.shape[-1] ** -0.5
    checks.scalar("scale", scale)
    if query.ndim > 3:
        return _lay_out(
            query,
            key,
            value,
            w,
            maps,
            scale,
            mask=mask,
            bias=bias,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            segment_ids=segment_ids,
        )
    # As jax.nn: a batch of one, to which masks and lengths may have an axis.
    inputs, restore = _lay_out(
        query[None],
        key[None],
        value[None],
        w,
        maps,
        scale,
        mask=mask,
        bias=bias,
        query_seq_lengths=_at_least(1, query_seq_lengths),
        key_value_seq_lengths=_at_least(1, key_value_seq_lengths),
        segment_ids=_at_least(2, segment_ids),
    )
    return inputs, lambda out: restore(out)[0]


def _at_least(ndim: int, x: ArrayLike | None) -> jax.Array | None:
    return None if x is None else jnp.array(x, ndmin=ndim)


def _lay_out(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    projection: jax.Array | StructuredProjection | None,
    maps: tuple[LogFeatureMap, LogFeatureMap],
    scale: ArrayLike,
    *,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> tuple[Inputs, Callable[[jax.Array], jax.Array]]:
    """Lays ``[*batch, length, heads, dim]`` out."""
    query_map, key_map = maps
    *batch, query_length, num_heads, dim = query.shape
    key_length, num_key_heads = key.shape[-3:-1]
    groups = num_heads // num_key_heads
    dtype = query.dtype
    compute = jnp.promote_types(dtype, jnp.float32)
    if projection is not None:
        compute = jnp.promote_types(compute, projection.dtype)
    log_weights = key_log_weights(
        mask,
        bias,
        key_value_seq_lengths,
        batch=tuple(batch),
        num_heads=num_heads,
        query_length=query_length,
        key_length=key_length,
        dtype=compute,
    )
    if log_weights is not None and log_weights.shape[-2] not in (1, num_key_heads):
        # Heads that share their keys but not their mask no longer share a state.
        key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
        if projection is not None and projection.ndim == 3:
            repeat = functools.partial(jnp.repeat, repeats=groups, axis=0)
            projection = jax.tree.map(repeat, projection)
        groups = 1

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(batch), *x.shape[len(batch) :])

    grouped = query.reshape(*query.shape[:-2], num_heads // groups, groups, dim)
    real = None
    if query_seq_lengths is not None:
        real = within_lengths("query_seq_lengths", query_seq_lengths, tuple(batch), query_length)
        # Padding may hold anything, NaN too: it must not reach the gradients.
        grouped = jnp.where(real[..., None, None, None], grouped, 0)
    runs = None
    if segment_ids is not None:
        runs = flat(run_numbers(segment_ids, tuple(batch), query_length, key_length))
    root = jnp.sqrt(jnp.asarray(scale, compute))
    inputs = Inputs(
        flat(grouped).astype(compute) * root,
        flat(key).astype(compute) * root,
        flat(value).astype(jnp.bfloat16 if dtype == jnp.bfloat16 else compute),
        _per_head(query_map, projection),
        _per_head(key_map, projection),
        None if log_weights is None else flat(log_weights).mT,
        runs,
    )

    def restore(out: jax.Array) -> jax.Array:
        out = out.reshape(*batch, query_length, num_heads, value.shape[-1])
        if real is not None:
            out = jnp.where(real[..., None, None], out, 0)
        return out.astype(dtype)

    return inputs, restore


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
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


def _check_projection(
    projection: jax.Array | StructuredProjection, *, num_key_heads: int, dim: int
) -> None:
    if projection.ndim not in (2, 3) or projection.shape[-1] != dim:
        raise ValueError(
            f"projection must be [num_features, {dim}] or [{num_key_heads}, num_features, {dim}] "
            f"for heads of dim {dim}, got shape {projection.shape}."
        )
    if projection.ndim == 3 and projection.shape[0] != num_key_heads:
        raise ValueError(
            f"projection must have one W for each of the {num_key_heads} key heads, "
            f"got shape {projection.shape}."
        )


def _per_head(
    log_features: LogFeatureMap,
    projection: jax.Array | StructuredProjection | None,
) -> Callable[[jax.Array], LogFeatures]:
    """The feature map for ``[B, length, K, ..., H]``, each of the K heads with its own W."""
    if projection is None or projection.ndim == 2:
        return lambda x: log_features(x, projection)
    each_head = jax.vmap(log_features, in_axes=(2, 0), out_axes=2)
    return lambda x: each_head(x, projection)
