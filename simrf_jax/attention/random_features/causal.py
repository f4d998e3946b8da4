"""Causal random-feature attention: chunk by chunk, exact at any scale, without a look ahead."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

from simrf_jax.attention.inputs.arguments import Inputs, contract
from simrf_jax.attention.random_features.state import (
    AttentionState,
    HeadMaps,
    Readout,
    hide,
    largest,
    or_zero,
    signed_exp,
    with_ones,
)
from simrf_jax.features import FeatureMap, LogFeatures, Side, calls_function

Tree = TypeVar("Tree")

CHUNK_SIZE = 64  # Keys taken at a time unless the caller says.


class Scanned(NamedTuple):
    """The result of a scan: the sums that queries read of the keys that they see.

    Attributes:
      readout: Sums of ``[B, T, K, G]`` queries.
      spoiled: ``[B, T, K, G]``, True where a query, or a key that it sees, is not finite.
    """

    readout: Readout
    spoiled: Bool[Array, "B T K G"]

    def outputs(self) -> Float[Array, "B T K G D"]:
        """Returns ``[B, T, K, G, D]``; zeros where no key is visible."""
        return jnp.where(self.spoiled[..., None], jnp.nan, self.readout.outputs())


class Tokens(NamedTuple):
    """Queries and keys of the same positions, as in ``Inputs``; all of them, or one chunk.

    Attributes:
      query: ``[B, T, K, G, H]``, or features that were computed before.
      key: ``[B, T, K, H]``, or features that were computed before.
      value: ``[B, T, K, D + 1]``, with the column that sums the denominator.
      log_weights: ``[B, T, K]``.
      segments: ``[B, T]``, or None.
    """

    query: Float[Array, "B T K G H"] | LogFeatures
    key: Float[Array, "B T K H"] | LogFeatures
    value: Float[Array, "B T K D+1"]
    log_weights: Float[Array, "B T K"]
    segments: Integer[Array, "B T"] | None


class Carry(NamedTuple):
    """The keys before a chunk.

    Attributes:
      state: Sums over those of the last segment, all finite.
      spoiled: ``[B, K]``, True where one of them is not finite.
      segment: ``[B]``, the number of the last segment, or None without segments.
    """

    state: AttentionState
    spoiled: Bool[Array, "B K"]
    segment: Integer[Array, " B"] | None


def causal_attention(
    inputs: Inputs, features: HeadMaps, state: AttentionState, *, chunk_size: int
) -> tuple[Float[Array, "B T K G D"], AttentionState]:
    r"""Lets each query attend to a state and to the keys up to its own position.

    Between chunks a scan carries the state of all earlier keys. Inside a chunk halving brackets
    them: the right half of the chunk reads the left half, the right half of each half its left one,
    and so on, down to each query and the key of its own position. Each set of maxima is taken over
    keys that all its readers see, and a query's shift is the largest sum of these maxima and its
    own exponents. So nothing of the future, not even its rounding, reaches the past.

    The backward pass computes the features of a chunk again: what is kept is one state for each
    chunk, O(T num_features D / chunk_size), and not the features, O(T num_features).

    Args:
      inputs: Queries, keys and values.
      features: Their feature maps.
      state: State of the keys before the first.
      chunk_size: A power of two. Time O(T (num_features D + log(chunk_size) num_features)).

    Returns:
      ``[B, T, K, G, D]`` in the logits' type, and the state of all keys (of those of the last
      segment, if there are segments). Zeros where no key is visible.
    """
    tokens = _tokens(_as_many_keys_as_queries(inputs))
    tokens, features = _map_custom(tokens, features)
    scan = _scan_chunks if calls_function(features.feature_map) else _compiled_scan
    scanned, state = scan(tokens, features, state, chunk_size=chunk_size, with_own_key=True)
    return scanned.outputs(), state


def packed_attention(
    inputs: Inputs,
    features: HeadMaps,
    before: AttentionState,
    after: AttentionState,
    *,
    chunk_size: int,
) -> Float[Array, "B T K G D"]:
    """Lets each query attend to the keys of its segment: those up to its position, and the rest.

    Args:
      inputs: Queries, keys and values with segments.
      features: Their feature maps.
      before: State of earlier keys of the first segment.
      after: State of later keys of the last segment.
      chunk_size: A power of two.
    """
    tokens, features = _map_custom(_tokens(inputs), features)
    scan = _scan_chunks if calls_function(features.feature_map) else _compiled_scan
    up_to, _ = scan(tokens, features, before, chunk_size=chunk_size, with_own_key=True)
    flip = functools.partial(jax.tree.map, functools.partial(jnp.flip, axis=1))
    beyond, _ = scan(flip(tokens), features, after, chunk_size=chunk_size, with_own_key=False)
    beyond = flip(beyond)
    return Scanned(up_to.readout.add(beyond.readout), up_to.spoiled | beyond.spoiled).outputs()


def _tokens(inputs: Inputs) -> Tokens:
    """Returns what is scanned."""
    value = with_ones(inputs.value)
    return Tokens(inputs.query, inputs.key, value, inputs.key_log_weights, inputs.segments)


def _as_many_keys_as_queries(inputs: Inputs) -> Inputs:
    """Cuts keys that no query sees off, or adds hidden ones."""
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]

    def fit(x: Float[Array, "B S *rest"], fill: float | None) -> Float[Array, "B T *rest"]:
        return _pad(x[:, :length], max(0, length - key_length), fill)

    return dataclasses.replace(
        inputs,
        key=fit(inputs.key, None if key_length else 1),  # As _pad says: no zeros.
        value=fit(inputs.value, 0),
        key_log_weights=fit(inputs.key_log_weights, -jnp.inf),
    )


def _pad(
    x: Shaped[Array, "B length *rest"], count: int, fill: float | None
) -> Shaped[Array, "B length+{count} *rest"]:
    """Adds ``count`` positions of ``fill`` at the end, or copies of the last position if None.

    A user's feature map takes padding too: what it makes of a real key is as finite as that of the
    key itself, which cannot be said of zeros.
    """
    if not count:
        return x
    padding = [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2)
    if fill is None:
        return jnp.pad(x, padding, mode="edge")
    return jnp.pad(x, padding, constant_values=fill)


def split_length(
    x: Shaped[Array, "B length *rest"], size: int, fill: float | None
) -> Shaped[Array, "chunks B {size} *rest"]:
    """Returns chunks ``[chunks, B, size, ...]`` of ``[B, length, ...]``, padded by ``_pad``."""
    x = _pad(x, -x.shape[1] % size, fill)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


@dataclasses.dataclass(frozen=True)
class _Given(FeatureMap):
    """Features that were computed before, as the feature map of themselves."""

    is_finite = True

    def log_features(self, x: LogFeatures, projection: None, *, side: Side) -> LogFeatures:
        del projection, side
        return x


def _map_custom(tokens: Tokens, features: HeadMaps) -> tuple[Tokens, HeadMaps]:
    """Replaces tokens, outside jit, by the features that a user's function gives them.

    The scan is compiled once for feature maps that are pytrees. What is compiled must not outlive a
    user's function, which may do something else the next time.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tokens, features)))
    if traced or not calls_function(features.feature_map):
        return tokens, features
    tokens = tokens._replace(
        query=features.log_features(tokens.query, "query"),
        key=features.log_features(tokens.key, "key"),
    )
    return tokens, HeadMaps(None, _Given())


def _scan_chunks(
    tokens: Tokens,
    features: HeadMaps,
    state: AttentionState,
    *,
    chunk_size: int,
    with_own_key: bool,
) -> tuple[Scanned, AttentionState]:
    """Returns what each query reads of the state and the keys before it (and its own key)."""
    batch, length = tokens.value.shape[:2]
    size = min(chunk_size, 1 << max(length - 1, 0).bit_length())

    def split(x: Tree, fill: float | None) -> Tree:
        return jax.tree.map(functools.partial(split_length, size=size, fill=fill), x)

    chunks = Tokens(
        split(tokens.query, None),
        split(tokens.key, None),
        split(tokens.value, 0),
        split(tokens.log_weights, -jnp.inf),
        # Padding joins the last segment, because the state that is returned is that of its keys.
        split(tokens.segments, None),
    )
    segment = None
    if tokens.segments is not None:
        # The state is that of the first segment, whose number is 0 if there are no tokens.
        segment = jnp.sum(tokens.segments[:, :1], 1, tokens.segments.dtype)
    attend = jax.checkpoint(
        functools.partial(_attend_chunk, features, with_own_key), prevent_cse=False
    )
    carry, scanned = jax.lax.scan(attend, Carry(*state.split_spoiled(), segment), chunks)

    def join(x: Shaped[Array, "chunks B C *rest"]) -> Shaped[Array, "B T *rest"]:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, x.shape[1] * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, scanned), carry.state.spoil(carry.spoiled)


_compiled_scan = jax.jit(_scan_chunks, static_argnames=("chunk_size", "with_own_key"))


def _attend_chunk(
    features: HeadMaps, with_own_key: bool, carry: Carry, chunk: Tokens
) -> tuple[Carry, Scanned]:
    """Takes one step of the scan."""
    state, _, segment = carry
    segments, value = chunk.segments, chunk.value
    queries, no_features = features.queries(chunk.query)
    keys, spoils = features.keys(chunk.key, chunk.log_weights)
    spoiled = _sees(spoils, carry, segments)
    if segment is None or segments is None:
        readout = state.read(queries, value.dtype)
        state = state.merge(AttentionState.of(keys, value))
    else:
        last = segments[:, -1]
        readout = state.read(hide(queries, segments == segment[:, None]), value.dtype)
        here = AttentionState.of(hide(keys, segments == last[:, None]), value)
        state, segment = state.where(segment == last).merge(here), last
    if with_own_key:
        readout = readout.add(_read_own_position(queries, keys, value))
    half = value.shape[1] // 2
    while half:
        readout = readout.add(_read_left_halves(queries, keys, value, segments, half))
        half //= 2
    scanned = Scanned(readout, no_features | spoiled[..., None])
    return Carry(state, spoiled[:, -1], segment), scanned


def _sees(
    spoils: Bool[Array, "B C K"], carry: Carry, segments: Integer[Array, "B C"] | None
) -> Bool[Array, "B C K"]:
    """Returns ``[B, C, K]``, True at queries that see a key of the chunk, or before, that spoils.

    Args:
      spoils: ``[B, C, K]``, True at keys that are not finite.
      carry: The keys before the chunk.
      segments: ``[B, C]``, or None.
    """
    before = carry.spoiled[:, None]
    if carry.segment is None or segments is None:
        return before | (jnp.cumsum(spoils, axis=1) > 0)
    before = before & (segments == carry.segment[:, None])[..., None]
    visible = jnp.tri(spoils.shape[1], dtype=bool)[None]
    visible &= segments[:, :, None] == segments[:, None]
    return before | jnp.any(visible[..., None] & spoils[:, None], axis=2)


def _read_own_position(
    queries: LogFeatures, keys: LogFeatures, value: Float[Array, "B C K columns"]
) -> Readout:
    """Lets each query read the key of its own position, ``[B, C, K, G, D + 1]``."""
    logits = queries.exponent + keys.exponent[:, :, :, None]
    shift = largest(logits, axis=-1)
    products = signed_exp(logits - or_zero(shift), queries.values)
    if keys.values is not None:
        products = products * keys.values[:, :, :, None]
    weights = jnp.sum(products, axis=-1, keepdims=True)
    return Readout(weights * value[:, :, :, None], shift)


def _read_left_halves(
    queries: LogFeatures,
    keys: LogFeatures,
    value: Float[Array, "B C K columns"],
    segments: Integer[Array, "B C"] | None,
    half: int,
) -> Readout:
    """Lets the right half of every stretch of 2 * half positions read the left half."""

    def split(x: Shaped[Array, "B C *rest"], side: int) -> Shaped[Array, "B stretches half *rest"]:
        """Returns one half of every stretch of ``[B, C, ...]``, ``[B, stretches, half, ...]``."""
        stretches = x.shape[1] // (2 * half)
        return x.reshape(x.shape[0], stretches, 2, half, *x.shape[2:])[:, :, side]

    left = jax.tree.map(functools.partial(split, side=0), keys)
    right = jax.tree.map(functools.partial(split, side=1), queries)
    if segments is not None:
        # A segment that spans both halves must contain the left half's last token.
        last = split(segments, 0)[:, :, -1:]
        left = hide(left, split(segments, 0) == last)
        right = hide(right, split(segments, 1) == last)
    maxima = largest(left.exponent, axis=2)
    logits = right.exponent + maxima[:, :, :, :, None]
    shift = largest(logits, axis=-1)
    key_features = signed_exp(left.exponent - or_zero(maxima), left.values)
    query_features = signed_exp(logits - or_zero(shift), right.values)
    weights = contract("bnqkgm,bnskm->bnkgqs", query_features, key_features)
    sums = contract("bnkgqs,bnskd->bnqkgd", weights, split(value, side=0))

    def back(
        x: Float[Array, "B stretches half *rest"], fill: float
    ) -> Float[Array, "B 2*stretches*half *rest"]:
        """Puts the right halves beside the left halves, which read nothing."""
        both = jnp.stack([jnp.full_like(x, fill), x], axis=2)
        return both.reshape(x.shape[0], x.shape[1] * 2 * half, *x.shape[3:])

    return Readout(back(sums, 0), back(shift, -jnp.inf))
