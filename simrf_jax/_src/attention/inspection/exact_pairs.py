"""The attention that an exact band and exact keys would give, for sizes that are data.

Attention compiles a program for each bandwidth and number of exact keys. Here all of them share one
program, which takes the logarithms of the kernels of all pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from simrf_jax._src.attention.estimator import ExactKeys
from simrf_jax._src.attention.inspection.all_pairs import normalized
from simrf_jax._src.attention.random_features.kept_keys import kept_pairs


class ExactPairs(NamedTuple):
    """A choice of pairs of queries and keys with exact weights.

    Attributes:
      bandwidth: Distance over which queries see keys exactly; -1 for no band.
      num_keys: Number of keys with the largest estimated mass that all queries see exactly.
      num_kept: Number of keys with the best scores, of those before the band, that a causal query
        sees exactly; None if no keys are kept by score.
      positions: ``[g]``, positions of more such keys, counted from the end if negative.
    """

    bandwidth: Integer[Array, ""]
    num_keys: Integer[Array, ""]
    num_kept: Integer[Array, ""] | None
    positions: Integer[Array, " g"]

    @classmethod
    def of(
        cls, exact_bandwidth: int | None, exact_keys: int | ExactKeys | tuple[int, ...] | None
    ) -> ExactPairs:
        """Returns the choice for arguments of ``random_feature_attention``.

        ``ExactKeys`` are by score, of causal attention.
        """
        return cls(
            jnp.asarray(-1 if exact_bandwidth is None else exact_bandwidth),
            jnp.asarray(exact_keys if isinstance(exact_keys, int) else 0),
            jnp.asarray(exact_keys.count) if isinstance(exact_keys, ExactKeys) else None,
            jnp.asarray(exact_keys if isinstance(exact_keys, tuple) else (), jnp.int32),
        )

    def among(
        self,
        estimated: Float[Array, "*batch N T S"],
        counts: Bool[Array, "*batch T"],
        num_key_heads: int,
        ranks: Float[Array, "*batch K T S"] | None,
    ) -> Bool[Array, "*batch N T S"]:
        """Returns True at the pairs.

        Args:
          estimated: Logarithms of the kernel that features estimate, minus infinity where a key is
            hidden.
          counts: False at queries that are padding, and give no mass to keys.
          num_key_heads: Number K of key heads, each of which chooses its keys.
          ranks: Ranks of the keys by score, of ``score_ranks``; None if no keys are kept by score.

        Raises:
          TypeError: If keys are kept by score, but there are no ranks.
        """
        *batch, heads, length, key_length = estimated.shape
        place = jnp.arange(key_length, dtype=jnp.int32)
        near = jnp.abs(jnp.arange(length, dtype=jnp.int32)[:, None] - place[None]) <= self.bandwidth
        positions = jnp.where(self.positions < 0, self.positions + key_length, self.positions)
        near |= jnp.any(place[:, None] == positions[None], axis=-1)[None]
        weights = jnp.where(counts[..., None, :, None], normalized(estimated)[0], 0)
        groups = heads // num_key_heads
        mass = jnp.sum(weights, axis=-2).reshape(*batch, num_key_heads, groups, key_length)
        mass = jnp.sum(mass, axis=-2)
        rank = jnp.argsort(jnp.argsort(-mass, axis=-1), axis=-1)
        chosen = jnp.repeat(rank < self.num_keys, groups, axis=-2)[..., None, :]
        if self.num_kept is not None:
            if ranks is None:
                raise TypeError("ranks must be those of the keys that are kept by score, got None.")
            kept = kept_pairs(ranks, self.num_kept, self.bandwidth + 1)
            chosen |= jnp.repeat(kept, groups, axis=-3)
        return chosen | jnp.broadcast_to(near, estimated.shape)


class HeadErrors(NamedTuple):
    """The difference between the attention of each head and softmax attention.

    Attributes:
      relative_error: ``[..., N]``, squared error of the outputs divided by their squared norm; 0
        where softmax attention returns zeros.
      counts: ``[..., N]``, False where it does.
      far_sum: ``[..., N]``, sum over queries of the weights that features estimate.
      softmax_far_sum: ``[..., N]``, the same sum of softmax weights.
      num_queries: ``[..., N]``, number of queries that see a key.
    """

    relative_error: Float[Array, "*batch N"]
    counts: Bool[Array, "*batch N"]
    far_sum: Float[Array, "*batch N"]
    softmax_far_sum: Float[Array, "*batch N"]
    num_queries: Integer[Array, "*batch N"]


@jax.jit
def head_errors(
    estimated: Float[Array, "*batch N T S"],
    exact: Float[Array, "*batch N T S"],
    value: Float[Array, "*batch S K D"],
    counts: Bool[Array, "*batch T"],
    pairs: ExactPairs,
    ranks: Float[Array, "*batch K T S"] | None,
) -> HeadErrors:
    """Returns the errors of positive features with exact pairs.

    Args:
      estimated: Logarithms of the kernel that features estimate, minus infinity where a key is
        hidden.
      exact: Logarithms of the softmax kernel.
      value: Values.
      counts: False at queries that are padding.
      pairs: Pairs with exact weights.
      ranks: Ranks of the keys by score; None if no keys are kept by score.
    """
    near = pairs.among(estimated, counts, value.shape[-2], ranks)
    sees = jnp.any(exact != -jnp.inf, axis=-1) & counts[..., None, :]
    implied, softmax = (
        jnp.where(sees[..., None], normalized(logs)[0], 0)
        for logs in (jnp.where(near, exact, estimated), exact)
    )
    groups = exact.shape[-3] // value.shape[-2]
    value = jnp.repeat(jnp.swapaxes(value, -3, -2), groups, axis=-3).astype(exact.dtype)
    # Padding may hold anything, even NaN, and 0 * NaN is not 0.
    value = jnp.where(jnp.any(exact != -jnp.inf, axis=-2)[..., None], value, 0)
    highest = jax.lax.Precision.HIGHEST
    expected = jnp.matmul(softmax, value, precision=highest)
    error = jnp.matmul(implied - softmax, value, precision=highest)
    error, norm = (jnp.sum(jnp.square(x), axis=(-2, -1)) for x in (error, expected))
    is_zero = norm == 0
    far_sum, softmax_far_sum = (
        jnp.sum(jnp.where(near, 0, weights), axis=(-2, -1)) for weights in (implied, softmax)
    )
    return HeadErrors(
        jnp.where(is_zero, 0, error / jnp.where(is_zero, 1, norm)),
        ~is_zero,
        far_sum,
        softmax_far_sum,
        jnp.sum(sees, axis=-1),
    )
