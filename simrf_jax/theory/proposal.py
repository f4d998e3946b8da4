r"""Optimal positive features: importance sampling from a Gaussian of another width.

The features have a parameter A < 1/8. One row estimates the kernel, relative to its value, by

.. math::
    f(w) = (1 - 4A)^{d/2}\, e^{2A |w|^2 + \sqrt{1 - 4A}\, w \cdot u - v^2/2}, \qquad
    w \sim N(0, I), \quad |u| = v = |x + y|,

which has mean 1. With :math:`\rho = 1 / (1 - 8A)`, two rows of independent norms have the same
:math:`E f f'` for every A, because the weights and the norms are then averaged out one row at a
time. Two rows of one norm, at the angle of cosine c, have

.. math::
    E f f' = \Big(\frac{1 + \rho}{2 \sqrt\rho}\Big)^d
    \exp\Big(v^2 \Big(\frac{(1 + \rho)(1 + c)}{2} - 1\Big)\Big).

At c = 1 this is the second moment of one row, :math:`S(A) = (\dots)^d e^{\rho v^2}`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.bessel import log_hyp0f1
from simrf_jax.theory.conformity import log_series
from simrf_jax.theory.norms import antithetic_rule
from simrf_jax.theory.pairs import Pairs
from simrf_jax.theory.series import positive_series

_SMALL = 1.0  # Below this t = v^2 the error is a sum of small terms, and above it a difference.


def optimal_parameter(
    mean_squared_distance: ArrayLike, dim: int
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the parameter A of optimal positive features in closed form.

    .. math::
        A^* = \frac{1 - 2\varphi - \sqrt{(2\varphi + 1)^2 + 8\varphi}}{16}, \qquad
        \varphi = \frac{v^2}{d}, \quad v = |x + y|.

    It minimises the second moment of the estimate at a given v, and the mean of its logarithm if
    :math:`v^2` is a mean over pairs. It is negative except at v = 0. It is the same for every
    coupling of rows with independent norms, because only the second moment of a single row depends
    on A. Where norms are coupled, it is nearly optimal.

    Args:
      mean_squared_distance: The mean of :math:`|x + y|^2`, any shape, at least 0.
      dim: Dimension d.

    Returns:
      float64 array of the shape of ``mean_squared_distance``.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``mean_squared_distance`` is not real.
      ValueError: If a number is out of range.

    Example:
      >>> print(f"{optimal_parameter(4.0, 64):.6f}")
      -0.028361

    References:
      Likhosherstov et al., Chefs' Random Tables (NeurIPS 2022), Theorem 3.3,
      https://arxiv.org/abs/2205.15317
      Likhosherstov et al., FAVOR# (2023), for the mean of the logarithm,
      https://arxiv.org/abs/2302.00787
    """
    dim = checks.positive_int("dim", dim)
    phi = arguments.norms("mean_squared_distance", mean_squared_distance) / dim
    root = np.sqrt((2 * phi + 1) ** 2 + 8 * phi)
    # Each form has no cancellation on its side.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(phi < 0.5, -phi / (1 - 2 * phi + root), (1 - 2 * phi - root) / 16)[()]


def log_relative_mse(
    t: Float64[np.ndarray, "*#shape"],
    parameter: Float64[np.ndarray, "*#shape"],
    num_features: int,
    dim: int,
    pairs: tuple[Pairs, ...],
) -> Float64[np.ndarray, "*shape"]:
    """Returns the log of E(K_hat / K - 1)^2 for positive features with chi norms.

    Args:
      t: Squared norms v^2.
      parameter: Parameter A of the features, 0 for positive features as such.
      num_features: Number of rows m.
      dim: Dimension d.
      pairs: Coupled pairs of the rows.
    """
    t, parameter = np.broadcast_arrays(t, parameter)
    result = np.where(np.isnan(t), np.nan, 0.0)
    small, large = t < _SMALL, t >= _SMALL
    with np.errstate(divide="ignore"):
        result[small] = np.log(_sum_of_terms(t[small], parameter[small], dim, pairs))
    result[large] = _log_difference(t[large], parameter[large], dim, pairs)
    result -= np.log(num_features)
    return result


def _sum_of_terms(
    t: Float64[np.ndarray, " n"],
    parameter: Float64[np.ndarray, " n"],
    dim: int,
    pairs: tuple[Pairs, ...],
) -> Float64[np.ndarray, " n"]:
    """Returns m times the error as that at A = 0 plus what A changes."""
    total = np.expm1(t) * positive_series(t, dim, pairs, even=False)
    total += _change_at_equal_norms(t, parameter, dim, 1.0)
    for weight, cosine, norms in pairs:
        if norms == "equal":
            total += weight * _change_at_equal_norms(t, parameter, dim, cosine)
        elif norms == "antithetic":
            total += weight * _change_at_antithetic_norms(t, parameter, dim, cosine)
    return total


def _log_difference(
    t: Float64[np.ndarray, " n"],
    parameter: Float64[np.ndarray, " n"],
    dim: int,
    pairs: tuple[Pairs, ...],
) -> Float64[np.ndarray, " n"]:
    """Returns the log of m times the error from the second moments of rows and pairs."""
    logs, ones = [_log_at_equal_norms(t, parameter, dim, 1.0)], 1.0
    for weight, cosine, norms in pairs:
        if norms == "equal":
            log_moment = _log_at_equal_norms(t, parameter, dim, cosine)
        elif norms == "antithetic":
            log_moment = _log_at_antithetic_norms(t, parameter, dim, cosine)
        else:
            log_moment = log_series(t, dim, cosine) - t
        logs.append(np.log(weight) + log_moment)
        ones += weight
    log_moments = special.logsumexp(logs, axis=0)
    return log_moments + np.log(-np.expm1(np.log(ones) - log_moments))


def _log_at_equal_norms(
    t: Float64[np.ndarray, " n"], parameter: Float64[np.ndarray, " n"], dim: int, cosine: float
) -> Float64[np.ndarray, " n"]:
    """Returns the log of E f f' for two rows of one norm."""
    return (
        log_inflation(parameter, dim) + (cosine + excess_of_rho(parameter) * (1 + cosine) / 2) * t
    )


def _change_at_equal_norms(
    t: Float64[np.ndarray, " n"], parameter: Float64[np.ndarray, " n"], dim: int, cosine: float
) -> Float64[np.ndarray, " n"]:
    """Returns E f f' for two rows of one norm, less its value at A = 0."""
    exponent = log_inflation(parameter, dim) + excess_of_rho(parameter) * (1 + cosine) / 2 * t
    return np.exp(cosine * t) * np.expm1(exponent)


def excess_of_rho(
    parameter: Float64[np.ndarray, "*shape"] | float,
) -> Float64[np.ndarray, "*shape"] | float:
    """Returns rho - 1."""
    return 8 * parameter / (1 - 8 * parameter)


def log_inflation(
    parameter: Float64[np.ndarray, "*shape"] | float, dim: int
) -> Float64[np.ndarray, "*shape"] | np.float64:
    """Returns d log((1 + rho) / (2 sqrt(rho))), to full relative accuracy for small A."""
    return dim * np.log1p(2 * np.sinh(np.log1p(-8 * parameter) / 4) ** 2)


def _log_at_antithetic_norms(
    t: Float64[np.ndarray, " n"], parameter: Float64[np.ndarray, " n"], dim: int, cosine: float
) -> Float64[np.ndarray, " n"]:
    """Returns the log of E f f' for two rows with F(a) + F(a') = 1."""

    def log_mean(t: float, parameter: float) -> float:
        rule = antithetic_rule(dim, _largest_norm(t, parameter, dim))
        return special.logsumexp(_log_product(t, parameter, dim, cosine, *rule[:2]) + rule[2])

    return np.array([log_mean(*case) for case in zip(t, parameter, strict=True)])


def _change_at_antithetic_norms(
    t: Float64[np.ndarray, " n"], parameter: Float64[np.ndarray, " n"], dim: int, cosine: float
) -> Float64[np.ndarray, " n"]:
    """Returns E f f' for two rows with F(a) + F(a') = 1, less its value at A = 0."""

    def mean_change(t: float, parameter: float) -> float:
        rule = antithetic_rule(dim, _largest_norm(t, parameter, dim))
        with_tilt = np.expm1(_log_product(t, parameter, dim, cosine, *rule[:2]))
        without = np.expm1(_log_product(t, 0.0, dim, cosine, *rule[:2]))
        return np.exp(rule[2]) @ (with_tilt - without)

    return np.array([mean_change(*case) for case in zip(t, parameter, strict=True)])


def _log_product(
    t: float,
    parameter: float,
    dim: int,
    cosine: float,
    norms: Float64[np.ndarray, " nodes"],
    others: Float64[np.ndarray, " nodes"],
) -> Float64[np.ndarray, " nodes"]:
    """Returns the log of E f f' over rotations, for given norms of the two rows."""
    squares = norms**2 + others**2
    log_weights = dim * np.log1p(-4 * parameter) + 2 * parameter * squares
    squared_resultants = np.maximum(squares + 2 * cosine * norms * others, 0)
    return log_weights + log_hyp0f1(dim / 2, (1 - 4 * parameter) * t * squared_resultants / 4) - t


def _largest_norm(t: float, parameter: float, dim: int) -> float:
    """Returns a norm beyond which the integrand over norms falls."""
    return dim**0.5 + np.sqrt(t / min(1.0, 1 - 4 * parameter))
