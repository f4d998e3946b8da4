"""Measured errors of attention with calibrated features, valid for vectors of any length."""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Key

from simrf_jax._src.projections import draw_projection
from simrf_jax._src.selection.inputs import AttentionInputs, QueryPoint, Variances

Sizes: TypeAlias = Int[np.ndarray, " sizes"]  # Numbers of rows.


def errors_in_trials(
    inputs: AttentionInputs, variances: Variances, sizes: Sizes, num_draws: int
) -> Float64[np.ndarray, "num_draws heads queries sizes"]:
    """Returns squared errors of attention for draws of W, relative to the outputs of each head.

    The sum over a head's queries is the relative squared error of the head. The rows are cross-
    polytopes from one fixed PRNG key, so the errors are a function of the arguments. The first rows
    of a projection form a projection with fewer rows.

    Args:
      inputs: Inputs in the coordinates of the map.
      variances: Variances of the rows of each head.
      sizes: Ascending numbers of rows.
      num_draws: Number of draws.
    """
    keys = jax.random.split(jax.random.key(0), (len(inputs.heads), num_draws))
    result = np.empty((num_draws, len(inputs.heads), inputs.x.shape[-2], len(sizes)))
    for i, head in enumerate(inputs.heads):
        points = list(inputs.queries(head))
        draws = np.asarray(_draw_rows(keys[i], int(sizes[-1]), inputs.dim), np.float64)
        for j, rows in enumerate(draws):
            for t, point in enumerate(points):
                result[j, i, t] = _squared_errors(point, rows, variances[head[-1]], sizes)
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_rows(
    keys: Key[Array, " draws"], num_features: int, dim: int
) -> Float[Array, "draws num_features dim"]:
    draw = functools.partial(
        draw_projection, num_features=num_features, dim=dim, coupling="cross_polytope"
    )
    return jax.vmap(draw)(keys)


def _squared_errors(
    point: QueryPoint,
    rows: Float64[np.ndarray, "m dim"],
    variances: Float64[np.ndarray, " dim"],
    sizes: Sizes,
) -> Float64[np.ndarray, " sizes"]:
    """Returns the relative squared error of one output with the first m rows, m in ``sizes``."""
    exponents = (np.sqrt(variances) * point.sums) @ rows.T + (1 - variances) / 2 @ rows.T**2
    exponents -= np.sum(point.sums**2, axis=-1, keepdims=True) / 2
    # Factors that all terms share cancel in the normalized weights.
    terms = point.probabilities[:, None] * np.exp(exponents - np.max(exponents))
    starts = np.concatenate([[0], sizes[:-1]])
    sums = np.cumsum(np.add.reduceat(terms, starts, axis=1), axis=1)
    totals = np.sum(sums, axis=0)
    # Rows whose terms underflow relative to later rows count as uniform attention.
    estimated = np.where(totals > 0, sums / np.where(totals > 0, totals, 1), 1 / len(sums))
    difference = estimated - point.probabilities[:, None]
    if point.value is not None:
        difference = point.value.T @ difference
    return np.sum(difference**2, axis=0) / point.squared_outputs
