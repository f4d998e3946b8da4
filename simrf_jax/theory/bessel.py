"""The conformity of two rows whose resultant (their sum) has a given length."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy import special

_MAX_LOG = 600.0  # The power series is used below this logarithm, because e^600 is finite.


def log_hyp0f1(
    b: float, x: Float64[np.ndarray, "*shape"] | np.float64
) -> Float64[np.ndarray, "*shape"]:
    r"""Returns the logarithm of :math:`{}_0F_1(; b; x)`.

    With :math:`b = d/2` and :math:`x = v^2 r^2 / 4`, :math:`{}_0F_1` is the average of
    :math:`e^{w \cdot u}` over all directions of w in d dimensions, where :math:`|w| = r` and
    :math:`|u| = v`.

    Args:
      b: A number of at least 1/2.
      x: Numbers of at least 0. Infinite and NaN values are returned unchanged.

    Returns:
      The logarithms.

    Example:
      >>> import numpy as np
      >>> x = np.array([1.0, 1e3, 1e9])  # cosh is 0F1(; 1/2; x^2 / 4)
      >>> np.round(log_hyp0f1(0.5, x**2 / 4), 6)
      array([4.33781000e-01, 9.99306853e+02, 9.99999999e+08])
    """
    x = np.asarray(x)
    bound = np.minimum(2 * np.sqrt(x), x / b)  # The logarithm is at most this large.
    result = np.array(x, dtype=np.float64)
    small, large = bound < _MAX_LOG, (bound >= _MAX_LOG) & np.isfinite(x)
    result[small] = np.log1p(_series(b, x[small], np.max(bound[small], initial=0.0)))
    result[large] = _uniform_expansion(b - 1, 2 * np.sqrt(x[large])) + special.gammaln(b)
    return result


def _series(b: float, x: Float64[np.ndarray, " n"], bound: float) -> Float64[np.ndarray, " n"]:
    """Returns the power series without its leading 1, for logarithms of at most ``bound``."""
    term = np.ones_like(x)
    total = np.zeros_like(x)
    # The terms are largest where k (k + b) = x, which is before k = bound.
    for k in range(int(bound + 12 * np.sqrt(bound) + 30)):
        term *= x / ((k + 1) * (b + k))
        total += term
    return total


def _uniform_expansion(order: float, z: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    r"""Returns the logarithm of :math:`(2/z)^\nu I_\nu(z)`.

    The function uses Debye's expansion (DLMF 10.41.3) in powers of :math:`1/q`, with
    :math:`q = \sqrt{\nu^2 + z^2}`.

    Args:
      order: Order :math:`\nu`.
      z: Arguments z.
    """
    q = np.hypot(order, z)
    p2 = (order / q) ** 2
    u1 = (3 - 5 * p2) / 24
    u2 = (81 - 462 * p2 + 385 * p2**2) / 1152
    u3 = (30375 - 369603 * p2 + 765765 * p2**2 - 425425 * p2**3) / 414720
    correction = (u1 + (u2 + u3 / q) / q) / q
    return q - order * np.log((order + q) / 2) - np.log(2 * np.pi * q) / 2 + np.log1p(correction)
