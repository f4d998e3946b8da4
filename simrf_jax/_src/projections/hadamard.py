"""The Walsh-Hadamard transform, and random rotations built from it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Key

NUM_FACTORS = 3


def padded_dim(dim: int) -> int:
    """Returns the power of two to which vectors are padded with zeros.

    Example:
      >>> padded_dim(1), padded_dim(64), padded_dim(65)
      (1, 64, 128)
    """
    return 1 << (dim - 1).bit_length()


def hadamard_transform(
    x: Float[Array, "*batch n"], *, radix: int = 128
) -> Float[Array, "*batch n"]:
    r"""Multiplies vectors by the Hadamard matrix in time O(n log n).

    .. math:: H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}, \qquad H_1 = 1.

    The matrix is a Kronecker product, so the transform is one small matrix product along each axis
    of ``x`` reshaped to a box. Radix 2 is the textbook butterfly.

    Args:
      x: Vectors, where n is a power of two.
      radix: Largest side of the box, a power of two. The box has as few sides as the radix allows,
        and they are as equal as possible: small products suit matrix units, and few sides mean few
        passes over the memory.

    Returns:
      The products with the matrix. Applying the transform twice multiplies the vector by n.

    Example:
      >>> import jax.numpy as jnp
      >>> hadamard_transform(jnp.array([1.0, 2.0, 3.0, 4.0]))
      Array([10., -2., -4.,  0.], dtype=float32)
    """
    # For 1,024 vectors of 4,096 dimensions, butterflies take twice the time of two 64 x 64 products
    # on a CPU, and 12 times as long by the compiler's cost model for a TPU v5e (benchmarks).
    *batch, n = x.shape
    inner = 1  # The transform over the last log2(inner) bits of the index is done.
    for side in _sides(n, radix):
        small = jnp.asarray(_hadamard_matrix(side), x.dtype)
        if inner == 1:
            box = x.reshape(*batch, n // side, side)
            box = jnp.matmul(box, small, precision=jax.lax.Precision.HIGHEST)
        else:
            box = x.reshape(*batch, n // (inner * side), side, inner)
            box = jnp.einsum("...ai,ab->...bi", box, small, precision=jax.lax.Precision.HIGHEST)
        x = box.reshape(*batch, n)
        inner *= side
    return x


def _sides(n: int, radix: int) -> list[int]:
    """Returns the sides of the box, powers of two whose product is n."""
    bits, most = n.bit_length() - 1, radix.bit_length() - 1
    stages = -(-bits // most)
    return [1 << ((bits + stage) // stages) for stage in range(stages)]


@functools.cache
def _hadamard_matrix(n: int) -> Int8[np.ndarray, "{n} {n}"]:
    index = np.arange(n)
    odd = np.bitwise_count(index[:, None] & index) % 2
    return np.where(odd, -1, 1).astype(np.int8)


def random_signs(
    key: Key[Array, ""], num_blocks: int, dim: int
) -> Int8[Array, "{num_blocks} 3 {dim}"]:
    """Draws the Rademacher signs of the HD factors.

    Args:
      key: A typed PRNG key.
      num_blocks: Number of row blocks, each of which has its own rotation.
      dim: Dimension of the rotations, a power of two.
    """
    return jax.random.rademacher(key, (num_blocks, NUM_FACTORS, dim), jnp.int8)


def rotate(
    x: Float[Array, "*#batch n"], signs: Int8[Array, "*#batch 3 n"]
) -> Float[Array, "*#batch n"]:
    r"""Applies the rotation :math:`R = H D_3 H D_2 H D_1`, with H scaled to be orthogonal.

    Args:
      x: Vectors.
      signs: Diagonals of the matrices :math:`D_k`. Their leading axes broadcast with those of
        ``x``.

    Returns:
      R x.
    """
    for factor in range(NUM_FACTORS):
        # Scaling each factor keeps the intermediate numbers from growing.
        flips = signs[..., factor, :].astype(x.dtype) * x.shape[-1] ** -0.5
        x = hadamard_transform(x * jnp.broadcast_to(flips, x.shape))
    return x


def rotate_back(x: Float[Array, "*batch n"], signs: Int8[Array, "3 n"]) -> Float[Array, "*batch n"]:
    """Undoes ``rotate`` by multiplying rows by R from the right.

    Args:
      x: Rows.
      signs: Diagonals as in ``rotate``.

    Returns:
      x R.
    """
    for factor in reversed(range(NUM_FACTORS)):
        flips = signs[..., factor, :].astype(x.dtype) * x.shape[-1] ** -0.5
        x = hadamard_transform(x) * jnp.broadcast_to(flips, x.shape)
    return x
