"""Conformity of given rows, such as one draw; the closed forms average over all draws."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.bessel import log_hyp0f1


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
      dim: Dimension d of the space that R rotates, at least the number of coordinates, which is the
        default.

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
        log_terms = log_hyp0f1(dim / 2, (v[..., None] / 2) ** 2 * squared_resultants(rows))
        return log_mean_exp(log_terms)


def squared_resultants(
    rows: Float64[np.ndarray, "*batch m coordinates"],
) -> Float64[np.ndarray, "*batch m*(m-1)//2"]:
    """Returns the squared lengths of w_i + w_j for i < j."""
    i, j = np.triu_indices(rows.shape[-2], 1)
    gram = rows @ np.swapaxes(rows, -1, -2)
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    # If two rows cancel, only rounding errors remain, which may be negative.
    return np.maximum(squares[..., i] + squares[..., j] + 2 * gram[..., i, j], 0)


def log_mean_exp(x: Float64[np.ndarray, "*batch n"]) -> Float64[np.ndarray, "*batch"] | np.float64:
    """Returns the log of the mean of e^x over the last axis, with relative accuracy for small x."""
    largest = np.max(x, axis=-1)
    largest = np.where(np.isposinf(largest), 0, largest)
    return largest + np.log1p(np.mean(np.expm1(x - largest[..., None]), axis=-1))
