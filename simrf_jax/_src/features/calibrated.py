"""Positive features whose proposal is fitted to the queries and keys of each head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from simrf_jax._src import checks
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.feature_map import FeatureMap
from simrf_jax._src.features.log_space import LogFeatures, Side, widened
from simrf_jax._src.projections import Projection, ProjectionLike, product


@dataclasses.dataclass(frozen=True, eq=False)
class Calibrated(FeatureMap):
    r"""Positive features that are centered, balanced and tilted, as ``calibrate`` fits them.

    The softmax kernel is unchanged if the queries and the keys are shifted, up to factors, and if a
    matrix stretches the queries while its inverse transpose stretches the keys. Also, the rows
    of W may be drawn from another Gaussian law if each feature is weighted by the ratio of the
    densities. All three leave the estimate unbiased and positive; chosen well, they lower its
    variance by orders of magnitude where queries and keys are not isotropic. With

    .. math:: \tilde x = M (x - b_x), \qquad \tilde y = M^{-\top} (y - b_y), \qquad
        \tilde w = \Sigma^{1/2} w, \qquad
        \ell(\tilde w) = \log \frac{N(\tilde w; 0, I)}{N(\tilde w; 0, \Sigma)}

    the features of queries x and keys y are

    .. math::
        \log \phi(x)_i &= \tilde w_i \cdot \tilde x - \tfrac12 |\tilde x|^2
            + b_y \cdot (x - \tfrac12 b_x) + \tfrac12 \ell(\tilde w_i) - \tfrac12 \log m, \\
        \log \phi(y)_i &= \tilde w_i \cdot \tilde y - \tfrac12 |\tilde y|^2
            + b_x \cdot (y - \tfrac12 b_y) + \tfrac12 \ell(\tilde w_i) - \tfrac12 \log m.

    Each array may have a leading axis of key heads K. W must have Gaussian rows, such as those of
    ``norms="chi"``; only a map without a tilt (``variances`` all 1) may have rows with fixed norms.

    Attributes:
      query_mean: :math:`b_x`, ``[K, H]``, in units of queries times the root of the scale.
      key_mean: :math:`b_y`, ``[K, H]``.
      query_matrix: M, ``[K, H, H]``.
      key_matrix: :math:`M^{-\top}`, ``[K, H, H]``.
      variances: Diagonal of :math:`\Sigma`, ``[K, H]``.

    References:
      Likhosherstov et al., FAVOR#: Sharp Attention Kernel Approximations via New Classes of
      Positive Random Features (2023), https://arxiv.org/abs/2302.00787
    """

    is_finite = True
    multiplies_rows = True
    coupling = "simplex"
    axes_of_one: ClassVar[Mapping[str, int]] = {
        "query_mean": 1,
        "key_mean": 1,
        "query_matrix": 2,
        "key_matrix": 2,
        "variances": 1,
    }
    query_mean: Float[Array, "*K H"]
    key_mean: Float[Array, "*K H"]
    query_matrix: Float[Array, "*K H H"]
    key_matrix: Float[Array, "*K H H"]
    variances: Float[Array, "*K H"]

    @classmethod
    def identity(
        cls, num_heads: SupportsIndex, dim: SupportsIndex, dtype: DTypeLike = jnp.float32
    ) -> Calibrated:
        """Returns the map before any calibration, with the features of ``Positive``.

        Args:
          num_heads: Number K of key heads.
          dim: Width H of a head.
          dtype: Floating type of the arrays.

        Raises:
          TypeError: If a size is not an integer, or dtype is not floating.
          ValueError: If a size is below 1.
        """
        num_heads = checks.positive_int("num_heads", num_heads)
        dim = checks.positive_int("dim", dim)
        dtype = checks.floating_dtype("dtype", dtype)
        # One array for each field, because a training step may donate each of them.
        vectors, matrices = (num_heads, dim), (num_heads, 1, 1)
        return cls(
            query_mean=jnp.zeros(vectors, dtype),
            key_mean=jnp.zeros(vectors, dtype),
            query_matrix=jnp.tile(jnp.eye(dim, dtype=dtype), matrices),
            key_matrix=jnp.tile(jnp.eye(dim, dtype=dtype), matrices),
            variances=jnp.ones(vectors, dtype),
        )

    @property
    def head_dim(self) -> int:
        """Width of a head of the calibration."""
        return jnp.shape(self.query_mean)[-1]

    @property
    def needs_chi_norms(self) -> bool:
        """True if W is known to be tilted; False for traced variances, whose values are unknown."""
        is_traced = isinstance(self.variances, jax.core.Tracer)
        return not is_traced and bool(np.any(jax.device_get(self.variances) != 1))

    def log_features(
        self, x: Float[Array, "*batch H"], projection: ProjectionLike, *, side: Side
    ) -> LogFeatures:
        """Returns the features of one head's queries or keys.

        Raises:
          ValueError: If the vectors have a different dim, or the map holds arrays of several heads.
        """
        if jnp.shape(self.query_mean) != x.shape[-1:]:
            raise ValueError(
                f"x must be [..., dim] with the dim of one head of the calibration, got shape "
                f"{x.shape} for means of shape {jnp.shape(self.query_mean)}."
            )
        return self.log_features_of_heads(x, projection, side=side)

    def log_features_of_heads(
        self, x: Float[Array, "*batch H"], projection: ProjectionLike, *, side: Side
    ) -> LogFeatures:
        """Returns the features of ``[batch, length, K, ..., H]``.

        The head axis stays in place, so that XLA multiplies all heads by one W in a single product.
        ``jax.vmap`` would move it.
        """
        w = Projection.of(projection)
        mean, _, other, _ = self._of_side(side, x.dtype)
        x = x.astype(mean.dtype)
        balanced = in_coordinates(x, self, side)
        products = (x - _broadcast(0.5 * mean, x)) * _broadcast(other, x)
        log_scale = jnp.sum(products - 0.5 * jnp.square(balanced), axis=-1, keepdims=True)
        tilted = balanced * _broadcast(jnp.sqrt(self._variances(x.dtype)), x)
        exponent = _of_heads(tilted, w.unweighted)
        exponent += _broadcast(self._half_log_weights(w, x.dtype), exponent)
        return LogFeatures(exponent, log_scale - 0.5 * math.log(exponent.shape[-1]))

    def key_scores(self, y: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
        r"""Returns scores of keys of one head, for queries and keys like those of the fit.

        .. math:: b_x \cdot y + \tfrac12 \sum_l \frac{\lambda_l}{1 + \lambda_l^2}
            \left(M^{-\top} (y - b_y) - \lambda_l M b_x\right)_l^2

        with :math:`\lambda_l` the variance of balanced queries, and of balanced keys, along axis l.
        It is computed as the variance for which the tilt :math:`\Sigma_l` is optimal. For the
        default fit this is the variance of the data, for ``fit_mixture`` it is smaller. Without a
        tilt it is 1.
        """
        query_mean, query_matrix, key_mean, key_matrix = self._of_side("query", y.dtype)
        y = y.astype(query_mean.dtype)
        # The inverse of log_optimal_variance, whose argument is that of x + y, twice as large.
        steep = 4 * self._variances(y.dtype) - 2
        variances = 0.125 * steep * (steep - 2) / (steep + 2)
        variances = jnp.where(jnp.all(steep == 2), 1, variances)
        center = _times(key_matrix, key_mean) + variances * _times(query_matrix, query_mean)
        offsets = product(y, key_matrix) - jnp.broadcast_to(center, y.shape)
        shares = jnp.broadcast_to(variances / (1 + jnp.square(variances)), y.shape)
        linear = y * jnp.broadcast_to(query_mean, y.shape)
        return jnp.sum(linear + 0.5 * shares * jnp.square(offsets), axis=-1)

    def exponential_form(self, projection: ProjectionLike, *, side: Side) -> ExponentialForm:
        r"""Returns the form of one head, for vectors that are not centered.

        The linear term of a key completes its square, as the transpose of :math:`M^{-\top}` takes
        :math:`M b_x` back to :math:`b_x`:

        .. math:: b_x \cdot y - \tfrac12 |M^{-\top} (y - b_y)|^2
            = a - \tfrac12 |M^{-\top} y - c|^2, \qquad c = M b_x + M^{-\top} b_y.
        """
        w = Projection.of(projection)
        rows = w.dense_rows()
        mean, matrix, other, other_matrix = self._of_side(side, rows.dtype)
        tilted = rows * jnp.broadcast_to(jnp.sqrt(self._variances(rows.dtype)), rows.shape)
        balanced = _times(matrix, mean)
        # The transpose of ``matrix`` maps ``linear`` to ``other`` up to the rounding of both
        # matrices; a step of iterative refinement corrects it.
        linear = _times(other_matrix, other)
        linear += _times(other_matrix, other - _times(matrix.T, linear))
        center = balanced + linear
        shifts = _times(tilted, balanced)
        offsets = self._half_log_weights(w, rows.dtype)
        offsets -= jnp.concatenate([shifts, -shifts]) if w.is_paired else shifts
        squares = jnp.square(center) - jnp.square(balanced) - mean * other
        return ExponentialForm(
            jnp.matmul(tilted, matrix, precision=jax.lax.Precision.HIGHEST),
            offsets,
            matrix,
            center,
            0.5 * jnp.sum(squares),
            w.is_paired,
        )

    def _of_side(self, side: Side, dtype: DTypeLike) -> tuple[jax.Array, ...]:
        """Returns the mean and matrix of a side, then those of the other, in at least ``dtype``."""
        queries, keys = (self.query_mean, self.query_matrix), (self.key_mean, self.key_matrix)
        own, other = (queries, keys) if side == "query" else (keys, queries)
        return tuple(widened(array, dtype) for array in (*own, *other))

    def _variances(self, dtype: DTypeLike) -> jax.Array:
        return widened(self.variances, dtype)

    def _half_log_weights(self, w: Projection, dtype: DTypeLike) -> Float[Array, "*K num_features"]:
        """Returns half the log density ratio at each row, plus half the log weight of the row."""
        variances = self._variances(np.promote_types(w.dtype, dtype))
        if w.ndim == 3:
            axis = 0 if variances.ndim == 2 else None
            return jax.vmap(_half_log_weights, in_axes=(axis, 0))(variances, w)
        return _half_log_weights(variances, w)


def in_coordinates(
    x: Float[Array, "*batch H"], calibration: Calibrated, side: Side
) -> Float[Array, "*batch H"]:
    """Returns vectors centered and balanced: ``[..., H]``, or ``[batch, length, K, ..., H]``."""
    mean, matrix, *_ = calibration._of_side(side, x.dtype)
    return _of_heads(x - _broadcast(mean, x), jnp.asarray(matrix))


def _times(matrix: Float[Array, "*K rows H"], x: Float[Array, "*K H"]) -> Float[Array, "*K rows"]:
    """Multiplies a matrix by a vector in full precision.

    A CPU has fast products for this. On a TPU the matrix unit takes longer than a sum.
    """

    def by_product(matrix: jax.Array, x: jax.Array) -> jax.Array:
        columns = jnp.matmul(matrix, x[..., None], precision=jax.lax.Precision.HIGHEST)
        return jnp.squeeze(columns, -1)

    def by_sum(matrix: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(matrix * jnp.broadcast_to(x[..., None, :], matrix.shape), axis=-1)

    return jax.lax.platform_dependent(matrix, x, cpu=by_product, default=by_sum)


def _half_log_weights(
    variances: Float[Array, "*K H"], w: Projection
) -> Float[Array, "*K num_features"]:
    # Large terms of long rows nearly cancel, so the mean is subtracted from each square.
    rows = w.dense_rows()
    squares = jnp.square(rows.astype(variances.dtype)) - 1
    constant = jnp.sum(jnp.log(variances) + 1 - variances, axis=-1, keepdims=True)
    shape = (*variances.shape[:-1], *squares.shape)
    log_ratio = _times(jnp.broadcast_to(squares, shape), 1 - variances)
    log_ratio += jnp.broadcast_to(constant, log_ratio.shape)
    if w.is_paired:
        log_ratio = jnp.concatenate([log_ratio, log_ratio], axis=-1)
    return w.add_half_log_weights(0.25 * log_ratio)


def _broadcast(
    vector: Float[Array, "*K width"], x: Float[Array, "*batch width"]
) -> Float[Array, "*batch width"]:
    """Repeats one vector along ``[..., width]``, or K along ``[batch, length, K, ..., width]``."""
    *heads, width = jnp.shape(vector)
    ones = (1,) * (x.ndim - 4) if heads else ()
    return jnp.broadcast_to(jnp.reshape(vector, (*heads, *ones, width)), x.shape)


def _of_heads(x: Float[Array, "*batch H"], rows: Any) -> Float[Array, "*batch rows"]:
    """Multiplies vectors by one matrix, dense or structured, or by one for each of K heads."""
    if rows.ndim == 2:
        return product(x, rows)
    return jax.vmap(product, in_axes=(2, 0), out_axes=2)(x, rows)
