"""Quadrature over the angle phi of a pair of rows, and vectorisation in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64
from scipy import special

_NODES = 256
_CHUNK = 2**18  # Largest size of a temporary array, which then takes 2 MiB.


@functools.lru_cache(maxsize=64)
def phi_rule(
    dim: int,
) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
    r"""Returns a quadrature rule for averages over :math:`\phi` of functions of :math:`\sin\phi`.

    The density of :math:`\phi` is proportional to :math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. By
    symmetry the nodes cover only half of that range.

    Args:
      dim: Dimension d.

    Returns:
      Two arrays: :math:`\sin\phi` at the nodes, and the logarithms of the weights. The
      weights add up to 1.
    """
    roots, weights = np.polynomial.legendre.leggauss(_NODES)
    # The substitution phi = (pi / 2) u^2 on half of the range puts nodes where (1 + c sin(phi))^k
    # peaks: towards 0 for c < 0, where the peak has width 1/k, and towards pi/2 for c > 0.
    u = (roots + 1) / 2
    sines = np.sin(np.pi / 2 * u**2)
    log_weights = np.log(weights * u) + (dim - 1) * np.log(sines)
    # The weights are normalised by their own sum, because gamma functions would add an error of
    # 1e-13, and small ratios would multiply it by 2 dim.
    return sines, log_weights - special.logsumexp(log_weights)


def over_chunks(
    function: Callable[[Float64[np.ndarray, " n"]], Float64[np.ndarray, " n"]],
    values: Float64[np.ndarray, " size"],
    width: int,
) -> Float64[np.ndarray, " size"]:
    """Applies a vectorised function to an array in chunks, so that its memory is bounded.

    Args:
      function: Vectorised function of an array ``[n]`` that returns an array ``[n]``.
      values: Arguments of the function.
      width: Size of the function's temporary arrays per value.

    Returns:
      The function's results for all values.
    """
    rows = max(1, _CHUNK // width)
    starts = range(0, values.size, rows)
    return np.concatenate([values[:0], *(function(values[i : i + rows]) for i in starts)])
