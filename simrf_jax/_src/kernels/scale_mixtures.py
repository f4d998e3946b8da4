r"""Isotropic kernels that are valid in every dimension: mixtures of Gaussians of all scales.

By Schoenberg's theorem these kernels are the averages

.. math:: K(x, y) = E\, e^{-s |x - y|^2 / 2}

over the law of a positive number s. A row of W for such a kernel is :math:`w = \sqrt s\, g` with g
standard normal. Its direction is uniform on the sphere for every kernel, so all couplings of
directions are the same as for the Gaussian kernel, where s = 1. Only the law of the norms
:math:`\sqrt s\, |g|` changes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float64

from simrf_jax._src import checks
from simrf_jax._src.kernels import exact

# Range of log s. At the least parameters that the kernels accept, the law of s has 1e-8 to 1e-7 of
# its mass outside.
_LEAST, _MOST = -60.0, 80.0
_NEGLIGIBLE = 1e-22
_FAR = 1e4  # Its exponential is 0, and powers of it are finite.


class ScaleMixture(abc.ABC):
    r"""An isotropic kernel :math:`K(x, y) = E\, e^{-s |x - y|^2 / 2}` in units of its length scale.

    The object is the kernel of all pairs, as in ``Matern(1.5)(x, y)``, and the law of the norms of
    W, as in ``draw_projection(..., kernel=Matern(1.5))``. ``trigonometric_features`` and
    ``phase_features`` of such a W estimate it.

    A custom kernel is a frozen dataclass with the density of log s. The rest follows from it.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, simrf_jax
      >>> from scipy import stats
      >>> @dataclasses.dataclass(frozen=True)
      ... class LogNormal(simrf_jax.kernels.ScaleMixture):  # log s is standard normal.
      ...     def log_density(self, log_scale):
      ...         return stats.norm.logpdf(log_scale)
      >>> x = jnp.array([[0.0, 0.0], [1.0, 0.5]])
      >>> w = simrf_jax.draw_projection(
      ...     jax.random.key(0), 4096, 2, coupling="orthogonal", kernel=LogNormal()
      ... )
      >>> phi = simrf_jax.trigonometric_features(x, w, kernel=LogNormal())
      >>> print(f"{LogNormal()(x, x)[0, 1]:.2f} {phi[0] @ phi[1]:.2f}")
      0.50 0.51

    References:
      Schoenberg, Metric spaces and completely monotone functions (Annals of Mathematics 39, 1938),
      https://doi.org/10.2307/1968466
      Langrené, Warin and Gruet, New random projections for isotropic kernels using stable spectral
      distributions (2024), for independent rows of these kernels, https://arxiv.org/abs/2411.02770
    """

    @property
    def step(self) -> float:
        """Distance of the nodes of log s in quadrature.

        With it the trapezoidal rule is accurate to about rounding error for densities that are
        smooth on the scale of one. A narrower density needs a smaller step.
        """
        return 0.25

    @abc.abstractmethod
    def log_density(
        self, log_scale: Float64[np.ndarray, "*shape"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the logarithm of the density of log s.

        Args:
          log_scale: Values of log s.
        """

    def profile(self, squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the kernel as a function of the squared distance, in its floating type.

        Args:
          squared_distance: Squared distances in units of the length scale, at least 0.
        """
        log_scales, weights = self.scales()

        def add(total: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
            scale, weight = node
            return total + weight * jnp.exp(-scale * squared_distance), None

        nodes = (np.exp(log_scales) / 2, weights)
        nodes = jax.tree.map(lambda x: jnp.asarray(x, squared_distance.dtype), nodes)
        return jax.lax.scan(add, jnp.zeros_like(squared_distance), nodes)[0]

    def scales(self) -> tuple[Float64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"]]:
        """Returns a quadrature rule for averages over s: the nodes of log s, and their weights."""
        nodes = np.arange(_LEAST, _MOST, self.step)
        weights = self.step * np.exp(self.log_density(nodes))
        counts = weights > _NEGLIGIBLE
        return nodes[counts], weights[counts]

    def __call__(
        self,
        x: Float[ArrayLike, "*batch n dim"],
        y: Float[ArrayLike, "*batch p dim"],
        *,
        length_scale: Float[ArrayLike, "*#dim"] = 1.0,
    ) -> Float[Array, "*batch n p"]:
        """Returns the kernel of all pairs.

        Args:
          x: Vectors.
          y: Vectors with the same leading shape and dim.
          length_scale: Positive length scale, one number or one for each column. The result is
            differentiable in it.

        Returns:
          The kernel of each pair, computed in float32 or wider from the differences x - y.

        Raises:
          TypeError: If an argument is not floating.
          ValueError: If the shapes do not match.
        """
        x, y, dtype = exact.pair(x, y)
        x, y = scaled(x, length_scale), scaled(y, length_scale)
        return self.profile(exact.squared_distances(x, y)).astype(dtype)


def scaled(
    x: Float[ArrayLike, "*batch dim"], length_scale: Float[ArrayLike, "*#dim"]
) -> Float[Array, "*batch dim"]:
    """Returns vectors in units of a length scale, in float32 or wider unless it is 1.

    Args:
      x: Vectors.
      length_scale: One number, or one for each column.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shape of the length scale is neither [] nor [dim].
    """
    x = checks.vectors("x", x)
    if isinstance(length_scale, float | int) and length_scale == 1:
        return x
    length_scale = checks.floating("length_scale", length_scale)
    if length_scale.shape not in ((), x.shape[-1:]):
        raise ValueError(
            f"length_scale must be one number or one for each of {x.shape[-1]} columns, got shape "
            f"{length_scale.shape}."
        )
    x = x.astype(np.promote_types(x.dtype, jnp.float32))
    return x / jnp.broadcast_to(length_scale.astype(x.dtype), x.shape)


@dataclasses.dataclass(frozen=True)
class Gaussian(ScaleMixture):
    r"""The Gaussian kernel, :math:`e^{-r^2/2}` of the distance r; s = 1."""

    def log_density(
        self, log_scale: Float64[np.ndarray, "*shape"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Raises ``ValueError``: a single scale has no density."""
        raise ValueError("The Gaussian kernel has one scale, s = 1, and no density of scales.")

    def profile(self, squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the kernel as a function of the squared distance."""
        return jnp.exp(-0.5 * squared_distance)


GAUSSIAN = Gaussian()


@dataclasses.dataclass(frozen=True)
class Matern(ScaleMixture):
    r"""The Matérn kernel of any smoothness.

    .. math::
        K = \frac{2^{1 - \nu}}{\Gamma(\nu)} z^\nu K_\nu(z), \qquad z = \sqrt{2 \nu}\, r

    Its rows have the multivariate t law with :math:`2 \nu` degrees of freedom, and :math:`\nu / s`
    the Gamma law of shape :math:`\nu`. For :math:`\nu = \tfrac12` it is the Laplace kernel
    :math:`e^{-r}` of the Euclidean distance; scikit-learn's ``laplacian_kernel`` uses the Manhattan
    distance instead.

    Attributes:
      nu: Smoothness :math:`\nu`, from 0.2 to 1e6. Samples of a Gaussian process have fewer than
        :math:`\nu` derivatives.

    Raises:
      TypeError: If ``nu`` is not a number.
      ValueError: If ``nu`` is below 0.2, where quadrature over s is not accurate, or above 1e6,
        where the kernel is the Gaussian one up to 1e-6.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> x, y = jnp.zeros((1, 2)), jnp.array([[1.0, 1.0]])
      >>> for nu in (0.5, 1.5, 2.5):
      ...     print(f"{simrf_jax.kernels.Matern(nu)(x, y)[0, 0]:.6f}")
      0.243117
      0.297821
      0.317283

    References:
      Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), Eq. 4.14,
      https://gaussianprocess.org/gpml
    """

    nu: float = 1.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "nu", _between("nu", self.nu, 0.2, 1e6))

    @property
    def step(self) -> float:
        """Distance of the nodes of log s, whose standard deviation is about nu^(-1/2)."""
        return min(0.25, 0.5 * self.nu**-0.5)

    def log_density(
        self, log_scale: Float64[np.ndarray, "*shape"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the logarithm of the density of log s, that of an inverse Gamma variable."""
        return _log_gamma_density(self.nu, -log_scale)

    def profile(self, squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the kernel as a function of the squared distance."""
        if self.nu not in (0.5, 1.5, 2.5):
            return super().profile(squared_distance)
        return _matern(self.nu, 2 * self.nu * squared_distance)


@dataclasses.dataclass(frozen=True)
class RationalQuadratic(ScaleMixture):
    r"""The rational quadratic kernel, :math:`(1 + \tfrac{r^2}{2 \alpha})^{-\alpha}`.

    Here :math:`\alpha s` has the Gamma law of shape :math:`\alpha`.

    Attributes:
      alpha: Shape :math:`\alpha`, from 0.3 to 1e6. The larger it is, the closer the kernel is to
        the Gaussian one.

    Raises:
      TypeError: If ``alpha`` is not a number.
      ValueError: If ``alpha`` is below 0.3, where quadrature over s is not accurate, or above 1e6,
        where the kernel is the Gaussian one up to 1e-6.

    References:
      Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), Eq. 4.19,
      https://gaussianprocess.org/gpml
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _between("alpha", self.alpha, 0.3, 1e6))

    @property
    def step(self) -> float:
        """Distance of the nodes of log s, whose standard deviation is about alpha^(-1/2)."""
        return min(0.25, 0.5 * self.alpha**-0.5)

    def log_density(
        self, log_scale: Float64[np.ndarray, "*shape"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the logarithm of the density of log s, that of a Gamma variable."""
        return _log_gamma_density(self.alpha, log_scale)

    def profile(self, squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the kernel as a function of the squared distance."""
        return jnp.exp(-self.alpha * jnp.log1p(squared_distance / (2 * self.alpha)))


@dataclasses.dataclass(frozen=True)
class PoweredExponential(ScaleMixture):
    r"""The powered exponential kernel, :math:`e^{-r^p}` for p from 0.4 to 1.9.

    Its rows have an isotropic stable law: s / 2 is a positive stable variable of index p / 2. For p
    = 1 it is the Laplace kernel, like ``Matern(0.5)``. For p = 2 it would be the Gaussian kernel at
    a distance of :math:`\sqrt 2\, r`.

    Attributes:
      power: Exponent p.

    Raises:
      TypeError: If ``power`` is not a number.
      ValueError: If ``power`` is below 0.4, where quadrature over s is not accurate, or above 1.9:
        its time grows like 1 / (2 - p)^2, and a first draw takes half a minute at 1.9.

    References:
      Nolan, Univariate Stable Distributions (2020), Sec. 3.3 for the integral over angles,
      https://doi.org/10.1007/978-3-030-52915-4
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "power", _between("power", self.power, 0.4, 1.9))

    @property
    def step(self) -> float:
        """Distance of the nodes of log s, whose density begins steeply if p is near 2."""
        return 0.25 * min(1.0, 2 / self.power - 1)

    def log_density(
        self, log_scale: Float64[np.ndarray, "*shape"]
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the logarithm of the density of log s, by an integral over Kanter's angle."""
        index = self.power / 2
        odds = index / (1 - index)
        # Nodes of the logit of the angle over pi, because large s come from angles near pi.
        step = 0.4 * (1 - index)
        logits = np.arange(-38.0, 38 + index * _MOST, step)
        share, rest = 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(logits))
        log_a = (
            np.log(np.sin((1 - index) * np.pi * share))
            + odds * np.log(np.sin(index * np.pi * share))
            - (1 + odds) * np.log(np.sin(np.pi * np.minimum(share, rest)))
        )
        weights = step * share * rest
        log_stable = np.ravel(log_scale) - math.log(2)
        means = []
        for chunk in np.array_split(log_stable, 1 + log_stable.size // 512):
            # The density of log s over the angle, computed without cancellation.
            exponent = log_a - odds * chunk[:, None]
            with np.errstate(over="ignore"):
                means.append(np.exp(exponent - np.exp(exponent)) @ weights)
        with np.errstate(divide="ignore"):
            log_mean = np.log(np.concatenate(means))
        return math.log(odds) + log_mean.reshape(np.shape(log_scale))

    def profile(self, squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the kernel as a function of the squared distance."""
        positive = ~(squared_distance <= 0)  # NaN stays NaN.
        power = jnp.where(positive, squared_distance, 1) ** (self.power / 2)
        return jnp.exp(-jnp.where(positive, power, 0))


def _log_gamma_density(
    shape: float, log_value: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """Returns the log density of log g, where g has a Gamma law of mean 1."""
    with np.errstate(over="ignore"):
        log_density = shape * (math.log(shape) + log_value - np.exp(log_value))
    return log_density - math.lgamma(shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matern(nu: float, square: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the Matérn kernel as a function of z^2 = 2 nu r^2, for nu = 1/2, 3/2 or 5/2."""
    z = jnp.minimum(_root(square), _FAR)
    polynomial = {0.5: jnp.ones_like(z), 1.5: 1 + z, 2.5: 1 + z + z**2 / 3}[nu]
    return polynomial * jnp.exp(-z)


@_matern.defjvp
def _jvp_of_matern(
    nu: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # The derivatives of the root would be 0 where z is 0. That is kept for nu = 1/2, whose
    # derivative does not exist there.
    [square], [tangent] = primals, tangents
    if nu == 0.5:
        return jax.jvp(lambda x: jnp.exp(-_root(x)), primals, tangents)
    return _matern(nu, square), _matern(nu - 1, square) * tangent / (4 - 4 * nu)


def _root(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the square root, with the derivative 0 at 0."""
    positive = ~(x <= 0)  # NaN stays NaN.
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def _between(name: str, value: Any, least: float, most: float) -> float:
    """Returns a parameter as a Python number after checking it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most:,.10g}, got {value}.")
    return float(value)
