"""Density of the length of a pair's resultant."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.numerics import over_chunks, phi_rule

_FAR = 1e100  # Its square is finite, its density 0.


def resultant_norm_pdf(w: ArrayLike, dim: int, *, coupling: str) -> np.ndarray | np.float64:
    r"""Density of the resultant's length :math:`w = |w_i + w_j|` of a pair of rows of one block.

    .. math::
        p(w) = E_\phi \frac{1}{a} p_{\chi_{2d}}\!\left(\frac wa\right), \qquad
        a = \sqrt{1 + c \sin\phi},

    with :math:`c = -1/(d-1)` for simplex rows and :math:`c = 0`, that is :math:`\chi_{2d}`, for
    orthogonal rows. For iid rows :math:`w / \sqrt 2` is :math:`\chi_d`. A coupling that makes the
    resultant shorter has less conformity.

    Args:
      w: Lengths, any shape, at least 0.
      dim: Dimension d of the rows.
      coupling: How the rows are coupled: ``"iid"``, ``"orthogonal"`` or ``"simplex"``.

    Returns:
      float64 array of the shape of ``w``.

    Raises:
      TypeError: If ``dim`` is not an integer or ``w`` not real.
      ValueError: If the coupling is unknown or has no closed form or no pair of rows in ``dim``
        dimensions (all but iid need 2), or a number is out of range.

    Example:
      >>> import numpy as np
      >>> for coupling in ("iid", "orthogonal", "simplex"):
      ...     print(coupling, np.round(resultant_norm_pdf(3.0, 6, coupling=coupling), 6))
      iid 0.400188
      orthogonal 0.512481
      simplex 0.628499

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 18 and 20, and Fig. 5.
    """
    dim = checks.positive_int("dim", dim)
    arguments.pair_coupling(coupling, dim)
    length: np.ndarray = np.minimum(arguments.norms("w", w), _FAR)
    if coupling == "iid":
        log_pdf = _log_chi_pdf(length / np.sqrt(2), dim) - np.log(2) / 2
    elif coupling == "orthogonal":
        log_pdf = _log_chi_pdf(length, 2 * dim)
    elif dim == 2:
        return _antiparallel_pdf(length)[()]
    else:
        log_pdf = _log_simplex_pdf(length.ravel(), dim).reshape(length.shape)
    return np.exp(log_pdf)[()]


def _log_chi_pdf(w: np.ndarray, freedom: int) -> np.ndarray:
    norm = (freedom / 2 - 1) * np.log(2) + special.gammaln(freedom / 2)
    return special.xlogy(freedom - 1, w) - w**2 / 2 - norm


def _log_simplex_pdf(w: np.ndarray, dim: int) -> np.ndarray:
    sines, log_weights = phi_rule(dim)
    log_a = np.log1p(-sines / (dim - 1)) / 2

    def log_pdf(w: np.ndarray) -> np.ndarray:
        scaled = _log_chi_pdf(w[:, None] * np.exp(-log_a), 2 * dim)
        return special.logsumexp(scaled - log_a + log_weights, axis=1)

    return over_chunks(log_pdf, w, sines.size)


def _antiparallel_pdf(w: np.ndarray) -> np.ndarray:
    """Density of the difference of two Rayleigh norms; the scale a reaches 0 here, at pi/2."""
    tail = special.erfcx(w / 2) * (1 - w**2 / 2)
    return np.exp(-(w**2) / 2) * (w + np.sqrt(np.pi) * tail) / 2
