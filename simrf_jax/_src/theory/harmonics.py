r"""Covariances of kernel estimates in spherical harmonics (Gegenbauer series, Funk-Hecke).

For two sums :math:`u = x + y` and :math:`u' = x' + y'` of lengths v and v', and two rows
:math:`a s` and :math:`a' s'` under a common Haar rotation,

.. math::
    E f(u) f'(u') = \sum_k N_k P_k(s \cdot s')\, P_k(\cos(u, u'))\, E \psi_k(a, v) \psi_k(a', v'),

where :math:`P_k` are the Gegenbauer polynomials with :math:`P_k(1) = 1`, :math:`N_k` is the number
of harmonics of degree k, and

.. math::
    \psi_k(a, v) = (1 - 4A)^{d/2} e^{2A a^2 - v^2/2} B_k\big(\sqrt{1 - 4A}\, a v\big), \qquad
    B_k(z) = \Big(\frac z2\Big)^k \frac{\Gamma(\frac d2)}{\Gamma(k + \frac d2)}\,
    {}_0F_1\Big(; k + \tfrac d2; \tfrac{z^2}{4}\Big).

For equal norms, Weber's second exponential integral of Bessel functions (DLMF 10.43.28) gives

.. math::
    E \psi_k(a, v) \psi_k(a, v') = \Big(\frac{1 + \rho}{2 \sqrt\rho}\Big)^d
    e^{(\rho - 1) (v^2 + v'^2) / 4} B_k\Big(\frac{1 + \rho}{2} v v'\Big), \qquad
    \rho = \frac{1}{1 - 8A}.

For independent norms the expectation is the product of the means :math:`g_k(v) g_k(v')`, which do
not depend on A:

.. math::
    g_k(v) = \Big(\frac{v}{\sqrt 2}\Big)^k e^{-v^2/2} \sum_j \frac{(v^2/2)^j}{j!}
    \frac{\Gamma(\frac{d + k}{2} + j)}{\Gamma(k + \frac d2 + j)}.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike
from scipy import special

from simrf_jax._src import checks
from simrf_jax._src.projections import FIXED_NORMS, BlockMode, Norms
from simrf_jax._src.projections.norms import squared_norm
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import ClosedFormCoupling
from simrf_jax._src.theory.pairs import NormRelation, Pairs, coupled_rows
from simrf_jax._src.theory.positive import bias, excess_of_rho, log_inflation, rule_of_features
from simrf_jax._src.theory.quadrature import Nodes, Vector, log_hyp0f1

Radial: TypeAlias = Float64[np.ndarray, "orders nodes n"]  # For each degree, norm and distance.
_PANELS = 16  # Panels of the quadrature over antithetic norms, which keep 10 digits.


def estimate_covariance(
    sums: ArrayLike,
    num_features: int,
    *,
    coupling: ClosedFormCoupling,
    norms: Norms = "chi",
    parameter: float = 0.0,
    block: BlockMode = "regular",
) -> Float64[np.ndarray, "n n"]:
    r"""Returns the exact covariance of the relative errors of kernel estimates from one W.

    .. math::
        E \Big(\frac{\hat K(x_i, y_i)}{K(x_i, y_i)} - 1\Big)
        \Big(\frac{\hat K(x_j, y_j)}{K(x_j, y_j)} - 1\Big), \qquad u_i = x_i + y_i

    The matrix depends only on the sums u, and is the same for the Gaussian and the softmax kernel.
    Its diagonal is the relative mean squared error, including the bias of fixed norms. The features
    are positive features, or optimal positive features if ``parameter`` is not 0.

    Args:
      sums: Sums u = x + y, ``[n, dim]``, with dim of at least 2.
      num_features: Number of rows m of the projection.
      coupling: Coupling of the rows; see ``kernel_mse``.
      norms: Law of the row norms; see ``kernel_mse``.
      parameter: Parameter A of the features, one number; see ``kernel_mse``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.

    Returns:
      float64 matrix. For v from 0.1 to 40, its errors are at most 1e-10 of the diagonal that iid
      rows have. If these overflow, entries are infinite or NaN. The number of terms of the series
      grows like the largest v^2.

    Raises:
      TypeError: If ``num_features`` is not an integer, or an array is not real.
      ValueError: If a name is unknown, arguments do not fit each other, or a number is out of
        range.

    Example:
      >>> import numpy as np
      >>> sums = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
      >>> np.round(estimate_covariance(sums, 4, coupling="simplex"), 6)
      array([[0.22164 , 0.019001],
             [0.019001, 0.22164 ]])

    References:
      Müller, Spherical Harmonics (1966), for the Funk-Hecke theorem,
      https://doi.org/10.1007/BFb0094775
    """
    array = checks.real("sums", sums)
    if array.ndim != 2 or array.shape[-1] < 2 or not np.all(np.isfinite(array)):
        raise ValueError(
            f"sums must be [n, dim] with dim of at least 2, and finite, got shape {array.shape}."
        )
    rows = coupled_rows(num_features, array.shape[-1], coupling, block, norms)
    moments = RowCovariances(array, arguments.one_parameter(parameter, norms), norms)
    total = sum(pair.weight * moments.of(pair) for pair in rows.kinds)
    return rows.weight**2 / rows.num_rows * total + moments.bias_product


class RowCovariances:
    """Covariances of the relative estimates of two rows.

    Attributes:
      norms: Law of the norms.
      dim: Dimension d.
      degrees: Largest degree of the series.
      bias_product: Products of the biases, ``[n, n]``.
    """

    def __init__(
        self, sums: Float64[np.ndarray, "n dim"], parameter: float | Vector, norms: Norms
    ) -> None:
        """Prepares the covariances at some sums u = x + y.

        Args:
          sums: Sums u.
          parameter: Parameter A of the features. If there is one for each axis, only
            ``of_parallel_rows`` has a closed form.
          norms: Law of the norms.
        """
        self.norms = norms
        self.dim = sums.shape[1]
        self._sums, self._parameters = sums, np.broadcast_to(parameter, self.dim)
        self._gram = sums @ sums.T
        self._squares = np.diagonal(self._gram)
        largest = np.max(self._squares, initial=0.0)
        if norms == "shared":  # A positive parameter then has the effect of longer sums.
            largest *= 1 + max(0.0, np.max(excess_of_rho(self._parameters))) / 2
        self.degrees = int(largest + 9 * np.sqrt(largest) + 14)
        biases = bias(self._squares, self.dim, norms)
        self.bias_product = np.outer(biases, biases)

    def of(self, pair: Pairs) -> Float64[np.ndarray, "n n"]:
        """Returns E f f' - E f E f' for two rows of this kind, without the weight of the pairs."""
        if is_parallel(pair, self.norms):
            return self.of_parallel_rows(pair.cosine)
        polynomials = gegenbauer(np.array(pair.cosine), self.dim, self.degrees)
        return np.tensordot(polynomials, self.of_degrees(pair.norms), axes=1)

    def of_parallel_rows(self, cosine: float) -> Float64[np.ndarray, "n n"]:
        """Returns the covariances for the rows w and w, or w and -w."""
        # The square of u + u' is expanded, so that the cross terms are one matrix product.
        tilted = excess_of_rho(self._parameters) / 4 * self._sums
        own, cross = np.sum(tilted * self._sums, axis=1), tilted @ self._sums.T
        exponent = own[:, None] + own + cosine * (self._gram + 2 * cross)
        return np.expm1(np.sum(log_inflation(self._parameters, 1)) + exponent)

    def of_degrees(self, relation: NormRelation) -> Float64[np.ndarray, "degrees n n"]:
        """Returns N_k P_k(cos(u, u')) E psi_k psi_k' for each degree k, minus 1 at k = 0."""
        # At a distance of 0 only degree 0 contributes, so the cosine does not matter.
        lengths = np.sqrt(np.where(self._squares > 0, self._squares, 1))
        cosines = np.clip(self._gram / np.outer(lengths, lengths), -1, 1)
        return gegenbauer(cosines, self.dim, self.degrees) * self._radial_products(relation)

    def _radial_products(self, relation: NormRelation) -> Float64[np.ndarray, "degrees n n"]:
        """Returns N_k E psi_k psi_k' for each degree k, minus 1 at k = 0."""
        distances = np.sqrt(self._squares)
        parameter = float(self._parameters[0])
        if self.norms in FIXED_NORMS:
            norms = np.sqrt([squared_norm(self.norms, self.dim)])
            values = radial_coefficients(norms, distances, self.dim, parameter, self.degrees)[:, 0]
        elif relation == "independent":
            values = mean_coefficients(distances, self.dim, self.degrees)
        elif relation == "equal":
            return self._products_of_equal_norms(parameter)
        else:
            return self._products_of_antithetic_norms(parameter)
        products = values[:, :, None] * values[:, None]
        products[0] = 0  # The product of the means.
        return products

    def _products_of_antithetic_norms(self, parameter: float) -> Float64[np.ndarray, "degrees n n"]:
        """Returns N_k E psi_k(a, v) psi_k(a', v') for each degree k, minus 1 at k = 0."""
        largest = np.max(self._squares, initial=0.0)
        *both, log_weights = rule_of_features(largest, parameter, self.dim, _PANELS)
        options = (np.sqrt(self._squares), self.dim, parameter, self.degrees, log_weights / 2)
        values, others = (radial_coefficients(norms, *options) for norms in both)
        products = np.swapaxes(values, 1, 2) @ others
        products = (products + np.swapaxes(products, 1, 2)) / 2
        products[0] -= 1
        return products

    def _products_of_equal_norms(self, parameter: float) -> Float64[np.ndarray, "degrees n n"]:
        """Returns N_k E psi_k(a, v) psi_k(a, v') for each degree k, minus 1 at k = 0."""
        excess, lengths = excess_of_rho(parameter), np.sqrt(self._squares)
        log_scale = excess / 4 * (self._squares[:, None] + self._squares)
        log_scale += log_inflation(parameter, self.dim)
        z = (1 + excess / 2) * lengths[:, None] * lengths
        log_products = log_scale + log_bessel(z, self.dim, self.degrees)
        log_n = log_multiplicities(self.dim, np.arange(self.degrees + 1.0))
        products = np.exp(log_products + log_n[:, None, None])
        products[0] = np.expm1(log_products[0])
        return products


def is_parallel(pair: Pairs, norms: Norms) -> bool:
    """Returns whether the rows are w and w, or w and -w, for which there is a closed form.

    Args:
      pair: Kind of the pair.
      norms: Law of the norms; fixed norms have no closed form.
    """
    is_random = norms not in FIXED_NORMS
    return is_random and pair.norms == "equal" and abs(pair.cosine) == 1


def gegenbauer(
    cosines: Float64[np.ndarray, "*shape"], dim: int, degrees: int
) -> Float64[np.ndarray, "*orders"]:
    """Returns the Gegenbauer polynomials P_k with P_k(1) = 1 for k = 0, ..., ``degrees``.

    Args:
      cosines: Arguments in [-1, 1].
      dim: Dimension d, at least 2.
      degrees: Largest k, at least 1.

    Example:
      >>> import numpy as np
      >>> gegenbauer(np.array([-1.0, 0.0, 1.0]), 3, 2)  # Legendre polynomials
      array([[ 1. ,  1. ,  1. ],
             [-1. ,  0. ,  1. ],
             [ 1. , -0.5,  1. ]])
    """
    result = np.empty((degrees + 1, *cosines.shape))
    result[0], result[1] = 1, cosines
    for k in range(1, degrees):
        raised = (2 * k + dim - 2) * cosines * result[k] - k * result[k - 1]
        result[k + 1] = raised / (k + dim - 2)
    return result


def mean_coefficients(distances: Vector, dim: int, degrees: int) -> Float64[np.ndarray, "orders n"]:
    """Returns sqrt(N_k) g_k(v) for k = 0, ..., ``degrees``.

    Args:
      distances: Norms v.
      dim: Dimension d, at least 2.
      degrees: Largest k.
    """
    half_t = distances**2 / 2
    largest = np.max(half_t, initial=0.0)
    k = np.arange(degrees + 1.0)
    j = np.arange(int(largest + 12 * np.sqrt(largest) + 40.0))[:, None]
    log_ratios = special.gammaln((dim + k) / 2 + j) - special.gammaln(k + dim / 2 + j)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_poisson = special.xlogy(j, half_t) - half_t - special.gammaln(j + 1)
        averages = np.exp(log_ratios - log_ratios[0]).T @ np.exp(log_poisson)
        log_powers = special.xlogy(k[:, None], distances**2 / 2) / 2
        log_scale = log_ratios[0] + log_multiplicities(dim, np.arange(degrees + 1.0)) / 2
        return averages * np.exp(log_powers + log_scale[:, None])


def radial_coefficients(
    norms: Nodes,
    distances: Vector,
    dim: int,
    parameter: float,
    degrees: int,
    log_scale: float | Nodes = 0.0,
) -> Radial:
    """Returns sqrt(N_k) psi_k(a, v) e^log_scale for k = 0, ..., ``degrees``.

    Args:
      norms: Norms a of rows.
      distances: Norms v.
      dim: Dimension d, at least 2.
      parameter: Parameter A of the features.
      degrees: Largest k.
      log_scale: Logarithms of factors, one for each norm, without which the result may overflow.
    """
    z = np.sqrt(1 - 4 * parameter) * norms[:, None] * distances
    log_weights = dim / 2 * np.log1p(-4 * parameter) + 2 * parameter * norms**2 + log_scale
    result = log_bessel(z, dim, degrees)
    result += log_multiplicities(dim, np.arange(degrees + 1.0))[:, None, None] / 2
    result += log_weights[:, None] - distances**2 / 2
    return np.exp(result, out=result)


def log_bessel(
    z: Float64[np.ndarray, "*shape"], dim: int, degrees: int
) -> Float64[np.ndarray, "*orders"]:
    """Returns the logarithms of B_k(z) for k = 0, ..., ``degrees``.

    Args:
      z: Numbers of at least 0.
      dim: Dimension d, at least 2.
      degrees: Largest k.
    """
    b = dim / 2 + degrees
    log_ratio = log_hyp0f1(b + 1, (z / 2) ** 2) - log_hyp0f1(b, (z / 2) ** 2)
    ratio = z / (2 * b) * np.exp(log_ratio)
    # B_k / B_(k - 1) follows from B_(k + 1) / B_k by the recurrence of Bessel functions, which has
    # no negative terms in this direction.
    result = np.empty((degrees + 1, *z.shape))
    for k in range(degrees, 0, -1):
        result[k] = ratio = z / (2 * k + dim - 2 + z * ratio)
    with np.errstate(divide="ignore"):
        np.log(result[1:], out=result[1:])
    result[0] = log_hyp0f1(dim / 2, (z / 2) ** 2)
    return np.cumsum(result, axis=0, out=result)


def log_multiplicities(dim: int, k: Vector) -> Vector:
    """Returns the log of N_k, the number of spherical harmonics of degree k."""
    positive = np.maximum(k, 1)
    log_n = np.log(2 * positive + dim - 2) + special.gammaln(positive + dim - 2)
    log_n -= special.gammaln(positive + 1) + special.gammaln(dim - 1)
    return np.where(k > 0, log_n, 0.0)
