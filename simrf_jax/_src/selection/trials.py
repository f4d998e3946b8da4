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
) -> tuple[Float64[np.ndarray, " sizes"], Float64[np.ndarray, " sizes"]]:
    """Returns the mean relative squared error of attention over heads, and its standard error.

    The standard error is that of draws of W and of the choice of queries. The rows are
    cross-polytopes from one fixed PRNG key, so the errors are a function of the arguments. The
    first rows of a projection form a projection with fewer rows.

    Args:
      inputs: Inputs in the coordinates of the map.
      variances: Variances of the rows of each head.
      sizes: Ascending numbers of rows.
      num_draws: Number of draws, at least 2.
    """
    num_heads = len(inputs.heads)
    keys = jax.random.split(jax.random.key(0), (num_heads, num_draws))
    of_draws, variance = np.zeros((num_draws, len(sizes))), np.zeros(len(sizes))
    for i, head in enumerate(inputs.heads):
        points = list(inputs.queries(head))
        draws = np.asarray(_draw_rows(keys[i], int(sizes[-1]), inputs.dim), np.float64)
        of_queries = np.zeros((len(points), len(sizes)))
        for j, rows in enumerate(draws):
            errors = [_squared_errors(one, rows, variances[head[-1]], sizes) for one in points]
            of_draws[j] += np.sum(errors, axis=0) / num_heads
            of_queries += np.divide(errors, num_draws)
        shares = np.array([point.share for point in points])
        variance += variance_of_ratio(of_queries, shares) / num_heads**2
    variance += of_draws.var(axis=0, ddof=1) / num_draws
    return of_draws.mean(axis=0), np.sqrt(variance)


def variance_of_ratio(
    errors: Float64[np.ndarray, "queries sizes"], shares: Float64[np.ndarray, " queries"]
) -> Float64[np.ndarray, " sizes"]:
    """Returns the variance of a head's relative error over a random choice of its queries.

    Args:
      errors: Squared errors of the queries, relative to the squared norm of all outputs.
      shares: Shares of the queries in this squared norm.
    """
    residuals = errors - shares[:, None] * np.sum(errors, axis=0)
    return np.sum(residuals**2, axis=0) * len(errors) / max(len(errors) - 1, 1)


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
