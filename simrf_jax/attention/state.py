"""What linear attention knows of the keys it has seen, in sums that nothing can overflow.

Attention is a monoid: the states of two sets of keys merge into the state of both, and what a query
reads from two states adds up to what it reads from their merger. Bidirectional, causal and
step-by-step attention, and attention over many devices, are ways to bracket one product.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax.attention.layout import HeadMaps, Inputs, Vectors
from simrf_jax.features import LogFeatures


class AttentionState(NamedTuple):
    r"""Sums over keys, for each feature in units of its largest key.

    .. math:: c_i = \max_s \kappa_{si}, \qquad S_i = \sum_s e^{\kappa_{si} - c_i} (v_s, 1)

    with :math:`\kappa` the log features of the keys; values of signed maps stand as factors before
    the exponentials. Its size does not depend on the number of keys.

    Attributes:
      sums: ``[B, K, num_features, D + 1]``; the last column sums the denominator.
      maxima: ``[B, K, num_features]``, or ``[B, K, 1]`` of a map whose features share an exponent;
        minus infinity where no key was seen.
    """

    sums: jax.Array
    maxima: jax.Array


class Readout(NamedTuple):
    """What queries read from a state, in units of e^shift; several add up by ``add``.

    Attributes:
      sums: ``[..., D + 1]``, numerator and denominator.
      shift: ``[..., 1]``; minus infinity where nothing was read.
    """

    sums: jax.Array
    shift: jax.Array


class KeyFeatures(NamedTuple):
    """Features of keys, with all that scales them in the exponent.

    Attributes:
      features: Exponents are minus infinity where a key is hidden or has no finite features.
      spoils: ``[B, S, K]``, True where a visible key or its features are not finite: whoever sees
        it gets NaN.
    """

    features: LogFeatures
    spoils: jax.Array


class QueryFeatures(NamedTuple):
    """Features of queries.

    Attributes:
      features: Zeros where a query has no finite features.
      spoiled: ``[B, T, K, G]``, True at these; they get NaN.
    """

    features: LogFeatures
    spoiled: jax.Array


def key_features(maps: HeadMaps, key: Vectors, log_weights: jax.Array) -> KeyFeatures:
    """Returns the features of keys ``[B, S, K, H]``, weighed by ``log_weights``, ``[B, S, K]``."""
    keys = maps.key(key)
    # A user's map marks what is not finite by exponents that are all NaN. Scales may overflow.
    finite = ~jnp.isnan(keys.exponent[..., 0]) & (keys.log_scale[..., 0] < jnp.inf)
    visible = ((log_weights > -jnp.inf) & finite)[..., None]  # NaN is not above minus infinity.
    exponent = jnp.where(visible, keys.exponent + keys.log_scale + log_weights[..., None], -jnp.inf)
    spoils = (log_weights != -jnp.inf) & ~visible[..., 0]
    return KeyFeatures(LogFeatures(exponent, jnp.zeros_like(keys.log_scale), keys.values), spoils)


def query_features(maps: HeadMaps, query: Vectors) -> QueryFeatures:
    """Returns the features of queries ``[B, T, K, G, H]``."""
    queries = maps.query(query)
    spoiled = jnp.isnan(queries.exponent[..., 0])
    exponent = jnp.where(spoiled[..., None], -jnp.inf, queries.exponent)
    return QueryFeatures(queries._replace(exponent=exponent), spoiled)


def empty_state(inputs: Inputs, maps: HeadMaps) -> AttentionState:
    """Returns the state of no keys."""
    keys, _ = key_features(maps, inputs.key[:, :0], inputs.key_log_weights[:, :0])
    features = signed_exp(keys.exponent, keys.values)[..., None]
    # As summarise, but an einsum of nothing fails in shard_map without jit (jax 0.10.2).
    sums = jnp.sum(features * with_ones(inputs.value[:, :0])[:, :, :, None], axis=1)
    return AttentionState(sums, jnp.squeeze(largest(keys.exponent, axis=1), 1))


def spoil(state: AttentionState, where: jax.Array) -> AttentionState:
    """Returns the state with NaN sums where ``where``, ``[B, K]``, is True."""
    return state._replace(sums=jnp.where(where[:, :, None, None], jnp.nan, state.sums))


def split_spoiled(state: AttentionState) -> tuple[AttentionState, jax.Array]:
    """Returns a state of finite sums, and where ``spoil`` made them NaN, ``[B, K]``."""
    spoiled = jnp.any(jnp.isnan(state.sums), axis=(-2, -1))
    sums = jnp.where(spoiled[:, :, None, None], 0, state.sums)
    return state._replace(sums=sums), spoiled


def with_ones(value: jax.Array) -> jax.Array:
    """One more column of values, all ones, sums the denominator along with the numerator."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def summarise(keys: LogFeatures, value: jax.Array) -> AttentionState:
    """The state of keys ``[B, S, K, ...]`` with values ``[B, S, K, D + 1]``."""
    maxima = largest(keys.exponent, axis=1)
    features = signed_exp(keys.exponent - finite(maxima), keys.values)
    return AttentionState(contract("bskm,bskd->bkmd", features, value), jnp.squeeze(maxima, 1))


def merge(first: AttentionState, second: AttentionState) -> AttentionState:
    """The state of the keys of both."""
    maxima = jnp.maximum(first.maxima, second.maxima)
    return AttentionState(in_units_of(first, maxima) + in_units_of(second, maxima), maxima)


def in_units_of(state: AttentionState, maxima: jax.Array) -> jax.Array:
    """The sums relative to other maxima, at least as large."""
    return state.sums * jnp.exp(state.maxima - finite(maxima))[..., None]


def keep(state: AttentionState, where: jax.Array) -> AttentionState:
    """The state where ``where``, ``[B]``, is True, and an empty one elsewhere."""
    where = where[:, None, None]
    return AttentionState(
        jnp.where(where[..., None], state.sums, 0), jnp.where(where, state.maxima, -jnp.inf)
    )


def read(state: AttentionState, queries: LogFeatures, dtype: jnp.dtype) -> Readout:
    """What queries ``[B, T, K, G, ...]`` find, ``[B, T, K, G, D + 1]``.

    A query's log_scale cancels in the ratio and is left out. A feature that is zero for all keys is
    left out too, or it could set the shift of those that matter.

    Args:
      state: Of ``[B, K]``.
      queries: Features of ``[B, T, K, G, H]``.
      dtype: To contract in.
    """
    logits = queries.exponent + state.maxima[:, None, :, None, :]
    shift = largest(logits, axis=-1)
    features = signed_exp(logits - finite(shift), queries.values)
    sums = contract("btkgm,bkmd->btkgd", features, state.sums.astype(dtype))
    return Readout(sums, shift)


def add(first: Readout, second: Readout) -> Readout:
    """What is read from two states together."""
    shift = jnp.maximum(first.shift, second.shift)
    sums = sum(readout.sums * jnp.exp(readout.shift - finite(shift)) for readout in (first, second))
    return Readout(jnp.asarray(sums), shift)


def normalise(readout: Readout) -> jax.Array:
    """Numerator over denominator, ``[..., D]``; zeros where no key is visible."""
    numerator, denominator = readout.sums[..., :-1], readout.sums[..., -1:]
    nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
    return jnp.where(nothing, 0, numerator / jnp.where(nothing, 1, denominator))


def hide(features: LogFeatures, visible: jax.Array) -> LogFeatures:
    """Features that are zero where ``visible``, ``[B, length]``, is False."""
    shape = visible.shape + (1,) * (features.exponent.ndim - visible.ndim)
    exponent = jnp.where(visible.reshape(shape), features.exponent, -jnp.inf)
    return features._replace(exponent=exponent)


def largest(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """A shift, through which no gradient has to flow; minus infinity of nothing."""
    return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))


def finite(shift: jax.Array) -> jax.Array:
    """A shift of 0 where there is nothing above minus infinity."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def signed_exp(exponent: jax.Array, values: jax.Array | None) -> jax.Array:
    """Features of their exponents, shifted, and values."""
    phi = jnp.exp(exponent)
    return phi if values is None else phi * values


def contract(spec: str, features: jax.Array, values: jax.Array) -> jax.Array:
    """Contracts in the type of ``values``, accumulates in the type of ``features``."""
    wide, narrow = features.dtype, values.dtype
    if wide == narrow:
        return jnp.einsum(spec, features, values, precision=jax.lax.Precision.HIGHEST)
    features = features.astype(narrow)

    def mixed(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=wide)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a.astype(wide), b.astype(wide))

    # Inside jit, XLA's CPU backend (jaxlib 0.10.2) has no bfloat16 x bfloat16 = float32 product.
    return jax.lax.platform_dependent(features, values, cpu=widened, default=mixed)
