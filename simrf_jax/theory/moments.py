r"""Moments of the resultant of a pair, relative to those of an iid pair.

For rows at a fixed cosine :math:`c`, :math:`|w_i + w_j|^2 = r^2 (1 + c \sin\phi)` with
:math:`r \sim \chi_{2d}` independent of :math:`\phi`, whose density is proportional to
:math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. Hence

.. math::
    \frac{E |w_i + w_j|^{2k}}{E |w_i + w_j|^{2k}_\text{iid}} = r_k I_k(c), \qquad
    r_k = \prod_{j<k} \frac{d+j}{d+2j}, \qquad I_k(c) = E_\phi (1 + c \sin\phi)^k.

Conformities and mean squared errors are power series with these coefficients. They are Eqs. 23 and
24 of Reid et al., Simplex Random Features (ICML 2023), in a form without cancellation.

Two rows of equal norms have :math:`|w_i + w_j|^2 = 2 (1 + c) a^2`, hence the relative moments
:math:`(1 + c)^k`. Those of antithetic norms are computed by quadrature over the norm.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax.theory.norms import antithetic_rule
from simrf_jax.theory.numerics import over_chunks, phi_rule
from simrf_jax.theory.pairs import Pairs


def log_relative_moments(
    dim: int, cosine: float, degrees: int
) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns the logarithm of r_k I_k(c) for k = 0, ..., ``degrees``."""
    if not cosine:
        return _log_r(dim, degrees)
    sines, log_weights = phi_rule(dim)
    log_bases = np.log1p(cosine * sines)

    def log_i(k: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
        return special.logsumexp(k[:, None] * log_bases + log_weights, axis=1)

    k = np.arange(degrees + 1.0)
    return _log_r(dim, degrees) + over_chunks(log_i, k, sines.size)


def scaled_deficits(dim: int, pairs: Pairs, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns 2^-k (1 - M_k) for k = 0, ..., ``degrees``, with M_k the relative moments of pairs.

    The result has full relative accuracy for independent norms and c <= 0, and for equal norms. The
    function forms neither 2^k nor moments that grow like (1 + c)^k for c > 0.

    Args:
      dim: Dimension d.
      pairs: Kind of the pairs.
      degrees: Largest k.
    """
    k = np.arange(degrees + 1.0)
    if pairs.norms == "equal":
        return -_scaled_powers_minus_1(k, np.array([_log1p(pairs.cosine)]))[:, 0]
    if pairs.norms == "antithetic":
        return _scaled_antithetic_deficits(dim, pairs.cosine, k)
    return _scaled_independent_deficits(dim, pairs.cosine, k)


def _scaled_independent_deficits(
    dim: int, cosine: float, k: Float64[np.ndarray, " k"]
) -> Float64[np.ndarray, " k"]:
    log_r = _log_r(dim, k.size - 1)
    deficits = -np.exp(-k * np.log(2)) * np.expm1(log_r)
    if not cosine:
        return deficits
    sines, log_weights = phi_rule(dim)
    log_bases, weights = np.log1p(cosine * sines), np.exp(log_weights)

    def scaled_i_minus_1(k: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
        return _scaled_powers_minus_1(k, log_bases) @ weights

    return deficits - np.exp(log_r) * over_chunks(scaled_i_minus_1, k, sines.size)


def _scaled_antithetic_deficits(
    dim: int, cosine: float, k: Float64[np.ndarray, " k"]
) -> Float64[np.ndarray, " k"]:
    norms, others, log_weights = antithetic_rule(dim, np.sqrt(dim + 2.0 * k.size))
    log_squares = np.log((norms**2 + others**2 + 2 * cosine * norms * others) / 4)
    # An iid pair has |w_i + w_j|^2 = 2 chi^2_d, whose moments are 4^k (d/2)_k.
    log_moments = np.concatenate([[0.0], np.cumsum(np.log(dim / 2 + k[:-1]))])

    def log_joint(k: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
        return special.logsumexp(k[:, None] * log_squares + log_weights, axis=1)

    log_relative = over_chunks(log_joint, k, norms.size) - log_moments
    return np.exp(-k * np.log(2)) - np.exp(log_relative - k * np.log(2))


def _scaled_powers_minus_1(
    k: Float64[np.ndarray, " k"], log_bases: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, "k n"]:
    """Returns 2^-k (base^k - 1) for each k and base."""
    growth = k[:, None] * log_bases
    scale = np.exp((-k * np.log(2))[:, None] + np.maximum(growth, 0))
    return scale * np.sign(growth) * -np.expm1(-np.abs(growth))


def _log1p(cosine: float) -> float:
    """Returns log(1 + c), or a number whose exponential is 0 for c = -1."""
    return float(np.log1p(cosine)) if cosine > -1 else -800.0


def _log_r(dim: int, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns the logarithm of r_k for k = 0, ..., ``degrees``."""
    j = np.arange(float(degrees))
    return np.concatenate([[0.0], np.cumsum(np.log1p(-j / (dim + 2 * j)))])
