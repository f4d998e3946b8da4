"""Causal attention that keeps the keys of the largest scores exact: the others join running sums.

A key that has left never returns, so each key joins the sums once, at the position where it left.
Queries read the keys that have left as causal attention reads keys: one for each position.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from simrf_jax._src import one_line
from simrf_jax._src.attention.estimator import HeadMaps
from simrf_jax._src.attention.inputs.call import Inputs, contract
from simrf_jax._src.attention.random_features.causal import (
    causal_attention,
    in_units_of_the_kernel,
    one_key_for_each_query,
)
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    Readout,
    exp_in_units,
    join_length,
    largest,
    pad,
    split_length,
    take_keys,
    with_ones,
)


class KeptKeys(NamedTuple):
    """Keys of the largest scores, in the order of their positions, for each key head.

    Attributes:
      key: ``[..., g, K, H]``, multiplied by the square root of the scale.
      value: ``[..., g, K, D]``.
      log_weights: ``[..., g, K]`` to add to the logits.
      score: ``[..., g, K]``; minus infinity where there is no key yet.
    """

    key: Float[Array, "*batch g K H"]
    value: Float[Array, "*batch g K D"]
    log_weights: Float[Array, "*batch g K"]
    score: Float[Array, "*batch g K"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    @classmethod
    def of(cls, inputs: Inputs, features: HeadMaps) -> KeptKeys:
        """Returns all keys, scaled, with their scores."""
        log_weights = inputs.key_log_weights
        score = features.key_scores(inputs.key, log_weights)
        return cls(inputs.key, inputs.value, log_weights, score)

    @classmethod
    def empty(cls, inputs: Inputs, count: int) -> KeptKeys:
        """Returns no keys like those of the inputs, with room for ``count``."""
        none = (x[:, :0] for x in (inputs.key, inputs.value, inputs.key_log_weights))
        key, value, log_weights = (pad(x, 0, count, 0) for x in none)
        return cls(key, value, log_weights, jnp.full_like(log_weights, -jnp.inf))

    def at(self, index: Integer[Array, "B new K"]) -> KeptKeys:
        """Returns the keys at an index of each head."""
        return KeptKeys(*(take_keys(x, index) for x in self))


def check_count(kept: KeptKeys, count: int) -> None:
    """Raises ``ValueError`` unless there is room for ``count`` keys."""
    if (given := jnp.shape(kept.score)[-2]) != count:
        raise ValueError(
            f"state must hold {count} exact keys, got {given}; make a new one with init."
        )


class ExactKeysState(NamedTuple):
    """The state of causal random-feature attention with exact keys.

    Attributes:
      kept: The keys that the next query sees exactly, unless a new key displaces one.
      far: Sums over the keys that have left.
    """

    kept: KeptKeys
    far: AttentionState

    def __repr__(self) -> str:
        return one_line.representation(self)

    @classmethod
    def empty(cls, inputs: Inputs, features: HeadMaps, count: int) -> ExactKeysState:
        """Returns the state of no keys, for keys like those of the inputs."""
        return cls(KeptKeys.empty(inputs, count), AttentionState.empty(inputs, features))


class Division(NamedTuple):
    """Keys divided into those that queries see exactly and those that have left.

    Attributes:
      near: Sums that queries read of the keys that they see exactly.
      far: Inputs with the keys that have left, each at the position where it left; other
        positions are hidden.
      kept: The keys that have not left.
    """

    near: Readout
    far: Inputs
    kept: KeptKeys

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        query_segments: Integer[Array, "B T"] | None,
        features: HeadMaps,
        kept: KeptKeys,
        *,
        chunk_size: int,
        with_own_key: bool,
    ) -> Division:
        """Divides the keys before each query.

        Args:
          inputs: Queries and the same number of keys, scaled.
          query_segments: ``[B, T]``, segments of the queries, or None. Those of the keys may lag
            behind.
          features: Feature maps, whose scores choose.
          kept: Keys before these.
          chunk_size: Number of keys per chunk, a power of two.
          with_own_key: True if a query sees the key at its own position.
        """
        length, segments = inputs.key.shape[1], inputs.segments
        keys = KeptKeys.of(inputs, features)
        chunks = _Chunk(
            split_length(inputs.query, chunk_size, None),
            KeptKeys(
                split_length(keys.key, chunk_size, None),
                split_length(keys.value, chunk_size, 0),
                split_length(keys.log_weights, chunk_size, -jnp.inf),
                split_length(keys.score, chunk_size, -jnp.inf),
            ),
            split_length(query_segments, chunk_size, None),
            split_length(segments, chunk_size, None),
        )
        segment = None if segments is None else jnp.sum(segments[:, :1], 1, segments.dtype)
        step = jax.checkpoint(functools.partial(_divide_chunk, with_own_key), prevent_cse=False)
        (kept, _), divided = jax.lax.scan(step, (kept, segment), chunks)
        (sums, shift), left = join_length(divided, length)
        near = Readout(sums, shift, jnp.zeros_like(shift[..., 0], bool))
        far = dataclasses.replace(
            inputs, key=left.key, value=left.value, key_log_weights=left.log_weights
        )
        return cls(near, far, kept)


class _Chunk(NamedTuple):
    """Queries and keys of a chunk of positions.

    Attributes:
      query: ``[B, C, K, G, H]``.
      keys: The keys at these positions.
      query_segments: ``[B, C]``, or None.
      key_segments: ``[B, C]``, or None.
    """

    query: Float[Array, "B C K G H"]
    keys: KeptKeys
    query_segments: Integer[Array, "B C"] | None
    key_segments: Integer[Array, "B C"] | None


# The sums and the shift of a ``Readout``.
_Sums: TypeAlias = tuple[Float[Array, "B C K G columns"], Float[Array, "B C K G 1"]]


def _divide_chunk(
    with_own_key: bool, carry: tuple[KeptKeys, Integer[Array, " B"] | None], chunk: _Chunk
) -> tuple[tuple[KeptKeys, Integer[Array, " B"] | None], tuple[_Sums, KeptKeys]]:
    """Takes one step of the scan.

    Args:
      with_own_key: True if a query sees the key at its own position.
      carry: The keys kept before the chunk, and their segment.
      chunk: Queries and keys.

    Returns:
      The keys kept after the chunk and their segment; the sums that queries read of kept keys, and
      the key that leaves at each position.
    """
    before, segment = carry
    count, size = before.key.shape[1], chunk.query.shape[1]
    keys = KeptKeys(
        *(jnp.concatenate(both, axis=1) for both in zip(before, chunk.keys, strict=True))
    )
    segments = None
    if segment is not None and chunk.key_segments is not None:
        carried = jnp.broadcast_to(segment[:, None], (segment.shape[0], count))
        segments = jnp.concatenate([carried, chunk.key_segments], axis=1)
    held = held_keys(keys.score, segments, count)
    is_kept = (jnp.arange(count + size) < count)[None, :, None]
    first = (is_kept & (keys.score > -jnp.inf))[:, None]
    earlier = jnp.concatenate([first, held[:, :-1]], axis=1)
    sees = held if with_own_key else earlier
    is_own = jnp.eye(size, count + size, count, dtype=bool)[None, :, :, None]
    leaves = (earlier | is_own) & ~held
    if segments is not None:
        leaves &= _same(chunk.key_segments, segments)
        sees &= _same(chunk.query_segments, segments)
    # Where no key leaves, the own key stands there, hidden.
    left = keys.at(jnp.argmax(jnp.where(leaves, 2, is_own.astype(int)), axis=2))
    left = left._replace(log_weights=jnp.where(jnp.any(leaves, axis=2), left.log_weights, -jnp.inf))
    last = jnp.moveaxis(held[:, -1], 1, -1)
    order = jnp.where(last, jnp.arange(count + size, 0, -1)[None, None], 0)
    ranks, index = jax.lax.top_k(order, count)
    kept = keys.at(jnp.moveaxis(index, -1, 1))
    is_key = jnp.moveaxis(ranks, -1, 1) > 0
    kept = kept._replace(
        log_weights=jnp.where(is_key, kept.log_weights, 0),
        score=jnp.where(is_key, kept.score, -jnp.inf),
    )
    segment = None if segments is None else segments[:, -1]
    return (kept, segment), (_read(chunk.query, keys, sees), left)


def held_keys(
    score: Float[Array, "B n K"], segments: Integer[Array, "B n"] | None, count: int
) -> Bool[Array, "B C n K"]:
    """Returns which keys are kept after the key at each of the C positions has come.

    A key is kept until ``count`` keys of its segment have come with larger scores, or with equal
    scores at earlier positions.

    Args:
      score: ``[B, n, K]`` of ``count`` keys that came before, and of the keys at C = n - count
        positions; minus infinity for none.
      segments: ``[B, n]``, or None.
      count: Number of keys to keep.
    """
    n = score.shape[1]
    comes_by = jnp.tri(n - count, n, count, dtype=score.dtype)
    beats = _beats(score, segments).astype(score.dtype)
    num_better = jnp.einsum("tj,bkji->btik", comes_by, beats)
    return _has_come(score, segments, count) & (num_better < count)


def _beats(
    score: Float[Array, "B n K"], segments: Integer[Array, "B n"] | None
) -> Bool[Array, "B K n n"]:
    """Returns which keys, along the first axis of length n, are better than which others."""
    other, own = jnp.moveaxis(score, 1, -1)[:, :, :, None], score.mT[:, :, None]
    is_earlier = ~jnp.tri(score.shape[1], dtype=bool)[None, None]
    beats = (other > own) | ((other == own) & is_earlier)
    if segments is not None:
        beats &= (segments[:, :, None] == segments[:, None])[:, None]
    return beats


def _has_come(
    score: Float[Array, "B n K"], segments: Integer[Array, "B n"] | None, num_before: int
) -> Bool[Array, "B C n K"]:
    """Returns which keys of its segment have come by the position of each but the first keys."""
    n = score.shape[1]
    comes_by = jnp.tri(n - num_before, n, num_before, dtype=bool)
    has_come = comes_by[None, :, :, None] & (score > -jnp.inf)[:, None]
    if segments is not None:
        has_come &= _same(segments[:, num_before:], segments)
    return has_come


def key_ranks(inputs: Inputs, features: HeadMaps) -> Float[Array, "B K T S"]:
    """Returns the rank by score of each key among those up to each query's position, from 0 on.

    It is infinite for keys after the query, hidden keys and keys of other segments.

    Args:
      inputs: Queries and keys, scaled.
      features: Feature maps, whose scores rank the keys.
    """
    key_length = inputs.key.shape[1]
    coming = one_key_for_each_query(inputs, 0)
    score = KeptKeys.of(coming, features).score
    # A product as in held_keys is faster for a chunk, but takes cubic time.
    num_better = jnp.cumsum(_beats(score, coming.segments), axis=2, dtype=score.dtype)
    has_come = jnp.moveaxis(_has_come(score, coming.segments, 0), 3, 1)
    ranks = jnp.where(has_come, num_better, jnp.inf)
    missing = max(0, key_length - ranks.shape[3])
    widths = ((0, 0), (0, 0), (0, 0), (0, missing))
    return jnp.pad(ranks, widths, constant_values=jnp.inf)[..., :key_length]


def kept_pairs(
    ranks: Float[Array, "*batch T S"], count: ArrayLike, delay: ArrayLike
) -> Bool[Array, "*batch T S"]:
    """Returns a mask of the pairs of queries and kept keys.

    Args:
      ranks: Ranks of the keys, of ``key_ranks``.
      count: Number of keys to keep.
      delay: Number of positions after which a key comes.
    """
    length = ranks.shape[-2]
    rows = jnp.arange(length) - delay
    rows = jnp.where(rows < 0, length, rows)  # Beyond the end, where all ranks are infinite.
    return jnp.take(ranks, rows, axis=-2, mode="fill", fill_value=jnp.inf) < count


def _same(
    segments: Integer[Array, "B C"] | None, of_keys: Integer[Array, "B n"]
) -> Bool[Array, "B C n 1"]:
    assert segments is not None
    return (segments[:, :, None] == of_keys[:, None])[..., None]


def _read(query: Float[Array, "B C K G H"], keys: KeptKeys, sees: Bool[Array, "B C n K"]) -> _Sums:
    """Lets queries read the keys that they see by the softmax kernel."""
    highest = jax.lax.Precision.HIGHEST
    # With this order of axes the products need no transposed copies.
    logits = jnp.einsum("btkgh,bskh->bkgts", query, keys.key, precision=highest)
    logits += keys.log_weights.mT[:, :, None, None]
    logits = jnp.where(jnp.moveaxis(sees, 3, 1)[:, :, None], logits, -jnp.inf)
    shift = largest(logits, axis=-1)
    weights = exp_in_units(logits, shift)
    sums = contract("bkgts,bskd->bkgtd", weights, with_ones(keys.value))
    return jnp.moveaxis(sums, 3, 1), jnp.moveaxis(shift, 3, 1)


def attend_with_kept_keys(
    inputs: Inputs, features: HeadMaps, state: ExactKeysState, *, chunk_size: int
) -> tuple[Readout, ExactKeysState]:
    """Lets each query attend to a state and to the keys up to its own position.

    Args:
      inputs: Queries, keys and values, scaled.
      features: Their feature maps.
      state: State of the keys before the first.
      chunk_size: Number of keys per chunk, a power of two.

    Returns:
      The sums that the queries read, and the state of all keys.
    """
    if inputs.key.shape[1] != inputs.query.shape[1]:
        inputs = one_key_for_each_query(inputs, 0)
    divided = Division.of(
        inputs, inputs.segments, features, state.kept, chunk_size=chunk_size, with_own_key=True
    )
    read, far = causal_attention(divided.far, features, state.far, chunk_size=chunk_size)
    readout = in_units_of_the_kernel(read).add(divided.near)
    return readout, ExactKeysState(divided.kept, far)
