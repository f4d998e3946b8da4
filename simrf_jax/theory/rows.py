"""Conformity of rows that are given: of a draw, where the closed forms average over all draws."""

from __future__ import annotations

import numpy as np
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.theory import arguments
from simrf_jax.theory.bessel import log_hyp0f1


def log_conformity_of_rows(
    v: ArrayLike, rows: ArrayLike, *, dim: int | None = None
) -> np.ndarray | np.float64:
    r"""Logarithm of the conformity of given rows, up to their common random rotation.

    .. math::
        \rho = \frac{1}{m (m - 1)} \sum_{i \ne j}
        {}_0F_1\!\left(; \tfrac d2; \tfrac{v^2 |w_i + w_j|^2}{4}\right)
        = \frac{1}{m (m - 1)} \sum_{i \ne j} E_R\, e^{(w_i + w_j) \cdot R u}, \qquad |u| = v.

    Its mean over draws of the norms and directions is what ``log_conformity`` is the logarithm of.

    Args:
      v: Norms :math:`|x + y|`, at least 0; a shape that broadcasts with ``[...]``.
      rows: Rows w, ``[..., m, coordinates]``, m at least 2: a draw of W, or directions in a
        subspace times their norms.
      dim: Dimension d of the space that is rotated, by default the number of coordinates.

    Returns:
      float64 array of the broadcast leading shape, to 14 digits; it does not overflow.

    Raises:
      TypeError: If ``dim`` is not an integer, or ``v`` or ``rows`` not real.
      ValueError: If there is no pair of rows, ``dim`` is less than the coordinates, the shapes do
        not broadcast, or ``v`` is negative.

    Example:
      >>> import numpy as np
      >>> for second in ([2.0, 0.0], [0.0, 2.0], [-2.0, 0.0]):
      ...     print(f"{log_conformity_of_rows(1.0, [[2.0, 0.0], second]):.6f}")
      2.424973
      1.447472
      0.000000

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 12 and Fig. 4.
    """
    v, rows = arguments.norms("v", v), arguments.real("rows", rows)
    if rows.ndim < 2 or rows.shape[-2] < 2 or rows.shape[-1] < 1:
        raise ValueError(f"rows must be [..., m, coordinates], m at least 2, got {rows.shape}.")
    dim = checks.positive_int("dim", rows.shape[-1] if dim is None else dim)
    if dim < rows.shape[-1]:
        raise ValueError(f"dim must be at least the coordinates, {rows.shape[-1]}, got {dim}.")
    try:
        np.broadcast_shapes(v.shape, rows.shape[:-2])
    except ValueError:
        raise ValueError(
            f"v must broadcast with the leading shape of rows, got {v.shape} and {rows.shape}."
        ) from None
    with np.errstate(over="ignore", invalid="ignore"):
        log_terms = log_hyp0f1(dim / 2, (v[..., None] / 2) ** 2 * squared_resultants(rows))
        return log_mean_exp(log_terms)[()]


def squared_resultants(rows: np.ndarray) -> np.ndarray:
    """Squares of the lengths of w_i + w_j for i < j, ``[..., m (m - 1) / 2]``."""
    i, j = np.triu_indices(rows.shape[-2], 1)
    gram = rows @ np.swapaxes(rows, -1, -2)
    squares = np.diagonal(gram, axis1=-2, axis2=-1)
    # Of antiparallel rows only rounding errors remain, of either sign.
    return np.maximum(squares[..., i] + squares[..., j] + 2 * gram[..., i, j], 0)


def log_mean_exp(x: np.ndarray) -> np.ndarray:
    """Log of the mean of e^x over the last axis, to relative accuracy where x is small."""
    largest = np.max(x, axis=-1)
    largest = np.where(np.isposinf(largest), 0, largest)
    return largest + np.log1p(np.mean(np.expm1(x - largest[..., None]), axis=-1))
