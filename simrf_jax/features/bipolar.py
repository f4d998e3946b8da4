"""Bipolar hybrid features: a hyperbolic and a trigonometric estimator, and the weight between them.

The first is exact where y = -x, the second where y = x. Angular weights leave each alone at its
end, for vectors of equal length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.features.exponential import hyperbolic_log_features
from simrf_jax.features.hybrid import hybrid_log_features
from simrf_jax.features.log_space import LogFeatures
from simrf_jax.features.trigonometric import trigonometric_log_features
from simrf_jax.projections import (
    Projection,
    StructuredProjection,
    as_projection,
    draw_projection,
    project,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hyperbolic", "trigonometric", "weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BipolarProjection(StructuredProjection):
    """The random vectors of a bipolar hybrid; see draw_bipolar_projection.

    Attributes:
      hyperbolic: W of the hyperbolic base estimator, ``[..., num_features, dim]``.
      trigonometric: W of the trigonometric one, of the same shape.
      weights: The vectors tau of the weights, ``[..., num_weights, dim]``.
    """

    hyperbolic: Projection
    trigonometric: Projection
    weights: Projection

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one base's projection, ``[..., num_features, dim]``."""
        parts = (self.hyperbolic, self.trigonometric, self.weights)
        one, other, tau = (as_projection(part).shape for part in parts)
        if one != other or len(tau) < 2 or (*one[:-2], one[-1]) != (*tau[:-2], tau[-1]):
            raise ValueError(
                "hyperbolic and trigonometric must be [..., num_features, dim] of one shape, and "
                f"weights [..., num_weights, dim], got {one}, {other} and {tau}."
            )
        return one

    @property
    def dtype(self) -> jnp.dtype:
        """The floating type of one base's projection."""
        return as_projection(self.hyperbolic).dtype

    def draw_like(self, key: jax.Array, **draw_options: Any) -> BipolarProjection:
        """Draws another by ``draw_bipolar_projection``; its parts must be arrays."""
        if any(isinstance(part, StructuredProjection) for part in vars(self).values()):
            return super().draw_like(key, **draw_options)
        base, weights = jax.typeof(self.hyperbolic), jax.typeof(self.weights)
        return draw_bipolar_projection(
            key, base.shape[0], weights.shape[0], base.shape[1], dtype=base.dtype, **draw_options
        )


def draw_bipolar_projection(
    key: jax.Array,
    num_features: int,
    num_weights: int,
    dim: int,
    *,
    coupling: str = "orthogonal",
    block: str = "regular",
    rotation: str = "haar",
    norms: str = "chi",
    dtype: DTypeLike = jnp.float32,
    num_sweeps: int | None = None,
) -> BipolarProjection:
    """Draws the random vectors of a bipolar hybrid estimator.

    Args:
      key: A typed PRNG key. ``jax.vmap`` over keys draws a stack.
      num_features: Rows m of either base estimator.
      num_weights: Number n of random vectors that estimate the weight.
      dim: Dimension d.
      coupling: Of the rows of each base, as ``draw_projection``. The bases are independent of each
        other and of the weights, whose vectors are iid, as Theorem 3.1 and Lemma 3.2 ask.
      block: Of the bases, as ``draw_projection``, and so the others.
      rotation: Likewise.
      norms: Likewise.
      dtype: Floating type.
      num_sweeps: Likewise.

    Returns:
      A ``BipolarProjection``, for ``angular_hybrid_features`` and ``gaussian_hybrid_features``.

    Raises:
      TypeError: As ``draw_projection``.
      ValueError: As ``draw_projection``.

    Example:
      >>> import jax, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 64)
      >>> p.hyperbolic.shape, p.trigonometric.shape, p.weights.shape
      ((16, 64), (16, 64), (8, 64))

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3.
    """
    checks.typed_key(key)
    num_weights = checks.positive_int("num_weights", num_weights)
    one, two, three = jax.random.split(key, 3)
    draw_base = functools.partial(
        draw_projection,
        num_features=num_features,
        dim=dim,
        coupling=coupling,
        block=block,
        rotation=rotation,
        norms=norms,
        dtype=dtype,
        num_sweeps=num_sweeps,
    )
    weights = draw_projection(three, num_weights, dim, coupling="iid", dtype=dtype)
    return BipolarProjection(draw_base(one), draw_base(two), weights)


def angular_log_features(
    x: ArrayLike, projection: BipolarProjection, *, side: str, kernel: str
) -> LogFeatures:
    """``angular_hybrid_features`` with the scales apart."""
    tau = _bipolar(projection).weights
    signs = jnp.where(project(x, tau) < 0, -1.0, 1.0)
    sign = -1 if side == "query" else 1
    rho = sign * signs * (2 * signs.shape[-1]) ** -0.5
    return _bipolar_log_features(x, projection, rho, 0.5, side, kernel)


def gaussian_log_features(
    x: ArrayLike,
    projection: BipolarProjection,
    *,
    side: str,
    bandwidth: ArrayLike = 1.0,
    kernel: str,
) -> LogFeatures:
    """``gaussian_hybrid_features`` with the scales apart."""
    checks.scalar("bandwidth", bandwidth, sign="positive")
    tau = _bipolar(projection).weights
    x = checks.vectors("x", x)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    u = (wide if side == "query" else -wide) / bandwidth
    rho = trigonometric_log_features(u, tau, kernel="gaussian")
    weight = rho.evaluate(rho.exponent.dtype)
    return _bipolar_log_features(x, projection, weight, 0.0, side, kernel)


def _bipolar(projection: BipolarProjection) -> BipolarProjection:
    if not isinstance(projection, BipolarProjection):
        raise TypeError(
            "projection must be a BipolarProjection, made by draw_bipolar_projection, "
            f"got {type(projection).__name__}."
        )
    _ = projection.shape  # Which its parts must agree on.
    return projection


def _bipolar_log_features(
    x: ArrayLike,
    projection: BipolarProjection,
    rho: jax.Array,
    offset: float,
    side: str,
    kernel: str,
) -> LogFeatures:
    bases = [
        hyperbolic_log_features(x, projection.hyperbolic, kernel=kernel),
        trigonometric_log_features(x, projection.trigonometric, kernel=kernel),
    ]
    return hybrid_log_features(bases, [rho.astype(bases[0].exponent.dtype)], [offset], side=side)


def angular_hybrid_features(
    x: ArrayLike, projection: BipolarProjection, *, side: str, kernel: str = "softmax"
) -> jax.Array:
    r"""Bipolar hybrid features with angular weights.

    The hyperbolic estimator, exact at y = -x, has the weight

    .. math::
        \lambda = \frac{\theta_{x,y}}{\pi}, \qquad \hat\lambda = \tfrac12 - \tfrac{1}{2n} \sum_i
            \operatorname{sgn}(\tau_i \cdot x) \operatorname{sgn}(\tau_i \cdot y)

    and the trigonometric one, exact at y = x, the rest. For vectors of equal length the estimate
    has no variance at either end, :math:`\theta = 0` and :math:`\theta = \pi`.

    Args:
      x: Vectors ``[..., dim]``.
      projection: A ``BipolarProjection``.
      side: ``"query"`` for one argument of the kernel, ``"key"`` for the other.
      kernel: ``"softmax"`` or ``"gaussian"``.

    Returns:
      Array ``[..., 4 num_features (num_weights + 1)]`` of x's dtype, in time
      O(nd + md + mn), computed in float32 at least.

    Raises:
      TypeError: If x is not floating or the projection is no ``BipolarProjection``.
      ValueError: If a name is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = simrf_jax.angular_hybrid_features(x, p, side="query")
      >>> for y in (x, -x):  # exact at both ends
      ...     psi_2 = simrf_jax.angular_hybrid_features(y, p, side="key")
      ...     print(f"{psi_1 @ psi_2:.5f} {jnp.exp(x @ y):.5f}")
      2.01375 2.01375
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Theorem 3.1 and Lemma 3.2.
    """
    features = angular_log_features(x, projection, side=side, kernel=kernel)
    return features.evaluate(jnp.asarray(x).dtype)


def gaussian_hybrid_features(
    x: ArrayLike,
    projection: BipolarProjection,
    *,
    side: str,
    bandwidth: ArrayLike = 1.0,
    kernel: str = "softmax",
) -> jax.Array:
    r"""Bipolar hybrid features with Gaussian weights.

    The hyperbolic estimator, exact at y = -x, has the weight

    .. math:: \lambda = \exp\bigl(-|x + y|^2 / (2 \sigma^2)\bigr)

    estimated by trigonometric features of :math:`x/\sigma` and :math:`-y/\sigma`, which are exact
    there too; the trigonometric estimator has the rest. At y = x the weight of the hyperbolic one
    is not quite zero, nor then the variance.

    Args:
      x: Vectors ``[..., dim]``.
      projection: A ``BipolarProjection``.
      side: ``"query"`` for one argument of the kernel, ``"key"`` for the other.
      bandwidth: :math:`\sigma`, the distance from y = -x at which the weight passes over; a number,
        which may be traced.
      kernel: ``"softmax"`` or ``"gaussian"``.

    Returns:
      Array ``[..., 2 num_features (4 num_weights + 1)]`` of x's dtype, in time
      O(nd + md + mn), computed in float32 at least.

    Raises:
      TypeError: If x is not floating or the projection is no ``BipolarProjection``.
      ValueError: If a name is unknown, the shapes do not match or the bandwidth is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = simrf_jax.gaussian_hybrid_features(x, p, side="query")
      >>> psi_2 = simrf_jax.gaussian_hybrid_features(-x, p, side="key")
      >>> print(f"{psi_1 @ psi_2:.5f} {jnp.exp(-x @ x):.5f}")
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Gaussian lambda coefficients.
    """
    features = gaussian_log_features(x, projection, side=side, bandwidth=bandwidth, kernel=kernel)
    return features.evaluate(jnp.asarray(x).dtype)
