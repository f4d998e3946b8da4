"""Conformity: the expected product of the two exponentials of a coupled pair of rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import PairCoupling
from simrf_jax.theory.moments import log_relative_moments
from simrf_jax.theory.numerics import over_chunks

_MAX_V = 1000.0  # The series has v^2 terms, which take a few seconds at this v.


def log_conformity(
    v: ArrayLike,
    dim: int,
    *,
    coupling: PairCoupling | None = None,
    cosine: float | None = None,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the logarithm of the conformity of a pair of rows at a fixed angle.

    .. math::
        \rho(x, y) = E\, e^{(w_i + w_j) \cdot u}
        = E_\phi\, {}_1F_1\!\left(d; \tfrac d2; \tfrac{v^2}{2} (1 + c \sin\phi)\right)
        = \sum_k \frac{v^{2k}}{k!} r_k I_k(c), \qquad |u| = v = |x + y|,

    where the density of :math:`\phi` is proportional to :math:`\sin^{d-1}\phi` on :math:`[0, \pi]`,
    :math:`r_k = \prod_{j<k} \frac{d+j}{d+2j}` and :math:`I_k(c) = E_\phi (1 + c \sin\phi)^k`. The
    cosine c of the angle is 0 for orthogonal rows and :math:`-1/(d-1)` for the rows of a simplex
    row block of d rows. Iid rows have :math:`\rho = e^{v^2}`. The lower the conformity, the lower
    the variance of positive random features.

    Args:
      v: Norms :math:`|x + y|`, any shape, at least 0 and at most 1000.
      dim: Dimension d of the rows.
      coupling: Coupling of the rows: ``"iid"``, ``"orthogonal"`` or ``"simplex"``. Exactly one of
        ``coupling`` and ``cosine`` must be given.
      cosine: Cosine of the angle between the rows, one number in [-1, 1].

    Returns:
      float64 array of the shape of ``v``, :math:`\log \rho` to 12 digits or more.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``v`` or ``cosine`` is not real.
      ValueError: If the coupling is unknown, has no closed form, or has no pair of rows in ``dim``
        dimensions (all but iid need 2), if a number is out of range, or if not exactly one of
        ``coupling`` and ``cosine`` is given.

    Example:
      >>> import numpy as np
      >>> for coupling in ("iid", "orthogonal", "simplex"):
      ...     print(coupling, np.round(log_conformity(1.0, 6, coupling=coupling), 6))
      iid 1.0
      orthogonal 0.94762
      simplex 0.780162
      >>> print(np.round(log_conformity(1.0, 6, cosine=-0.2), 6))
      0.780162

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 10, 19, 21, 23 and 24,
      https://arxiv.org/abs/2301.13856
    """
    dim = checks.positive_int("dim", dim)
    cosine = arguments.pair_cosine(coupling, cosine, dim)
    v = arguments.norms("v", v)
    if cosine is None:
        with np.errstate(over="ignore"):
            return (v**2)[()]
    if np.any(v > _MAX_V):
        raise ValueError(f"v must be at most {_MAX_V:g}, got {np.nanmax(v)}.")
    result = np.full(v.shape, np.nan)
    known = ~np.isnan(v)
    result[known] = log_series(v[known] ** 2, dim, cosine)
    return result[()]


def log_series(t: Float64[np.ndarray, " n"], dim: int, cosine: float) -> Float64[np.ndarray, " n"]:
    """Returns the logarithm of rho_c(t), from as many terms of the series as count."""
    # r_k falls with k, and I_k grows by a factor of at most 1 + max(c, 0) per step, so that the
    # largest term is at or before k = peak.
    peak = np.max(t, initial=0.0) * (1 + max(cosine, 0.0))
    log_moments = log_relative_moments(dim, cosine, int(peak + 12 * np.sqrt(peak) + 60))
    k = np.arange(1.0, log_moments.size)
    log_coefficients = log_moments[1:] - special.gammaln(k + 1)

    def log_rho(t: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        with np.errstate(divide="ignore"):
            log_terms = k * np.log(t)[:, None] + log_coefficients
        # The sum leaves out its leading 1, which would swallow the digits of a small log rho.
        return np.logaddexp(0, special.logsumexp(log_terms, axis=1))

    return over_chunks(log_rho, t, k.size)
