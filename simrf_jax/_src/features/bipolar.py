"""Bipolar hybrid features, a weighted blend of a hyperbolic and a trigonometric estimator.

The hyperbolic estimator is exact at y = -x and the trigonometric one at y = x. The weight between
them depends on x and y and is estimated too. If x and y have equal length, angular weights select
the exact estimator at either end.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Key, Real

from simrf_jax._src import checks
from simrf_jax._src.features.exponential import Hyperbolic
from simrf_jax._src.features.feature_map import FeatureMap, named
from simrf_jax._src.features.hybrid import hybrid_log_features
from simrf_jax._src.features.log_space import Kernel, LogFeatures, Side
from simrf_jax._src.features.trigonometric import Trigonometric
from simrf_jax._src.projections import (
    BlockMode,
    Coupling,
    DrawOptions,
    Norms,
    ProjectionLike,
    Rotation,
    StructuredProjection,
    draw_projection,
    project,
)
from simrf_jax._src.projections.record import agreed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BipolarProjection(StructuredProjection):
    """Random vectors of a bipolar hybrid estimator; see ``draw_bipolar_projection``.

    Attributes:
      hyperbolic: W of the hyperbolic base estimator, ``[..., num_features, dim]``.
      trigonometric: W of the trigonometric base estimator, of the same shape.
      weights: The random vectors tau that estimate the weight, ``[..., num_weights, dim]``.
      draw_options: Options with which both base estimators were drawn, or None if unknown.
    """

    expected = "a BipolarProjection, made by draw_bipolar_projection"
    hyperbolic: ProjectionLike
    trigonometric: ProjectionLike
    weights: ProjectionLike
    draw_options: DrawOptions | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one base estimator's projection, ``[..., num_features, dim]``."""
        parts = (self.hyperbolic, self.trigonometric, self.weights)
        if any(part is None for part in parts):
            raise TypeError("Each part must be an array [..., rows, dim], got None.")
        one, other, tau = map(np.shape, parts)
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
        return jnp.result_type(self.hyperbolic)

    def redraw(
        self, key: Key[Array, ""], draw_options: DrawOptions | None = None
    ) -> BipolarProjection:
        """Draws another ``BipolarProjection`` of the same structure, shapes and dtype.

        Args:
          key: A typed PRNG key.
          draw_options: Options for the base estimators, by default those of the projection. If the
            projection has options, these must be equal.

        Raises:
          TypeError: If a part is a structured projection instead of an array.
          ValueError: If the projection was drawn with other options than those given, or if neither
            has options.
        """
        options = agreed(self.draw_options, draw_options)
        num_features, dim = self.shape
        num_weights = np.shape(self.weights)[0]
        drawn = BipolarProjection.draw(key, num_features, num_weights, dim, options, self.dtype)
        # Keep the pytree structure, including a missing draw_options.
        drawn = dataclasses.replace(drawn, draw_options=self.draw_options)
        structure: Any = jax.tree.structure(self)
        if structure != jax.tree.structure(drawn):
            raise self.no_redraw()
        return drawn

    @staticmethod
    def draw(
        key: Key[Array, ""],
        num_features: int,
        num_weights: int,
        dim: int,
        options: DrawOptions,
        dtype: DTypeLike = jnp.float32,
    ) -> BipolarProjection:
        """Draws both base estimators with given options; see ``draw_bipolar_projection``.

        Args:
          key: A typed PRNG key.
          num_features: Number of rows m of each base estimator's projection.
          num_weights: Number n of random vectors that estimate the weight.
          dim: Dimension d of the vectors to project.
          options: Options of the base estimators.
          dtype: Floating type of all arrays.

        Raises:
          TypeError: If a size is not an integer, or dtype is not floating.
          ValueError: If a size is below 1 or too small for the options, or they draw weights.
        """
        num_weights = checks.positive_int("num_weights", num_weights)
        if options.draws_weights:
            raise ValueError(
                f"norms={options.norms!r} gives rows weights, which the trigonometric base "
                "estimator cannot honor; a bipolar hybrid takes any other law of norms."
            )
        one, two, three = jax.random.split(key, 3)
        hyperbolic = options.draw(one, num_features, dim, dtype=dtype)
        trigonometric = options.draw(two, num_features, dim, dtype=dtype)
        weights = draw_projection(three, num_weights, dim, coupling="iid", dtype=dtype)
        return BipolarProjection(hyperbolic, trigonometric, weights, options)


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
      A ``BipolarProjection``, for ``AngularHybrid`` and ``GaussianHybrid``.

    Raises:
      TypeError: If the key is not a typed PRNG key, a size is not an integer, or dtype is not
        floating.
      ValueError: If a name is unknown, a size is below 1, a simplex has ``dim < 2``, or num_sweeps
        is given to a coupling other than ``simplex_plus``, or the base estimators do not support
        the norms.

    Example:
      >>> import jax
      >>> from simrf_jax import hybrid
      >>> p = hybrid.draw_bipolar_projection(jax.random.key(0), 16, 8, 64)
      >>> p.hyperbolic.shape, p.trigonometric.shape, p.weights.shape
      ((16, 64), (16, 64), (8, 64))

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3,
      https://arxiv.org/abs/2110.04367
    """
    checks.typed_key(key)
    options = DrawOptions(coupling, block, rotation, norms, num_sweeps)
    return BipolarProjection.draw(key, num_features, num_weights, dim, options, dtype)


class BipolarHybrid(FeatureMap, static=("kernel",)):
    """Base class of both hybrids, which differ only in the features of the weight."""

    projection_type = BipolarProjection
    is_finite = True
    coupling = "orthogonal"
    kernel: Kernel

    @abc.abstractmethod
    def weight(
        self, x: Float[Array, "*batch dim"], tau: ProjectionLike, *, side: Side
    ) -> tuple[Float[Array, "*batch weights"], float]:
        """Returns the features of the weight of the hyperbolic estimator, and its constant."""

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: BipolarProjection, *, side: Side
    ) -> LogFeatures:
        """Returns psi_1 of queries and psi_2 of keys.

        Raises:
          TypeError: If the projection is not a ``BipolarProjection``.
          ValueError: If the shapes do not match.
        """
        parts = BipolarProjection.of(projection)
        _ = parts.shape  # Raises if the shapes of the parts do not match.
        rho, constant = self.weight(x, parts.weights, side=side)
        bases = [
            Hyperbolic(self.kernel).log_features(x, parts.hyperbolic, side=side),
            Trigonometric(self.kernel).log_features(x, parts.trigonometric, side=side),
        ]
        rho = rho.astype(bases[0].exponent.dtype)
        return hybrid_log_features(bases, [rho], [constant], side=side)


@named("angular_hybrid")
@dataclasses.dataclass(frozen=True)
class AngularHybrid(BipolarHybrid):
    r"""Bipolar hybrid features with angular weights.

    The hyperbolic estimator, which is exact at y = -x, has the weight

    .. math::
        \lambda = \frac{\theta_{x,y}}{\pi}, \qquad \hat\lambda = \tfrac12 - \tfrac{1}{2n} \sum_i
            \operatorname{sgn}(\tau_i \cdot x) \operatorname{sgn}(\tau_i \cdot y)

    and the trigonometric estimator, which is exact at y = x, has the weight :math:`1 -
    \hat\lambda`. Here :math:`\theta_{x,y}` is the angle between x and y. For vectors of equal
    length the estimate has no variance at :math:`\theta = 0` and :math:`\theta = \pi`. At
    :math:`\pi` the rounding error grows like :math:`e^{2|x|^2}`, because the weight of zero is a
    difference of sums of features: in float32 it is 2e-5 of the kernel at :math:`|x| = 2`, and 5 %
    at 2.8. ``draw_bipolar_projection`` draws W. There are ``4 num_features (num_weights + 1)``
    features, in time O(nd + md + mn), with m = num_features, n = num_weights and d = dim.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from simrf_jax import hybrid
      >>> p = hybrid.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = hybrid.AngularHybrid().features(x, p, side="query")
      >>> for y in (x, -x):  # exact at both ends
      ...     psi_2 = hybrid.AngularHybrid().features(y, p, side="key")
      ...     print(f"{psi_1 @ psi_2:.5f} {jnp.exp(x @ y):.5f}")
      2.01375 2.01375
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Theorem 3.1 and Lemma 3.2,
      https://arxiv.org/abs/2110.04367
    """

    kernel: Kernel = "softmax"

    def weight(
        self, x: Float[Array, "*batch dim"], tau: ProjectionLike, *, side: Side
    ) -> tuple[Float[Array, "*batch weights"], float]:
        """Returns signs divided by the square root of twice their number."""
        signs = jnp.where(project(x, tau) < 0, -1.0, 1.0)
        sign = -1 if side == "query" else 1
        return sign * signs * (2 * signs.shape[-1]) ** -0.5, 0.5


@named("gaussian_hybrid")
@dataclasses.dataclass(frozen=True, eq=False)  # The bandwidth may be an array.
class GaussianHybrid(BipolarHybrid):
    r"""Bipolar hybrid features with Gaussian weights.

    The hyperbolic estimator, which is exact at y = -x, has the weight

    .. math:: \lambda = \exp\bigl(-|x + y|^2 / (2 \sigma^2)\bigr)

    which trigonometric features of :math:`x/\sigma` and :math:`-y/\sigma` estimate, exactly at y =
    -x. The trigonometric estimator, which is exact at y = x, has the weight :math:`1 -
    \hat\lambda`. At y = x the weight of the hyperbolic estimator is not quite zero, and so the
    variance is not quite zero either. At y = -x the rounding error grows as for ``AngularHybrid``:
    in float32 it is 5e-5 of the kernel at :math:`|x| = 2`, and 13 % at 2.8.
    ``draw_bipolar_projection`` draws W. There are ``2 num_features (4 num_weights + 1)`` features,
    in time O(nd + md + mn), with m = num_features, n = num_weights and d = dim.

    Attributes:
      bandwidth: :math:`\sigma`, the distance :math:`|x + y|` at which the weight moves from the
        hyperbolic to the trigonometric estimator, in the unit of x; a positive number.
      kernel: ``"softmax"``, which attention estimates, or ``"gaussian"``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from simrf_jax import hybrid
      >>> p = hybrid.draw_bipolar_projection(jax.random.key(0), 16, 8, 4)
      >>> x = jnp.array([0.1, -0.7, 0.4, 0.2])
      >>> psi_1 = hybrid.GaussianHybrid().features(x, p, side="query")
      >>> psi_2 = hybrid.GaussianHybrid().features(-x, p, side="key")
      >>> print(f"{psi_1 @ psi_2:.5f} {jnp.exp(-x @ x):.5f}")
      0.49659 0.49659

    References:
      Choromanski et al., Hybrid Random Features (ICLR 2022), Sec. 3, Gaussian lambda coefficients,
      https://arxiv.org/abs/2110.04367
    """

    bandwidth: Real[ArrayLike, ""] = 1.0
    kernel: Kernel = "softmax"

    def __post_init__(self) -> None:
        """Checks the bandwidth, unless it is traced, and the kernel."""
        super().__post_init__()
        checks.scalar("bandwidth", self.bandwidth, sign="positive")

    def weight(
        self, x: Float[Array, "*batch dim"], tau: ProjectionLike, *, side: Side
    ) -> tuple[Float[Array, "*batch weights"], float]:
        """Returns trigonometric features of queries, and of the negatives of keys."""
        wide = x.astype(np.promote_types(x.dtype, jnp.float32))
        u = (wide if side == "query" else -wide) / self.bandwidth
        rho = Trigonometric("gaussian").log_features(u, tau, side=side)
        return rho.evaluate(rho.exponent.dtype), 0.0
