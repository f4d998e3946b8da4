"""Bidirectional random-feature attention: in one piece, or chunk by chunk on a CPU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from simrf_jax.attention.inputs.arguments import Inputs, contract
from simrf_jax.attention.random_features.state import (
    AttentionState,
    HeadMaps,
    in_units_of,
    largest,
    read_all,
    with_nan,
    with_ones,
)
from simrf_jax.features import LogFeatures, calls_function

CHUNK_ROWS = 8192  # Queries or keys of all heads together whose features are made at a time.
LEAST_CHUNK = 64  # Shorter chunks would lose more time to calls than they save.


def bidirectional_attention(inputs: Inputs, features: HeadMaps) -> Float[Array, "B T K G D"]:
    r"""Lets each query attend to all keys.

    .. math::
        o_t = \frac{\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i} v_s}
                   {\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i}}

    with :math:`a_{ti}` the exponents of the queries, :math:`\kappa_{si}` those of the keys (scale
    and log weights included), :math:`c_i = \max_s \kappa_{si}` (``AttentionState.maxima``) and
    :math:`b_t = \max_i (a_{ti} + c_i)` (``Readout.shift``). Values of signed maps stand as factors
    before the exponentials. Both shifts cancel, so this is the estimator itself. Nothing overflows,
    and for a positive map the denominator is at least 1 wherever a query and a visible key have a
    feature in common. So no epsilon is needed.

    On a CPU the features of a few tokens at a time are made, used and forgotten while they are in
    the cache. The backward pass makes them again. Other backends compute all of them at once.

    Args:
      inputs: Queries, keys and values without segments.
      features: Their feature maps.

    Returns:
      ``[B, T, K, G, D]`` in the logits' type; zeros where no key is visible.
    """
    if calls_function(features.feature_map) or inputs.key.shape[1] == 0:
        return _attend_at_once(inputs, features)
    return jax.lax.platform_dependent(
        inputs, features, cpu=_attend_by_chunks, default=_attend_at_once
    )


def _attend_at_once(inputs: Inputs, features: HeadMaps) -> Float[Array, "B T K G D"]:
    """Computes the features of all tokens."""
    keys, spoils = features.keys(inputs.key, inputs.key_log_weights)
    state = AttentionState.of(keys, with_ones(inputs.value))
    return read_all(state, jnp.any(spoils, axis=1), inputs.query, features, inputs.value.dtype)


class Chunks(NamedTuple):
    """Keys of one head or, with one axis more, of all heads, by chunks of the length.

    Attributes:
      key: ``[chunks, B, S, 1, H]``.
      value: ``[chunks, B, S, 1, D]``.
      log_weights: ``[chunks, B, S, 1]``.
    """

    key: Float[Array, "chunks *K B S 1 H"]
    value: Float[Array, "chunks *K B S 1 D"]
    log_weights: Float[Array, "chunks *K B S 1"]


def _attend_by_chunks(inputs: Inputs, features: HeadMaps) -> Float[Array, "B T K G D"]:
    """Computes the features of few tokens at a time.

    The heads come before the length, which all products of matrices are fast in.
    """
    batch, length, num_heads, groups, _ = inputs.query.shape
    of_keys = functools.partial(_split, rows=batch * num_heads)
    keys = Chunks(
        of_keys(inputs.key, fill=0),
        of_keys(inputs.value, fill=0),
        of_keys(inputs.key_log_weights, fill=-jnp.inf),
    )
    queries = _split(inputs.query, rows=batch * num_heads * groups, fill=0)
    axes = features.head_axes()

    def attend(
        queries: Float[Array, "chunks B T 1 G H"], keys: Chunks, features: HeadMaps
    ) -> tuple[Float[Array, "chunks B T 1 G D"], Bool[Array, "chunks B T 1 G"]]:
        features = features.with_head_axis(axes)
        state, spoiled = _state_of(keys, features)

        def read(query: Float[Array, "B T 1 G H"]) -> tuple[Any, Any]:
            of_query, no_features = features.queries(query)
            return _read(state, of_query, keys.value.dtype), no_features | spoiled[:, None, :, None]

        return _map(read, queries)

    out, spoiled = jax.vmap(attend, in_axes=(1, 1, axes), out_axes=1)(queries, keys, features)
    return with_nan(_join(out, length), _join(spoiled, length))


def _state_of(chunks: Chunks, features: HeadMaps) -> tuple[AttentionState, Bool[Array, "B 1"]]:
    """Returns the state of the keys of all chunks, and where one of them is not finite.

    A first pass over several chunks takes the maxima. If the units changed from chunk to chunk, the
    backward pass would have to keep the sums of each.
    """
    if chunks.key.shape[0] == 1:
        keys, spoils = features.keys(chunks.key[0], chunks.log_weights[0])
        maxima = jnp.squeeze(largest(keys.exponent, axis=1), 1)
        return _state_of_chunk(keys, chunks.value[0], maxima), jnp.any(spoils, axis=1)

    def larger(
        maxima: Float[Array, "B 1 #num_features"], chunk: Chunks
    ) -> tuple[Float[Array, "B 1 #num_features"], None]:
        keys = features.keys(chunk.key, chunk.log_weights).features
        # XLA (jaxlib 0.10.2) would take the maximum inside the product, with one thread.
        exponent = jax.lax.optimization_barrier(keys.exponent)
        return jnp.maximum(maxima, jnp.squeeze(largest(exponent, axis=1), 1)), None

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sums_of(chunk: Chunks) -> tuple[Float[Array, "B 1 m columns"], Bool[Array, "B 1"]]:
        keys, spoils = features.keys(chunk.key, chunk.log_weights)
        return _state_of_chunk(keys, chunk.value, maxima).sums, jnp.any(spoils, axis=1)

    def add(sums: Float[Array, "B 1 m columns"], chunk: Chunks) -> tuple[Any, Bool[Array, "B 1"]]:
        more, spoiled = sums_of(chunk)
        return sums + more, spoiled

    none, _ = features.keys(chunks.key[0][:, :0], chunks.log_weights[0][:, :0])
    empty = AttentionState.of_none(none, with_ones(chunks.value[0][:, :0]))
    maxima, _ = jax.lax.scan(larger, empty.maxima, jax.lax.stop_gradient(chunks))
    sums, spoiled = jax.lax.scan(add, empty.sums, chunks)
    return AttentionState(sums, maxima), jnp.any(spoiled, axis=0)


def _state_of_chunk(
    keys: LogFeatures, value: Float[Array, "B S K D"], maxima: Float[Array, "B K #num_features"]
) -> AttentionState:
    """Returns the state of keys in units of maxima that may be those of more keys."""
    phi = in_units_of(maxima, keys)
    numerators = contract("bskm,bskd->bkmd", phi, value)
    # In the precision of the numerators, so that both see the same weights.
    denominators = jnp.sum(phi.astype(value.dtype).astype(phi.dtype), axis=1)[..., None]
    return AttentionState(jnp.concatenate([numerators, denominators], axis=-1), maxima)


def _read(
    state: AttentionState, queries: LogFeatures, dtype: jnp.dtype
) -> Float[Array, "B T K G D"]:
    """Returns what queries read of a state, numerator over denominator.

    On a CPU a product with D columns and one with a single column are faster than one with D + 1,
    and so is the product of the gradient with ones instead of its sum.
    """
    phi, _ = state.weigh(queries)
    sums = state.sums.astype(dtype)
    numerator, denominator = (
        jnp.moveaxis(contract("btkgm,bkmd->bktgd", phi, part), 2, 1)
        for part in (sums[..., :-1], sums[..., -1:])
    )
    nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
    inverse = jnp.where(nothing, 0, 1 / jnp.where(nothing, 1, denominator))
    ones = jnp.ones((1, numerator.shape[-1]), inverse.dtype)
    return numerator * jnp.matmul(inverse, ones, precision=jax.lax.Precision.HIGHEST)


def _map(function: Any, chunks: Float[Array, "chunks B T 1 G H"]) -> Any:
    """Maps over chunks without keeping what the function computes on the way, unless of one."""
    if chunks.shape[0] == 1:
        return jax.tree.map(lambda x: x[None], function(chunks[0]))
    return jax.lax.map(jax.checkpoint(function, prevent_cse=False), chunks)


def _split(
    x: Shaped[Array, "B length K *rest"], *, rows: int, fill: float
) -> Shaped[Array, "chunks K B size 1 *rest"]:
    """Returns chunks of the length of about equal size, padded at the end, heads first.

    Args:
      x: ``[B, length, K, ...]``.
      rows: Number of features that each position has in all.
      fill: Value of the padding.
    """
    batch, length, num_heads, *rest = x.shape
    longest = max(LEAST_CHUNK, CHUNK_ROWS // max(rows, 1))
    count = -(-length // longest) or 1
    size = -(-length // count)
    padding = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(batch, count, size, num_heads, *rest)
    return jnp.expand_dims(jnp.moveaxis(x, (1, 3), (0, 1)), 4)


def _join(
    x: Shaped[Array, "chunks K B size 1 *rest"], length: int
) -> Shaped[Array, "B {length} K *rest"]:
    """Returns ``[B, length, K, ...]``: the inverse of ``_split``."""
    x = jnp.moveaxis(jnp.squeeze(x, 4), (0, 1), (1, 3))
    batch, count, size, *rest = x.shape
    return x.reshape(batch, count * size, *rest)[:, :length]
