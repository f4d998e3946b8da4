"""A few keys that all queries see exactly, and random features for all others.

Most of the error of random features comes from a few keys, such as attention sinks, whose kernel
estimates are far off for all queries at once. Exact keys never enter the running sums, so nothing
is subtracted. Numerator and denominator are one sum each over both kinds of keys.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from simrf_jax._src.attention.estimator import HeadMaps, KeyChoice, QueryFeatures
from simrf_jax._src.attention.inputs.call import Inputs, contract, repeat_heads
from simrf_jax._src.attention.random_features.state import (
    SUMMARY_CHUNK,
    AttentionState,
    Keys,
    Readout,
    exp_in_units,
    join_length,
    largest,
    split_length,
    sum_keys,
    take_keys,
    weigh,
    with_ones,
)
from simrf_jax._src.features import LogFeatures, calls_function


class SharedKeys(NamedTuple):
    """The keys that all queries see exactly, for each key head.

    Attributes:
      position: ``[B, g, K]``, the positions of the keys; the sequence length where there is no key.
      key: ``[B, g, K, H]``, multiplied by the square root of the scale, as the queries are.
      value: ``[B, g, K, D + 1]``, with the column that sums the denominator.
      log_weights: ``[B, g, K]`` to add to the logits; minus infinity where a key is hidden.
      nonfinite: ``[B, g, K]``, True at keys that are not finite: a query that sees one gets NaN.
    """

    position: Integer[Array, "B g K"]
    key: Float[Array, "B g K H"]
    value: Float[Array, "B g K D+1"]
    log_weights: Float[Array, "B g K"]
    nonfinite: Bool[Array, "B g K"]

    @classmethod
    def of(cls, inputs: Inputs, features: HeadMaps, choice: KeyChoice) -> SharedKeys:
        """Returns the chosen keys.

        Args:
          inputs: Queries and keys, of which there is at least one, multiplied by the square root of
            the scale.
          features: Their feature maps.
          choice: The number of keys and the rule that chooses them, or their positions.
        """
        position = choice_of(inputs, features, choice)
        log_weights = take_keys(inputs.key_log_weights, position)
        log_weights = jnp.where(position < inputs.key.shape[1], log_weights, -jnp.inf)
        nonfinite = jnp.isnan(log_weights)
        return cls(
            position,
            take_keys(inputs.key, position),
            with_ones(take_keys(inputs.value, position)),
            jnp.where(nonfinite, -jnp.inf, log_weights),
            nonfinite,
        )

    def among(self, keys: Float[Array, "B S K H"]) -> Bool[Array, "B S K"]:
        """Returns ``[B, S, K]``, True at the positions of these keys among all keys."""
        positions = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :, None, None]
        return jnp.any(self.position[:, None] == positions, axis=2)

    def logits(self, query: Float[Array, "B T K G H"]) -> Float[Array, "B T K G g"]:
        """Returns the logits of queries, with the log weights of the keys."""
        highest = jax.lax.Precision.HIGHEST
        # With other orders of axes, XLA for the CPU transposes copies and takes far longer.
        logits = jnp.einsum("btkgh,bskh->bktgs", query, self.key, precision=highest)
        log_weights = jnp.moveaxis(self.log_weights, 1, -1)[:, None, :, None]
        return jnp.moveaxis(logits, 2, 1) + log_weights

    def append_to_queries(
        self, queries: QueryFeatures, query: Float[Array, "B T K G H"]
    ) -> QueryFeatures:
        """Returns the features of queries, followed by the weights of exact keys.

        An exact key is one more feature, which is 1 for this key and 0 for the others.
        """
        (exponents, log_scale, values), logits = queries.features, self.logits(query)
        # Next to the logits, features whose scale is minus infinity count for nothing.
        exponents = jnp.where(log_scale > -jnp.inf, exponents, -jnp.inf)
        if values is not None:
            exponents = jnp.broadcast_to(exponents, values.shape)
            values = jnp.concatenate([values, jnp.ones_like(logits)], axis=-1)
        exact = logits - jnp.where(jnp.isfinite(log_scale), log_scale, 0)
        exponents = jnp.concatenate([exponents, exact], axis=-1)
        poisoned = queries.poisoned | ~(log_scale < jnp.inf)[..., 0]
        return QueryFeatures(LogFeatures(exponents, log_scale, values), poisoned)

    def append_to_state(self, state: AttentionState) -> AttentionState:
        """Returns the sums over other keys, followed by the values of exact keys."""
        values = jnp.moveaxis(self.value, 1, 2).astype(state.sums.dtype)
        maxima = jnp.broadcast_to(state.maxima, state.sums.shape[:-1])
        return AttentionState(
            jnp.concatenate([state.sums, values], axis=-2),
            jnp.concatenate([maxima, jnp.zeros_like(values[..., 0], maxima.dtype)], axis=-1),
        )

    def read(self, inputs: Inputs, *, is_causal: bool, bandwidth: int | None = None) -> Readout:
        """Lets queries read those of the keys that causality, segments and the band leave visible.

        Args:
          inputs: The queries, multiplied by the square root of the scale, and the segments.
          is_causal: True if a query sees no later keys.
          bandwidth: Distance within which an exact band already includes the keys; None without a
            band.
        """
        query, segments = inputs.query, inputs.segments
        position = jnp.moveaxis(self.position, 1, -1)[:, None]  # [B, 1, K, g].
        own = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :, None, None]
        sees = position <= own if is_causal else jnp.ones_like(position + own, bool)
        if bandwidth is not None:
            sees &= jnp.abs(position - own) > bandwidth
        if segments is not None:
            of_heads = jnp.broadcast_to(
                segments[:, None, None], (*position.shape[:3], segments.shape[1])
            )
            of_keys = jnp.take_along_axis(of_heads, position, axis=-1)
            sees &= of_keys == segments[:, : query.shape[1], None, None]
        logits = jnp.where(sees[:, :, :, None], self.logits(query), -jnp.inf)
        shift = largest(logits, axis=-1)
        sums = contract("btkgs,bskd->btkgd", exp_in_units(logits, shift), self.value)
        poisoned = jnp.any(sees & jnp.moveaxis(self.nonfinite, 1, -1)[:, None], axis=-1)
        return Readout(sums, shift, jnp.broadcast_to(poisoned[..., None], query.shape[:-1]))


def choice_of(inputs: Inputs, features: HeadMaps, choice: KeyChoice) -> Integer[Array, "B g K"]:
    """Returns the positions of the chosen keys, ``[B, g, K]``; the length where there is none."""
    length, positions = inputs.key.shape[1], choice.positions
    if positions is None:
        if choice.by == "mass":
            worth = _over_copies(estimated_mass(inputs, features), inputs.copies)
        else:
            worth = features.key_scores(inputs.key, inputs.key_log_weights)
        worth = jnp.moveaxis(worth, 1, -1)
        count = choice.count
        if isinstance(length, int):
            count = min(count, length)
        else:  # A symbolic length, of jax.export, may be less. Beyond it there is no key.
            worth = jnp.pad(worth, [(0, 0)] * 2 + [(0, count)], constant_values=-jnp.inf)
        return jnp.moveaxis(jax.lax.top_k(worth, count)[1], -1, 1)
    positions = jnp.where(positions < 0, positions + length, positions)
    # A position that is given twice counts once.
    same = positions[..., :, None] == positions[..., None, :]
    again = jnp.any(jnp.tril(same, k=-1), axis=-1)
    is_key = (positions >= 0) & (positions < length) & ~again
    positions = jnp.where(is_key, positions, length)
    positions = jnp.broadcast_to(positions, (*inputs.batch, positions.shape[-1]))
    positions = positions.reshape(inputs.key.shape[0], positions.shape[-1], 1)
    return jnp.broadcast_to(positions, (*positions.shape[:2], inputs.key.shape[2]))


def _over_copies(mass: Float[Array, "B S K"], copies: int) -> Float[Array, "B S K"]:
    """Returns the sums of masses over query heads that have a copy each of one key head."""
    if copies == 1:
        return mass
    sharding = jax.typeof(mass).sharding
    if sharding.spec[2] is not None:  # Explicit mesh axes may split the heads of a sum.
        whole = jax.NamedSharding(sharding.mesh, jax.P(*sharding.spec[:2], None))
        mass = jax.sharding.reshard(mass, whole)
    by_key_head = mass.reshape(*mass.shape[:2], -1, copies)
    is_hidden = by_key_head == -jnp.inf
    total = jnp.sum(jnp.where(is_hidden, 0, by_key_head), axis=-1)
    total = jnp.where(jnp.all(is_hidden, axis=-1), -jnp.inf, total)
    total = repeat_heads(total, copies, axis=2)
    return total if sharding.spec[2] is None else jax.sharding.reshard(total, sharding)


def estimated_mass(inputs: Inputs, features: HeadMaps) -> Float[Array, "B S K"]:
    r"""Returns the sum over queries of the attention weights that the features imply.

    .. math::
        c_s = \phi(k_s)^\top \sum_t \frac{\phi(q_t)}{\phi(q_t)^\top \sum_r \phi(k_r)}

    over all queries of a key head, in time O((T + S) m), with the features of one chunk of tokens
    in memory at a time. It is minus infinity at hidden keys. If queries and keys have the same
    length, queries at hidden keys are padding and do not count. There are no gradients.

    Raises:
      ValueError: If features may be negative, so that their sums are not masses. A user's function
        is not checked.
    """
    inputs, features = jax.lax.stop_gradient((inputs, features))
    # Only denominators are needed.
    keys = Keys.of(dataclasses.replace(inputs, value=inputs.value[..., :1]), SUMMARY_CHUNK)
    state, _ = sum_keys(keys, features)
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    is_hidden = inputs.key_log_weights == -jnp.inf
    counts = inputs.real & inputs.finite
    if length == key_length:
        counts &= ~is_hidden[..., None]
    queries = (inputs.query[None], counts[None])  # A symbolic length, of jax.export, is one chunk.
    if isinstance(length, int):
        size = min(max(length, 1), SUMMARY_CHUNK)
        queries = (split_length(inputs.query, size, None), split_length(counts, size, 0))

    def add(
        shares: Float[Array, "B K m"],
        chunk: tuple[Float[Array, "B T K G H"], Bool[Array, "B T K G"]],
    ) -> tuple[Float[Array, "B K m"], None]:
        """Adds the features of queries, each over its denominator."""
        phi, poisoned = features.queries(chunk[0])
        if phi.values is not None and not calls_function(features.feature_map):
            raise ValueError(
                "A number of exact_keys is chosen by positive features, and these may be "
                "negative; pass the positions of the keys."
            )
        weights, _ = weigh(phi, state.maxima[:, None, :, None])
        totals = contract("btkgm,bkmd->btkgd", weights, state.sums[..., -1:])
        has_share = (totals > 0) & (chunk[1] & ~poisoned)[..., None]
        more = jnp.where(has_share, weights / jnp.where(has_share, totals, 1), 0)
        return shares + jnp.sum(more, axis=(1, 3)), None

    shares, _ = jax.lax.scan(add, jnp.zeros_like(state.sums[..., 0]), queries)

    def mass(chunk: Keys) -> Float[Array, "B S K"]:
        phi = features.keys(chunk.key, chunk.key_log_weights).features
        weights = exp_in_units(phi.exponent, state.maxima[:, None], phi.values)
        return contract("bskm,bkmd->bskd", weights, shares[..., None])[..., 0]

    masses = join_length(jax.lax.map(mass, keys), key_length)
    return jnp.where(is_hidden, -jnp.inf, masses)
