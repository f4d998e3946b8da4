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
      readout: Sums of ``[B, T, K, G]`` queries, without the queries' log_scale.
      log_scale: ``[B, T, K, G, 1]``, the queries' log_scale, which cancels in the ratio.
      spoiled: ``[B, T, K, G]``, True where a query, or a key that it sees, is not finite.
    """

    readout: Readout
    log_scale: Float[Array, "B T K G 1"]
    spoiled: Bool[Array, "B T K G"]

    def outputs(self) -> Float[Array, "B T K G D"]:
        """Returns ``[B, T, K, G, D]``; zeros where no key is visible."""
        return jnp.where(self.spoiled[..., None], jnp.nan, self.readout.outputs())


class Tokens(NamedTuple):
    """Queries and as many keys, as in ``Inputs``; all of them, or one chunk.

    Attributes:
      query: ``[B, T, K, G, H]``, or features that were computed before.
      key: ``[B, T, K, H]``, or features that were computed before.
      value: ``[B, T, K, D + 1]``, with the column that sums the denominator.
      log_weights: ``[B, T, K]``.
      query_segments: ``[B, T]``, or None.
      key_segments: ``[B, T]``, or None. They are those of the queries, unless keys were moved to
        later positions, and the later the position, the later the segment.
    """

    query: Float[Array, "B T K G H"] | LogFeatures
    key: Float[Array, "B T K H"] | LogFeatures
    value: Float[Array, "B T K D+1"]
    log_weights: Float[Array, "B T K"]
    query_segments: Integer[Array, "B T"] | None
    key_segments: Integer[Array, "B T"] | None

    @classmethod
    def of(cls, inputs: Inputs, query_segments: Integer[Array, "B T"] | None) -> Tokens:
        """Returns queries and keys to scan, and the segments of the queries."""
        value, log_weights = with_ones(inputs.value), inputs.key_log_weights
        return cls(inputs.query, inputs.key, value, log_weights, query_segments, inputs.segments)


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
    inputs = one_key_for_each_query(inputs, 0)
    tokens, features = _map_custom(Tokens.of(inputs, inputs.segments), features)
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
    tokens, features = _map_custom(Tokens.of(inputs, inputs.segments), features)
    scan = _scan_chunks if calls_function(features.feature_map) else _compiled_scan
    up_to, _ = scan(tokens, features, before, chunk_size=chunk_size, with_own_key=True)
    beyond, _ = read_earlier(flip(tokens), features, after, chunk_size=chunk_size)
    beyond = flip(beyond)
    readout, spoiled = up_to.readout.add(beyond.readout), up_to.spoiled | beyond.spoiled
    return up_to._replace(readout=readout, spoiled=spoiled).outputs()


def read_earlier(
    tokens: Tokens, features: HeadMaps, state: AttentionState, *, chunk_size: int
) -> tuple[Scanned, AttentionState]:
    """Lets each query read a state and the keys at positions before its own.

    Args:
      tokens: Queries and keys.
      features: Their feature maps.
      state: State of the keys before the first.
      chunk_size: A power of two.

    Returns:
      The sums that the queries read, and the state of all keys, as ``causal_attention`` has it.
    """
    tokens, features = _map_custom(tokens, features)
    scan = _scan_chunks if calls_function(features.feature_map) else _compiled_scan
    return scan(tokens, features, state, chunk_size=chunk_size, with_own_key=False)


def flip(tree: Tree) -> Tree:
    """Returns arrays ``[B, T, ...]`` in the reverse order of their positions."""
    return jax.tree.map(functools.partial(jnp.flip, axis=1), tree)


def one_key_for_each_query(inputs: Inputs, start: int) -> Inputs:
    """Returns the keys from a position on, as many as queries; hidden ones beyond the ends.

    Args:
      inputs: Queries and keys, of any number.
      start: Position, maybe negative, of the key that goes to the first query.
    """
    fit = functools.partial(stretch, start=start, length=inputs.query.shape[1])
    return dataclasses.replace(
        inputs,
        key=fit(inputs.key, fill=None if inputs.key.shape[1] else 1),  # As _pad says: no zeros.
        value=fit(inputs.value, fill=0),
        key_log_weights=fit(inputs.key_log_weights, fill=-jnp.inf),
        segments=None if inputs.segments is None else fit(inputs.segments, fill=None),
    )


def stretch(
    x: Shaped[Array, "B S *rest"], start: int, length: int, fill: float | None
) -> Shaped[Array, "B {length} *rest"]:
    """Returns as many positions from ``start`` on, which may be negative, padded by ``_pad``."""
    start = min(max(start, -length), x.shape[1])  # Farther out there is padding alone.
    before, after = max(0, -start), max(0, start + length - x.shape[1])
    return _pad(x, before, after, fill)[:, start + before :][:, :length]


def _pad(
    x: Shaped[Array, "B length *rest"], before: int, after: int, fill: float | None
) -> Shaped[Array, "B length+{before}+{after} *rest"]:
    """Adds positions of ``fill`` at both ends, or copies of the outermost positions if None.

    A user's feature map takes padding too: what it makes of a real key is as finite as that of the
    key itself, which cannot be said of zeros.
    """
    if not before and not after:
        return x
    if fill is not None:
        padding = [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding, constant_values=fill)
    # jnp.pad(mode="edge") fails if an Explicit mesh axis shards another axis (jax 0.10.2).
    ends = jnp.repeat(x[:, :1], before, axis=1), jnp.repeat(x[:, -1:], after, axis=1)
    return jnp.concatenate([ends[0], x, ends[1]], axis=1)


def split_length(
    x: Shaped[Array, "B length *rest"], size: int, fill: float | None
) -> Shaped[Array, "chunks B {size} *rest"]:
    """Returns chunks ``[chunks, B, size, ...]`` of ``[B, length, ...]``, padded by ``_pad``."""
    x = _pad(x, 0, -x.shape[1] % size, fill)
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


@dataclasses.dataclass(frozen=True)
class _Given(FeatureMap):
    """Features that were computed before, as the feature map of themselves."""

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
    log_features = features.feature_map.log_features_of_heads
    tokens = tokens._replace(
        query=log_features(tokens.query, features.projection, side="query"),
        key=log_features(tokens.key, features.projection, side="key"),
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
        split(tokens.query_segments, None),
        split(tokens.key_segments, None),
    )
    segment = None
    if tokens.key_segments is not None:
        # The state is that of the first segment, whose number is 0 if there are no tokens.
        segment = jnp.sum(tokens.key_segments[:, :1], 1, tokens.key_segments.dtype)
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
    state, spoiled, segment = carry
    of_queries, of_keys, value = chunk.query_segments, chunk.key_segments, chunk.value
    queries, no_features = features.queries(chunk.query)
    keys, spoils = features.keys(chunk.key, chunk.log_weights)
    sees_spoiled = _sees(spoils, carry, chunk, with_own_key)
    if segment is None or of_queries is None or of_keys is None:
        readout = state.read(queries, value.dtype)
        state = state.merge(AttentionState.of(keys, value))
        spoiled |= jnp.any(spoils, axis=1)
    else:
        last = of_keys[:, -1]
        readout = state.read(hide(queries, of_queries == segment[:, None]), value.dtype)
        in_last = of_keys == last[:, None]
        state = state.where(segment == last).merge(AttentionState.of(hide(keys, in_last), value))
        spoiled &= (segment == last)[:, None]
        spoiled |= jnp.any(spoils & in_last[..., None], axis=1)
        segment = last
    if with_own_key:
        readout = readout.add(_read_own_position(queries, keys, value))
    half = value.shape[1] // 2
    while half:
        readout = readout.add(_read_left_halves(queries, keys, chunk, half))
        half //= 2
    scanned = Scanned(readout, queries.log_scale, no_features | sees_spoiled[..., None])
    return Carry(state, spoiled, segment), scanned


def _sees(
    spoils: Bool[Array, "B C K"], carry: Carry, chunk: Tokens, with_own_key: bool
) -> Bool[Array, "B C K"]:
    """Returns ``[B, C, K]``, True at queries that see a key of the chunk, or before, that spoils.

    Args:
      spoils: ``[B, C, K]``, True at keys that are not finite.
      carry: The keys before the chunk.
      chunk: Queries and keys.
      with_own_key: True if a query sees the key at its own position.
    """
    before = carry.spoiled[:, None]
    if carry.segment is None or chunk.query_segments is None or chunk.key_segments is None:
        own = 0 if with_own_key else spoils
        return before | (jnp.cumsum(spoils, axis=1) - own > 0)
    before = before & (chunk.query_segments == carry.segment[:, None])[..., None]
    visible = jnp.tri(spoils.shape[1], k=0 if with_own_key else -1, dtype=bool)[None]
    visible &= chunk.query_segments[:, :, None] == chunk.key_segments[:, None]
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


def _read_left_halves(queries: LogFeatures, keys: LogFeatures, chunk: Tokens, half: int) -> Readout:
    """Lets the right half of every stretch of 2 * half positions read the left half."""

    def split(x: Shaped[Array, "B C *rest"], side: int) -> Shaped[Array, "B stretches half *rest"]:
        """Returns one half of every stretch of ``[B, C, ...]``, ``[B, stretches, half, ...]``."""
        stretches = x.shape[1] // (2 * half)
        return x.reshape(x.shape[0], stretches, 2, half, *x.shape[2:])[:, :, side]

    left = jax.tree.map(functools.partial(split, side=0), keys)
    right = jax.tree.map(functools.partial(split, side=1), queries)
    if chunk.query_segments is not None and chunk.key_segments is not None:
        # A segment with keys in the left half and queries in the right one must contain the last
        # key of the left half.
        of_keys = split(chunk.key_segments, 0)
        left = hide(left, of_keys == of_keys[:, :, -1:])
        right = hide(right, split(chunk.query_segments, 1) == of_keys[:, :, -1:])
    maxima = largest(left.exponent, axis=2)
    logits = right.exponent + maxima[:, :, :, :, None]
    shift = largest(logits, axis=-1)
    key_features = signed_exp(left.exponent - or_zero(maxima), left.values)
    query_features = signed_exp(logits - or_zero(shift), right.values)
    weights = contract("bnqkgm,bnskm->bnkgqs", query_features, key_features)
    sums = contract("bnkgqs,bnskd->bnqkgd", weights, split(chunk.value, side=0))

    def back(
        x: Float[Array, "B stretches half *rest"], fill: float
    ) -> Float[Array, "B 2*stretches*half *rest"]:
        """Puts the right halves beside the left halves, which read nothing."""
        both = jnp.stack([jnp.full_like(x, fill), x], axis=2)
        return both.reshape(x.shape[0], x.shape[1] * 2 * half, *x.shape[3:])

    return Readout(back(sums, 0), back(shift, -jnp.inf))
