"""Causal random-feature attention: chunk by chunk, exact at any scale, no leak from the future.

A weight is a sum over features of products of two exponentials, that of the query and that of the
key. It is computed as a matrix product, and each feature is divided by its unit on one side and
multiplied by it on the other. The unit may depend only on keys that all readers see. Otherwise
later keys would reach earlier outputs through rounding or overflow.

Nearly always one unit for each feature suffices for a chunk: the largest exponent in the state or,
if that is empty, the exponent of the first key. A later key may be larger by a factor of
``e**limit``: floating-point numbers keep their precision, and a query's sum is at least 1 in its
own units, so nothing that counts is lost below the smallest number. Where a key is larger still,
every pair of a query and a key of the chunk has its own unit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Integer, Shaped

from simrf_jax._src.attention.estimator import HeadMaps, QueryFeatures, compiled, hide
from simrf_jax._src.attention.inputs.call import Inputs, contract
from simrf_jax._src.attention.inputs.masks import Size
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    Readout,
    exp_in_units,
    join_length,
    largest,
    pad,
    split_length,
    weigh,
    with_ones,
)
from simrf_jax._src.features import FeatureMap, LogFeatures, Side, calls_function

# Fractions of the largest exponent of the contraction dtype by which keys may exceed their unit.
# With the first, sums over values up to 2**30 are finite, and values down to 2**-30 over such a
# sum, which occur in gradients, do not underflow. Other values need the second.
LIMIT, LIMIT_FOR_OTHER_VALUES, LARGE_VALUE = 0.6, 0.06, 2.0**30


class Scanned(NamedTuple):
    """The result of a scan: the sums that queries read of the keys that they see.

    Attributes:
      readout: Sums of ``[B, T, K, G]`` queries, without the queries' log_scale.
      log_scale: ``[B, T, K, G, 1]``, the queries' log_scale, which cancels in the ratio.
    """

    readout: Readout
    log_scale: Float[Array, "B T K G 1"]


def in_units_of_the_kernel(read: Scanned) -> Readout:
    """Returns sums of kernel estimates.

    The log_scale of a query, which cancels in plain attention, does not cancel between exact
    weights and estimated ones.
    """
    overflows = ~(read.log_scale < jnp.inf)
    log_scale = jnp.where(overflows, -jnp.inf, read.log_scale)
    unit = jax.lax.stop_gradient(log_scale)
    factor = exp_in_units(log_scale, unit)  # One, or zero; it carries the gradient.
    sums, shift, poisoned = read.readout
    return Readout(sums * factor, shift + unit, poisoned | overflows[..., 0])


class Tokens(NamedTuple):
    """Queries and the same number of keys, as in ``Inputs``; all of them, or one chunk.

    Attributes:
      query: ``[B, T, K, G, H]``, or features that were computed before.
      key: ``[B, T, K, H]``, or features that were computed before.
      value: ``[B, T, K, D + 1]``, with the column that sums the denominator.
      log_weights: ``[B, T, K]``.
      query_segments: ``[B, T]``, or None.
      key_segments: ``[B, T]``, or None. They equal those of the queries, unless keys were moved to
        other positions. The keys of a segment are next to each other.
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
      state: Sums over the keys of the last segment, all finite.
      poisoned: ``[B, K]``, True where one of these keys is not finite.
      segment: ``[B]``, the number of the last segment, or None without segments.
    """

    state: AttentionState
    poisoned: Bool[Array, "B K"]
    segment: Integer[Array, " B"] | None

    def of_last_segment(self, chunk: Tokens) -> Carry:
        """Returns the keys that belong to the last segment of a chunk."""
        if self.segment is None or chunk.key_segments is None:
            return self
        segment = chunk.key_segments[:, -1]
        is_same = segment == self.segment
        return Carry(self.state.where(is_same), self.poisoned & is_same[:, None], segment)


def causal_attention(
    inputs: Inputs, features: HeadMaps, state: AttentionState, *, chunk_size: int
) -> tuple[Scanned, AttentionState]:
    r"""Lets each query attend to a state and to the keys up to its own position.

    A scan over chunks carries the state of all earlier keys. The docstring of this module explains
    how queries read the keys of their own chunk, so that the future does not affect the past, not
    even through rounding.

    The backward pass recomputes the features of each chunk: only one state for each chunk is kept,
    O(T num_features D / chunk_size), not the features, O(T num_features).

    Args:
      inputs: Queries, keys and values.
      features: Their feature maps.
      state: State of the keys before the first.
      chunk_size: A power of two. Time O(T num_features (D + chunk_size)).

    Returns:
      The sums that the queries read, and the state of all keys (of those of the last segment, if
      there are segments).
    """
    if inputs.key.shape[1] != inputs.query.shape[1]:
        inputs = one_key_for_each_query(inputs, 0)
    tokens = Tokens.of(inputs, inputs.segments)
    return scan(tokens, state, features, chunk_size=chunk_size, with_own_key=True)


def packed_attention(
    inputs: Inputs,
    features: HeadMaps,
    before: AttentionState,
    after: AttentionState,
    *,
    chunk_size: int,
) -> Scanned:
    """Lets each query attend to the keys of its segment: those up to its position, and the rest.

    Args:
      inputs: Queries, keys and values with segments.
      features: Their feature maps.
      before: State of earlier keys of the first segment.
      after: State of later keys of the last segment.
      chunk_size: A power of two.
    """
    up_to = Tokens.of(inputs, inputs.segments)
    # Paired with the next key, a query reads its own key here too, so one scan does for both.
    later = Tokens.of(one_key_for_each_query(inputs, 1), inputs.segments)
    read, _ = scan_both_ways(
        up_to, later, before, after, features, chunk_size=chunk_size, with_own_key=True
    )
    return read


def one_key_for_each_query(inputs: Inputs, start: int) -> Inputs:
    """Returns the keys from a position on, one for each query; keys beyond the ends are hidden.

    Args:
      inputs: Queries and keys; their numbers may differ.
      start: Position, maybe negative, of the key that is paired with the first query.
    """
    fit = functools.partial(stretch, start=start, length=inputs.query.shape[1])
    return dataclasses.replace(
        inputs,
        key=fit(inputs.key, fill=None if inputs.key.shape[1] else 1),  # Copies, not zeros: see pad.
        value=fit(inputs.value, fill=0),
        key_log_weights=fit(inputs.key_log_weights, fill=-jnp.inf),
        segments=None if inputs.segments is None else fit(inputs.segments, fill=None),
    )


def stretch(
    x: Shaped[Array, "B S *rest"], start: int, length: Size, fill: float | None
) -> Shaped[Array, "B {length} *rest"]:
    """Returns ``length`` positions from ``start`` on, which may be negative, padded by ``pad``."""
    if isinstance(length, int) and isinstance(x.shape[1], int):  # Not symbolic, of jax.export.
        start = min(max(start, -length), x.shape[1])  # Farther out there is only padding.
    before, after = max(0, -start), max(0, start + length - x.shape[1])
    return pad(x, before, after, fill)[:, start + before :][:, :length]


@dataclasses.dataclass(frozen=True)
class _Given(FeatureMap):
    """Feature map of features that were computed before: the identity."""

    def log_features(self, x: LogFeatures, projection: None, *, side: Side) -> LogFeatures:
        del projection, side
        return x


def _map_custom(tokens: Tokens, features: HeadMaps) -> tuple[Tokens, HeadMaps]:
    """Replaces tokens by the features that a user's function, if there is one, gives them."""
    if not calls_function(features.feature_map):
        return tokens, features
    log_features = features.feature_map.log_features_of_heads
    tokens = tokens._replace(
        query=log_features(tokens.query, features.projection, side="query"),
        key=log_features(tokens.key, features.projection, side="key"),
    )
    return tokens, HeadMaps(None, _Given())


def scan(
    tokens: Tokens,
    state: AttentionState,
    features: HeadMaps,
    *,
    chunk_size: int,
    with_own_key: bool,
) -> tuple[Scanned, AttentionState]:
    """Lets each query read a state and the keys at positions before its own.

    Args:
      tokens: Queries and keys.
      state: State of the keys before the first.
      features: Their feature maps.
      chunk_size: A power of two.
      with_own_key: True if a query also reads the key at its own position.

    Returns:
      The sums that the queries read, and the state of all keys, as in ``causal_attention``.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tokens, features)))
    if not traced:
        # Then the scan is compiled once, although user functions, maybe impure, are not cached.
        tokens, features = _map_custom(tokens, features)
    static = ("chunk_size", "with_own_key")
    program = compiled(_scan_chunks, features.feature_map, *static, inline=False)
    return program(features, tokens, state, chunk_size=chunk_size, with_own_key=with_own_key)


def scan_both_ways(
    earlier: Tokens,
    later: Tokens,
    before: AttentionState,
    after: AttentionState,
    features: HeadMaps,
    *,
    chunk_size: int,
    with_own_key: bool,
) -> tuple[Scanned, AttentionState]:
    """Lets each query read the keys of one pairing before its own, and those of another after it.

    One scan goes through the sequence and its reverse, side by side on an axis of their own. Two
    scans, one after the other, have twice as many operations, which a GPU launches one by one. A
    user's function is called before the scan, also under jit, because it may not work under vmap.

    Args:
      earlier: Queries and keys. A query reads the keys at earlier positions.
      later: The same queries and other keys. A query reads the keys at later positions.
      before: State of the keys before those of ``earlier``, which all queries read.
      after: State of the keys after those of ``later``, which all queries read.
      features: The feature maps.
      chunk_size: A power of two.
      with_own_key: True if a query also reads the keys at its own position.

    Returns:
      The sums that the queries read, and the state of ``before`` and all keys of ``earlier``.
    """
    in_reverse = functools.partial(jax.tree.map, functools.partial(jnp.flip, axis=1))
    earlier, mapped = _map_custom(earlier, features)
    later, _ = _map_custom(in_reverse(later), features)
    both = jax.tree.map(lambda *x: jnp.stack(x), (earlier, before), (later, after))
    one_way = functools.partial(
        scan, features=mapped, chunk_size=chunk_size, with_own_key=with_own_key
    )
    read, state = jax.vmap(one_way)(*both)
    forward, state = jax.tree.map(lambda x: x[0], (read, state))
    backward = jax.tree.map(lambda x: x[1], read)
    return forward._replace(readout=forward.readout.add(in_reverse(backward.readout))), state


def _scan_chunks(
    features: HeadMaps,
    tokens: Tokens,
    state: AttentionState,
    *,
    chunk_size: int,
    with_own_key: bool,
) -> tuple[Scanned, AttentionState]:
    """Returns the sums each query reads of the state and earlier keys (and its own key)."""
    length = tokens.value.shape[1]
    chunks = Tokens(
        split_length(tokens.query, chunk_size, None),
        split_length(tokens.key, chunk_size, None),
        split_length(tokens.value, chunk_size, 0),
        split_length(tokens.log_weights, chunk_size, -jnp.inf),
        # Padding joins the last segment, because the returned state is that of its keys.
        split_length(tokens.query_segments, chunk_size, None),
        split_length(tokens.key_segments, chunk_size, None),
    )
    segment = None
    if tokens.key_segments is not None:
        # The state belongs to the first segment, whose number is 0 if there are no tokens.
        segment = jnp.sum(tokens.key_segments[:, :1], 1, tokens.key_segments.dtype)
    step = functools.partial(_attend_chunk, features, with_own_key=with_own_key)
    # JAX asks for a name. A partial has none, so JAX would print it, features included.
    attend = jax.checkpoint(functools.update_wrapper(step, _attend_chunk), prevent_cse=False)
    carry, scanned = jax.lax.scan(attend, Carry(*state.split_poisoned(), segment), chunks)
    return join_length(scanned, length), carry.state.poison(carry.poisoned)


class _Visibility(NamedTuple):
    """The keys that the queries of a chunk see, by position and segment.

    Attributes:
      with_own_key: True if a query sees the key at its own position.
      carried: ``[B, C]``, True at queries in the last segment before the chunk.
      same_segment: ``[B, C, C]``, True for a query and a key of one segment; None without segments.
      in_last: ``[B, C]``, True at keys in the chunk's last segment.
    """

    with_own_key: bool
    carried: Bool[Array, "B C"]
    same_segment: Bool[Array, "B C C"] | None
    in_last: Bool[Array, "B C"]

    @classmethod
    def of(cls, carry: Carry, chunk: Tokens, *, with_own_key: bool) -> _Visibility:
        """Returns what the queries of a chunk see after the keys of ``carry``."""
        of_queries, of_keys = chunk.query_segments, chunk.key_segments
        if carry.segment is None or of_queries is None or of_keys is None:
            # Not the first head alone: where heads are sharded, no device has the first head of
            # all.
            everywhere = jnp.ones_like(jnp.max(chunk.log_weights, axis=-1), bool)
            return cls(with_own_key, everywhere, None, everywhere)
        carried = of_queries == carry.segment[:, None]
        same_segment = of_queries[:, :, None] == of_keys[:, None]
        return cls(with_own_key, carried, same_segment, of_keys == of_keys[:, -1:])

    def pairs(self, size: int) -> Bool[Array, " #B C C"]:
        """Returns ``[B, C, C]``, True for a query and a key that it sees."""
        earlier = jnp.tri(size, k=0 if self.with_own_key else -1, dtype=bool)[None]
        return earlier if self.same_segment is None else earlier & self.same_segment

    def any(self, flags: Bool[Array, "B C K"]) -> Bool[Array, "B C K"]:
        """Returns ``[B, C, K]``, True at queries that see a key of the chunk with a flag."""
        if self.same_segment is None:
            earlier = jnp.cumsum(flags, axis=1)
            return earlier > (0 if self.with_own_key else flags.astype(earlier.dtype))
        return jnp.any(self.pairs(flags.shape[1])[..., None] & flags[:, None], axis=2)


def _attend_chunk(
    features: HeadMaps, carry: Carry, chunk: Tokens, *, with_own_key: bool
) -> tuple[Carry, Scanned]:
    """Takes one step of the scan.

    Args:
      features: Feature maps.
      carry: The keys before the chunk.
      chunk: Queries and keys.
      with_own_key: True if a query sees the key at its own position.

    Returns:
      The keys up to the end of the chunk, and the sums that its queries read.
    """
    queries = features.queries(chunk.query)
    keys, nonfinite = features.keys(chunk.key, chunk.log_weights)
    visible_from = functools.partial(_Visibility.of, carry, chunk, with_own_key=with_own_key)
    visibility = visible_from()
    kept = carry.of_last_segment(chunk)
    sees_nonfinite = (carry.poisoned[:, None] & visibility.carried[..., None]) | visibility.any(
        nonfinite
    )
    queries = queries._replace(poisoned=queries.poisoned | sees_nonfinite[..., None])

    visible = (chunk.log_weights > -jnp.inf) & ~nonfinite
    unit_of_queries, unit_of_keys = _units(carry, keys.exponent, visible, chunk)
    # Minus infinity also where both are: their difference would be NaN.
    relative = jnp.where(keys.exponent > -jnp.inf, keys.exponent - unit_of_keys, -jnp.inf)
    limit = _limit(chunk.value)
    is_large = (largest(relative, axis=-1) > limit)[..., 0]
    relative = jnp.where(relative <= limit, relative, -jnp.inf)
    weights = exp_in_units(relative, jnp.zeros((), relative.dtype), keys.values)
    in_units = _KeysInUnits(weights, keys.exponent, unit_of_queries, unit_of_keys)
    readout = _read_in_units(queries, in_units, visible, carry, chunk, visibility)
    state = _add_in_units(kept.state, in_units, chunk.value, visibility.in_last)

    # Inside shard_map, not all devices take the branch. If it computed features, XLA could put
    # collectives over other axes into it, which would wait forever.
    is_manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types

    def by_pairs(
        sums: Float[Array, "B C K G columns"],
        shift: Float[Array, "B C K G 1"],
        state: AttentionState,
    ) -> tuple[Float[Array, "B C K G columns"], Float[Array, "B C K G 1"], AttentionState]:
        visibility, of_queries, of_keys = visible_from(), queries, keys
        if not is_manual:
            # As arguments, XLA on GPUs would write features to memory in every step, even if it
            # does not take this branch.
            of_queries = features.queries(chunk.query)
            of_keys, _ = features.keys(chunk.key, chunk.log_weights)
        hidden = of_queries._replace(features=hide(of_queries.features, visibility.carried))
        earlier = carry.state.read(hidden, carry.poisoned, chunk.value.dtype)
        pairs = visibility.pairs(chunk.value.shape[1])
        in_pairs = earlier.add(_read_pairs(of_queries, of_keys, chunk.value, pairs))
        with_all = kept.state.add_keys(hide(of_keys, visibility.in_last), chunk.value)
        # Replace only results that involve a large key, so that its rounding reaches no other
        # output.
        is_changed = visibility.any(is_large)[..., None, None]
        of_state = jnp.any(is_large & visibility.in_last[..., None], axis=1)[..., None]
        sums = jnp.where(is_changed, in_pairs.sums, sums)
        shift = jnp.where(is_changed, in_pairs.shift, shift)
        state = AttentionState(
            jnp.where(of_state[..., None], with_all.sums, state.sums),
            jnp.where(of_state, with_all.maxima, state.maxima),
        )
        return sums, shift, state

    # The barrier keeps XLA from computing the same numbers in two ways, one for each branch. Each
    # part has its own barrier, because queries may vary over mesh axes that keys do not vary over.
    sums, shift = jax.lax.optimization_barrier((readout.sums, readout.shift))
    state = jax.lax.optimization_barrier(state)
    sums, shift, state = jax.lax.cond(
        _any(is_large), jax.checkpoint(by_pairs), lambda *found: found, sums, shift, state
    )
    poisoned = kept.poisoned | jnp.any(nonfinite & visibility.in_last[..., None], axis=1)
    scanned = Scanned(Readout(sums, shift, queries.poisoned), queries.features.log_scale)
    return Carry(state, poisoned, kept.segment), scanned


@jax.custom_batching.custom_vmap
def _any(flags: Bool[Array, " *shape"]) -> Bool[Array, ""]:
    """Returns one Boolean, even under ``vmap``, where one for each example would run both branches.

    A select between both branches, which ``vmap`` would make, also loses their Explicit sharding.
    """
    return jnp.any(flags)


_any.def_vmap(lambda _, __, flags: (_any(flags), False))


def _units(
    carry: Carry,
    exponent: Float[Array, "B C K #m"],
    visible: Bool[Array, "B C K"],
    chunk: Tokens,
) -> tuple[Float[Array, " B #C K #m"], Float[Array, " B #C K #m"]]:
    """Returns the logarithms of the units of queries and of keys; see ``_KeysInUnits``.

    They are the largest exponents of the state, or the exponents of the first key of the segment.

    Args:
      carry: The keys before the chunk.
      exponent: Exponents of the keys of the chunk.
      visible: True at keys that some query may see.
      chunk: Queries and keys.
    """
    exponent = jax.lax.stop_gradient(exponent)
    maxima = carry.state.maxima[:, None]
    has_state = largest(maxima, axis=-1) > -jnp.inf
    carried_segment, of_queries, of_keys = carry.segment, chunk.query_segments, chunk.key_segments
    if carried_segment is None or of_queries is None or of_keys is None:
        is_first = visible & (jnp.cumsum(visible, axis=1) == 1)
        first = largest(jnp.where(is_first[..., None], exponent, -jnp.inf), axis=1)
        units = jnp.where(has_state, maxima, first)
        return units, units

    def units_of(segments: Integer[Array, "B C"]) -> Float[Array, "B C K #m"]:
        same = (segments[:, :, None] == of_keys[:, None])[..., None] & visible[:, None]
        first = jnp.argmax(same, axis=2)
        first = jnp.take_along_axis(exponent, first[..., None], axis=1)
        first = jnp.where(jnp.any(same, axis=2)[..., None], first, -jnp.inf)
        carried = (segments == carried_segment[:, None])[..., None, None]
        return jnp.where(carried & has_state, maxima, first)

    return units_of(of_queries), units_of(of_keys)


class _KeysInUnits(NamedTuple):
    """Keys of a chunk.

    Attributes:
      features: Features in units of e^of_keys.
      exponent: Exponents of the features, in no units.
      of_queries: Logarithms of the units of the features that queries read, ``[B, C, K, m]``, or
        ``[B, 1, K, m]`` without segments; minus infinity where nothing is visible.
      of_keys: The same for the keys.
    """

    features: Float[Array, "B C K m"]
    exponent: Float[Array, "B C K #m"]
    of_queries: Float[Array, " B #C K #m"]
    of_keys: Float[Array, " B #C K #m"]


def _limit(value: Float[Array, "B C K columns"]) -> Float[Array, "B C K 1"]:
    """Returns by how much exponents may exceed those of the units."""
    range_of_type = math.log(float(jnp.finfo(value.dtype).max))
    # The last column holds the ones.
    size = jnp.max(jnp.abs(value[..., :-1]), axis=-1, keepdims=True, initial=0)
    is_ordinary = (size < LARGE_VALUE) & ((size > 1 / LARGE_VALUE) | (size == 0))
    return range_of_type * jnp.where(is_ordinary, LIMIT, LIMIT_FOR_OTHER_VALUES)


def _read_in_units(
    queries: QueryFeatures,
    keys: _KeysInUnits,
    visible: Bool[Array, "B C K"],
    carry: Carry,
    chunk: Tokens,
    visibility: _Visibility,
) -> Readout:
    """Lets the queries of a chunk read the state and the keys of the chunk.

    Args:
      queries: Features of the queries.
      keys: The keys.
      visible: True at keys that some query may see.
      carry: The keys before the chunk.
      chunk: Queries and keys.
      visibility: The keys that the queries see.
    """
    state, narrow = carry.state, chunk.value.dtype
    features, shift = weigh(queries.features, keys.of_queries[:, :, :, None])
    # Heads come before the length, because XLA on a GPU would transpose all features otherwise.
    features = jnp.moveaxis(features, 1, 3)
    of_keys, value = (jnp.moveaxis(x, 1, 2) for x in (keys.features, chunk.value))
    # Rounded to the type of the values, as the product with them would round.
    weights = contract("bkgqm,bksm->bkgqs", features, of_keys.astype(narrow)).astype(narrow)
    weights = jnp.where(visibility.pairs(value.shape[2])[:, None, None], weights, 0)
    # Behind a barrier, because XLA on a GPU would copy keys and state together for one product.
    rounded = jax.lax.optimization_barrier(features.astype(narrow)).astype(features.dtype)
    of_state = jnp.where(visibility.carried[:, None, None, :, None], rounded, 0)
    earlier = contract("bkgqm,bkmd->bkgqd", of_state, state.sums.astype(narrow))
    of_chunk = contract("bkgqs,bksd->bkgqd", weights, value).astype(earlier.dtype)
    sums = jnp.moveaxis(of_chunk + earlier, 3, 1)
    has_state = largest(state.maxima, axis=-1)[:, None, :, 0] > -jnp.inf
    sees_state = visibility.carried[..., None] & has_state
    sees = (sees_state | visibility.any(visible))[..., None, None]
    return Readout(sums, jnp.where(sees, shift, -jnp.inf), queries.poisoned)


def _add_in_units(
    state: AttentionState,
    keys: _KeysInUnits,
    value: Float[Array, "B C K columns"],
    in_last: Bool[Array, "B C"],
) -> AttentionState:
    """Returns the state of earlier keys plus the keys of the last segment of a chunk."""
    visible = in_last[..., None, None]
    exponent = jnp.where(visible, keys.exponent, -jnp.inf)
    maxima = jnp.maximum(state.maxima, jnp.squeeze(largest(exponent, axis=1), 1))
    features = jnp.where(visible, keys.features, 0)
    more = contract("bksm,bksd->bkmd", jnp.moveaxis(features, 1, 2), jnp.moveaxis(value, 1, 2))
    # The units are the maxima of the state, unless it is empty.
    unit = exp_in_units(keys.of_keys[:, -1], maxima)[..., None]
    return AttentionState((state.sums + more) * unit, maxima)


def _read_pairs(
    queries: QueryFeatures,
    keys: LogFeatures,
    value: Float[Array, "B C K columns"],
    pairs: Bool[Array, " #B C C"],
) -> Readout:
    """Lets each query read the keys of its chunk that it sees, each pair in its own unit."""

    @jax.checkpoint
    def of_key(key: LogFeatures) -> tuple[Float[Array, "B C K G"], Float[Array, "B C K G"]]:
        """Returns the weights of one key for all queries, and the logarithms of their units."""
        key = jax.tree.map(lambda x: x[:, None, :, None], key)
        products, units = weigh(queries.features, key.exponent)
        if key.values is not None:
            products = products * key.values
        return jnp.sum(products, axis=-1), jnp.squeeze(units, -1)

    by_position = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), keys)
    weights, units = jax.lax.map(of_key, by_position)
    sees = jnp.transpose(pairs, (2, 0, 1))[..., None, None]
    units = jnp.where(sees, units, -jnp.inf)
    shift = largest(units, axis=0)
    weights = weights * exp_in_units(units, shift)
    sums = contract("sbqkg,bskd->bqkgd", weights, value)
    return Readout(sums, jnp.squeeze(shift, 0)[..., None], queries.poisoned)
