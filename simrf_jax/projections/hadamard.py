"""The Walsh-Hadamard transform, and random rotations made of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

NUM_FACTORS = 3


def padded_dim(dim: int) -> int:
    """The power of two to which vectors are padded with zeros.

    Example:
      >>> padded_dim(1), padded_dim(64), padded_dim(65)
      (1, 64, 128)
    """
    return 1 << (dim - 1).bit_length()


def hadamard_transform(x: jax.Array, *, radix: int = 128) -> jax.Array:
    r"""Multiplies vectors by the Hadamard matrix, in time O(n log n).

    .. math:: H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}, \qquad H_1 = 1.

    The matrix is a Kronecker product, so that the transform is one small matrix product along each
    axis of ``x`` reshaped to a box of sides ``radix``. Radix 2 is the textbook butterfly.

    Args:
      x: Vectors ``[..., n]``, n a power of two.
      radix: Side of the small matrices, a power of two.

    Returns:
      Array ``[..., n]``; the transform twice is n times the vector.

    Example:
      >>> import jax.numpy as jnp
      >>> hadamard_transform(jnp.array([1.0, 2.0, 3.0, 4.0]))
      Array([10., -2., -4.,  0.], dtype=float32)
    """
    n = x.shape[-1]
    batch = x.shape[:-1]
    inner = 1  # The transform of the last log2(inner) bits of the index is done.
    while inner < n:
        side = min(radix, n // inner)
        box = x.reshape(*batch, n // (inner * side), side, inner)
        small = jnp.asarray(_hadamard_matrix(side), x.dtype)
        if inner == 1:
            box = jnp.matmul(box[..., 0], small, precision=jax.lax.Precision.HIGHEST)
        else:
            box = jnp.einsum("...ai,ab->...bi", box, small, precision=jax.lax.Precision.HIGHEST)
        x = box.reshape(*batch, n)
        inner *= side
    return x


@functools.cache
def _hadamard_matrix(n: int) -> np.ndarray:
    return scipy.linalg.hadamard(n, dtype=np.int8)


def random_signs(key: jax.Array, num_blocks: int, dim: int) -> jax.Array:
    """Rademacher signs of the HD factors, int8 ``[num_blocks, NUM_FACTORS, dim]``."""
    return jax.random.rademacher(key, (num_blocks, NUM_FACTORS, dim), jnp.int8)


def rotate(x: jax.Array, signs: jax.Array) -> jax.Array:
    r"""Applies the rotation :math:`R = H D_3 H D_2 H D_1`, with H scaled to be orthogonal.

    Args:
      x: Vectors ``[..., n]``.
      signs: The diagonals of D, ``[..., NUM_FACTORS, n]``; the leading axes broadcast.

    Returns:
      R x, ``[..., n]``.
    """
    for factor in range(NUM_FACTORS):
        flips = jnp.broadcast_to(signs[..., factor, :].astype(x.dtype), x.shape)
        x = hadamard_transform(x * flips)
    return x * x.shape[-1] ** (-0.5 * NUM_FACTORS)
