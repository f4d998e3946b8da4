"""The Gaussian, softmax and ReLU kernels of all pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from simrf_jax._src import checks


def gaussian_kernel(
    x: Float[ArrayLike, "*batch n dim"], y: Float[ArrayLike, "*batch p dim"]
) -> Float[Array, "*batch n p"]:
    r"""Returns the Gaussian kernel of all pairs, :math:`K(x, y) = \exp(-|x - y|^2 / 2)`.

    Args:
      x: Vectors in units of the kernel's length scale.
      y: Vectors with the same leading shape and dim.

    Returns:
      The kernel of each pair, computed in float32 or wider from the differences x - y, so that
      close pairs lose no digits.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.gaussian_kernel(jnp.zeros((1, 2)), jnp.array([[0.0, 0.0], [1.0, 1.0]]))
      Array([[1.        , 0.36787945]], dtype=float32)

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 4, https://arxiv.org/abs/2301.13856
    """
    x, y, dtype = pair(x, y)
    return jnp.exp(-0.5 * squared_distances(x, y)).astype(dtype)


def softmax_kernel(
    x: Float[ArrayLike, "*batch n dim"], y: Float[ArrayLike, "*batch p dim"]
) -> Float[Array, "*batch n p"]:
    r"""Returns the softmax kernel of all pairs, :math:`K(x, y) = \exp(x \cdot y)`.

    Args:
      x: Vectors.
      y: Vectors with the same leading shape and dim.

    Returns:
      The kernel of each pair, computed in float32 or wider.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.softmax_kernel(jnp.ones((1, 2)), jnp.array([[0.0, 0.0], [0.5, 0.5]]))
      Array([[1.       , 2.7182817]], dtype=float32)

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 5, https://arxiv.org/abs/2301.13856
    """
    x, y, dtype = pair(x, y)
    dots = jnp.einsum("...nd,...pd->...np", x, y, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(dots).astype(dtype)


def relu_kernel(
    x: Float[ArrayLike, "*batch n dim"], y: Float[ArrayLike, "*batch p dim"]
) -> Float[Array, "*batch n p"]:
    r"""Returns the ReLU kernel of all pairs, half the arc-cosine kernel of order one.

    .. math::
        K(x, y) = \mathbb E[\max(w \cdot x, 0) \max(w \cdot y, 0)]
            = \tfrac{|x| |y|}{2 \pi} \bigl(\sin\theta + (\pi - \theta) \cos\theta\bigr)

    with w standard normal and :math:`\theta` the angle between x and y. ``relu_features`` estimates
    it.

    Args:
      x: Vectors.
      y: Vectors with the same leading shape and dim.

    Returns:
      The kernel of each pair, computed in float32 or wider.

    Raises:
      TypeError: If an argument is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.relu_kernel(jnp.array([[2.0, 0.0]]), jnp.array([[2.0, 0.0], [-1.0, 0.0]]))
      Array([[2., 0.]], dtype=float32)

    References:
      Cho and Saul, Kernel Methods for Deep Learning (NeurIPS 2009), Eq. 6.
    """
    x, y, dtype = pair(x, y)
    (x_length, x), (y_length, y) = _length_and_direction(x), _length_and_direction(y)
    cosine = jnp.einsum("...nd,...pd->...np", x, y, precision=jax.lax.Precision.HIGHEST)
    return (x_length * y_length.mT * _arc_cosine(jnp.clip(cosine, -1, 1))).astype(dtype)


def _length_and_direction(
    x: Float[Array, "*batch n dim"],
) -> tuple[Float[Array, "*batch n 1"], Float[Array, "*batch n dim"]]:
    """Returns lengths and unit vectors.

    Large vectors do not overflow, and the gradients at zero are finite.
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0))
    largest = jnp.where(largest == 0, 1, largest)
    x /= largest
    squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    zero = squared == 0
    length = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squared)))
    return largest * length, x / jnp.where(zero, 1, length)


@jax.custom_jvp
def _arc_cosine(cosine: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    angle = jnp.arccos(cosine)
    # Rounding may make the result for antiparallel vectors slightly negative.
    return jnp.maximum(jnp.sin(angle) + (jnp.pi - angle) * cosine, 0) / (2 * jnp.pi)


@_arc_cosine.defjvp
def _arc_cosine_jvp(
    primals: tuple[Float[Array, "*shape"]], tangents: tuple[Float[Array, "*shape"]]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    # Differentiating arccos itself would give an infinite derivative for parallel vectors.
    [cosine], [tangent] = primals, tangents
    return _arc_cosine(cosine), (jnp.pi - jnp.arccos(cosine)) / (2 * jnp.pi) * tangent


@jax.jit  # Without jit, the differences of all pairs would be stored as an array.
def squared_distances(
    x: Float[Array, "*batch n dim"], y: Float[Array, "*batch p dim"]
) -> Float[Array, "*batch n p"]:
    """Returns |x - y|^2 of all pairs."""
    return jnp.sum(jnp.square(x[..., :, None, :] - y[..., None, :, :]), axis=-1)


def pair(
    x: Float[ArrayLike, "*batch n dim"], y: Float[ArrayLike, "*batch p dim"]
) -> tuple[Float[Array, "*batch n dim"], Float[Array, "*batch p dim"], jnp.dtype]:
    """Returns x and y in the dtype of the computation, and the dtype of the result."""
    x, y = checks.floating("x", x), checks.floating("y", y)
    if x.ndim < 2 or y.ndim < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ValueError(
            "x must be [..., n, dim] and y [..., p, dim] with the same leading shape and dim, "
            f"got {x.shape} and {y.shape}."
        )
    dtype = jnp.promote_types(x.dtype, y.dtype)
    compute = np.promote_types(dtype, jnp.float32)
    return x.astype(compute), y.astype(compute), dtype
