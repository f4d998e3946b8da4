"""Random rotations: the part of a projection that makes it isotropic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax.projections.hadamard import padded_dim, random_signs, rotate_back


def haar_rotation(key: jax.Array, vectors: jax.Array, dim: int) -> jax.Array:
    r"""Multiplies vectors by the first rows of a Haar-distributed orthogonal matrix.

    Stewart's method: with :math:`x_k` standard normal in the last :math:`d - k + 1` coordinates and
    :math:`H_k` the Householder reflection that maps :math:`x_k` to :math:`-\operatorname{sign}
    (x_{kk})\, |x_k|\, e_k`,

    .. math:: Q = H_1 H_2 \cdots H_n \operatorname{diag}(-\operatorname{sign} x_{kk})

    has the law of the first n columns of a Haar matrix. It is the Q of a Gaussian matrix, sign fix
    included, without forming or factorising that matrix.

    Args:
      key: A typed PRNG key.
      vectors: Rows S to rotate, floating ``[num_rows, n]``, n at most dim.
      dim: Dimension d.

    Returns:
      :math:`S Q^\top`, ``[num_rows, dim]``; an identity S gives an orthonormal frame.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = haar_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Stewart, The efficient generation of random orthogonal matrices (SIAM J. Numer. Anal., 1980).
    """
    # Not jax.random.orthogonal: XLA on a CPU with two cores can deadlock when several LAPACK calls
    # of one jitted computation run side by side, as the layers of a model's init would. This needs
    # no LAPACK and is the fastest on the CPU: 15 ms for 288 rotations in 64 dimensions, against 21
    # by QR, 18 by Cholesky-QR twice and 51 by the polar factor; and by the compiler's model for a
    # TPU v5e on a par with Cholesky-QR (benchmarks/haar.py).
    n = vectors.shape[1]
    x = jnp.triu(jax.random.normal(key, (n, dim), vectors.dtype))
    sign = jnp.where(jnp.diagonal(x) < 0, -1, 1).astype(x.dtype)
    eye = jnp.eye(n, dim, dtype=x.dtype)
    reflectors = x + sign[:, None] * jnp.linalg.norm(x, axis=-1, keepdims=True) * eye
    reflectors /= jnp.linalg.norm(reflectors, axis=-1, keepdims=True)

    def reflect(i: jax.Array, rows: jax.Array) -> jax.Array:
        v = reflectors[n - 1 - i]
        return rows - 2 * jnp.outer(jnp.dot(rows, v, precision=jax.lax.Precision.HIGHEST), v)

    # From the vectors on rather than from the identity, which spares the product of the two.
    start = jnp.pad(-sign[None] * vectors, ((0, 0), (0, dim - n)))
    return jax.lax.fori_loop(0, n, reflect, start)


def hadamard_rotation(key: jax.Array, vectors: jax.Array, dim: int) -> jax.Array:
    r"""Multiplies by the first rows of :math:`H D_3 H D_2 H D_1`, H Hadamard and D random signs.

    Nearly Haar: the second moments are exact, the fourth are off by :math:`(-2/d)^3 (1 - 3/(d+2))`.
    Kernel estimates are biased by one per cent at :math:`|x + y| = 1` for d = 4 and by less for
    larger d, at 2 by several per cent for d up to 8 (benchmarks/rotation_bias.py).

    Args:
      key: A typed PRNG key.
      vectors: Rows to rotate, floating ``[num_rows, n]``, n at most dim.
      dim: Dimension d, a power of two.

    Returns:
      Array ``[num_rows, dim]``, in time O(num_rows d log d).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = hadamard_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Yu et al., Orthogonal Random Features (NeurIPS 2016), Sec. 4; Reid et al., Simplex Random
      Features (ICML 2023), Sec. 4.2 and App. B.
    """
    [signs] = random_signs(key, 1, dim)
    return rotate_back(jnp.pad(vectors, ((0, 0), (0, dim - vectors.shape[1]))), signs)


def givens_rotation(key: jax.Array, vectors: jax.Array, dim: int) -> jax.Array:
    r"""Multiplies by the first rows of a butterfly product of random Givens rotations.

    .. math:: Q = G_1 G_2 \cdots G_{\log_2 d}

    where :math:`G_l` rotates the d/2 disjoint pairs of coordinates that lie :math:`d / 2^l` apart,
    each by an angle of its own with :math:`\cos^2` of law Beta(k/2, k/2), k = :math:`d / 2^l`.
    That law makes every row of Q exactly uniform on the sphere, so orthogonal features are
    unbiased; their joint law is not Haar's, so simplex features are only nearly so.

    Args:
      key: A typed PRNG key.
      vectors: Rows to rotate, floating ``[num_rows, n]``, n at most dim.
      dim: Dimension d, a power of two.

    Returns:
      Array ``[num_rows, dim]``, in time O(num_rows d log d), after d (d - 1) normal draws.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = givens_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Genz, Methods for generating random orthogonal matrices (1998), for butterflies; Choromanski
      et al., Unifying Orthogonal Monte Carlo Methods (ICML 2019), for Givens rotations.
    """
    num_rows, n = vectors.shape
    dtype = vectors.dtype
    if dim == 1:
        return vectors * jax.random.rademacher(key, (1, 1), dtype)
    q = jnp.pad(vectors, ((0, 0), (0, dim - n)))
    # One draw for all levels, and norms of Gaussian vectors for chi variables: every further draw,
    # and a gamma sampler above all, would take seconds to compile.
    gaussian = jax.random.normal(key, (dim * (dim - 1),), dtype)
    stride = dim // 2
    while stride:
        here, gaussian = jnp.split(gaussian, [dim * stride])
        vectors = here.reshape(2, 1, dim // (2 * stride), stride, stride)
        # The two legs of a random right triangle: cos and sin up to the hypotenuse.
        legs = jnp.linalg.norm(vectors, axis=-1) * jnp.where(vectors[..., 0] < 0, -1, 1)
        cos, sin = legs / jnp.linalg.norm(legs, axis=0, keepdims=True)
        first, second = jnp.moveaxis(q.reshape(num_rows, -1, 2, stride), 2, 0)
        turned = (cos * first - sin * second, sin * first + cos * second)
        q = jnp.stack(turned, axis=2).reshape(num_rows, dim)
        stride //= 2
    return q


class Rotation(NamedTuple):
    """How a block's rotation is drawn.

    Attributes:
      rotate: From (key, vectors ``[num_rows, n]``, dim) to ``[num_rows, dim]``: the vectors, in the
        first n of dim coordinates, multiplied by a random orthogonal matrix from the right.
      ambient_dim: The dimension in which it works, to which vectors are padded with zeros.
    """

    rotate: Callable[[jax.Array, jax.Array, int], jax.Array]
    ambient_dim: Callable[[int], int]


ROTATIONS = {
    "haar": Rotation(haar_rotation, lambda dim: dim),
    "hadamard": Rotation(hadamard_rotation, padded_dim),
    "givens": Rotation(givens_rotation, padded_dim),
}
