"""How attention lays its inputs out: by key heads, scaled, all that hides keys in one array."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention.masks import key_log_weights, run_numbers, within_lengths
from simrf_jax.features import (
    FeatureMap,
    LibraryMap,
    LogFeatureMap,
    LogFeatures,
    log_feature_maps,
)
from simrf_jax.projections import Projection, StructuredProjection, as_projection


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["projection"],
    meta_fields=["of_queries", "of_keys"],
)
@dataclasses.dataclass(frozen=True)
class HeadMaps:
    """The feature maps of all heads, and their W.

    Attributes:
      projection: W of all heads, or ``[K, num_features, H]``, one for each; None if none is needed.
      of_queries: Feature map of queries.
      of_keys: Feature map of keys.
    """

    projection: jax.Array | StructuredProjection | None
    of_queries: LogFeatureMap
    of_keys: LogFeatureMap

    def query(self, x: Vectors) -> LogFeatures:
        """Returns the log features of queries ``[B, T, K, G, H]``."""
        return self._each_head(self.of_queries, x)

    def key(self, x: Vectors) -> LogFeatures:
        """Returns the log features of keys ``[B, S, K, H]``."""
        return self._each_head(self.of_keys, x)

    def are_the_librarys(self) -> bool:
        """Returns whether both maps do the same whenever they are called."""
        return isinstance(self.of_queries, LibraryMap) and isinstance(self.of_keys, LibraryMap)

    def _each_head(self, log_features: LogFeatureMap, x: Vectors) -> LogFeatures:
        if self.projection is None or self.projection.ndim == 2:
            return log_features(x, self.projection)
        return jax.vmap(log_features, in_axes=(2, 0), out_axes=2)(x, self.projection)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query", "key", "value", "key_log_weights", "runs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries, keys and values by key heads; K is their number, G that of query heads for each.

    All queries, keys and values are finite: those that were not, and hidden ones, hold something
    harmless, for 0 * NaN is not 0, also in gradients.

    Attributes:
      query: ``[B, T, K, G, H]``, scaled, in the type to compute logits in.
      key: ``[B, S, K, H]``, scaled, in the same type.
      value: ``[B, S, K, D]`` in the type to contract in.
      key_log_weights: ``[B, S, K]`` to add to the logits; minus infinity hides a key, and NaN marks
        one that was not finite: whoever sees it gets NaN.
      runs: ``[B, S]``, the number of the segment that each position belongs to, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    key_log_weights: jax.Array
    runs: jax.Array | None


# So many numbers of moderate weight can be added: larger ones count as not finite.
MOST_TERMS = 2**24

# Vectors, or what stands for them if they have been mapped to features before.
Vectors: TypeAlias = jax.Array | LogFeatures

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
) -> tuple[Inputs, HeadMaps, Restore]:
    """Lays out what ``random_feature_attention`` takes."""
    w = None if projection is None else as_projection(projection)
    maps = HeadMaps(w, *log_feature_maps(feature_map))
    inputs, restore = lay_out(
        query,
        key,
        value,
        dtype=None if w is None else w.dtype,
        # A user's map may have no finite features at zero.
        fill_with_tokens=not maps.are_the_librarys(),
        **options,
    )
    if w is not None:
        num_key_heads, dim = jnp.shape(key)[-2:]
        _check_projection(w, num_key_heads=num_key_heads, dim=dim)
        if w.ndim == 3 and (groups := inputs.key.shape[2] // num_key_heads) > 1:
            w = jax.tree.map(functools.partial(jnp.repeat, repeats=groups, axis=0), w)
    return inputs, dataclasses.replace(maps, projection=w), restore


def lay_out(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    dtype: DTypeLike | None = None,
    fill_with_tokens: bool = False,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> tuple[Inputs, Restore]:
    """Checks and arranges what has the layout of ``jax.nn.dot_product_attention``.

    Args:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      dtype: Logits are computed in this type, that of the inputs or float32, whichever is widest.
      fill_with_tokens: Whether a query or key that is hidden or not finite is replaced by another
        of its head; by zeros otherwise.
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
    inputs, restore = _by_key_heads(
        query,
        key,
        value,
        compute,
        jnp.asarray(scale, compute),
        fill_with_tokens=fill_with_tokens,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        **lengths,
    )
    return inputs, (lambda out, **options: restore(out, **options)[0]) if unbatched else restore


def _by_key_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    compute: jnp.dtype,
    scale: jax.Array,
    *,
    fill_with_tokens: bool,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> tuple[Inputs, Restore]:
    """Lays ``[*batch, length, heads, dim]`` out; queries times keys are multiplied by ``scale``."""
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
    if log_weights.shape[-2] not in (1, num_key_heads):
        # Heads that share their keys but not their mask no longer share a state.
        key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
        groups = 1

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(batch), *x.shape[len(batch) :])

    query = flat(query.reshape(*query.shape[:-2], num_heads // groups, groups, dim))
    query, key = query.astype(compute), flat(key).astype(compute)
    # The sign goes with the queries: features estimate exp(x . y) for any x and y.
    root = jnp.sqrt(jnp.abs(scale))
    of_queries, of_keys = jnp.sign(scale) * root, root
    value = flat(value).astype(jnp.bfloat16 if dtype == jnp.bfloat16 else compute)
    real = jnp.ones((1, query_length), bool)
    if query_seq_lengths is not None:
        real = within_lengths("query_seq_lengths", query_seq_lengths, tuple(batch), query_length)
        real = flat(real)
    real = real[:, :, None, None]
    finite = _is_finite(query * of_queries)
    fill = _first if fill_with_tokens else _zeros
    log_weights = _mark(flat(log_weights).mT, _is_finite(key * of_keys) & _is_finite(value))
    visible = log_weights > -jnp.inf
    runs = None
    if segment_ids is not None:
        runs = flat(run_numbers(segment_ids, tuple(batch), query_length, key_length))
    inputs = Inputs(
        # Scaled last: 0 * NaN would reach the gradient of the scale.
        _replace(query, real & finite, fill) * of_queries,
        _replace(key, visible, fill) * of_keys,
        _replace(value, visible, _zeros),
        log_weights,
        runs,
    )

    def restore(out: jax.Array, *, dtype: DTypeLike = dtype) -> jax.Array:
        out = jnp.where(finite[..., None], out, jnp.nan)
        out = jnp.where(real[..., None], out, 0)
        out = out.reshape(*batch, query_length, num_heads, out.shape[-1])
        return out.astype(dtype)

    return inputs, restore


def _is_finite(x: jax.Array) -> jax.Array:
    """Returns ``[...]``, True where ``[..., dim]`` is finite and sums over it cannot overflow."""
    largest = float(jnp.finfo(x.dtype).max) / MOST_TERMS
    return jnp.all(jnp.abs(jax.lax.stop_gradient(x)) <= largest, axis=-1)


def _mark(log_weights: jax.Array, finite: jax.Array) -> jax.Array:
    """Returns log weights ``[B, S, K]`` that are NaN where a visible key is not finite.

    Args:
      log_weights: ``[1 or B, S, 1 or K]``; minus infinity hides a key.
      finite: ``[B, S, K]``, True at keys and values that are finite.
    """
    # Beyond the bound an exponent would overflow.
    finite &= log_weights <= float(jnp.finfo(log_weights.dtype).max) / 4
    return jnp.where(finite | (log_weights == -jnp.inf), log_weights, jnp.nan)


def _replace(
    x: jax.Array, where: jax.Array, fill: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Returns vectors ``[B, length, ..., dim]`` as they are where ``where`` is True."""
    where = jnp.broadcast_to(where, x.shape[:-1])[..., None]
    return jnp.where(where, x, fill(x, where))


def _zeros(x: jax.Array, where: jax.Array) -> jax.Array:
    """Returns a vector that is harmless but for feature maps without a value at zero."""
    del where
    return jnp.zeros((), x.dtype)


def _first(x: jax.Array, where: jax.Array) -> jax.Array:
    """Returns the first vector ``[B, 1, ..., dim]`` where ``where`` is True; or ones."""
    is_first = where & (jnp.cumsum(where, axis=1) == 1)
    first = jnp.sum(jnp.where(is_first, x, 0), axis=1, keepdims=True)
    some = jnp.any(where, axis=1, keepdims=True)
    return jax.lax.stop_gradient(jnp.where(some, first, 1))


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
