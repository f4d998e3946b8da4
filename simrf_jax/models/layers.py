"""Dropout and biases as Flax has them, in a form that compiles to less on a TPU."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name

MASK = "dropout_mask"  # Its name for policies of jax.checkpoint.
COLUMNS = 8  # Of the matrix of ones. The compiler makes a slow sum of a product with one column.


def dropout(x: jax.Array, prng_key: jax.Array, rate: float) -> jax.Array:
    """Sets a random part of the entries to zero and divides the others by the part that stays.

    The result is that of ``nnx.Dropout``, whose mask XLA computes anew in each product that reads
    the result, and in their gradients. Here the mask is computed once and kept for the gradient,
    one byte for each entry; policies of ``jax.checkpoint`` know it as ``"dropout_mask"``.

    Args:
      x: Any shape.
      prng_key: PRNG key of the mask.
      rate: Part of the entries that is dropped, at least 0 and below 1.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      ValueError: If the rate is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from simrf_jax.models import dropout
      >>> dropout(jnp.ones((2, 4)), jax.random.key(0), 0.5)
      Array([[0., 0., 2., 2.],
             [0., 2., 2., 0.]], dtype=float32)

    References:
      Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting (JMLR
      2014), https://jmlr.org/papers/v15/srivastava14a.html
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, got {rate}.")
    if rate == 0:
        return x
    kept = 1 - rate
    # The barrier keeps the compiler from computing the mask where it is read.
    mask = jax.lax.optimization_barrier(jax.random.bernoulli(prng_key, kept, x.shape))
    mask = checkpoint_name(mask, MASK)
    return jnp.where(mask, x / kept, jnp.zeros_like(x))


def sum_bias_gradients_by_products(layer: nnx.LinearGeneral) -> None:
    """Lets a TPU compute the gradient of a layer's bias as a matrix product with ones.

    The gradient is the sum over all tokens. The compiler fuses this sum into the operation before
    it, but cannot do so where that is a kernel, as for the layers in front of attention. By itself
    the sum takes ten times the cycles of the product. On other devices nothing changes.

    Args:
      layer: A layer without batch axes, such as those of ``nnx.MultiHeadAttention``. It is changed.

    Raises:
      ValueError: If the layer has batch axes, or a ``dot_general`` or ``promote_dtype`` of its own.

    Example:
      >>> from flax import nnx
      >>> from simrf_jax.models import sum_bias_gradients_by_products
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, rngs=nnx.Rngs(0))
      >>> for layer in (attention.query, attention.key, attention.value):
      ...     sum_bias_gradients_by_products(layer)
    """
    flax_general = layer.dot_general is None and layer.dot_general_cls is None
    if layer.batch_axis or not flax_general or layer.promote_dtype is not promote_dtype:
        raise ValueError(
            "layer must have no batch axes and Flax's dot_general and promote_dtype, got "
            f"batch_axis={dict(layer.batch_axis)}, dot_general={layer.dot_general}, "
            f"dot_general_cls={layer.dot_general_cls}, promote_dtype={layer.promote_dtype}."
        )
    layer.promote_dtype = cast(Any, _promote_together)  # It returns no arrays of the same tree.
    layer.dot_general = _dot_general_and_bias


def _promote_together(
    arrays: tuple[jax.Array, jax.Array, jax.Array | None], **keywords: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None], None]:
    """Hands the bias to ``_dot_general_and_bias`` beside the kernel."""
    x, kernel, bias = promote_dtype(arrays, **keywords)
    return x, (kernel, bias), None


def _dot_general_and_bias(
    x: jax.Array, kernel_and_bias: tuple[jax.Array, jax.Array | None], *args: Any, **keywords: Any
) -> jax.Array:
    kernel, bias = kernel_and_bias
    y = jax.lax.dot_general(x, kernel, *args, **keywords)
    return y if bias is None else _add_bias(y, bias)


@jax.custom_vjp
def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


def _add_bias_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(x, bias), bias


def _add_bias_backward(bias: jax.Array, of_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(of_out.ndim - bias.ndim))
    of_bias = jax.lax.platform_dependent(
        of_out,
        tpu=functools.partial(_sum_by_product, axes=axes),
        default=functools.partial(jnp.sum, axis=axes),
    )
    return of_out, of_bias.astype(bias.dtype)


def _sum_by_product(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Returns the sum over the first axes, computed in float32 as a product with ones."""
    ones = jnp.ones((*x.shape[: len(axes)], COLUMNS), x.dtype)
    product = jnp.tensordot(ones, x, (axes, axes), preferred_element_type=jnp.float32)
    return product[0].astype(x.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)
