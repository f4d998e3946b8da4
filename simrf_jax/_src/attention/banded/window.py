"""The state of banded attention: the last keys and values of a sequence."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from simrf_jax._src import one_line
from simrf_jax._src.attention.inputs.call import Inputs


class Window(NamedTuple):
    """The state of banded attention: the last k keys and values, with k the bandwidth.

    Attributes:
      key: ``[..., k, K, H]``.
      value: ``[..., k, K, D]``.
      log_weights: ``[..., k, K]``, log weights of the keys from masks and biases; minus infinity
        where a key is hidden or not there yet, NaN where a key was not finite.
    """

    key: Float[Array, "*batch bandwidth K H"]
    value: Float[Array, "*batch bandwidth K D"]
    log_weights: Float[Array, "*batch bandwidth K"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    def followed_by(self, inputs: Inputs) -> Window:
        """Returns the keys ``[B, k, ...]`` followed by new ones."""
        key = inputs.key.astype(inputs.value.dtype)
        return jax.tree.map(_join, self, Window(key, inputs.value, inputs.key_log_weights))

    def put_into(self, inputs: Inputs) -> Inputs:
        """Returns inputs whose keys are replaced by these, ``[B, S, ...]``."""
        return dataclasses.replace(
            inputs, key=self.key, value=self.value, key_log_weights=self.log_weights
        )

    def part(self, keys: slice) -> Window:
        """Returns some of the keys ``[B, S, ...]``."""
        return Window(*(x[:, keys] for x in self))


def _join(
    before: Float[Array, "B bandwidth *rest"], new: Float[Array, "B T *rest"]
) -> Float[Array, "B bandwidth+T *rest"]:
    sharding = jax.typeof(new).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        # The initial window is replicated on all devices.
        before = jax.sharding.reshard(before, sharding)
    return jnp.concatenate([before, new], axis=1)


def check_bandwidth(window: Window, bandwidth: int) -> None:
    """Raises ``ValueError`` unless the window has ``bandwidth`` keys."""
    if (given := jnp.shape(window.key)[-3]) != bandwidth:
        raise ValueError(
            f"state must be of bandwidth={bandwidth}, got one of bandwidth={given}; make a new one "
            "with init."
        )


def empty_window(inputs: Inputs, bandwidth: int) -> Window:
    """Returns a window of hidden zeros."""
    (batch, _, *heads), width = inputs.key.shape, inputs.value.shape[-1]
    key = jnp.zeros((batch, bandwidth, *heads), inputs.value.dtype)
    value = jnp.zeros((*key.shape[:-1], width), inputs.value.dtype)
    return Window(key, value, jnp.full(key.shape[:-1], -jnp.inf, inputs.key.dtype))
