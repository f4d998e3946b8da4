"""The conformity of two rows whose resultant has a given length."""

from __future__ import annotations

import numpy as np
from scipy import special

_MAX_LOG = 600.0  # e^600 is finite.


def log_hyp0f1(b: float, x: np.ndarray) -> np.ndarray:
    r"""Logarithm of :math:`{}_0F_1(; b; x)` for b of at least 1/2 and x >= 0.

    With :math:`b = d/2` and :math:`x = v^2 w^2 / 4` it is the average of :math:`e^{w \cdot u}` over
    the directions of w, :math:`|w| = w` and :math:`|u| = v`, in d dimensions.

    Example:
      >>> import numpy as np
      >>> x = np.array([1.0, 1e3, 1e9])  # cosh is 0F1(; 1/2; x^2 / 4)
      >>> np.round(log_hyp0f1(0.5, x**2 / 4), 6)
      array([4.33781000e-01, 9.99306853e+02, 9.99999999e+08])
    """
    bound = np.minimum(2 * np.sqrt(x), x / b)  # Of the logarithm.
    result = np.array(x, dtype=np.float64)  # What is infinite or NaN stays so.
    small, large = bound < _MAX_LOG, (bound >= _MAX_LOG) & np.isfinite(x)
    result[small] = np.log1p(_series(b, x[small], np.max(bound[small], initial=0.0)))
    result[large] = _uniform_expansion(b - 1, 2 * np.sqrt(x[large])) + special.gammaln(b)
    return result


def _series(b: float, x: np.ndarray, bound: float) -> np.ndarray:
    """The power series without its 1."""
    term = np.ones_like(x)
    total = np.zeros_like(x)
    # The terms peak where k (k + b) = x, before k = bound.
    for k in range(int(bound + 12 * np.sqrt(bound) + 30)):
        term *= x / ((k + 1) * (b + k))
        total += term
    return total


def _uniform_expansion(order: float, z: np.ndarray) -> np.ndarray:
    r"""Log of :math:`(2/z)^\nu I_\nu(z)` by Debye's expansion (DLMF 10.41.3), in 1/q."""
    q = np.hypot(order, z)
    p2 = (order / q) ** 2
    u1 = (3 - 5 * p2) / 24
    u2 = (81 - 462 * p2 + 385 * p2**2) / 1152
    u3 = (30375 - 369603 * p2 + 765765 * p2**2 - 425425 * p2**3) / 414720
    correction = (u1 + (u2 + u3 / q) / q) / q
    return q - order * np.log((order + q) / 2) - np.log(2 * np.pi * q) / 2 + np.log1p(correction)
