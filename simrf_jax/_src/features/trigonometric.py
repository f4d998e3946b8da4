"""Trigonometric feature maps (random Fourier features): sine and cosine, or one shifted cosine."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float64

from simrf_jax._src import checks
from simrf_jax._src.features.feature_map import FeatureMap, named
from simrf_jax._src.features.log_space import (
    KERNELS,
    Kernel,
    LogFeatures,
    Side,
    half_squared_norm,
)
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture, scaled
from simrf_jax._src.projections import ProjectionLike, product


class _Oscillating(FeatureMap):
    """Base class of feature maps whose products depend on x - y, up to a factor of each vector.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, ``"gaussian"``, or a ``ScaleMixture``.
    """

    is_finite = True
    coupling = "orthogonal"

    def __post_init__(self) -> None:
        """Checks the kernel."""
        kernel = getattr(self, "kernel", None)
        if not isinstance(kernel, ScaleMixture):
            checks.one_of("kernel", kernel, KERNELS)

    @property
    def kernel_of_rows(self) -> ScaleMixture:
        """Kernel for which W must be drawn."""
        kernel = getattr(self, "kernel", None)
        return kernel if isinstance(kernel, ScaleMixture) else GAUSSIAN


@named("trigonometric")
@dataclasses.dataclass(frozen=True)
class Trigonometric(_Oscillating, static=("kernel",)):
    """The feature map of ``trigonometric_features``.

    Attributes:
      kernel: ``"softmax"``, which attention estimates, ``"gaussian"``, or a ``ScaleMixture``.
    """

    kernel: Kernel | ScaleMixture = "softmax"

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: ProjectionLike, *, side: Side
    ) -> LogFeatures:
        """Returns the same features for queries and keys."""
        angles = product(x, projection)
        values = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return _mean_over_rows(x, values, angles.shape[-1], self.kernel)


@named("phase")
@dataclasses.dataclass(frozen=True, eq=False)  # Comparing arrays gives no single Boolean.
class Phase(_Oscillating, static=("kernel",)):
    """The feature map of ``phase_features``.

    Attributes:
      phases: Shifts ``[num_features]`` in radians; None for ``even_phases``.
      kernel: ``"softmax"``, which attention estimates, ``"gaussian"``, or a ``ScaleMixture``.
    """

    phases: Float[ArrayLike, " num_features"] | None = None
    kernel: Kernel | ScaleMixture = "softmax"

    def log_features(
        self, x: Float[Array, "*batch dim"], projection: ProjectionLike, *, side: Side
    ) -> LogFeatures:
        """Returns the same features for queries and keys.

        Raises:
          TypeError: If the phases are not floating.
          ValueError: If the number of phases is not that of the features.
        """
        angles = product(x, projection)
        num_features = angles.shape[-1]
        phases = self.phases
        phases = even_phases(num_features) if phases is None else checks.floating("phases", phases)
        if phases.shape != (num_features,):
            raise ValueError(
                f"phases must be [num_features] = ({num_features},), got shape {phases.shape}."
            )
        shifted = angles + jnp.broadcast_to(jnp.asarray(phases, angles.dtype), angles.shape)
        return _mean_over_rows(x, 2**0.5 * jnp.cos(shifted), num_features, self.kernel)


def _mean_over_rows(
    x: Float[Array, "*batch dim"],
    values: Float[Array, "*batch features"],
    num_rows: int,
    kernel: Kernel | ScaleMixture,
) -> LogFeatures:
    """Returns features with the given bounded values and their common scale."""
    log_scale = half_squared_norm(x, values.dtype)
    if kernel != "softmax":
        log_scale = jnp.zeros_like(log_scale)
    return LogFeatures(jnp.zeros_like(log_scale), log_scale - 0.5 * math.log(num_rows), values)


def even_phases(num_features: int) -> Float64[np.ndarray, " {num_features}"]:
    r"""Returns phases that need no randomness, :math:`b_i = \pi (\tfrac14 + i / m)`.

    Random phases make the mean of :math:`\sum_i \cos(2 b_i)` zero, which removes the bias. For
    these phases the sum itself is zero.

    Example:
      >>> bool(abs(sum(np.cos(2 * even_phases(7)))) < 1e-12)
      True
    """
    return np.pi * (0.25 + np.arange(num_features) / num_features)


def trigonometric_features(
    x: Float[ArrayLike, "*batch dim"],
    projection: ProjectionLike,
    *,
    kernel: Kernel | ScaleMixture = "softmax",
    length_scale: Float[ArrayLike, "*#dim"] = 1.0,
) -> Float[Array, "*batch features"]:
    r"""Returns trigonometric random features (random Fourier features) of a kernel.

    .. math::
        \phi(x) = \tfrac{1}{\sqrt m}\, e^{c|x|^2} \bigl(\sin(w_1 \cdot x), \dots,
            \sin(w_m \cdot x), \cos(w_1 \cdot x), \dots, \cos(w_m \cdot x)\bigr)

    with :math:`c = \tfrac12` for the softmax kernel and :math:`c = 0` for all others. The
    product :math:`\phi(x) \cdot \phi(y)` is the mean of :math:`\cos(w_i \cdot (x - y))` times the
    prefactors of x and y. It is an unbiased estimate of the kernel, exact at x = y, and may be
    negative. The coupling **orthogonal** suits this map best: a simplex helps feature maps that
    distinguish w from -w, and cosines do not.

    Args:
      x: Vectors.
      projection: W, ``[num_features, dim]``, the same for both sides of the product.
      kernel: ``"softmax"``, :math:`\exp(x \cdot y)`, ``"gaussian"``, :math:`\exp(-|x-y|^2/2)`, or a
        ``ScaleMixture`` such as ``simrf_jax.kernels.Matern(1.5)``. W must be drawn for it; a
        ``Projection`` that was drawn for another kernel is refused.
      length_scale: Length scale of the kernel, one number or one for each column. The features are
        differentiable in it.

    Returns:
      ``2 num_features`` features of x's dtype, computed in float32 or wider.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the kernel is unknown or not that of the projection, or the shapes do not
        match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> x = jax.random.normal(jax.random.key(0), (16,))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 64, 16, coupling="orthogonal")
      >>> phi = simrf_jax.trigonometric_features(x, w, kernel="gaussian")
      >>> print(phi.shape, f"{phi @ phi:.5f}")  # exact at y = x
      (128,) 1.00000

    References:
      Rahimi and Recht, Random Features for Large-Scale Kernel Machines (NeurIPS 2007).
      Yu et al., Orthogonal Random Features (NeurIPS 2016), https://arxiv.org/abs/1610.09072
      Reid et al., Simplex Random Features (ICML 2023), Eq. 3 and Sec. 4.1,
      https://arxiv.org/abs/2301.13856
    """
    x = checks.vectors("x", x)
    return Trigonometric(kernel).features(scaled(x, length_scale), projection).astype(x.dtype)


def phase_features(
    x: Float[ArrayLike, "*batch dim"],
    projection: ProjectionLike,
    phases: Float[ArrayLike, " num_features"],
    *,
    kernel: Kernel | ScaleMixture = "softmax",
    length_scale: Float[ArrayLike, "*#dim"] = 1.0,
) -> Float[Array, "*batch num_features"]:
    r"""Returns random Fourier features with one shifted cosine for each row of W.

    .. math:: \phi(x)_i = \sqrt{\tfrac{2}{m}}\, e^{c|x|^2} \cos(w_i \cdot x + b_i)

    with :math:`c = \tfrac12` for the softmax kernel and :math:`c = 0` for all others. For the
    same W these are half as many features as ``trigonometric_features``, and the estimate has more
    variance: it is not exact even at x = y.

    Args:
      x: Vectors.
      projection: W, ``[num_features, dim]``, the same for both sides of the product.
      phases: Shifts b in radians, the same for both sides of the product.
        Draw them uniformly on the circle:
        ``jax.random.uniform(key, (num_features,), maxval=2 * jnp.pi)``.
      kernel: Kernel of the products, a name or a ``ScaleMixture``; see ``trigonometric_features``.
      length_scale: Length scale of the kernel, one number or one for each column.

    Returns:
      The features in x's dtype, computed in float32 or wider.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the kernel is unknown or the shapes do not match.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 64, 16, coupling="orthogonal")
      >>> b = jax.random.uniform(jax.random.key(1), (64,), maxval=2 * jnp.pi)
      >>> simrf_jax.phase_features(jnp.ones((3, 16)), w, b).shape
      (3, 64)

    References:
      Rahimi and Recht, Random Features for Large-Scale Kernel Machines (NeurIPS 2007), Algorithm 1.
    """
    x = checks.vectors("x", x)
    phase = Phase(checks.floating("phases", phases), kernel)
    return phase.features(scaled(x, length_scale), projection).astype(x.dtype)
