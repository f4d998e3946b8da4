"""The quadrature over the angle of a pair, and vectorisation in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from scipy import special

_NODES = 256
_CHUNK = 2**18  # Numbers in one temporary array: 2 MiB.


@functools.lru_cache(maxsize=64)
def phi_rule(dim: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Averages over :math:`\phi` with density proportional to :math:`\sin^{d-1}\phi`.

    Returns:
      :math:`\sin\phi` at the nodes and the logarithm of their weights, which add up to 1.
    """
    roots, weights = np.polynomial.legendre.leggauss(_NODES)
    # phi = (pi / 2) u^2 on half the range puts nodes where (1 + c sin(phi))^k peaks: towards 0
    # for c < 0, where the width is 1/k, and towards pi/2 for c > 0.
    u = (roots + 1) / 2
    sines = np.sin(np.pi / 2 * u**2)
    log_weights = np.log(weights * u) + (dim - 1) * np.log(sines)
    # Normalised by their own sum: gamma functions would cost 1e-13, times 2 dim in small ratios.
    return sines, log_weights - special.logsumexp(log_weights)


def over_chunks(
    function: Callable[[np.ndarray], np.ndarray], values: np.ndarray, width: int
) -> np.ndarray:
    """Applies a function that needs ``width`` numbers for each value of a one-dimensional array."""
    rows = max(1, _CHUNK // width)
    starts = range(0, values.size, rows)
    return np.concatenate([values[:0], *(function(values[i : i + rows]) for i in starts)])
