"""Mixture projections: rows around several centers, with weights that keep estimates unbiased."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float64, Int, Key

from simrf_jax._src import checks
from simrf_jax._src.projections.record import DrawOptions, Projection


def draw_mixture_projection(
    key: Key[Array, ""],
    centers: Float[ArrayLike, "num_centers dim"],
    num_features: int,
    *,
    weights: Sequence[float] | None = None,
    options: DrawOptions | None = None,
) -> Projection:
    r"""Draws a projection whose rows lie around centers, with weights that keep estimates unbiased.

    Component c of the mixture gets a fixed share :math:`\pi_c` of the rows, drawn from
    :math:`N(\mu_c, I)` and coupled with each other. The weight of a row is the density of the
    standard normal law over that of the mixture, whichever component the row comes from,

    .. math::
        e^{l(w)} = \frac{N(w; 0, I)}{\sum_c \pi_c N(w; \mu_c, I)}.

    Positive features estimate the kernel best with rows around x + y. The relative second moment of
    one row is at most :math:`\min_c e^{|x + y - \mu_c|^2} / \pi_c`, instead of :math:`e^{|x +
    y|^2}`, so rows near the centers of the pairs that matter lower the error.
    ``simrf_jax.calibration.fit_mixture`` fits the centers to queries and keys.

    A calibrated map with a tilt applies the weights of its tilt as well. Both factors together
    leave the estimates unbiased, because the weights here are relative to the law of rows that the
    map assumes.

    Args:
      key: A typed PRNG key. ``jax.vmap`` over keys and centers draws a projection for each head.
      centers: Centers :math:`\mu`, in the coordinates of the rows.
      num_features: Number of rows m, at least one for each center.
      weights: Positive number for each center, to which the numbers of rows are nearly
        proportional. Each component has at least one row. The default is equal shares.
      options: Coupling and norms of the rows of each component about its center, by default
        ``DrawOptions()``; see ``draw_projection``. Fixed norms and other kernels are refused.

    Returns:
      W, whose rows are ordered by component. To redraw it, call this function again with the key
      ``redraw_key(key, step, interval=...)``; ``redraw_projections`` refuses the result, because no
      key can draw the centers.

    Raises:
      TypeError: If the key is not typed, the centers are not floating, ``num_features`` is not an
        integer, or the options are not ``DrawOptions``.
      ValueError: If the centers are not ``[num_centers, dim]``, there are fewer rows than centers,
        there is not one positive weight for each center, or the options have fixed norms or another
        kernel.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> from simrf_jax.calibration import draw_mixture_projection
      >>> x, y = jnp.array([1.5, 1.0]), jnp.array([1.0, 1.5])
      >>> centers = jnp.array([[2.0, 2.0], [-2.0, -2.0]])
      >>> def spread(draw):
      ...     w = jax.vmap(draw)(jax.random.split(jax.random.key(0), 1000))
      ...     phi = jax.vmap(simrf_jax.positive_features, (None, 0))
      ...     return jnp.std(jnp.sum(phi(x, w) * phi(y, w), axis=-1))
      >>> plain = spread(lambda key: simrf_jax.draw_projection(key, 16, 2))
      >>> mixture = spread(lambda key: draw_mixture_projection(key, centers, 16))
      >>> bool(mixture < 0.1 * plain)
      True

    References:
      Veach and Guibas, Optimally Combining Sampling Techniques for Monte Carlo Rendering (SIGGRAPH
      1995), Sec. 3.3, for the balance heuristic, https://doi.org/10.1145/218380.218498
      Zheng et al., Linear Complexity Randomized Self-attention Mechanism (ICML 2022), for mixtures
      as proposals of attention, https://arxiv.org/abs/2204.04667
    """
    checks.typed_key(key)
    centers = checks.floating("centers", centers)
    if centers.ndim != 2 or 0 in centers.shape:
        raise ValueError(
            "centers must be [num_centers, dim] with at least one of each, got shape "
            f"{centers.shape}; use jax.vmap for a stack."
        )
    num_features = checks.positive_int("num_features", num_features)
    if num_features < len(centers):
        raise ValueError(
            "num_features must be at least the number of centers, got "
            f"{num_features} and {len(centers)}."
        )
    options = DrawOptions() if options is None else options
    if not isinstance(options, DrawOptions):
        raise TypeError(f"options must be a simrf_jax.DrawOptions, got {options!r}.")
    if not options.has_chi_norms:
        raise ValueError(
            "options must have norms whose rows are normal about their center, got "
            f"norms={options.norms!r} and kernel={options.kernel}."
        )
    counts = _row_counts(num_features, _relative(weights, len(centers)))
    return _draw(key, centers, tuple(counts.tolist()), options)


def _relative(
    weights: Sequence[float] | None, num_centers: int
) -> Float64[np.ndarray, " {num_centers}"]:
    """Returns the weights, one positive number for each center."""
    if weights is None:
        return np.ones(num_centers)
    numbers = np.asarray(weights, np.float64)
    if numbers.shape != (num_centers,) or not np.all(np.isfinite(numbers) & (numbers > 0)):
        raise ValueError(
            f"weights must be one positive number for each of {num_centers} centers, got {weights}."
        )
    return numbers


def _row_counts(
    num_features: int, weights: Float64[np.ndarray, " num_centers"]
) -> Int[np.ndarray, " num_centers"]:
    """Divides rows among components by the Sainte-Lague method, starting with one row each."""
    counts = np.ones(len(weights), int)
    for _ in range(num_features - len(weights)):
        counts[np.argmax(weights / (2 * counts + 1))] += 1
    return counts


@functools.partial(jax.jit, static_argnames=("counts", "options"))
def _draw(
    key: Key[Array, ""],
    centers: Float[Array, "num_centers dim"],
    counts: tuple[int, ...],
    options: DrawOptions,
) -> Projection:
    dtype, dim = centers.dtype, centers.shape[-1]
    centers = centers.astype(np.promote_types(dtype, jnp.float32))
    keys = jax.random.split(key, len(counts))
    rows, first = [], 0
    for count, group in itertools.groupby(counts):
        end = first + len(list(group))
        draw = functools.partial(options.draw, num_features=count, dim=dim, dtype=centers.dtype)
        around_zero = jax.vmap(draw)(keys[first:end])
        rows.append((jnp.asarray(around_zero) + centers[first:end, None]).reshape(-1, dim))
        first = end
    drawn = jnp.concatenate(rows)
    return Projection(drawn.astype(dtype), _log_weights(drawn, centers, counts))


def _log_weights(
    rows: Float[Array, "num_features dim"],
    centers: Float[Array, "num_centers dim"],
    counts: tuple[int, ...],
) -> Float[Array, " num_features"]:
    """Returns the log density of the standard normal law over that of the mixture at each row."""
    shares = np.array(counts) / sum(counts)
    products = jnp.einsum("md,cd->mc", rows, centers, precision=jax.lax.Precision.HIGHEST)
    constants = jnp.log(jnp.asarray(shares, rows.dtype)) - 0.5 * jnp.sum(centers**2, axis=-1)
    return -jax.nn.logsumexp(products + constants[None], axis=-1)
