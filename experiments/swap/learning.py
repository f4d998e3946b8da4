"""Learned features: the attention weights of a layer, trained to be those of softmax."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import optax

import simrf_jax
from simrf_jax import feature_maps


class Schedule(NamedTuple):
    """Steps of Adam that learn a feature map.

    Attributes:
      num_steps: Number of steps.
      batch_size: Number of sequences of a step.
      learning_rate: Learning rate of the first step. It falls to 0 along half a cosine.
    """

    num_steps: int
    batch_size: int
    learning_rate: float


# A loop in one program: a step is too short to be a program of its own.
@functools.partial(
    jax.jit, static_argnames=("is_causal", "schedule", "exact_bandwidth", "exact_keys")
)
def learn(
    prng_key: jax.Array,
    start: feature_maps.Learned,
    query: jax.Array,
    key: jax.Array,
    *,
    is_causal: bool,
    schedule: Schedule,
    exact_bandwidth: int | None,
    exact_keys: int | simrf_jax.ExactKeys | None,
) -> feature_maps.Learned:
    """Returns the feature map after distillation of the softmax weights of one layer.

    Args:
      prng_key: Typed PRNG key of the batches.
      start: Map before the first step.
      query: Queries ``[sequences, T, N, H]`` to learn from.
      key: Keys of the same shape.
      is_causal: True if a query sees no later key.
      schedule: Number of steps, and their size.
      exact_bandwidth: Bandwidth of the exact band beside which the map stands, or None.
      exact_keys: Exact keys beside which the map stands, or None.
    """
    rate = optax.cosine_decay_schedule(schedule.learning_rate, schedule.num_steps)
    optimizer = optax.adam(rate)
    batch_size = min(schedule.batch_size, len(query))

    def loss(learned: feature_maps.Learned, batch: jax.Array) -> jax.Array:
        return simrf_jax.distillation_loss(
            query[batch],
            key[batch],
            None,
            feature_map=learned,
            is_causal=is_causal,
            exact_bandwidth=exact_bandwidth,
            exact_keys=exact_keys,
        )

    def step(
        state: tuple[feature_maps.Learned, optax.OptState], prng_key: jax.Array
    ) -> tuple[tuple[feature_maps.Learned, optax.OptState], None]:
        learned, opt_state = state
        batch = jax.random.choice(prng_key, len(query), (batch_size,), replace=False)
        # The calibration has no gradient, so that Adam leaves it as it is.
        updates, opt_state = optimizer.update(jax.grad(loss)(learned, batch), opt_state)
        return (optax.apply_updates(learned, updates), opt_state), None

    prng_keys = jax.random.split(prng_key, schedule.num_steps)
    (learned, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), prng_keys)
    return learned
