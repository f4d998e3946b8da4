"""Squared errors of kernel estimates in many draws, and what they say about a mean and a ratio."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from simrf_jax._src.projections import Coupling

# The error that one feature contributes, given w.u for a unit vector u.
FEATURE_ERRORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "positive": lambda wu, v: jnp.expm1(v * wu - v * v / 2),
    "trigonometric": lambda wu, z: jnp.cos(z * wu) - jnp.exp(-z * z / 2),
}
ENTRIES = 2**20  # The most entries of all W that are drawn at a time.


@functools.partial(jax.jit, static_argnames=("dim", "coupling", "features"))
def squared_errors(
    keys: jax.Array, distances: jax.Array, *, dim: int, coupling: Coupling, features: str
) -> jax.Array:
    r"""Computes squared errors of the Gaussian kernel with as many features as dimensions.

    The error depends on x and y by way of one vector only,

    .. math::
        \hat K / K - 1 = \tfrac1m \sum_i (e^{w_i \cdot (x + y) - |x + y|^2 / 2} - 1)
        \quad \text{(positive)}, \qquad
        \hat K - K = \tfrac1m \sum_i \cos w_i \cdot (x - y) - e^{-|x - y|^2/2}
        \quad \text{(trigonometric)},

    which is laid along each axis in turn, where its projection is a column of W. The mean over axes
    has the expectation of each of them and less variance. One W serves all distances.

    Args:
      keys: ``[trials]``.
      distances: ``[n]``, v = abs(x + y), or z = abs(x - y) for trigonometric features.
      dim: Dimension d, and number of features m.
      coupling: Coupling of the rows of W; see ``draw_projection``.
      features: ``"positive"`` or ``"trigonometric"``.

    Returns:
      ``[trials, n]`` of the type of the distances; relative to K^2 for positive features, as if
      x = y, where K is 1.
    """
    feature_error = FEATURE_ERRORS[features]

    def one(key: jax.Array) -> jax.Array:
        w = simrf_jax.draw_projection(key, dim, dim, coupling=coupling, dtype=distances.dtype)

        def at(distance: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(jnp.mean(feature_error(w, distance), axis=0)))

        return jax.lax.map(at, distances)

    return jax.vmap(one)(keys)


def draw_errors(
    seed: int, num_trials: int, distances: tuple[float, ...], *, dim: int, **options: str
) -> np.ndarray:
    """Computes ``squared_errors`` in float64, ``[num_trials, distances]``.

    Draws of one seed are paired. Float32 would do for the draws, but not for a difference of 1e-8
    of numbers near 1.
    """
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(seed), num_trials)
        batch = max(1, ENTRIES // dim**2)
        errors = [
            squared_errors(keys[start : start + batch], jnp.array(distances), dim=dim, **options)
            for start in range(0, num_trials, batch)
        ]
        return np.concatenate([np.asarray(e) for e in errors])


class Estimate(NamedTuple):
    """A number with its standard error."""

    value: np.ndarray
    standard_error: np.ndarray

    def z_score(self, expected: np.ndarray) -> np.ndarray:
        """Returns the distance from the expected value in standard errors."""
        return (self.value - expected) / self.standard_error


def summary(samples: np.ndarray) -> dict[str, float]:
    """Returns the ``mean`` of one number's samples, for a results file."""
    estimate = mean(samples)
    return {"mean": float(estimate.value), "standard_error": float(estimate.standard_error)}


def mean(samples: np.ndarray) -> Estimate:
    """Returns the mean over the first axis."""
    return Estimate(samples.mean(axis=0), samples.std(axis=0, ddof=1) / len(samples) ** 0.5)


def ratio(samples: np.ndarray, baseline: np.ndarray) -> Estimate:
    """Returns the ratio of the means of paired samples, with its delta-method error."""
    value = samples.mean(axis=0) / baseline.mean(axis=0)
    residual = mean(samples - np.broadcast_to(value, baseline.shape) * baseline)
    return Estimate(value, residual.standard_error / np.abs(baseline.mean(axis=0)))
