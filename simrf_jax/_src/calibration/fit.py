"""The best Gaussian proposal for the means and covariances of queries and keys, in closed form.

``turn_rows`` keeps the rows of W in place when a new fit turns the axes of a calibration.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.calibration.jacobi import left_singular_vectors
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.features.calibrated import Calibrated

Balance: TypeAlias = bool | Literal["diagonal"]
Tilt: TypeAlias = Literal["log", "mean", "isotropic"]
TILTS = get_args(Tilt)


class _Spread(NamedTuple):
    """Second moments of queries and keys, and their remaining means.

    Attributes:
      queries: Second moment of the queries, ``[H, H]``.
      keys: Second moment of the keys, ``[H, H]``.
      query_mean: Mean of the queries, zero if they are centered.
      key_mean: Mean of the keys, zero if they are centered.
    """

    queries: Float[Array, "H H"]
    keys: Float[Array, "H H"]
    query_mean: Float[Array, " H"]
    key_mean: Float[Array, " H"]

    def stretch(
        self, query_matrix: Float[Array, "H H"], key_matrix: Float[Array, "H H"]
    ) -> _Spread:
        """Returns the moments of the vectors multiplied by the matrices."""
        return _Spread(
            _matmul(query_matrix, self.queries, query_matrix.T),
            _matmul(key_matrix, self.keys, key_matrix.T),
            _matmul(query_matrix, self.query_mean),
            _matmul(key_matrix, self.key_mean),
        )

    def of_sums(self) -> Float[Array, "H H"]:
        """Returns the second moment of x + y, for queries x and keys y that are independent."""
        cross = jnp.outer(self.query_mean, self.key_mean)
        return self.queries + self.keys + cross + cross.T


def fit(
    query: Moments, key: Moments, *, center: bool, balance: Balance, tilt: Tilt | None
) -> Calibrated:
    """Returns the feature map that minimizes the mean log second moment of the estimates.

    Args:
      query: Moments of the queries of each key head.
      key: Moments of the keys.
      center: True to subtract the means.
      balance: True for the matrix that makes both covariances equal and diagonal, ``"diagonal"``
        for the best diagonal matrix, False for none.
      tilt: Law of W; see ``calibrate``.
    """

    def fit_head(
        query_mean: Float[Array, " H"],
        key_mean: Float[Array, " H"],
        query_covariance: Float[Array, "H H"],
        key_covariance: Float[Array, "H H"],
    ) -> Calibrated:
        none = jnp.zeros_like(query_mean)
        spread = _Spread(query_covariance, key_covariance, none, none)
        if not center:
            spread = _Spread(
                query_covariance + jnp.outer(query_mean, query_mean),
                key_covariance + jnp.outer(key_mean, key_mean),
                query_mean,
                key_mean,
            )
            query_mean = key_mean = none
        query_matrix, key_matrix = _balance(spread.queries, spread.keys, balance)
        axes, variances = _tilt(spread.stretch(query_matrix, key_matrix).of_sums(), tilt)
        return Calibrated(
            query_mean, key_mean, _matmul(axes, query_matrix), _matmul(axes, key_matrix), variances
        )

    return jax.vmap(fit_head)(query.mean, key.mean, query.covariance(), key.covariance())


def _balance(
    queries: Float[Array, "H H"], keys: Float[Array, "H H"], balance: Balance
) -> tuple[Float[Array, "H H"], Float[Array, "H H"]]:
    """Returns M and its inverse transpose, where M minimizes the mean of |Mx|^2 + |M^-T y|^2.

    References:
      Moore, Principal component analysis in linear systems (IEEE Trans. Automat. Contr., 1981),
      https://doi.org/10.1109/TAC.1981.1102568, for the balancing of two second moments.
    """
    if not balance:
        eye = jnp.eye(queries.shape[-1], dtype=queries.dtype)
        return eye, eye
    if balance == "diagonal":
        root = (jnp.diagonal(keys) / jnp.diagonal(queries)) ** 0.25
        return jnp.diag(root), jnp.diag(1 / root)
    query_axes, query_squares = left_singular_vectors(queries)
    key_axes, key_squares = left_singular_vectors(keys)
    query_root = query_axes * jnp.sqrt(query_squares)[None]
    key_root = key_axes * jnp.sqrt(key_squares)[None]
    axes, values = left_singular_vectors(_matmul(query_root.T, key_root))
    whitened = (query_axes / jnp.sqrt(query_squares)[None]).T
    root = jnp.sqrt(values)[:, None]
    return root * _matmul(axes.T, whitened), _matmul(axes.T, query_root.T) / root


def _tilt(
    sums: Float[Array, "H H"], tilt: Tilt | None
) -> tuple[Float[Array, "H H"], Float[Array, " H"]]:
    """Returns the axes of the tilt as rows, and the variance of W along each."""
    dim = sums.shape[-1]
    if tilt is None or tilt == "isotropic":
        mean_square = jnp.trace(sums) / dim
        variance = 1.0 if tilt is None else log_optimal_variance(mean_square)
        return jnp.eye(dim, dtype=sums.dtype), jnp.full(dim, variance, sums.dtype)
    axes, squares = left_singular_vectors(sums)
    return axes.T, log_optimal_variance(squares) if tilt == "log" else 1 + 2 * squares


def log_second_moment(
    variances: Float[Array, "*batch H"], mean_square: Float[Array, "*batch H"]
) -> Float[Array, "*batch"]:
    r"""Returns the mean log second moment of estimates from one row of W, relative to the kernel.

    .. math:: \sum_l \log \frac{1 + \rho_l}{2 \sqrt{\rho_l}} + \rho_l \lambda_l, \qquad
        \rho_l = \frac{1}{2 \sigma_l - 1}

    It is in nats. Estimates from m iid rows have a relative variance of about its exponential over
    m.

    Args:
      variances: :math:`\sigma`, the variances of W along each axis, above 1/2.
      mean_square: :math:`\lambda`, the mean square of x + y along each axis.
    """
    rho = 1 / (2 * variances - 1)
    logs = jnp.log(0.5 * (1 + rho) * jax.lax.rsqrt(rho)) + rho * mean_square
    return jnp.sum(logs, axis=-1)


@jax.jit
def mean_log_second_moment(
    calibration: Calibrated, query: Moments, key: Moments
) -> Float[Array, " K"]:
    """Returns ``log_second_moment`` of each key head, averaged over its queries and keys.

    Args:
      calibration: Feature map, with arrays for each key head.
      query: Moments of the queries, scaled as in attention.
      key: Moments of the keys.
    """

    def of_head(own: Calibrated, query: Moments, key: Moments) -> Float[Array, ""]:
        query_mean, key_mean = query.mean - own.query_mean, key.mean - own.key_mean
        spread = _Spread(
            query.scatter / query.num_vectors + jnp.outer(query_mean, query_mean),
            key.scatter / key.num_vectors + jnp.outer(key_mean, key_mean),
            query_mean,
            key_mean,
        ).stretch(own.query_matrix, own.key_matrix)
        return log_second_moment(own.variances, jnp.diagonal(spread.of_sums()))

    return jax.vmap(of_head)(calibration, query, key)


def log_optimal_variance(mean_square: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    r"""Returns the variance of W that minimizes the mean log second moment along an axis.

    .. math:: \sigma = \frac{1 + \rho}{2 \rho}, \qquad
        \rho = \frac{2}{\sqrt{(2 \lambda + 1)^2 + 8 \lambda} + 2 \lambda + 1}

    Args:
      mean_square: :math:`\lambda`, the mean square of x + y along the axis.
    """
    twice = 2 * mean_square
    # sqrt((twice + 1)^2 + 4 twice) without the square, which overflows where the result does not.
    root = (twice + 1) * jnp.sqrt(1 + 4 * (twice / (twice + 1)) / (twice + 1))
    return 0.5 + 0.25 * (root + twice + 1)


@jax.jit
def turn_rows(
    rows: Float[Array, "*K m H"], before: Calibrated | None, after: Calibrated
) -> Float[Array, "*K m H"]:
    r"""Returns W for a new calibration, so that features change no more than the fit did.

    A fit chooses the axes of the tilt, along which it is diagonal. Small changes of the data may
    turn them by any angle. Unchanged rows would then act as new random rows, as after a redraw.
    With the polar decomposition M = O S of each ``query_matrix``, S depends continuously on the
    covariances and O holds the axes, so rows are multiplied by :math:`O_{before} O_{after}^\top`.
    Their norms and angles do not change.

    Args:
      rows: W of each key head.
      before: The calibration to which the rows belong; None for new rows.
      after: The new calibration, of the same shape.
    """
    turned = rows.reshape(-1, *rows.shape[-2:])
    if before is not None:
        turned = _matmul(turned, _axes(before))
    return _matmul(turned, _axes(after).swapaxes(-2, -1)).reshape(rows.shape)


def _axes(calibration: Calibrated) -> Float[Array, "heads H H"]:
    """Returns the orthogonal factors of the polar decompositions of the matrices of all heads.

    M = O S and its inverse transpose, O times the inverse of S, share this factor with their sum,
    which is well conditioned even where they are not.
    """
    sums = calibration.query_matrix + calibration.key_matrix
    return jax.vmap(_orthogonal_factor)(sums.reshape(-1, *sums.shape[-2:]))


def _orthogonal_factor(matrix: Float[Array, "H H"]) -> Float[Array, "H H"]:
    vectors, values = left_singular_vectors(matrix)
    axes = _matmul(vectors / values[None], _matmul(vectors.T, matrix))
    # A Newton-Schulz step removes the rounding errors of the factor, to first order.
    return 1.5 * axes - 0.5 * _matmul(axes, _matmul(axes.T, axes))


def _matmul(*matrices: Float[Array, " ..."]) -> Float[Array, " ..."]:
    first, *others = matrices
    for other in others:
        first = jnp.matmul(first, other, precision=jax.lax.Precision.HIGHEST)
    return first
