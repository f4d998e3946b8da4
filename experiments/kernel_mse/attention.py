"""Errors of random-feature attention with the projections of a blog post and with ours.

The post is Teddy Koker, "Performers: The Kernel Trick, Random Fourier Features, and Attention"
(2020), https://teddykoker.com/2020/11/performers/
Its code is at https://github.com/teddykoker/performer
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import simrf_jax
from simrf_jax.projections import Coupling

INPUTS, PROJECTION = range(2)  # Purposes of PRNG keys, which are folded in.


class Curve(NamedTuple):
    """One estimate of attention."""

    coupling: Coupling
    feature_map: str


class Panel(NamedTuple):
    """Setting that all curves of a panel share."""

    title: str
    scale: float  # Standard deviation of the queries, keys and values.
    as_written: bool


def draw_inputs(key: jax.Array, length: int, dim: int, scale: float) -> jax.Array:
    """Draws queries, keys and values, ``[3, length, dim]`` in float64."""
    key = jax.random.fold_in(key, INPUTS)
    return scale * jax.random.normal(key, (3, length, dim), jnp.float64)


def draw_projection(
    key: jax.Array, num_features: int, dim: int, curve: Curve, *, as_written: bool
) -> jax.Array:
    r"""Draws W as the post has it, or corrected; the library's attention then takes either.

    The post takes sines and cosines of :math:`2 \pi w \cdot x` instead of :math:`w \cdot x`. In its
    code every orthogonal row has the norm :math:`\sqrt{d / m}`, where :math:`\chi_d` is right.

    Args:
      key: A typed PRNG key.
      num_features: Number of rows m.
      dim: Dimension d.
      curve: Coupling, and the feature map that W is for.
      as_written: If true, draw the post's W; otherwise draw the corrected one.

    Returns:
      Projection ``[num_features, dim]`` in float64.
    """
    orthogonal_as_written = as_written and curve.coupling == "orthogonal"
    w = simrf_jax.draw_projection(
        jax.random.fold_in(key, PROJECTION),
        num_features,
        dim,
        coupling=curve.coupling,
        norms="sqrt_dim" if orthogonal_as_written else "chi",
        dtype=jnp.float64,
    )
    if orthogonal_as_written:
        w /= math.sqrt(num_features)
    if as_written and curve.feature_map == "trigonometric":
        w *= 2 * math.pi
    return w


@functools.partial(jax.jit, static_argnames="feature_map")
def squared_error(inputs: jax.Array, projection: jax.Array, *, feature_map: str) -> jax.Array:
    """Returns the mean squared error of the entries of attention's output.

    Args:
      inputs: Queries, keys and values, ``[3, length, dim]``.
      projection: W, ``[num_features, dim]``.
      feature_map: Name of a feature map; see ``random_feature_attention``.

    Returns:
      A scalar.
    """
    q, k, v = inputs[:, :, None]  # One head.
    estimate = simrf_jax.random_feature_attention(q, k, v, projection, feature_map=feature_map)
    return jnp.mean(jnp.square(estimate[:, 0] - exact_attention(inputs)))


@jax.jit
def uniform_error(inputs: jax.Array) -> jax.Array:
    """Returns the mean squared error of uniform attention, whose output is the mean value."""
    exact = exact_attention(inputs)
    uniform = jnp.mean(inputs[2], axis=0, keepdims=True)
    return jnp.mean(jnp.square(jnp.broadcast_to(uniform, exact.shape) - exact))


def exact_attention(inputs: jax.Array) -> jax.Array:
    """Computes softmax attention in the inputs' type.

    ``jax.nn.dot_product_attention`` would compute the softmax in float32.
    """
    q, k, v = inputs
    return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[1])) @ v
