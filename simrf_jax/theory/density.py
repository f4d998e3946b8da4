"""Density of the length of the resultant (the sum) of a pair of rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.arguments import PairCoupling
from simrf_jax.theory.numerics import over_chunks, phi_rule

_FAR = 1e100  # Lengths are clipped here, where the square is finite and the density is 0.
_NEAR = 1e-9  # The density of antiparallel rows is even in w, so that it is the same here as at 0.
# For cosines from here to -1, a falls towards 0 at phi = pi/2, and the nodes must follow it.
_OBTUSE = -0.5


def resultant_norm_pdf(
    w: ArrayLike,
    dim: int,
    *,
    coupling: PairCoupling | None = None,
    cosine: float | None = None,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the density of the resultant's length :math:`w = |w_i + w_j|` of a pair of rows.

    .. math::
        p(w) = E_\phi \frac{1}{a} p_{\chi_{2d}}\!\left(\frac wa\right), \qquad
        a = \sqrt{1 + c \sin\phi},

    Here c is the cosine of the angle between the rows, and the density of :math:`\phi` is
    proportional to :math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. The cosine is :math:`-1/(d-1)` for
    the rows of a simplex row block of d rows. It is 0 for orthogonal rows, whose w has the law
    :math:`\chi_{2d}`. For iid rows :math:`w / \sqrt 2` has the law :math:`\chi_d`. A coupling that
    makes the resultant shorter has less conformity.

    Args:
      w: Lengths of the resultant, any shape, at least 0.
      dim: Dimension d of the rows.
      coupling: Coupling of the rows: ``"iid"``, ``"orthogonal"`` or ``"simplex"``. Exactly one of
        ``coupling`` and ``cosine`` must be given.
      cosine: Cosine of the angle between the rows, one number in [-1, 1].

    Returns:
      float64 array of the shape of ``w``.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``w`` or ``cosine`` is not real.
      ValueError: If the coupling is unknown, has no closed form, or has no pair of rows in ``dim``
        dimensions (all but iid need 2), if a number is out of range, or if not exactly one of
        ``coupling`` and ``cosine`` is given.

    Example:
      >>> import numpy as np
      >>> for coupling in ("iid", "orthogonal", "simplex"):
      ...     print(coupling, np.round(resultant_norm_pdf(3.0, 6, coupling=coupling), 6))
      iid 0.400188
      orthogonal 0.512481
      simplex 0.628499
      >>> print(np.round(resultant_norm_pdf(3.0, 6, cosine=-0.2), 6))
      0.628499

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 18 and 20, and Fig. 5,
      https://arxiv.org/abs/2301.13856
    """
    dim = checks.positive_int("dim", dim)
    cosine = arguments.pair_cosine(coupling, cosine, dim)
    length = np.minimum(arguments.norms("w", w), _FAR)
    if cosine is None:
        log_pdf = _log_chi_pdf(length / np.sqrt(2), dim) - np.log(2) / 2
    elif cosine == 0:
        log_pdf = _log_chi_pdf(length, 2 * dim)
    elif cosine == -1 and dim == 2:
        return _antiparallel_pdf(length)
    else:
        log_pdf = _log_pdf(length.ravel(), dim, cosine).reshape(length.shape)
    return np.exp(log_pdf)[()]


def _log_chi_pdf(
    w: Float64[np.ndarray, "*shape"] | np.float64, freedom: int
) -> Float64[np.ndarray, "*shape"] | np.float64:
    """Returns the logarithm of the density of the chi distribution."""
    norm = (freedom / 2 - 1) * np.log(2) + special.gammaln(freedom / 2)
    return special.xlogy(freedom - 1, w) - w**2 / 2 - norm


def _log_pdf(w: Float64[np.ndarray, " n"], dim: int, cosine: float) -> Float64[np.ndarray, " n"]:
    if cosine >= _OBTUSE:
        sines, log_weights = phi_rule(dim)
        log_a = np.log1p(cosine * sines) / 2
    else:
        log_a, log_weights = _obtuse_rule(dim, cosine)
        w = np.maximum(w, _NEAR) if cosine == -1 else w

    def log_pdf(w: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        scaled = _log_chi_pdf(w[:, None] * np.exp(-log_a), 2 * dim)
        return special.logsumexp(scaled - log_a + log_weights, axis=1)

    return over_chunks(log_pdf, w, log_a.size)


def _obtuse_rule(
    dim: int, cosine: float
) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
    """Returns log a and the log weights at angles that are dense at both ends, for c near -1."""
    # This is the trapezoidal rule in x, the logit of (pi/2 - phi) / (pi/2). The peaks of the
    # integrand are as narrow as 0.5 / sqrt(dim) in x, wherever they are, and the error of the rule
    # is e^{-20 (width / step)^2}.
    x = np.arange(-40, 30, min(0.1, 0.35 / np.sqrt(dim)))
    from_right_angle = np.pi / 2 * special.expit(x)
    log_sines = np.log(np.sin(np.pi / 2 * special.expit(-x)))
    log_weights = (dim - 1) * log_sines + special.log_expit(x) + special.log_expit(-x)
    # This form of 1 + c sin(phi) has no cancellation.
    log_a = np.log((1 + cosine) - 2 * cosine * np.sin(from_right_angle / 2) ** 2) / 2
    return log_a, log_weights - special.logsumexp(log_weights)


def _antiparallel_pdf(
    w: Float64[np.ndarray, "*shape"] | np.float64,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    """Returns the density for antiparallel rows in two dimensions.

    The length of their resultant is the absolute difference of two Rayleigh norms. The scale a of
    the general formula reaches 0 here, at phi = pi/2.
    """
    tail = special.erfcx(w / 2) * (1 - w**2 / 2)
    return np.exp(-(w**2) / 2) * (w + np.sqrt(np.pi) * tail) / 2
