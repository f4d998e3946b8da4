r"""Moments of the resultant of a pair, relative to those of an iid pair.

For rows at a fixed cosine :math:`c`, :math:`|w_i + w_j|^2 = r^2 (1 + c \sin\phi)` with
:math:`r \sim \chi_{2d}` independent of :math:`\phi`, whose density is proportional to
:math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. Hence

.. math::
    \frac{E |w_i + w_j|^{2k}}{E |w_i + w_j|^{2k}_\text{iid}} = r_k I_k(c), \qquad
    r_k = \prod_{j<k} \frac{d+j}{d+2j}, \qquad I_k(c) = E_\phi (1 + c \sin\phi)^k.

Conformities and mean squared errors are power series with these coefficients. They are Eqs. 23 and
24 of Reid et al., Simplex Random Features (ICML 2023), in a form without cancellation.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax.theory.numerics import over_chunks, phi_rule


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


def scaled_deficits(dim: int, cosine: float, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns 2^-k (1 - r_k I_k(c)) for k = 0, ..., ``degrees``.

    The result has full relative accuracy for c <= 0. The function forms neither 2^k nor I_k, which
    grows like (1 + c)^k for c > 0.
    """
    log_r = _log_r(dim, degrees)
    k = np.arange(degrees + 1.0)
    log_scale = -k * np.log(2)
    deficits = -np.exp(log_scale) * np.expm1(log_r)
    if not cosine:
        return deficits
    sines, log_weights = phi_rule(dim)
    log_bases, weights = np.log1p(cosine * sines), np.exp(log_weights)

    def scaled_i_minus_1(k: Float64[np.ndarray, " k"]) -> Float64[np.ndarray, " k"]:
        growth = k[:, None] * log_bases
        scale = np.exp((-k * np.log(2))[:, None] + np.maximum(growth, 0))
        return (scale * np.sign(growth) * -np.expm1(-np.abs(growth))) @ weights

    return deficits - np.exp(log_r) * over_chunks(scaled_i_minus_1, k, sines.size)


def _log_r(dim: int, degrees: int) -> Float64[np.ndarray, " {degrees}+1"]:
    """Returns the logarithm of r_k for k = 0, ..., ``degrees``."""
    j = np.arange(float(degrees))
    return np.concatenate([[0.0], np.cumsum(np.log1p(-j / (dim + 2 * j)))])
