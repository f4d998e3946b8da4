"""Random rotations, which make a projection isotropic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from simrf_jax._src.projections.hadamard import padded_dim, random_signs, rotate_back

# Up to this many reflections, applying them one by one is faster than in blocks
# (benchmarks/haar.py). On a TPU, XLA estimates 2,000 cycles for each small operation, so blocks,
# which need fewer operations, win earlier.
LARGEST_ONE_BY_ONE = 64
LARGEST_ONE_BY_ONE_ON_TPU = 32
BLOCK = 32  # Reflections in a block, a power of two.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def haar_rotation(
    key: Key[Array, ""], vectors: Float[Array, "num_rows n"], dim: int
) -> Float[Array, "num_rows {dim}"]:
    r"""Multiplies vectors by the first rows of a Haar-distributed orthogonal matrix.

    The method is Stewart's. Let :math:`x_k` be standard normal in the last :math:`d - k + 1`
    coordinates and zero in the others, and let :math:`H_k` be the Householder reflection that maps
    :math:`x_k` to :math:`-\operatorname{sign}(x_{kk})\, |x_k|\, e_k`. Then

    .. math:: Q = H_1 H_2 \cdots H_n \operatorname{diag}(-\operatorname{sign} x_{kk})

    has the law of the first n columns of a Haar matrix. Q is the factor Q of a Gaussian matrix's QR
    decomposition, including the sign correction, but that matrix is neither formed nor factorized.

    Args:
      key: A typed PRNG key.
      vectors: Rows S to rotate, with n at most ``dim``.
      dim: Dimension d.

    Returns:
      :math:`S Q^\top`. If S is the identity, its rows are orthonormal.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = haar_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Stewart, The efficient generation of random orthogonal matrices (SIAM J. Numer. Anal., 1980).
    """
    # jax.random.orthogonal is ruled out: XLA on a CPU with two cores can deadlock when several
    # LAPACK calls of one jitted computation run concurrently, as in the init of a model with
    # several layers. Stewart's method needs no LAPACK and is the fastest on the CPU
    # (benchmarks/haar.py).
    n = vectors.shape[1]
    x = jnp.triu(jax.random.normal(key, (n, dim), vectors.dtype))
    sign = jnp.where(jnp.diagonal(x) < 0, -1, 1).astype(x.dtype)
    eye = jnp.eye(n, dim, dtype=x.dtype)
    reflectors = x + sign[:, None] * jnp.linalg.norm(x, axis=-1, keepdims=True) * eye
    reflectors /= jnp.linalg.norm(reflectors, axis=-1, keepdims=True)

    # Starting from the vectors saves the product that starting from the identity would need.
    start = jnp.pad(-sign[None] * vectors, ((0, 0), (0, dim - n)))
    if LARGEST_ONE_BY_ONE_ON_TPU < n <= LARGEST_ONE_BY_ONE:
        return jax.lax.platform_dependent(
            start, reflectors, tpu=_reflect_in_blocks, default=_reflect_one_by_one
        )
    reflect = _reflect_one_by_one if n <= LARGEST_ONE_BY_ONE else _reflect_in_blocks
    return reflect(start, reflectors)


def _reflect_one_by_one(
    rows: Float[Array, "num_rows dim"], reflectors: Float[Array, "n dim"]
) -> Float[Array, "num_rows dim"]:
    """Multiplies rows by the reflections of unit vectors, the last one first."""

    def reflect(
        i: Int[Array, ""], rows: Float[Array, "num_rows dim"]
    ) -> Float[Array, "num_rows dim"]:
        u = reflectors[len(reflectors) - 1 - i]
        return rows - 2 * jnp.outer(_matmul(rows, u), u)

    return jax.lax.fori_loop(0, len(reflectors), reflect, rows)


def _reflect_in_blocks(
    rows: Float[Array, "num_rows dim"], reflectors: Float[Array, "n dim"]
) -> Float[Array, "num_rows dim"]:
    r"""Multiplies rows by the reflections of unit vectors, the last one first.

    The rows pass through memory once per block of reflections. In the compact WY form, the product
    of the reflections of the rows of U, the last vectors first, is

    .. math:: H_1 H_2 \cdots H_b = I - U^\top T U, \qquad
        T^{-1} = \tfrac12 I + \operatorname{striu}(U U^\top)

    References:
      Schreiber and Van Loan, A storage-efficient WY representation for products of Householder
      transformations (SIAM J. Sci. Stat. Comput., 1989).
    """
    n, dim = reflectors.shape
    # A reflector of zeros changes nothing.
    blocks = jnp.pad(reflectors[::-1], ((0, -n % BLOCK), (0, 0))).reshape(-1, BLOCK, dim)
    gram = _matmul(blocks, blocks.mT)
    i, j = jnp.indices((BLOCK, BLOCK))
    t = jnp.broadcast_to(2 * jnp.eye(BLOCK, dtype=rows.dtype), gram.shape)
    size = 1
    while size < BLOCK:  # Merges the T of two halves.
        between = (i // (2 * size) == j // (2 * size)) & (i // size < j // size)
        t -= _matmul(t, _matmul(jnp.where(between[None], gram, 0), t))
        size *= 2

    def reflect(
        rows: Float[Array, "num_rows dim"],
        block: tuple[Float[Array, "block dim"], Float[Array, "block block"]],
    ) -> tuple[Float[Array, "num_rows dim"], None]:
        u, t = block
        return rows - _matmul(_matmul(_matmul(rows, u.T), t), u), None

    return jax.lax.scan(reflect, rows, (blocks, t))[0]


def hadamard_rotation(
    key: Key[Array, ""], vectors: Float[Array, "num_rows n"], dim: int
) -> Float[Array, "num_rows {dim}"]:
    r"""Multiplies vectors by the first rows of a product of Hadamard matrices and random signs.

    .. math:: R = H D_3 \, H D_2 \, H D_1

    where H is the orthogonal Hadamard matrix and each :math:`D_k` holds random signs. R is nearly
    Haar-distributed: its second moments are exact, and the sum of the fourth moments of a row's
    entries, which is :math:`3/(d+2)` for a Haar matrix, is off by :math:`(-2/d)^3 (1 - 3/(d+2))`.
    Kernel estimates are biased by one percent at :math:`|x + y| = 1` for d = 4 and by less for
    larger d. At :math:`|x + y| = 2` they are biased by several percent for d up to 8
    (benchmarks/rotation_bias.py).

    Args:
      key: A typed PRNG key.
      vectors: Rows to rotate, with n at most ``dim``.
      dim: Dimension d, a power of two.

    Returns:
      The rotated rows, computed in time O(num_rows d log d).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = hadamard_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Yu et al., Orthogonal Random Features (NeurIPS 2016), Sec. 4, https://arxiv.org/abs/1610.09072
      Reid et al., Simplex Random Features (ICML 2023), Sec. 4.2 and App. B.2.2, Eq. 89,
      https://arxiv.org/abs/2301.13856
    """
    [signs] = random_signs(key, 1, dim)
    return rotate_back(jnp.pad(vectors, ((0, 0), (0, dim - vectors.shape[1]))), signs)


def givens_rotation(
    key: Key[Array, ""], vectors: Float[Array, "num_rows n"], dim: int
) -> Float[Array, "num_rows {dim}"]:
    r"""Multiplies vectors by the first rows of a butterfly product of random Givens rotations.

    .. math:: Q = G_1 G_2 \cdots G_{\log_2 d}

    where :math:`G_l` rotates the d/2 disjoint pairs of coordinates that lie :math:`d / 2^l` apart.
    Each pair has its own angle, whose :math:`\cos^2` has the law Beta(k/2, k/2) with k = :math:`d /
    2^l`. This law makes every row of Q exactly uniform on the sphere, so kernel estimates with
    orthogonal rows are unbiased. The joint law of the rows is not Haar, so kernel estimates with
    simplex rows are only nearly unbiased.

    Args:
      key: A typed PRNG key.
      vectors: Rows to rotate, with n at most ``dim``.
      dim: Dimension d, a power of two.

    Returns:
      The rotated rows, computed in time O(num_rows d log d) after d (d - 1) normal draws.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = givens_rotation(jax.random.key(0), jnp.eye(3), 4)
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Genz, Methods for generating random orthogonal matrices (1998), for butterflies.
      Choromanski et al., Unifying Orthogonal Monte Carlo Methods (ICML 2019), for Givens rotations.
    """
    num_rows, n = vectors.shape
    dtype = vectors.dtype
    if dim == 1:
        return vectors * jax.random.rademacher(key, (1, 1), dtype)
    q = jnp.pad(vectors, ((0, 0), (0, dim - n)))
    # All levels share one draw, and norms of Gaussian vectors serve as chi variables, because every
    # additional draw, above all a gamma sampler, would take seconds to compile.
    gaussian = jax.random.normal(key, (dim * (dim - 1),), dtype)
    stride = dim // 2
    while stride:
        here, gaussian = jnp.split(gaussian, [dim * stride])
        vectors = here.reshape(2, 1, dim // (2 * stride), stride, stride)
        # The legs of a random right triangle, divided by its hypotenuse, are cos and sin.
        legs = jnp.linalg.norm(vectors, axis=-1) * jnp.where(vectors[..., 0] < 0, -1, 1)
        cos, sin = legs / jnp.linalg.norm(legs, axis=0, keepdims=True)
        first, second = jnp.moveaxis(q.reshape(num_rows, -1, 2, stride), 2, 0)
        turned = (cos * first - sin * second, sin * first + cos * second)
        q = jnp.stack(turned, axis=2).reshape(num_rows, dim)
        stride //= 2
    return q


class RotationRule(NamedTuple):
    """Distribution of the random rotation of a row block.

    Attributes:
      rotate: Function of (key, vectors ``[num_rows, n]``, dim) that returns ``[num_rows, dim]``:
        the vectors, placed in the first n of dim coordinates and multiplied by a random orthogonal
        matrix from the right.
      ambient_dim: Function of the dimension of the data that returns the dimension in which the
        rotation works. Vectors are padded with zeros to it.
    """

    rotate: Callable[
        [Key[Array, ""], Float[Array, "num_rows n"], int], Float[Array, "num_rows dim"]
    ]
    ambient_dim: Callable[[int], int]


Rotation: TypeAlias = Literal["haar", "hadamard", "givens"]
ROTATIONS: dict[Rotation, RotationRule] = {
    "haar": RotationRule(haar_rotation, lambda dim: dim),
    "hadamard": RotationRule(hadamard_rotation, padded_dim),
    "givens": RotationRule(givens_rotation, padded_dim),
}
