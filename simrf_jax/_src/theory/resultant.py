"""The resultant (the sum) of a pair of rows: the density of its length, and the conformity.

The conformity is the expected product of the exponentials of the two rows. Either the pair is
coupled and the mean is over all draws, or the rows are given, for example from one draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special
from scipy.spatial.distance import cdist

from simrf_jax._src import checks
from simrf_jax._src.projections import COUPLINGS
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import Numbers, PairCoupling
from simrf_jax._src.theory.pairs import coupled_rows
from simrf_jax._src.theory.quadrature import Rule, Vector, log_hyp0f1, over_chunks, phi_rule
from simrf_jax._src.theory.series import log_series

_MAX_V = 1000.0  # The conformity series has v^2 terms, which take a few seconds at this v.
_FAR = 1e100  # Lengths are clipped here, where the square is finite and the density is 0.
_NEAR = 1e-9  # The density of antiparallel rows is even in w, so it is the same here as at 0.
# Below this cosine, 1 + cosine * sin(phi) nearly vanishes at phi = pi/2, where nodes must be dense.
_OBTUSE = -0.5


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
    cosine = _pair_cosine(coupling, cosine, dim)
    t = arguments.squared_norms("v", v)
    if cosine is None:
        return t[()]
    if np.any(t > _MAX_V**2):
        raise ValueError(f"v must be at most {_MAX_V:g}, got {np.nanmax(v)}.")
    return np.piecewise(t, [~np.isnan(t)], [log_series, np.nan], dim, cosine)[()]


def log_conformity_of_rows(
    v: ArrayLike, rows: ArrayLike, *, dim: int | None = None
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the logarithm of the conformity of given rows under a common random rotation R.

    .. math::
        \rho = \frac{1}{m (m - 1)} \sum_{i \ne j}
        {}_0F_1\!\left(; \tfrac d2; \tfrac{v^2 |w_i + w_j|^2}{4}\right)
        = \frac{1}{m (m - 1)} \sum_{i \ne j} E_R\, e^{(w_i + w_j) \cdot R u}, \qquad |u| = v.

    ``log_conformity`` returns the logarithm of the mean of :math:`\rho` over draws of the norms and
    directions.

    Args:
      v: Norms :math:`|x + y|`, at least 0. Their shape must broadcast with the leading shape
        ``[...]`` of ``rows``.
      rows: Rows w, ``[..., m, coordinates]``, with m at least 2: a draw of W, or directions in a
        subspace multiplied by their norms.
      dim: Dimension d of the space that R rotates, at least the number of coordinates (the
        default).

    Returns:
      float64 array of the broadcast leading shape, to 14 digits. It does not overflow.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``v`` or ``rows`` is not real.
      ValueError: If there is no pair of rows, ``dim`` is less than the number of coordinates, the
        shapes do not broadcast, or ``v`` is negative.

    Example:
      >>> import numpy as np
      >>> for second in ([2.0, 0.0], [0.0, 2.0], [-2.0, 0.0]):
      ...     print(f"{log_conformity_of_rows(1.0, [[2.0, 0.0], second]):.6f}")
      2.424973
      1.447472
      0.000000

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 12 and Fig. 4,
      https://arxiv.org/abs/2301.13856
    """
    v, rows = arguments.norms("v", v), checks.real("rows", rows)
    if rows.ndim < 2 or rows.shape[-2] < 2 or rows.shape[-1] < 1:
        raise ValueError(
            "rows must be [..., m, coordinates] with m at least 2 and coordinates at least 1, "
            f"got {rows.shape}."
        )
    dim = checks.positive_int("dim", rows.shape[-1] if dim is None else dim)
    if dim < rows.shape[-1]:
        raise ValueError(
            f"dim must be at least {rows.shape[-1]}, the number of coordinates, got {dim}."
        )
    try:
        np.broadcast_shapes(v.shape, rows.shape[:-2])
    except ValueError:
        raise ValueError(
            f"v must broadcast with the leading shape of rows, got {v.shape} and {rows.shape}."
        ) from None
    with np.errstate(over="ignore", invalid="ignore"):
        squares = squared_resultants(rows)
        scaled = (v[..., None] / 2) ** 2 * squares
        scaled = np.where((squares == 0) & ~np.isnan(v[..., None]), 0, scaled)
        return log_mean_exp(log_hyp0f1(dim / 2, scaled))


def squared_resultants(
    rows: Float64[np.ndarray, "*batch m coordinates"],
) -> Float64[np.ndarray, "*batch m*(m-1)//2"]:
    """Returns the squared lengths of w_i + w_j for i < j."""
    pairs = np.triu_indices(rows.shape[-2], 1)
    # Not from products of rows, of which only rounding errors remain if two rows cancel.
    each = [cdist(w, -w, "sqeuclidean")[pairs] for w in rows.reshape(-1, *rows.shape[-2:])]
    return np.reshape(each, (*rows.shape[:-2], pairs[0].size))


def log_mean_exp(x: Float64[np.ndarray, "*batch n"]) -> Float64[np.ndarray, "*batch"] | np.float64:
    """Returns the log of the mean of e^x over the last axis, with relative accuracy for small x."""
    largest = np.max(x, axis=-1)
    largest = np.where(np.isposinf(largest), 0, largest)
    return largest + np.log1p(np.mean(np.expm1(x - largest[..., None]), axis=-1))


def resultant_norm_pdf(
    w: ArrayLike,
    dim: int,
    *,
    coupling: PairCoupling | None = None,
    cosine: float | None = None,
) -> Float64[np.ndarray, "*shape"] | np.float64:
    r"""Returns the density of the length :math:`w = |w_i + w_j|` of a pair's resultant.

    .. math::
        p(w) = E_\phi \frac{1}{a} p_{\chi_{2d}}\!\left(\frac wa\right), \qquad
        a = \sqrt{1 + c \sin\phi},

    Here c is the cosine of the angle between the rows, and the density of :math:`\phi` is
    proportional to :math:`\sin^{d-1}\phi` on :math:`[0, \pi]`. The cosine is :math:`-1/(d-1)` for
    the rows of a simplex row block of d rows. It is 0 for orthogonal rows, whose w has the law
    :math:`\chi_{2d}`. For iid rows :math:`w / \sqrt 2` has the law :math:`\chi_d`. A coupling that
    makes the resultant shorter has lower conformity.

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
    cosine = _pair_cosine(coupling, cosine, dim)
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


def _log_chi_pdf(w: Numbers, freedom: int) -> Numbers:
    """Returns the logarithm of the density of the chi distribution."""
    norm = (freedom / 2 - 1) * np.log(2) + special.gammaln(freedom / 2)
    return special.xlogy(freedom - 1, w) - w**2 / 2 - norm


def _log_pdf(w: Vector, dim: int, cosine: float) -> Vector:
    if cosine >= _OBTUSE:
        sines, log_weights = phi_rule(dim)
        log_a = np.log1p(cosine * sines) / 2
    else:
        log_a, log_weights = _obtuse_rule(dim, cosine)
        w = np.maximum(w, _NEAR) if cosine == -1 else w

    def log_pdf(w: Vector) -> Vector:
        scaled = _log_chi_pdf(w[:, None] * np.exp(-log_a), 2 * dim)
        return special.logsumexp(scaled - log_a + log_weights, axis=1)

    return over_chunks(log_pdf, w, log_a.size)


def _obtuse_rule(dim: int, cosine: float) -> Rule:
    """Returns log a and the log weights at angles that are dense at both ends, for c near -1."""
    # This is the trapezoidal rule in x, the logit of (pi/2 - phi) / (pi/2). The peaks of the
    # integrand have a width of at least 0.5 / sqrt(dim) in x, and the error of the rule is e^{-20
    # (width / step)^2}.
    x = np.arange(-40, 30, min(0.1, 0.35 / np.sqrt(dim)))
    from_right_angle = np.pi / 2 * special.expit(x)
    log_sines = np.log(np.sin(np.pi / 2 * special.expit(-x)))
    log_weights = (dim - 1) * log_sines + special.log_expit(x) + special.log_expit(-x)
    # This form of 1 + c sin(phi) has no cancellation.
    log_a = np.log((1 + cosine) - 2 * cosine * np.sin(from_right_angle / 2) ** 2) / 2
    return log_a, log_weights - special.logsumexp(log_weights)


def _antiparallel_pdf(w: Numbers) -> Numbers:
    """Returns the density for antiparallel rows in two dimensions.

    The length of their resultant is the absolute difference of two Rayleigh norms. The scale a of
    the general formula reaches 0 here, at phi = pi/2.
    """
    tail = special.erfcx(w / 2) * (1 - w**2 / 2)
    return np.exp(-(w**2) / 2) * (w + np.sqrt(np.pi) * tail) / 2


def _pair_cosine(coupling: Any, cosine: Any, dim: int) -> float | None:
    """Returns the cosine of the angle between a pair of rows, or None for iid rows."""
    if (coupling is None) == (cosine is None):
        raise ValueError(
            "Give exactly one of coupling and cosine, "
            f"got coupling={coupling!r} and cosine={cosine!r}."
        )
    if coupling is None:
        value = checks.real("cosine", cosine)
        if value.shape or not -1 <= value <= 1:
            raise ValueError(f"cosine must be one number in [-1, 1], got {cosine!r}.")
        if dim < 2:
            raise ValueError(f"A pair of rows at an angle needs dim of at least 2, got {dim}.")
        return float(value)
    if coupling not in COUPLINGS:
        checks.one_of("coupling", coupling, arguments.PAIR_COUPLINGS)
    arguments.coupling("coupling", coupling, dim)
    if coupling == "cross_polytope":
        raise ValueError(
            "coupling 'cross_polytope' has pairs of rows at two angles. "
            "Give cosine=-1 or cosine=0 instead."
        )
    if coupling == "iid":
        return None
    if dim < 2:
        raise ValueError(f"A pair of orthogonal rows needs dim of at least 2, got {dim}.")
    (pairs,) = coupled_rows(dim, dim, coupling, "square").pairs
    return pairs.cosine
