"""The mean product of two rows' positive features in float64, without the library."""

import functools

import numpy as np
import scipy.special

# Quadrature over a standard normal variable.
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def exact_chi(normal, dim):
    """Maps normal variables to chi variables of the same rank."""
    below = np.sqrt(2 * scipy.special.gammaincinv(dim / 2, scipy.special.ndtr(normal)))
    above = np.sqrt(2 * scipy.special.gammainccinv(dim / 2, scipy.special.ndtr(-normal)))
    return np.where(normal < 0, below, above)


@functools.cache
def mean_product(v, dim, cosine, norms):
    """Returns E f f', for f = K_hat / K of one row.

    The mean over the rotation is the series 0F1. The norms of the rows, which have an angle with
    this cosine, are "equal", "antithetic" or "independent" chi variables.
    """
    a = exact_chi(NODES, dim)
    b = {"equal": a, "antithetic": a[::-1], "independent": a[:, None]}[norms]
    weights = WEIGHTS * WEIGHTS[:, None] if norms == "independent" else WEIGHTS
    squares = a**2 + b**2 + 2 * cosine * a * b
    return np.sum(weights * scipy.special.hyp0f1(dim / 2, v**2 * squares / 4)) * np.exp(-(v**2))
