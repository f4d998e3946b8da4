"""The public attention function: what it accepts, what it refuses, and how it lays things out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.attention.bidirectional import bidirectional_attention
from simrf_jax.attention.layout import check_shapes
from simrf_jax.attention.masks import key_log_weights, within_lengths
from simrf_jax.features import FeatureMap, LogFeatureMap, LogFeatures, log_feature_maps
from simrf_jax.projections import Projection, StructuredProjection, as_projection

IMPLEMENTATIONS = ("xla",)


def random_feature_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    projection: Projection | None,
    *,
    feature_map: FeatureMap = "positive",
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Softmax attention estimated by random features, in time linear in the length.

    .. math::
        \operatorname{Att}(Q, K, V)_t = \frac{\phi(q_t)^\top \sum_s \phi(k_s) v_s^\top}
                                             {\phi(q_t)^\top \sum_s \phi(k_s)}

    with :math:`\phi` the features of the softmax kernel of queries and keys scaled by
    :math:`\sqrt{\text{scale}}`. It stands in for ``jax.nn.dot_product_attention`` and has its
    layout, defaults and mask meaning. It equals the estimator at any scale of the inputs: no
    epsilon, no overflow.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      projection: W, ``[num_features, H]`` shared by all heads, or ``[K, num_features, H]``, one
        for each key head and the queries that belong to it. An array, a ``FastProjection``, or
        what a hybrid map takes; None for a map that needs none.
      feature_map: By name, ``"positive"``, ``"hyperbolic"``, ``"trigonometric"``, ``"phase"`` (with
        evenly spaced phases), ``"relu"``, ``"elu"``, ``"angular_hybrid"``, ``"gaussian_hybrid"`` or
        ``"clustered_hybrid"``; or a callable from (x, projection) to features, with x
        ``[..., H]`` already scaled; or a ``FeaturePair`` of two. The library's own functions, also
        inside a pair or a ``functools.partial``, stand for their names: they take the softmax
        kernel unless told otherwise, and are exact at any scale, which the features of other
        callables are as far as their range allows. Maps that may be negative (trigonometric,
        phase, the hybrids) estimate the denominator with noise of either sign: where it comes near
        zero, so does the sense of the output.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, True to attend. It must be the same for
        all queries: have a query axis of size 1, or be a NumPy array that is constant along it.
      bias: Added to the logits; of the same shapes, with the same condition.
      scale: Multiplies the logits; by default :math:`1/\sqrt H`.
      is_causal: Only False is supported.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      implementation: ``"xla"`` or None for the default.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and exponentials are float32 at least; the
      two sums over the length and the features are in bfloat16 with float32 accumulation if the
      inputs are bfloat16. Queries that see no key get zeros.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not match, a name is unknown, scale is negative, or the mask, the
        bias or is_causal asks for what linear attention does not do here.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 197, 12, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> simrf_jax.random_feature_attention(q, k, v, w).shape
      (2, 197, 12, 64)

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021); Reid et al., Simplex
      Random Features (ICML 2023), Sec. 5.4.
    """
    arrays = {"query": query, "key": key, "value": value}
    query, key, value = (checks.floating(name, x) for name, x in arrays.items())
    check_shapes(query, key, value)
    maps = log_feature_maps(feature_map)
    w = None if projection is None else as_projection(projection)
    if w is not None:
        _check_projection(w, num_key_heads=key.shape[-2], dim=key.shape[-1])
    checks.one_of("implementation", implementation, (*IMPLEMENTATIONS, None))
    if is_causal:
        raise ValueError("is_causal=True is not supported: random features attend to all keys.")
    if scale is None:
        scale = key.shape[-1] ** -0.5
    checks.scalar("scale", scale)
    visibility = {"mask": mask, "bias": bias}
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    if query.ndim > 3:
        return _attend(query, key, value, w, maps, scale, **visibility, **lengths)
    # As jax.nn: a batch of one, to which masks and lengths may have an axis.
    lengths = {name: None if x is None else jnp.atleast_1d(x) for name, x in lengths.items()}
    return _attend(query[None], key[None], value[None], w, maps, scale, **visibility, **lengths)[0]


def _attend(
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
) -> jax.Array:
    """Lays ``[*batch, length, heads, dim]`` out by key heads, and attends."""
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
    root = jnp.sqrt(jnp.asarray(scale, compute))
    out = bidirectional_attention(
        flat(grouped).astype(compute) * root,
        flat(key).astype(compute) * root,
        flat(value).astype(jnp.bfloat16 if dtype == jnp.bfloat16 else compute),
        _per_head(query_map, projection),
        _per_head(key_map, projection),
        None if log_weights is None else flat(log_weights).mT,
    )
    out = out.reshape(*batch, query_length, num_heads, value.shape[-1])
    if real is not None:
        out = jnp.where(real[..., None, None], out, 0)
    return out.astype(dtype)


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
