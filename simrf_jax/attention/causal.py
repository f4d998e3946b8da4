"""Causal random-feature attention: chunk by chunk, exact at any scale, without a look ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from simrf_jax import checks
from simrf_jax.attention.layout import Inputs, log_weights_of
from simrf_jax.attention.state import (
    AttentionState,
    Readout,
    add,
    contract,
    finite,
    hide,
    keep,
    largest,
    log_key_features,
    merge,
    normalise,
    read,
    signed_exp,
    summarise,
    visible_only,
    with_ones,
)
from simrf_jax.features import LogFeatures

FeatureMap = Callable[[jax.Array], LogFeatures]
CHUNK_SIZE = 64


def check_chunk_size(chunk_size: int | None) -> int:
    """Returns the chunk size to use."""
    if chunk_size is None:
        return CHUNK_SIZE
    chunk_size = checks.positive_int("chunk_size", chunk_size)
    if chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}.")
    return chunk_size


def causal_attention(
    inputs: Inputs, state: AttentionState, *, chunk_size: int
) -> tuple[jax.Array, AttentionState]:
    r"""Each query attends to a state and to the keys up to its own position.

    Between chunks a scan carries the state of all earlier keys. Inside a chunk halving brackets
    them: the right half of the chunk reads the left half, the right half of each half its left one,
    and so on, down to each query and the key of its own position. Each shift is a maximum over keys
    that all its readers see: nothing of the future, not even its rounding, reaches the past.

    The backward pass computes the features of a chunk again: what is kept is one state for each
    chunk, O(T num_features D / chunk_size), and not the features, O(T num_features).

    Args:
      inputs: As ``lay_out_with_features`` makes them.
      state: Of the keys before the first.
      chunk_size: A power of two. Time O(T (num_features D + log(chunk_size) num_features)).

    Returns:
      ``[B, T, K, G, D]`` in the logits' type, and the state of all keys (of those of the last
      segment, if there are segments). Zeros where no key is visible.
    """
    inputs = _as_many_keys_as_queries(inputs)
    readout, state = _scan_chunks(inputs, state, chunk_size=chunk_size, own=True)
    return normalise(readout), state


def packed_attention(
    inputs: Inputs, before: AttentionState, after: AttentionState, *, chunk_size: int
) -> jax.Array:
    """Each query attends to the keys of its segment: those up to its position, and those beyond.

    Args:
      inputs: As ``lay_out_with_features`` makes them, with segments.
      before: State of earlier keys of the first segment.
      after: State of later keys of the last segment.
      chunk_size: A power of two.
    """
    up_to, _ = _scan_chunks(inputs, before, chunk_size=chunk_size, own=True)
    beyond, _ = _scan_chunks(_reversed(inputs), after, chunk_size=chunk_size, own=False)
    beyond = jax.tree.map(functools.partial(jnp.flip, axis=1), beyond)
    return normalise(add(up_to, beyond))


def _reversed(inputs: Inputs) -> Inputs:
    names = ("query", "key", "value", "key_log_weights", "runs")
    arrays = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**jax.tree.map(functools.partial(jnp.flip, axis=1), arrays))


def _as_many_keys_as_queries(inputs: Inputs) -> Inputs:
    """Cuts keys that no query sees off, or adds hidden ones."""
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    weights = log_weights_of(inputs) if key_length < length else inputs.key_log_weights

    def fit(x: jax.Array, fill: float) -> jax.Array:
        return _pad(x[:, :length], max(0, length - key_length), fill)

    return inputs._replace(
        key=fit(inputs.key, 0),
        value=fit(inputs.value, 0),
        key_log_weights=None if weights is None else fit(weights, -jnp.inf),
    )


def _pad(x: jax.Array, count: int, fill: float | None) -> jax.Array:
    """Adds positions of fill at the end, or of the last again."""
    padding = [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2)
    if fill is None:
        return jnp.pad(x, padding, mode="edge")
    return jnp.pad(x, padding, constant_values=fill)


def split_length(x: jax.Array | None, size: int, fill: float | None) -> jax.Array | None:
    """``[B, length, ...]`` to chunks ``[chunks, B, size, ...]``, filled up with what hides."""
    if x is None:
        return None
    x = _pad(x, -x.shape[1] % size, fill)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


def _scan_chunks(
    inputs: Inputs, state: AttentionState, *, chunk_size: int, own: bool
) -> tuple[Readout, AttentionState]:
    """What each query reads of the state and the keys before it (and its own), ``[B, T, ...]``."""
    batch, length = inputs.query.shape[:2]
    size = min(chunk_size, 1 << max(length - 1, 0).bit_length())
    weights = log_weights_of(inputs) if length % size else inputs.key_log_weights

    chunks = {
        "query": split_length(inputs.query, size, 0),
        "key": split_length(inputs.key, size, 0),
        "value": split_length(with_ones(inputs.value), size, 0),
        "log_weights": split_length(weights, size, -jnp.inf),
        # Whatever follows belongs to the last segment, for the state is that of its keys.
        "runs": split_length(inputs.runs, size, None),
    }
    # The first, for which the state is; 0 if there is none.
    run = None if inputs.runs is None else jnp.sum(inputs.runs[:, :1], 1, inputs.runs.dtype)
    maps = (inputs.query_map, inputs.key_map)
    attend = jax.checkpoint(functools.partial(_attend_chunk, maps, own), prevent_cse=False)
    (state, _), readouts = jax.lax.scan(attend, (state, run), chunks)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, x.shape[1] * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, readouts), state


def _attend_chunk(
    maps: tuple[FeatureMap, FeatureMap],
    own: bool,
    carry: tuple[AttentionState, jax.Array | None],
    chunk: dict[str, Any],
) -> tuple[tuple[AttentionState, jax.Array | None], Readout]:
    """One step of the scan; the carry's second part is the number of the last segment."""
    state, run = carry
    query_map, key_map = maps
    runs, log_weights = chunk["runs"], chunk["log_weights"]
    key, value = visible_only(chunk["key"], chunk["value"], log_weights)
    queries, keys = query_map(chunk["query"]), log_key_features(key_map(key), log_weights)
    if run is None:
        readout = read(state, queries, value.dtype)
        state = merge(state, summarise(keys, value))
    else:
        last = runs[:, -1]
        readout = read(state, hide(queries, runs == run[:, None]), value.dtype)
        here = summarise(hide(keys, runs == last[:, None]), value)
        state, run = merge(keep(state, run == last), here), last
    if own:
        readout = add(readout, _read_own_position(queries, keys, value))
    half = key.shape[1] // 2
    while half:
        readout = add(readout, _read_left_halves(queries, keys, value, runs, half))
        half //= 2
    return (state, run), readout


def _read_own_position(queries: LogFeatures, keys: LogFeatures, value: jax.Array) -> Readout:
    """Each query and the key of its own position, ``[B, C, K, G, D + 1]``."""
    logits = queries.exponent + keys.exponent[:, :, :, None]
    shift = largest(logits, axis=-1)
    products = signed_exp(logits - finite(shift), queries.values)
    if keys.values is not None:
        products = products * keys.values[:, :, :, None]
    weights = jnp.sum(products, axis=-1, keepdims=True)
    return Readout(weights * value[:, :, :, None], shift)


def _read_left_halves(
    queries: LogFeatures, keys: LogFeatures, value: jax.Array, runs: jax.Array | None, half: int
) -> Readout:
    """In every stretch of 2 * half positions, the right half reads the left half."""

    def split(x: jax.Array, side: int) -> jax.Array:
        """``[B, C, ...]`` to one half of every stretch, ``[B, stretches, half, ...]``."""
        stretches = x.shape[1] // (2 * half)
        return x.reshape(x.shape[0], stretches, 2, half, *x.shape[2:])[:, :, side]

    left = jax.tree.map(functools.partial(split, side=0), keys)
    right = jax.tree.map(functools.partial(split, side=1), queries)
    if runs is not None:
        # Segments are runs: those that both halves have part in hold the last of the left half.
        last = split(runs, 0)[:, :, -1:]
        left, right = hide(left, split(runs, 0) == last), hide(right, split(runs, 1) == last)
    maxima = largest(left.exponent, axis=2)
    logits = right.exponent + maxima[:, :, :, :, None]
    shift = largest(logits, axis=-1)
    key_features = signed_exp(left.exponent - finite(maxima), left.values)
    query_features = signed_exp(logits - finite(shift), right.values)
    weights = contract("bnqkgm,bnskm->bnkgqs", query_features, key_features)
    sums = contract("bnkgqs,bnskd->bnqkgd", weights, split(value, side=0))

    def back(x: jax.Array, left: float) -> jax.Array:
        """Beside the left halves, which read nothing."""
        both = jnp.stack([jnp.full_like(x, left), x], axis=2)
        return both.reshape(x.shape[0], x.shape[1] * 2 * half, *x.shape[3:])

    return Readout(back(sums, 0), back(shift, -jnp.inf))
