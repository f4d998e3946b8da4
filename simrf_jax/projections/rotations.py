"""Random rotations: the part of a projection that makes it isotropic."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def haar_frame(key: jax.Array, dim: int, num_rows: int, dtype: jnp.dtype) -> jax.Array:
    r"""Draws the first rows of a Haar-distributed orthogonal matrix.

    Stewart's method: with :math:`x_k` standard normal in the last :math:`d - k + 1` coordinates and
    :math:`H_k` the Householder reflection that maps :math:`x_k` to :math:`-\operatorname{sign}
    (x_{kk})\, |x_k|\, e_k`,

    .. math:: Q = H_1 H_2 \cdots H_n \operatorname{diag}(-\operatorname{sign} x_{kk})

    has the law of the first n columns of a Haar matrix. It is the Q of a Gaussian matrix, sign fix
    included, without forming or factorising that matrix.

    Args:
      key: A typed PRNG key.
      dim: Dimension d.
      num_rows: Rows n, at most d.
      dtype: Floating type to draw and compute in.

    Returns:
      Array ``[num_rows, dim]`` with orthonormal rows.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> q = haar_frame(jax.random.key(0), 4, 3, jnp.dtype("float32"))
      >>> q.shape, bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      ((3, 4), True)

    References:
      Stewart, The efficient generation of random orthogonal matrices (SIAM J. Numer. Anal., 1980).
    """
    # Not jax.random.orthogonal: XLA on a CPU with two cores can deadlock when several LAPACK calls
    # of one jitted computation run side by side, as the layers of a model's init would. This needs
    # no LAPACK, takes about as long, and draws only the rows that are asked for.
    x = jnp.triu(jax.random.normal(key, (num_rows, dim), dtype))
    sign = jnp.where(jnp.diagonal(x) < 0, -1, 1).astype(dtype)[:, None]
    eye = jnp.eye(num_rows, dim, dtype=dtype)
    reflectors = x + sign * jnp.linalg.norm(x, axis=-1, keepdims=True) * eye
    reflectors /= jnp.linalg.norm(reflectors, axis=-1, keepdims=True)

    def reflect(i: jax.Array, rows: jax.Array) -> jax.Array:
        v = reflectors[num_rows - 1 - i]
        return rows - 2 * jnp.outer(jnp.dot(rows, v, precision=jax.lax.Precision.HIGHEST), v)

    return -sign * jax.lax.fori_loop(0, num_rows, reflect, eye)


ROTATIONS = {"haar": haar_frame}
