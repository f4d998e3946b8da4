"""Singular vectors by Jacobi rotations, without LAPACK."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_SWEEPS = 40  # Every finite matrix we tried needed about ten.


class _State(NamedTuple):
    columns: Float[Array, "n n"]
    largest_cosine: Float[Array, ""]
    num_sweeps: Int[Array, ""]


def left_singular_vectors(
    matrix: Float[Array, "n n"],
) -> tuple[Float[Array, "n n"], Float[Array, " n"]]:
    """Returns the left singular vectors and the singular values of one square matrix.

    For a symmetric matrix without negative eigenvalues these are its eigenvectors and eigenvalues.
    The method is one-sided Jacobi: rotations of pairs of columns make the columns orthogonal. In
    each round, half of the columns meet the other half, as in a round-robin tournament, so a round
    takes only a few vector operations. Use ``jax.vmap`` for many matrices.

    This avoids LAPACK, because XLA on a CPU with two cores can deadlock when several LAPACK calls
    run concurrently in one jitted computation, as in the calibration of several layers.

    Args:
      matrix: A square matrix of full rank. If it is singular, some columns of the vectors are zero.

    Returns:
      The left singular vectors as columns, and the singular values, in no particular order.

    Example:
      >>> import jax.numpy as jnp
      >>> u, s = left_singular_vectors(jnp.array([[3.0, 0.0], [4.0, 5.0]]))
      >>> sorted(round(float(x), 4) for x in s)
      [2.2361, 6.7082]
      >>> bool(jnp.allclose(u.T @ u, jnp.eye(2), atol=1e-6))
      True

    References:
      Brent and Luk, The solution of singular-value and symmetric eigenvalue problems on
      multiprocessor arrays (SIAM J. Sci. Stat. Comput., 1985), https://doi.org/10.1137/0906007
    """
    size = matrix.shape[-1]
    # Scaling by a power of two, which is exact, keeps squares of columns from overflowing.
    exponent = jnp.frexp(jnp.max(jnp.abs(jax.lax.stop_gradient(matrix))))[1]
    matrix = jnp.ldexp(matrix, -exponent)
    # Pairs need an even number of columns. A zero column changes nothing.
    even = jnp.pad(matrix, ((0, 0), (0, size % 2)))
    tolerance = float(jnp.finfo(matrix.dtype).eps) * max(4, size)

    def is_coupled(state: _State) -> Bool[Array, ""]:
        return (state.largest_cosine > tolerance) & (state.num_sweeps < MAX_SWEEPS)

    # Above any cosine, and with the varying mesh axes of the matrix in a shard_map.
    not_yet = 2 + 0 * jnp.sum(matrix)
    start = _State(even, not_yet, jnp.asarray(0))
    columns = jax.lax.while_loop(is_coupled, _sweep, start).columns[:, :size]
    values = jnp.linalg.norm(columns, axis=0, keepdims=True)
    return columns / jnp.where(values > 0, values, 1), jnp.ldexp(values[0], exponent)


def _sweep(state: _State) -> _State:
    """Lets each pair of columns meet once."""
    num_columns = state.columns.shape[1]
    half = num_columns // 2

    def meet(
        _: Int[Array, ""], carry: tuple[Float[Array, "n even"], Float[Array, ""]]
    ) -> tuple[Float[Array, "n even"], Float[Array, ""]]:
        columns, largest = carry
        a, b, cosines = _rotate_pairs(columns[:, :half], columns[:, : half - 1 : -1])
        # The first column stays in place, and the others move on by one.
        others = jnp.concatenate([a[:, 1:], b[:, ::-1]], axis=1)
        columns = jnp.concatenate([a[:, :1], jnp.roll(others, 1, axis=1)], axis=1)
        return columns, jnp.maximum(largest, jnp.max(cosines))

    carry = state.columns, 0 * state.largest_cosine
    columns, largest = jax.lax.fori_loop(0, num_columns - 1, meet, carry)
    return _State(columns, largest, state.num_sweeps + 1)


def _rotate_pairs(
    a: Float[Array, "n half"], b: Float[Array, "n half"]
) -> tuple[Float[Array, "n half"], Float[Array, "n half"], Float[Array, "1 half"]]:
    """Rotates each pair of columns to be orthogonal, and returns their previous cosines."""
    square_a, square_b, product = (
        jnp.sum(one * other, axis=0, keepdims=True) for one, other in ((a, a), (b, b), (a, b))
    )
    lengths = jnp.sqrt(square_a) * jnp.sqrt(square_b)
    cosines = jnp.abs(product) / jnp.where(lengths > 0, lengths, 1)
    is_coupled = cosines > float(jnp.finfo(a.dtype).eps)
    slope = (square_b - square_a) / (2 * jnp.where(is_coupled, product, 1))
    tangent = jnp.where(slope < 0, -1, 1) / (jnp.abs(slope) + jnp.sqrt(1 + jnp.square(slope)))
    tangent = jnp.where(is_coupled, tangent, 0)
    cos = 1 / jnp.sqrt(1 + jnp.square(tangent))
    sin = cos * tangent
    return cos * a - sin * b, sin * a + cos * b, cosines
