"""Bipolar hybrid features, a weighted blend of a hyperbolic and a trigonometric estimator.

The hyperbolic estimator is exact at y = -x and the trigonometric one at y = x. The weight between
them depends on x and y and is estimated too. Angular weights leave the exact estimator alone at
either end if x and y have equal length.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Key, Real

from simrf_jax import checks, one_line
from simrf_jax.features.exponential import Hyperbolic
from simrf_jax.features.feature_map import FeatureMap, named
from simrf_jax.features.hybrid import hybrid_log_features
from simrf_jax.features.log_space import KERNELS, Kernel, LogFeatures, Side
from simrf_jax.features.trigonometric import Trigonometric
from simrf_jax.projections import (
    BlockMode,
    Coupling,
    DrawOptions,
    Norms,
    Projection,
    Rotation,
    StructuredProjection,
    as_projection,
    draw_projection,
    kind_of,
    project,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hyperbolic", "trigonometric", "weights"],
    meta_fields=["draw_options"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class BipolarProjection(StructuredProjection):
    """The random vectors of a bipolar hybrid estimator; see ``draw_bipolar_projection``.

    Attributes:
      hyperbolic: W of the hyperbolic base estimator, ``[..., num_features, dim]``.
      trigonometric: W of the trigonometric base estimator, of the same shape.
      weights: The random vectors tau that estimate the weight, ``[..., num_weights, dim]``.
      draw_options: Options that both base estimators were drawn by, or None if they are not known.
    """

    hyperbolic: Projection
    trigonometric: Projection
    weights: Projection
    draw_options: DrawOptions | None = None

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one base estimator's projection, ``[..., num_features, dim]``."""
        parts = (self.hyperbolic, self.trigonometric, self.weights)
        one, other, tau = (as_projection(part).shape for part in parts)
        if one != other or len(tau) < 2 or (*one[:-2], one[-1]) != (*tau[:-2], tau[-1]):
            raise ValueError(
                "hyperbolic and trigonometric must be [..., num_features, dim] of one shape, and "
                "weights must be [..., num_weights, dim] with the same leading axes and dim, "
                f"got {one}, {other} and {tau}."
            )
        return one

    @property
    def dtype(self) -> jnp.dtype:
        """Returns the floating type of one base estimator's projection."""
        return as_projection(self.hyperbolic).dtype

    def draw_like(self, key: Key[Array, ""], options: DrawOptions) -> BipolarProjection:
        """Draws another ``BipolarProjection`` of the same structure, shapes and dtype.

        Args:
          key: A typed PRNG key.
          options: Options to draw the base estimators by.

        Raises:
          TypeError: If a part is a structured projection instead of an array.
        """
        parts = (self.hyperbolic, self.trigonometric, self.weights)
        if any(isinstance(part, StructuredProjection) for part in parts):
            raise self.no_redraw()
        base, weights = jax.typeof(self.hyperbolic), jax.typeof(self.weights)
        drawn = _draw(key, base.shape[0], weights.shape[0], base.shape[1], options, base.dtype)
        # Of one that did not say how it was drawn, the structure stays as it was.
        return drawn if self.draw_options else dataclasses.replace(drawn, draw_options=None)


def draw_bipolar_projection(
    key: Key[Array, ""],
    num_features: int,
    num_weights: int,
    dim: int,
    *,
    coupling: Coupling = "orthogonal",
    block: BlockMode = "regular",
    rotation: Rotation = "haar",
    norms: Norms = "chi",
    dtype: DTypeLike = jnp.float32,
    num_sweeps: int | None = None,
) -> BipolarProjection:
    """Draws the random vectors of a bipolar hybrid estimator.

    Args:
      key: A typed PRNG key (``jax.random.key``). ``jax.vmap`` over keys draws a stack.
      num_features: Number of rows m of each base estimator's projection.
      num_weights: Number n of random vectors that estimate the weight.
      dim: Dimension d of the vectors to project.
      coupling: Joint law of the rows of each base estimator; see ``draw_projection``. The two base
        estimators are independent of each other and of the weight. The random vectors of the weight
        are iid, as Theorem 3.1 and Lemma 3.2 require.
      block: Row-block mode of the base estimators, ``"regular"`` or ``"square"``; see
        ``draw_projection``.
      rotation: Random rotation of the base estimators, ``"haar"``, ``"hadamard"`` or ``"givens"``;
        see ``draw_projection``.
      norms: Law of the row norms of the base estimators, other than ``"radau"``; see
        ``draw_projection``.
      dtype: Floating type of all arrays.
      num_sweeps: Number of sweeps of the coupling ``simplex_plus`` over its rows; see
        ``draw_projection``.

    Returns:
      A ``BipolarProjection``, for ``angular_hybrid_features`` and ``gaussian_hybrid_features``.

    Raises:
      TypeError: If the key is not a typed PRNG key, a size is not an integer, or dtype is not
        floating.
      ValueError: If a name is unknown, a size is below 1, a simplex has ``dim < 2``, or num_sweeps
        is given to another coupling than ``simplex_plus``, or the base estimators cannot have the
        norms.

    Example:
      >>> import jax, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 64)
      >>> p.hyperbolic.shape, p.trigonometric.shape, p.weights.shape
      ((16, 64), (16, 64), (8, 64))

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3,
      https://arxiv.org/abs/2110.04367
    """
    checks.typed_key(key)
    num_weights = checks.positive_int("num_weights", num_weights)
    options = DrawOptions(coupling, block, rotation, norms, num_sweeps)
    return _draw(key, num_features, num_weights, dim, options, dtype)


def _draw(
    key: Key[Array, ""],
    num_features: int,
    num_weights: int,
    dim: int,
    options: DrawOptions,
    dtype: DTypeLike,
) -> BipolarProjection:
    if options.norms == "radau":
        raise ValueError(
            "norms='radau' gives rows weights, which the trigonometric base estimator cannot "
            "honour; a bipolar hybrid takes any other law of norms."
        )
    one, two, three = jax.random.split(key, 3)
    hyperbolic = options.draw(one, num_features, dim, dtype=dtype)
    trigonometric = options.draw(two, num_features, dim, dtype=dtype)
    weights = draw_projection(three, num_weights, dim, coupling="iid", dtype=dtype)
    return BipolarProjection(hyperbolic, trigonometric, weights, options)


@named("angular_hybrid")
@dataclasses.dataclass(frozen=True)
class AngularHybrid(FeatureMap, static=("kernel",)):
    """The feature map of ``angular_hybrid_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    projection_type = BipolarProjection
    is_finite = True
    coupling = "orthogonal"
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the kernel."""
        checks.one_of("kernel", self.kernel, KERNELS)

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: BipolarProjection, *, side: Side
    ) -> LogFeatures:
        """Returns psi_1 of queries and psi_2 of keys.

        Raises:
          TypeError: If the projection is not a ``BipolarProjection``.
          ValueError: If the shapes do not match.
        """
        signs = jnp.where(project(x, _bipolar(projection).weights) < 0, -1.0, 1.0)
        sign = -1 if side == "query" else 1
        rho = sign * signs * (2 * signs.shape[-1]) ** -0.5
        return _combine(x, projection, rho, 0.5, side, self.kernel)


@named("gaussian_hybrid")
@dataclasses.dataclass(frozen=True, eq=False)  # The bandwidth may be an array.
class GaussianHybrid(FeatureMap, static=("kernel",)):
    """The feature map of ``gaussian_hybrid_features``.

    Attributes:
      bandwidth: The distance at which the weight passes from one base estimator to the other.
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.
    """

    projection_type = BipolarProjection
    is_finite = True
    coupling = "orthogonal"
    bandwidth: Real[ArrayLike, ""] = 1.0
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the bandwidth, unless it is traced, and the kernel."""
        checks.scalar("bandwidth", self.bandwidth, sign="positive")
        checks.one_of("kernel", self.kernel, KERNELS)

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: BipolarProjection, *, side: Side
    ) -> LogFeatures:
        """Returns psi_1 of queries and psi_2 of keys.

        Raises:
          TypeError: If the projection is not a ``BipolarProjection``.
          ValueError: If the shapes do not match.
        """
        tau = as_projection(_bipolar(projection).weights)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        u = (wide if side == "query" else -wide) / self.bandwidth
        rho = Trigonometric("gaussian").log_features(u, tau, side=side)
        weight = rho.evaluate(rho.exponent.dtype)
        return _combine(x, projection, weight, 0.0, side, self.kernel)


def _bipolar(projection: BipolarProjection) -> BipolarProjection:
    if not isinstance(projection, BipolarProjection):
        raise TypeError(
            "projection must be a BipolarProjection, made by draw_bipolar_projection, got "
            f"{kind_of(projection)}."
        )
    _ = projection.shape  # Raises if the shapes of the parts do not match.
    return projection


def _combine(
    x: Float[Array, "*batch dim"],
    projection: BipolarProjection,
    rho: Float[Array, "*batch weights"],
    offset: float,
    side: Side,
    kernel: Kernel,
) -> LogFeatures:
    """Returns the features of the hybrid of both base estimators."""
    hyperbolic, trigonometric = map(
        as_projection, (projection.hyperbolic, projection.trigonometric)
    )
    bases = [
        Hyperbolic(kernel).log_features(x, hyperbolic, side=side),
        Trigonometric(kernel).log_features(x, trigonometric, side=side),
    ]
    return hybrid_log_features(bases, [rho.astype(bases[0].exponent.dtype)], [offset], side=side)


def angular_hybrid_features(
    x: Float[ArrayLike, "*batch dim"],
    projection: BipolarProjection,
    *,
    side: Side,
    kernel: Kernel = "gaussian",
) -> Float[Array, "*batch features"]:
    r"""Returns bipolar hybrid features with angular weights.

    The hyperbolic estimator, which is exact at y = -x, has the weight

    .. math::
        \lambda = \frac{\theta_{x,y}}{\pi}, \qquad \hat\lambda = \tfrac12 - \tfrac{1}{2n} \sum_i
            \operatorname{sgn}(\tau_i \cdot x) \operatorname{sgn}(\tau_i \cdot y)

    and the trigonometric estimator, which is exact at y = x, has the weight
    :math:`1 - \hat\lambda`. Here :math:`\theta_{x,y}` is the angle between x and y. For vectors of
    equal length the estimate has no variance at :math:`\theta = 0` and :math:`\theta = \pi`.

    Args:
      x: Vectors in units of the kernel's length scale.
      projection: A ``BipolarProjection``, the same for both sides of the product.
      side: ``"query"`` for the first argument x of :math:`K(x, y)`, ``"key"`` for the second, y.
      kernel: ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or ``"softmax"``, :math:`\exp(x \cdot y)`.

    Returns:
      ``4 num_features (num_weights + 1)`` features of x's dtype, computed in float32 or wider
      in time O(nd + md + mn), with m = num_features, n = num_weights and d = dim.

    Raises:
      TypeError: If x is not floating or the projection is not a ``BipolarProjection``.
      ValueError: If a name is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = simrf_jax.angular_hybrid_features(x, p, side="query", kernel="softmax")
      >>> for y in (x, -x):  # exact at both ends
      ...     psi_2 = simrf_jax.angular_hybrid_features(y, p, side="key", kernel="softmax")
      ...     print(f"{psi_1 @ psi_2:.5f} {jnp.exp(x @ y):.5f}")
      2.01375 2.01375
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Theorem 3.1 and Lemma 3.2,
      https://arxiv.org/abs/2110.04367
    """
    return AngularHybrid(kernel).features(x, projection, side=side)


def gaussian_hybrid_features(
    x: Float[ArrayLike, "*batch dim"],
    projection: BipolarProjection,
    *,
    side: Side,
    bandwidth: Real[ArrayLike, ""] = 1.0,
    kernel: Kernel = "gaussian",
) -> Float[Array, "*batch features"]:
    r"""Returns bipolar hybrid features with Gaussian weights.

    The hyperbolic estimator, which is exact at y = -x, has the weight

    .. math:: \lambda = \exp\bigl(-|x + y|^2 / (2 \sigma^2)\bigr)

    which trigonometric features of :math:`x/\sigma` and :math:`-y/\sigma` estimate, exactly at
    y = -x. The trigonometric estimator, which is exact at y = x, has the weight
    :math:`1 - \hat\lambda`. At y = x the weight of the hyperbolic estimator is not quite zero, and
    so the variance is not quite zero either.

    Args:
      x: Vectors in units of the kernel's length scale.
      projection: A ``BipolarProjection``, the same for both sides of the product.
      side: ``"query"`` for the first argument x of :math:`K(x, y)`, ``"key"`` for the second, y.
      bandwidth: :math:`\sigma`, the distance :math:`|x + y|` at which the weight passes from the
        hyperbolic to the trigonometric estimator, in the unit of x; a positive number, which may be
        traced. It must be the same for both sides.
      kernel: ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or ``"softmax"``, :math:`\exp(x \cdot y)`.

    Returns:
      ``2 num_features (4 num_weights + 1)`` features of x's dtype, computed in float32 or wider
      in time O(nd + md + mn), with m = num_features, n = num_weights and d = dim.

    Raises:
      TypeError: If x is not floating, the projection is not a ``BipolarProjection`` or the
        bandwidth is not one real number.
      ValueError: If a name is unknown, the shapes do not match or the bandwidth is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = simrf_jax.gaussian_hybrid_features(x, p, side="query", kernel="softmax")
      >>> psi_2 = simrf_jax.gaussian_hybrid_features(-x, p, side="key", kernel="softmax")
      >>> print(f"{psi_1 @ psi_2:.5f} {jnp.exp(-x @ x):.5f}")
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Gaussian lambda coefficients,
      https://arxiv.org/abs/2110.04367
    """
    return GaussianHybrid(bandwidth, kernel).features(x, projection, side=side)
