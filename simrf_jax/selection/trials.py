r"""Error of attention with calibrated features: in closed form for iid rows, and in trials.

In the coordinates of the map, with :math:`\tilde v = \tilde x + \tilde y` and the variances
:math:`\Sigma_l` of the rows, one row estimates the kernel, relative to its value, by

.. math::
    f(w) = \prod_l \sqrt{\Sigma_l}\,
    e^{(1 - \Sigma_l) w_l^2 / 2 + \sqrt{\Sigma_l}\, w_l \tilde v_l - \tilde v_l^2 / 2}, \qquad
    w \sim N(0, I),

where w is the row before the tilt. Estimates of two pairs by one row have

.. math::
    E f f' = \prod_l \frac{1 + \rho_l}{2 \sqrt{\rho_l}}\,
    e^{(1 + \rho_l) (\tilde v_l + \tilde v'_l)^2 / 4 - (\tilde v_l^2 + \tilde v_l'^2) / 2}, \qquad
    \rho_l = \frac{1}{2 \Sigma_l - 1}.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float64, Int, Key

from simrf_jax.features.maps import Calibrated
from simrf_jax.projections import draw_projection
from simrf_jax.selection.inputs import AttentionInputs, QueryPoint


def in_coordinates_of(inputs: AttentionInputs, calibration: Calibrated) -> AttentionInputs:
    """Returns inputs whose queries meet the rows of W in the coordinates of a calibrated map.

    Args:
      inputs: Checked inputs of attention.
      calibration: Map with one array for each key head.

    Raises:
      ValueError: If the map is for other heads.
    """
    num_heads, dim = inputs.heads_shape[-1], inputs.dim
    shape = np.shape(calibration.variances)
    if len(shape) != 2 or shape[1] != dim or not shape[0] or num_heads % shape[0]:
        raise ValueError(
            "features must be a calibrated map for the heads of key, with variances "
            f"[key heads, {dim}], got variances of shape {shape} for {num_heads} query heads."
        )

    def balanced(
        x: Float64[np.ndarray, "*heads length dim"], mean: ArrayLike, matrix: ArrayLike
    ) -> Float64[np.ndarray, "*heads length dim"]:
        own_mean, own_matrix = (_of_each_head(leaf, num_heads) for leaf in (mean, matrix))
        return np.einsum("...nth,njh->...ntj", x - own_mean[:, None], own_matrix)

    c = calibration
    return inputs._replace(
        row_x=balanced(inputs.row_x, c.query_mean, c.query_matrix),
        row_y=balanced(inputs.row_y, c.key_mean, c.key_matrix),
    )


def head_variances(calibration: Calibrated, num_heads: int) -> Float64[np.ndarray, "num_heads dim"]:
    """Returns the variances of the rows for each query head.

    Args:
      calibration: Map with one array for each key head.
      num_heads: Number of query heads.
    """
    return _of_each_head(calibration.variances, num_heads)


def _of_each_head(leaf: ArrayLike, num_heads: int) -> Float64[np.ndarray, " heads *shape"]:
    array = np.asarray(jax.device_get(leaf), np.float64)
    return np.repeat(array, num_heads // len(array), axis=0)


def error_of_iid_rows(
    points: Iterable[QueryPoint], variances: Float64[np.ndarray, " dim"], num_features: int
) -> float:
    """Returns the relative squared error of one head to first order.

    Args:
      points: Queries of the head, at least one.
      variances: Variances of the rows along the axes of the map, above 1/2.
      num_features: Number of rows.
    """
    rho = 1 / (2 * variances - 1)
    log_inflation = np.sum(np.log((1 + rho) / (2 * np.sqrt(rho))))
    squared_error = squared_output = 0.0
    for point in points:
        # The square of v + v' is multiplied out, so that the cross terms are one product.
        own = np.sum((rho - 1) / 4 * point.sums**2, axis=-1)
        cross = ((1 + rho) / 2 * point.sums) @ point.sums.T
        excess = np.expm1(log_inflation + own[:, None] + own + cross)
        squared_error += np.sum(point.weights * excess)
        squared_output += point.squared_output
    return squared_error / (num_features * squared_output)


def errors_in_trials(
    inputs: AttentionInputs,
    variances: Float64[np.ndarray, "num_heads dim"],
    sizes: Int[np.ndarray, " sizes"],
    num_draws: int,
) -> Float64[np.ndarray, "num_draws sizes"]:
    """Returns relative squared errors of attention, the means over heads, in draws of W.

    The rows are cross-polytopes of one fixed PRNG key, so that the errors are a function of the
    arguments. The first rows of a projection are one of fewer rows.

    Args:
      inputs: Inputs in the coordinates of the map.
      variances: Variances of the rows of each head.
      sizes: Ascending numbers of rows.
      num_draws: Number of draws.
    """
    heads = list(np.ndindex(inputs.heads_shape))
    keys = jax.random.split(jax.random.key(0), (len(heads), num_draws))
    result = np.empty((len(heads), num_draws, len(sizes)))
    for i, head in enumerate(heads):
        points = list(inputs.queries(head))
        squared_output = sum(point.squared_output for point in points)
        for j, rows in enumerate(
            np.asarray(_draw_rows(keys[i], int(sizes[-1]), inputs.dim), np.float64)
        ):
            own = (_squared_errors(point, rows, variances[head[-1]], sizes) for point in points)
            result[i, j] = sum(own) / squared_output
    return result.mean(axis=0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_rows(
    keys: Key[Array, " draws"], num_features: int, dim: int
) -> Float[Array, "draws num_features dim"]:
    def draw(key: Key[Array, ""]) -> Float[Array, "num_features dim"]:
        return draw_projection(key, num_features, dim, coupling="cross_polytope")

    return jax.vmap(draw)(keys)


def _squared_errors(
    point: QueryPoint,
    rows: Float64[np.ndarray, "m dim"],
    variances: Float64[np.ndarray, " dim"],
    sizes: Int[np.ndarray, " sizes"],
) -> Float64[np.ndarray, " sizes"]:
    """Returns the squared error of one output for the first rows, of several numbers."""
    exponents = (np.sqrt(variances) * point.sums) @ rows.T + (1 - variances) / 2 @ rows.T**2
    exponents -= np.sum(point.sums**2, axis=-1, keepdims=True) / 2
    # What all terms share cancels in the normalised weights.
    terms = point.probabilities[:, None] * np.exp(exponents - np.max(exponents))
    starts = np.concatenate([[0], sizes[:-1]])
    sums = np.cumsum(np.add.reduceat(terms, starts, axis=1), axis=1)
    totals = np.sum(sums, axis=0)
    # Rows whose terms underflow beside those of later rows count as uniform attention.
    estimated = np.where(totals > 0, sums / np.where(totals > 0, totals, 1), 1 / len(sums))
    difference = estimated - point.probabilities[:, None]
    if point.value is not None:
        difference = point.value.T @ difference
    return np.sum(difference**2, axis=0)
