"""How attention lays its inputs out: by key heads, scaled, all that hides keys in one array."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention.masks import key_log_weights, run_numbers, within_lengths
from simrf_jax.features import FeatureMap, LogFeatureMap, LogFeatures, log_feature_maps
from simrf_jax.projections import Projection, StructuredProjection, as_projection


class Arrays(NamedTuple):
    """Queries, keys and values by key heads; K is their number, G that of query heads for each.

    Attributes:
      query: ``[B, T, K, G, H]``, scaled, in the type to compute logits in.
      key: ``[B, S, K, H]``, likewise.
      value: ``[B, S, K, D]`` in the type to contract in.
      key_log_weights: ``[1 or B, S, 1 or K]`` to add to the logits, or None; minus infinity hides.
      runs: ``[B, S]``, the number of the segment that each position belongs to, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    key_log_weights: jax.Array | None
    runs: jax.Array | None


class Inputs(NamedTuple):
    """``Arrays``, and the feature maps of queries ``[B, T, K, G, H]`` and keys ``[B, S, K, H]``."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    key_log_weights: jax.Array | None
    runs: jax.Array | None
    query_map: Callable[[jax.Array], LogFeatures]
    key_map: Callable[[jax.Array], LogFeatures]


def log_weights_of(inputs: Arrays | Inputs) -> jax.Array:
    """The key_log_weights, ``[1 or B, S, 1 or K]``; zeros where there are none."""
    if inputs.key_log_weights is None:
        return jnp.zeros((1, inputs.key.shape[1], 1), inputs.query.dtype)
    return inputs.key_log_weights


# From [B, T, K, G, D] to [..., T, N, D], in the type of the inputs or another (dtype=...).
Restore = Callable[..., jax.Array]


def lay_out_with_features(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projection: Projection | None,
    *,
    feature_map: FeatureMap,
    **options: ArrayLike | None,
) -> tuple[Inputs, Restore]:
    """``lay_out`` of what ``random_feature_attention`` takes."""
    maps = log_feature_maps(feature_map)
    w = None if projection is None else as_projection(projection)
    dtype = None if w is None else w.dtype
    arrays, restore = lay_out(query, key, value, dtype=dtype, **options)
    if w is not None:
        num_key_heads, dim = jnp.shape(key)[-2:]
        _check_projection(w, num_key_heads=num_key_heads, dim=dim)
        if w.ndim == 3 and (groups := arrays.key.shape[2] // num_key_heads) > 1:
            w = jax.tree.map(functools.partial(jnp.repeat, repeats=groups, axis=0), w)
    return Inputs(*arrays, *(_per_head(log_features, w) for log_features in maps)), restore


def lay_out(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> tuple[Arrays, Restore]:
    """Checks and arranges what has the layout of ``jax.nn.dot_product_attention``.

    Args:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      dtype: Logits are computed in this type, that of the inputs or float32, whichever is widest.
      mask: As ``random_feature_attention``, and so the others.
      bias: Likewise.
      scale: Likewise.
      query_seq_lengths: Likewise.
      key_value_seq_lengths: Likewise.
      segment_ids: Likewise.

    Returns:
      The arrays, and what makes the output of ``[B, T, K, G, D]``.
    """
    given = {"query": query, "key": key, "value": value}
    query, key, value = (checks.floating(name, x) for name, x in given.items())
    _check_shapes(query, key, value)
    if scale is None:
        scale = key.shape[-1] ** -0.5
    checks.scalar("scale", scale)
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    if unbatched := query.ndim == 3:
        # As jax.nn: a batch of one, to which masks and lengths may have an axis.
        query, key, value = query[None], key[None], value[None]
        lengths = {n: None if x is None else jnp.array(x, ndmin=1) for n, x in lengths.items()}
        segment_ids = None if segment_ids is None else jnp.array(segment_ids, ndmin=2)
    compute = jnp.promote_types(query.dtype, jnp.float32 if dtype is None else dtype)
    compute = jnp.promote_types(compute, jnp.float32)
    arrays, restore = _by_key_heads(
        query, key, value, compute, mask=mask, bias=bias, segment_ids=segment_ids, **lengths
    )
    scale = jnp.asarray(scale, compute)
    # The sign goes with the queries: features estimate exp(x . y) for any x and y.
    root = jnp.sqrt(jnp.abs(scale))
    arrays = arrays._replace(query=arrays.query * (jnp.sign(scale) * root), key=arrays.key * root)
    return arrays, (lambda out, **options: restore(out, **options)[0]) if unbatched else restore


def _by_key_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    compute: jnp.dtype,
    *,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> tuple[Arrays, Restore]:
    """Lays ``[*batch, length, heads, dim]`` out."""
    *batch, query_length, num_heads, dim = query.shape
    key_length, num_key_heads = key.shape[-3:-1]
    groups = num_heads // num_key_heads
    dtype = query.dtype
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
    arrays = Arrays(
        flat(grouped).astype(compute),
        flat(key).astype(compute),
        flat(value).astype(jnp.bfloat16 if dtype == jnp.bfloat16 else compute),
        None if log_weights is None else flat(log_weights).mT,
        runs,
    )

    def restore(out: jax.Array, *, dtype: DTypeLike = query.dtype) -> jax.Array:
        out = out.reshape(*batch, query_length, num_heads, out.shape[-1])
        if real is not None:
            out = jnp.where(real[..., None, None], out, 0)
        return out.astype(dtype)

    return arrays, restore


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
