r"""Mean squared errors of trigonometric features for every kernel, coupling and law of norms.

Let :math:`z = |x - y|`, let s be the scale of the kernel, :math:`K(z) = E e^{-s z^2 / 2}`, and
:math:`q = s z^2 / 2`. The cosine features of two rows at the cosine c have the covariance

.. math::
    \tfrac12 K(z \sqrt{2 + 2c}) + \tfrac12 K(z \sqrt{2 - 2c}) - K(z)^2
    = \tfrac12 E \left(e^{-(1 - c) q} - e^{-(1 + c) q}\right)^2 + \operatorname{Var} e^{-q}

if their norms are equal, which for c = 1 is the variance of one row. If their norms are
independent, it is the Gegenbauer series of ``harmonics`` at imaginary distances,

.. math::
    \sum_{n > 0} N_{2n} P_{2n}(c)\, (E\, G_n(q))^2, \qquad
    G_n(q) = \frac{q^n}{\Gamma(n)} \int_0^1 y^{n + d/2 - 1} (1 - y)^{n - 1} e^{-q y}\, dy.

These forms keep their digits at small distances. All averages over s are one integral over
:math:`\log q`, in which the kernel enters only through its density: the nodes are the same for all
distances. For parallel rows, whose :math:`P_{2n}` are 1, the sum over large n is an integral over
:math:`\log n`, because far away its terms begin to fall only where n is about :math:`z \sqrt d`.

Antithetic and stratified norms are averaged over the norms themselves. A row of the norm a has
:math:`E \cos(w \cdot (x - y)) = \Lambda(a z)` with the characteristic function
:math:`\Lambda(r) = {}_0F_1(; \tfrac d2; -\tfrac{r^2}{4})` of a random direction, and two rows of
the norms a and a' have

.. math::
    E \cos \cos = \tfrac12 \Lambda(r_+ z) + \tfrac12 \Lambda(r_- z), \qquad
    r_\pm^2 = a^2 + a'^2 \pm 2 c a a'.

The law of the norms is smooth. After many radians the cosines therefore average out, except at the
edges of strata and where the phase of two rows is stationary. The quadrature multiplies
:math:`\Lambda` by a taper that falls smoothly from 1 to 0, and has nodes for the radians before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.norms import chi_of_normal, log_norm_of_normal
from simrf_jax._src.theory.harmonics import gegenbauer, log_multiplicities
from simrf_jax._src.theory.pairs import SAME_ROW, Pairs, Rows
from simrf_jax._src.theory.quadrature import Nodes, Vector, over_chunks, sum_by_ratios

# Nodes of several strata.
NodesOfStrata: TypeAlias = Float64[np.ndarray, "strata nodes"]

_LEAST, _MOST = -60.0, 80.0  # Range of log q.
_DEGREES = 256  # Terms of the series that are added up one by one.
_MOST_DEGREES = 1e12  # Terms beyond are negligible up to the largest distance.
_NODES = 256  # Nodes of the integral over y; a quarter as many from degree 8 on.
# The ratio at 0 is computed at this distance, and errors below it are a power of the distance.
# Averages over norms lose digits there.
_SMALLEST = {"chi": 1e-8, "shared": 1e-8, "pair": 1e-8, "antithetic": 1e-4}
_LARGEST = 1e8  # Farther away, rows of independent norms count as uncorrelated.
_LARGEST_NORMAL = 8.5  # Less than 1e-17 of all norms lie beyond it.
_RADIANS, _FALL = 400.0, 20.0  # Middle and width of the taper.
_MOST_RADIANS = _RADIANS + 5 * _FALL  # The taper is 0 to rounding beyond it.
_PANEL_NODES, _PANEL_RADIANS, _PANEL_WIDTH = 20, 30.0, 1.5  # Nodes and most extent of a panel.


def trigonometric_mse(t: Vector, rows: Rows, kernel: ScaleMixture) -> Vector:
    """Returns mean squared errors for a kernel other than the softmax kernel.

    Args:
      t: Squared distances, at least 0.
      rows: Rows of the projection.
      kernel: The kernel.
    """
    return _continued(lambda each: each.of_all(rows) / rows.num_rows, t, rows, kernel)


def trigonometric_ratio(t: Vector, rows: Rows, kernel: ScaleMixture) -> Vector:
    """Returns mean squared errors relative to those of iid rows, and their limit at 0.

    Args:
      t: Squared distances, at least 0.
      rows: Rows of the projection.
      kernel: The kernel.
    """
    return _over_chunks(lambda each: each.of_all(rows) / each.of(SAME_ROW), t, rows, kernel)


def trigonometric_gap(t: Vector, rows: Rows, kernel: ScaleMixture) -> Vector:
    """Returns the mean squared error of iid rows minus that of coupled rows.

    Args:
      t: Squared distances, at least 0.
      rows: Rows of the projection.
      kernel: The kernel.
    """
    return _continued(lambda each: -each.of_pairs(rows.pairs) / rows.num_rows, t, rows, kernel)


def pair_covariances(
    t: Vector, dim: int, cosines: Vector, kernel: ScaleMixture
) -> Float64[np.ndarray, "cosines n"]:
    """Returns the covariances of the cosines of two rows of independent norms.

    Args:
      t: Squared distances, at least 0.
      dim: Dimension d.
      cosines: Cosines of the angles between the rows.
      kernel: The kernel.
    """
    covariances = _Covariances(t, Rows(2, dim, "chi", ()), kernel)
    return np.stack([covariances.of(Pairs(1.0, cosine)) for cosine in cosines])


def _continued(
    function: Callable[[_Covariances], Vector], t: Vector, rows: Rows, kernel: ScaleMixture
) -> Vector:
    """Evaluates a function of the covariances, which is a power of small distances."""
    result, least = _over_chunks(function, t, rows, kernel), _least_distance(rows) ** 2
    if not np.any(t < least):
        return result
    small, larger = _over_chunks(function, np.array([1, 2]) * least, rows, kernel)
    power = np.log2(larger / small) if small * larger > 0 else 2.0
    return np.where(t < least, small * (t / least) ** power, result)


def _least_distance(rows: Rows) -> float:
    return _SMALLEST.get(rows.norms, 1e-4)


def _over_chunks(
    function: Callable[[_Covariances], Vector], t: Vector, rows: Rows, kernel: ScaleMixture
) -> Vector:
    """Evaluates a function of the covariances at squared distances, in bounded memory."""
    width = 1 if kernel == GAUSSIAN else _log_q(_step(kernel, rows.dim)).size
    return over_chunks(lambda t: function(_Covariances(t, rows, kernel)), t, width)


class _Covariances:
    """Covariances of the cosines of two rows at some distances."""

    def __init__(self, t: Vector, rows: Rows, kernel: ScaleMixture) -> None:
        self._dim, self._num_rows, self._kernel = rows.dim, rows.num_rows, kernel
        self._z = np.clip(np.sqrt(t), _least_distance(rows), _LARGEST)
        half_t = self._z**2 / 2
        if kernel == GAUSSIAN:
            self._q, self._weights = half_t, np.eye(half_t.size)
        else:
            step = _step(kernel, rows.dim)
            log_q = _log_q(step)
            log_density = kernel.log_density(log_q[:, None] - np.log(half_t))
            used = np.flatnonzero(np.any(log_density > -700, axis=1))
            self._nodes = int(used[0]), int(used[-1]) + 1  # The others have no weight.
            self._q = np.exp(log_q[slice(*self._nodes)])
            self._weights = step * np.exp(log_density[slice(*self._nodes)])

    def of_all(self, rows: Rows) -> Vector:
        """Returns the mean squared error of rows, multiplied by their number."""
        total = self.of_pairs(rows.kinds)
        if rows.norms == "stratified":
            uncoupled = rows.num_rows - 1 - sum(pair.weight for pair in rows.pairs)
            total += uncoupled * self.of_uncoupled_rows()
        return total

    def of_pairs(self, pairs: tuple[Pairs, ...]) -> Vector:
        """Returns the sum of the covariances of pairs, each times its weight."""
        return sum((pair.weight * self.of(pair) for pair in pairs), np.zeros_like(self._z))

    def of(self, pair: Pairs) -> Vector:
        """Returns the covariance for two rows of this kind, without the weight of the pairs."""
        if pair.norms == "equal":
            cosine = abs(pair.cosine)
            difference = np.exp(-(1 - cosine) * self._q) * -np.expm1(-2 * cosine * self._q)
            return difference**2 / 2 @ self._weights + self._variance_of_scales()
        if pair.norms == "antithetic":
            return np.array([self._antithetic(z, pair.cosine) for z in self._z])
        if pair.norms == "independent":
            return self._independent(pair.cosine)

        products = np.array([self._mean_product_in_strata(z, pair.cosine) for z in self._z])
        independent, (mean, _) = self._independent(pair.cosine), self._means_of_strata
        return independent + (independent + mean**2 - products) / (self._num_rows - 1)

    def of_uncoupled_rows(self) -> Vector:
        """Returns the covariance for two rows of independent directions and stratified norms."""
        mean, mean_square = self._means_of_strata
        return (mean**2 - mean_square) / max(self._num_rows - 1, 1)

    def _variance_of_scales(self) -> Vector:
        """Returns the variance of e^(-q)."""
        deficit = -np.expm1(-self._q)
        return deficit**2 @ self._weights - (deficit @ self._weights) ** 2

    def _independent(self, cosine: float) -> Vector:
        """Returns the covariance of two rows of independent norms."""
        if self._dim == 1:
            return np.zeros_like(self._z)
        if abs(cosine) == 1:
            return self._sum_over_all_degrees
        # The signs alternate, and a smooth cutoff is exact to rounding.
        n = np.arange(1.0, _DEGREES + 1)
        cutoff = special.erfc((n - 0.75 * _DEGREES) / (_DEGREES / 14)) / 2
        polynomials = gegenbauer(np.array(cosine), self._dim, 2 * _DEGREES)[2::2]
        return cutoff * polynomials @ self._first_terms

    @functools.cached_property
    def _first_terms(self) -> Float64[np.ndarray, "degrees n"]:
        """N_2n (E G_n)^2 for n = 1, ..., ``_DEGREES``."""
        return self._mean_coefficients(is_parallel=False) ** 2

    @functools.cached_property
    def _sum_over_all_degrees(self) -> Vector:
        """The sum of N_2n (E G_n)^2 over all n."""
        _, weights = _rule_of_degrees(self._dim)
        total = weights @ self._mean_coefficients(is_parallel=True) ** 2
        return np.where(self._z < _LARGEST, total, 0.0)

    def _mean_coefficients(self, *, is_parallel: bool) -> Float64[np.ndarray, "degrees n"]:
        """Returns the means of sqrt(N_2n) G_n(q) over s for ``_degrees``."""
        if self._kernel == GAUSSIAN:
            return _coefficients(self._q, self._dim, _degrees(self._dim, is_parallel))
        step = _step(self._kernel, self._dim)
        return _coefficients_at_nodes(step, *self._nodes, self._dim, is_parallel) @ self._weights

    def _antithetic(self, z: float, cosine: float) -> float:
        """Returns the covariance of two rows of antithetic norms at one distance."""

        def phases(normal: Nodes) -> Float64[np.ndarray, "4 nodes"]:
            norms, others = self._norm(normal), self._norm(-normal)
            resultants = [_resultant(norms, others, c) for c in (-cosine, cosine)]
            return z * np.stack([norms, others, *resultants])

        # The phases of pairs are stationary at equal norms, and oscillations count from there.
        grid = np.append(0.0, np.geomspace(1e-6, _LARGEST_NORMAL, 2000))
        at_grid = phases(grid)
        start = at_grid[:, :1] * [[0], [0], [1], [1]]
        radians = np.minimum(np.abs(at_grid - start) / self._unit, _MOST_RADIANS)
        total = np.abs(np.diff(radians, prepend=radians[:, :1])).sum(axis=0).cumsum()
        place = _place(grid, total)
        edges = np.linspace(0, place[-1], int(np.ceil(place[-1])) + 1)
        normal, weights = _normal_rule(edges, place, grid)
        at_nodes = phases(normal)
        taper = _taper(np.abs(at_nodes - start) / self._unit)
        deficits = _deficit(at_nodes, taper, self._dim) @ weights
        alone, together = deficits[:2].sum(), deficits[2:].sum()
        return alone - together / 2 - (alone / 2) ** 2

    def _mean_product_in_strata(self, z: float, cosine: float) -> float:
        """Returns the mean over strata of E (1 - cos) (1 - cos') for two norms of one stratum."""
        total, num_strata = 0.0, self._num_rows
        for normal, weights in self._strata(z):
            r = z * self._norm(normal)
            taper = _taper(r / self._unit)
            tapers = taper[:, :, None] * taper[:, None]
            total += 2 * np.sum(weights * _deficit(r, taper, self._dim))
            signed = {-cosine, cosine}
            for c in signed:
                resultants = _resultant(r[:, :, None], r[:, None], c)
                deficits = _deficit(resultants, tapers, self._dim)
                total -= np.einsum("ki,kj,kij->", weights, weights, deficits) / len(signed)
            if abs(cosine) == 1:
                # The cosine of the difference of two norms does not oscillate where they are
                # nearly equal. There the integral of Lambda replaces it beyond the taper.
                slope = z * (self._norm(normal + 1e-4) - self._norm(normal - 1e-4)) / 2e-4
                density = num_strata * np.exp(-(normal**2) / 2) / np.sqrt(2 * np.pi) / slope
                log_integral = special.gammaln(self._dim / 2) - special.gammaln(self._dim / 2 - 0.5)
                integral = np.sqrt(np.pi) * np.exp(log_integral)
                total += integral * np.sum(weights * (1 - taper**2) * density)
        return total / num_strata

    def _strata(self, z: float) -> Iterator[tuple[NodesOfStrata, NodesOfStrata]]:
        """Yields normal variables in some strata, and weights that add up to 1 in each stratum."""
        (grid, norms), num_strata = self._grid, self._num_rows
        place = _place(grid, np.minimum(z * norms / self._unit, _MOST_RADIANS))
        normal = special.ndtri(np.arange(num_strata + 1) / num_strata)
        edges = np.interp(normal, grid, place)
        num_panels = np.ceil(np.diff(edges)).astype(int)
        for panels in np.unique(num_panels):
            strata = np.flatnonzero(num_panels == panels)
            size = max(1, 2**18 // (_PANEL_NODES * panels) ** 2)  # Bounds the memory of pairs.
            for some in np.split(strata, range(size, strata.size, size)):
                places = np.linspace(edges[some], edges[some + 1], panels + 1, axis=-1)
                yield _normal_rule(places, place, grid)

    @functools.cached_property
    def _means_of_strata(self) -> tuple[Vector, Vector]:
        """The mean of 1 - cos, and the mean over strata of its squared mean in each stratum."""
        means = np.stack([self._means_in_strata(z) for z in self._z], axis=-1)
        return np.mean(means, axis=0), np.mean(means**2, axis=0)

    def _means_in_strata(self, z: float) -> Float64[np.ndarray, " strata"]:
        """Returns the means of 1 - cos in each stratum at one distance."""

        def mean(normal: NodesOfStrata, weights: NodesOfStrata) -> Float64[np.ndarray, " some"]:
            r = z * self._norm(normal)
            return np.sum(weights * _deficit(r, _taper(r / self._unit), self._dim), axis=-1)

        return np.concatenate([mean(*rule) for rule in self._strata(z)])

    @functools.cached_property
    def _grid(self) -> tuple[Nodes, Nodes]:
        """Normal variables, and the norms of such rows."""
        grid = np.linspace(-_LARGEST_NORMAL, _LARGEST_NORMAL, 4000)
        return grid, self._norm(grid)

    @property
    def _unit(self) -> float:
        """Radians are counted in this unit, because Lambda varies slowly in high dimensions."""
        return max(1.0, self._dim**0.5 / 2)

    @functools.cached_property
    def _norm(self) -> Callable[[Nodes], Nodes]:
        return _norm(self._kernel, self._dim)


def _step(kernel: ScaleMixture, dim: int) -> float:
    """Returns the distance of nodes of log q: G_n is narrower in higher dimensions."""
    return kernel.step / np.ceil(kernel.step * dim**0.5 / 1.4)


def _log_q(step: float) -> Nodes:
    return np.arange(_LEAST, _MOST, step)


@functools.lru_cache(maxsize=16)
def _rule_of_degrees(dim: int) -> tuple[Nodes, Nodes]:
    """Returns numbers n, the first of them 1 to ``_DEGREES``, and weights of a sum over all n > 0.

    The sum of the later terms f(n) is their integral, by a Gauss rule over panels of log n, plus
    f' / 24 at its lower end, the correction of the midpoint rule.
    """
    first, last = np.log(_DEGREES + 0.5), np.log(_MOST_DEGREES)
    edges = np.linspace(first, last, int(np.ceil(16 * max(1.0, dim**0.5 / 4))) + 1)
    roots, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
    half = np.diff(edges)[:, None] / 2
    later = np.exp(edges[:-1, None] + half * (1 + roots))
    n = np.concatenate([np.arange(1.0, _DEGREES + 2), later.ravel()])
    weights_of_n = np.concatenate([np.ones(_DEGREES), [0.0], (half * weights * later).ravel()])
    weights_of_n[_DEGREES - 1 : _DEGREES + 1] += np.array([-1, 1]) / 24
    return n, weights_of_n


def _degrees(dim: int, is_parallel: bool) -> Nodes:
    """Returns the numbers n of the terms that two rows need."""
    return _rule_of_degrees(dim)[0] if is_parallel else np.arange(1.0, _DEGREES + 1)


@functools.lru_cache(maxsize=8)
def _coefficients_at_nodes(
    step: float, first: int, end: int, dim: int, is_parallel: bool
) -> Float64[np.ndarray, "degrees nodes"]:
    return _coefficients(np.exp(_log_q(step)[first:end]), dim, _degrees(dim, is_parallel))


def _coefficients(q: Vector, dim: int, degrees: Nodes) -> Float64[np.ndarray, "degrees n"]:
    """Returns sqrt(N_2n) G_n(q) for the numbers n."""
    log_n = log_multiplicities(dim, 2 * degrees) / 2
    result = np.empty((degrees.size, q.size))
    for i, n in enumerate(degrees):
        # In the logit of y the integrand is log-concave, with tail slopes n + d/2 and -n.
        a, b = n + dim / 2, 2 * n + dim / 2 + q
        peak = 2 * a / (b + np.sqrt(b**2 - 4 * q * a))
        width = (peak * (1 - peak) * (2 * n + dim / 2 + q * (1 - 2 * peak))) ** -0.5
        left, right = np.maximum(9 * width, 40 / a), np.maximum(9 * width, 40 / n)
        num_nodes = _NODES if n < 8 else _NODES // 4
        step = (left + right) / (num_nodes - 1)
        logit = special.logit(peak) - left + step * np.arange(num_nodes)[:, None]
        log_y, log_rest = special.log_expit(logit), special.log_expit(-logit)
        log_integrand = a * log_y + n * log_rest - q * np.exp(log_y)
        largest = np.max(log_integrand, axis=0)
        total = np.sum(np.exp(log_integrand - largest), axis=0)
        log_integral = np.log(total) + largest + np.log(step)
        result[i] = np.exp(log_n[i] + n * np.log(q) - special.gammaln(n) + log_integral)
    return result


def _one_minus_lambda(r: Float64[np.ndarray, "*shape"], dim: int) -> Float64[np.ndarray, "*shape"]:
    r"""Returns :math:`1 - {}_0F_1(; d/2; -r^2/4)`, without cancellation for small r."""
    result = np.empty_like(r)
    small = r**2 < 32 * dim
    x = r[small] ** 2 / 4
    result[small] = sum_by_ratios(2 * x / dim, lambda k: -x / ((k + 2) * (dim / 2 + k + 1)), 100)
    large = r[~small]
    bessel = special.jv(dim / 2 - 1, large)
    with np.errstate(divide="ignore"):
        log_size = np.log(np.abs(bessel)) + special.gammaln(dim / 2)
    log_size += (dim / 2 - 1) * np.log(2 / large)
    result[~small] = 1 - np.sign(bessel) * np.exp(log_size)
    return result


def _resultant(
    r: Float64[np.ndarray, "*#shape"], other: Float64[np.ndarray, "*#shape"], cosine: float
) -> Float64[np.ndarray, "*shape"]:
    """Returns the length of the sum of two vectors of given lengths and cosine."""
    return np.sqrt(np.maximum(r**2 + other**2 + 2 * cosine * r * other, 0))


def _deficit(
    r: Float64[np.ndarray, "*shape"], taper: Float64[np.ndarray, "*shape"], dim: int
) -> Float64[np.ndarray, "*shape"]:
    """Returns 1 minus the tapered characteristic function of a random direction."""
    return 1 - taper + taper * _one_minus_lambda(r, dim)


def _taper(radians: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Returns a factor of cosines that have turned by this many radians."""
    return special.erfc((radians - _RADIANS) / _FALL) / 2


def _place(normal: Nodes, radians: Nodes) -> Nodes:
    """Returns an increasing function of the normal variable that grows by 1 in each panel."""
    return normal / _PANEL_WIDTH + radians / _PANEL_RADIANS


def _normal_rule(
    places: Float64[np.ndarray, "*strata edges"],
    place: Float64[np.ndarray, " points"],
    grid: Float64[np.ndarray, " points"],
) -> tuple[Float64[np.ndarray, "*strata nodes"], Float64[np.ndarray, "*strata nodes"]]:
    """Returns nodes of a standard normal variable in panels, and weights that add up to 1.

    Args:
      places: Places of the panels' edges.
      place: Places of the normal variables of the grid.
      grid: Normal variables.
    """
    edges = np.interp(places, place, grid)[..., None]
    roots, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
    half = np.diff(edges, axis=-2) / 2
    normal = edges[..., :-1, :] + half * (1 + roots)
    weights = half * weights * np.exp(-(normal**2) / 2)
    normal, weights = (x.reshape(*places.shape[:-1], -1) for x in (normal, weights))
    return normal, weights / weights.sum(axis=-1, keepdims=True)


def _norm(kernel: ScaleMixture, dim: int) -> Callable[[Nodes], Nodes]:
    """Returns the increasing function from standard normal variables to norms of rows."""
    if kernel == GAUSSIAN:
        return functools.partial(chi_of_normal, dim=dim)
    log_norm = log_norm_of_normal(kernel, dim)
    return lambda normal: np.exp(log_norm(normal))
