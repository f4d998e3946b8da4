"""Laws of the row norms: those of a kernel (independent, coupled or stratified), or fixed norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Key

from simrf_jax._src import checks
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.couplings import Coupling
from simrf_jax._src.projections.row_blocks import CrossPolytope, EqualRowBlocks, RowBlock

if TYPE_CHECKING:
    from scipy.interpolate import CubicSpline

# Laws that give all rows the same weight, so W is an array.
UnweightedNorms: TypeAlias = Literal[
    "chi", "sqrt_dim", "antithetic", "shared", "pair", "stratified"
]
Norms: TypeAlias = Literal[UnweightedNorms, "radau"]
NORMS = get_args(Norms)
# The squares of these norms are not chi-squared variables, so any tilt of W would be biased.
FIXED_NORMS = ("sqrt_dim", "radau")

# No normal variable of JAX is further from zero, in float32 or in float64.
_LARGEST_NORMAL = 8.5
_NUM_NODES = 545
_LEAST, _MOST = -60.0, 60.0  # Range of the log norm, without its chi variable.
_NEGLIGIBLE = 90.0  # Scales whose log density is this far below the largest are left out.


def check_norms(norms: Norms, coupling: Coupling, kernel: ScaleMixture) -> None:
    """Raises ``ValueError`` unless rows of the coupling can have this law of norms.

    Args:
      norms: Joint law of the row norms.
      coupling: One of ``COUPLINGS``.
      kernel: Kernel that determines the law of each norm.

    Raises:
      TypeError: If the kernel is not a ``ScaleMixture``.
    """
    checks.one_of("norms", norms, NORMS)
    if not isinstance(kernel, ScaleMixture):
        raise TypeError(
            "kernel must be a simrf_jax.kernels.ScaleMixture, such as simrf_jax.kernels.Matern(), "
            f"got {kernel!r}."
        )
    if norms in FIXED_NORMS and kernel != GAUSSIAN:
        raise ValueError(
            f"norms={norms!r} fixes the norms of rows for the Gaussian kernel, got kernel={kernel}."
        )
    if coupling == "iid" and norms in ("antithetic", "shared"):
        raise ValueError(
            f"norms={norms!r} couples the norms of a row block, and coupling='iid' has no row "
            "blocks."
        )
    if coupling != "cross_polytope" and norms == "pair":
        raise ValueError(
            "norms='pair' gives one norm to a row and its negative, which only "
            f"coupling='cross_polytope' has, got coupling={coupling!r}."
        )


def squared_norm(norms: Norms, dim: int) -> float:
    """Returns the squared norm that a law of ``FIXED_NORMS`` gives all rows except the zero row.

    Args:
      norms: ``"sqrt_dim"`` or ``"radau"``.
      dim: Dimension d in which the rows have this norm.
    """
    return dim if norms == "sqrt_dim" else dim + 2.0


def radau_log_weights(
    num_features: int, dim: int, dtype: jnp.dtype
) -> Float[Array, " {num_features}"]:
    r"""Returns the log weights of ``norms="radau"``, whose last row is zero.

    The weights over m are those of the Gauss-Radau rule for the norm of a normal vector,
    :math:`2 / (d + 2)` for the zero row and :math:`d / (d + 2)` for all others together.

    Args:
      num_features: Number of rows m, including the zero row.
      dim: Dimension d in which the other rows have the norm :math:`\sqrt{d + 2}`.
      dtype: Floating type of the result.
    """
    of_others = dim * num_features / ((dim + 2) * (num_features - 1))
    of_zero_row = 2 * num_features / (dim + 2)
    log_weights = np.full(num_features, math.log(of_others))
    log_weights[-1] = math.log(of_zero_row)
    return jnp.asarray(log_weights, dtype)


def draw_norms(
    key: Key[Array, ""],
    norms: Norms,
    kernel: ScaleMixture,
    num_rows: int,
    row_blocks: Sequence[EqualRowBlocks],
    dim: int,
    dtype: jnp.dtype,
) -> Float[Array, " {num_rows}"]:
    """Draws the norms of all rows.

    Args:
      key: A typed PRNG key.
      norms: Joint law of the row norms.
      kernel: Kernel that determines the law of each norm.
      num_rows: Number of rows.
      row_blocks: Row blocks of the rows; coupled norms need them.
      dim: Dimension d in which the rows have these norms.
      dtype: Floating type of the norms.
    """
    if norms in FIXED_NORMS:
        return jnp.full(num_rows, squared_norm(norms, dim) ** 0.5, dtype)
    if norms == "stratified":
        normal = _stratified_normal(key, num_rows, dtype)
    else:
        normal = jax.random.normal(key, (num_rows,), dtype)
    if norms not in ("chi", "stratified"):
        source, sign = _couple(norms, row_blocks)
        normal = jnp.asarray(sign, dtype) * normal[source]
    return norms_of_normal(normal, kernel, dim)


def _stratified_normal(key: Key[Array, ""], num_rows: int, dtype: jnp.dtype) -> Float[Array, " n"]:
    """Draws standard normal variables, one from each of equally probable strata, in any order."""
    order, place = jax.random.split(key)
    within = jax.random.uniform(place, (num_rows,), dtype, minval=jnp.finfo(dtype).tiny)
    strata = jax.random.permutation(order, num_rows).astype(dtype)
    uniform = (strata + within) / num_rows
    # Probabilities near 0 have more digits than those near 1, and large norms need them.
    return -jax.scipy.special.ndtri(uniform)


def _couple(
    norms: Norms, row_blocks: Sequence[EqualRowBlocks]
) -> tuple[Int[np.ndarray, " num_features"], Int[np.ndarray, " num_features"]]:
    """Returns, for each row, the row whose normal variable it shares, and the sign."""
    sources, signs, first_row = [], [], 0
    for block, repeats in row_blocks:
        size = _rows_together(norms, block)
        place = np.arange(block.num_rows) % size
        is_mirrored = (norms == "antithetic") & (place >= size / 2)
        for _ in range(repeats):
            sources.append(first_row + np.arange(block.num_rows) - place)
            signs.append(np.where(is_mirrored, -1, 1))
            first_row += block.num_rows
    return np.concatenate(sources), np.concatenate(signs)


def _rows_together(norms: Norms, block: RowBlock | CrossPolytope) -> int:
    """Returns the number of consecutive rows whose norms depend on each other."""
    if norms == "shared":
        return block.num_rows
    # Antithetic norms of a cross-polytope belong to two pairs; the rows of a pair share a norm.
    return 4 if norms == "antithetic" and isinstance(block, CrossPolytope) else 2


def norms_of_normal(
    normal: Float[Array, "*shape"], kernel: ScaleMixture, dim: int
) -> Float[Array, "*shape"]:
    r"""Maps standard normal variables to norms of rows, :math:`F^{-1}(\Phi(z))`.

    The map is increasing, so z and -z give antithetic norms: their values of the distribution
    function F add up to one.

    Args:
      normal: Standard normal variables z.
      kernel: Kernel that determines the law F of each norm, such as chi for the Gaussian one.
      dim: Dimension d of the rows.

    Returns:
      Norms, accurate to a few units in the last place of float32 if they are chi variables.

    Example:
      >>> import jax.numpy as jnp
      >>> norms = norms_of_normal(jnp.array([-1.0, 0.0, 1.0]), GAUSSIAN, 64)
      >>> print(*(f"{norm:.4f}" for norm in norms))
      7.2626 7.9583 8.6750
    """
    coefficients = jnp.asarray(_spline(kernel, dim), normal.dtype)
    step = 2 * _LARGEST_NORMAL / (_NUM_NODES - 1)
    place = jnp.clip((normal + _LARGEST_NORMAL) / step, 0, _NUM_NODES - 1)
    piece = jnp.minimum(place.astype(jnp.int32), _NUM_NODES - 2)
    offset = place - piece.astype(place.dtype)
    cubic, square, linear, constant = coefficients[:, piece]
    value = ((cubic * offset + square) * offset + linear) * offset + constant
    return value if kernel == GAUSSIAN else jnp.exp(value)


@functools.lru_cache(maxsize=16)
def _spline(kernel: ScaleMixture, dim: int) -> Float64[np.ndarray, "4 pieces"]:
    """Returns a cubic spline of the chi variable, or of the log norm for another kernel.

    The nodes are equally spaced normal variables, and offsets in each piece go from 0 to 1.
    """
    # Imported here because SciPy takes longer to import than this library, and not every law needs
    # it.
    from scipy import interpolate

    nodes = np.linspace(-_LARGEST_NORMAL, _LARGEST_NORMAL, _NUM_NODES)
    is_chi = kernel == GAUSSIAN
    values = chi_of_normal(nodes, dim) if is_chi else log_norm_of_normal(kernel, dim)(nodes)
    return interpolate.CubicSpline(np.arange(_NUM_NODES), values).c


def chi_of_normal(normal: Float64[np.ndarray, "*shape"], dim: int) -> Float64[np.ndarray, "*shape"]:
    """Maps standard normal variables to chi variables with d degrees of freedom, in NumPy."""
    from scipy import special

    # XLA has no inverse of the incomplete gamma function, and its incomplete gamma function loses
    # four digits of float32 in high dimensions.
    tail = special.ndtr(-np.abs(normal))
    below, above = special.gammaincinv(dim / 2, tail), special.gammainccinv(dim / 2, tail)
    return np.sqrt(2 * np.where(normal < 0, below, above))


@functools.lru_cache(maxsize=16)
def log_norm_of_normal(kernel: ScaleMixture, dim: int) -> CubicSpline:
    r"""Returns the function from a standard normal variable to the log norm of a kernel's rows.

    It is :math:`\log F^{-1}(\Phi(z))`, where F is the distribution function of
    :math:`\sqrt s\, \chi_d`.

    Args:
      kernel: Kernel other than the Gaussian one.
      dim: Dimension d of the rows.
    """
    from scipy import interpolate, special

    # log(sqrt(s) chi) is a sum, whose density is a convolution. The density of log chi has a width
    # of about d^(-1/2). Splines integrate it to six digits.
    step = min(kernel.step / 8, 0.03 * dim**-0.5)
    log_roots = np.arange(_LEAST, _MOST, step)
    log_density = kernel.log_density(2 * log_roots)
    kept = np.flatnonzero(log_density > np.max(log_density) - _NEGLIGIBLE)
    used = slice(kept[0], kept[-1] + 1)
    log_roots, log_density = log_roots[used], log_density[used]
    shortest, longest = special.gammaincinv(dim / 2, 1e-20), special.gammainccinv(dim / 2, 1e-20)
    log_chis = np.arange(np.log(2 * shortest) / 2, np.log(2 * longest) / 2 + step, step)
    chi_density = dim * log_chis - np.exp(2 * log_chis) / 2
    chi_density = np.exp(chi_density - special.logsumexp(chi_density))
    density = np.convolve(2 * np.exp(log_density), chi_density)
    log_norms = log_roots[0] + log_chis[0] + step * np.arange(density.size)
    below = interpolate.CubicSpline(log_norms, density).antiderivative()(log_norms)
    above = interpolate.CubicSpline(log_norms, density[::-1]).antiderivative()(log_norms)[::-1]
    below, above = below / below[-1], above / below[-1]
    normal = np.where(below < above, special.ndtri(below), -special.ndtri(above))
    inside = np.abs(normal) < _LARGEST_NORMAL + 0.5
    normal, log_norms = normal[inside], log_norms[inside]
    rises = np.diff(normal, prepend=-np.inf) > 0
    return interpolate.CubicSpline(normal[rises], log_norms[rises])
