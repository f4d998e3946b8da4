"""Dropout and bias addition with Flax's results, but faster with XLA on a TPU."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

DROPOUT_MASK = "dropout_mask"  # Policies of jax.checkpoint refer to the mask by this name.
ONES_COLUMNS = 8  # With one column, XLA turns the product back into a slow sum.


def dropout(x: jax.Array, prng_key: jax.Array, rate: float) -> jax.Array:
    """Sets a random fraction of the entries to zero and divides the others by the fraction kept.

    The result equals that of ``nnx.Dropout``, whose mask XLA recomputes in each product that reads
    the result, and in their gradients. Here the mask is computed once and kept for the gradient,
    one byte for each entry; its name in policies of ``jax.checkpoint`` is ``"dropout_mask"``.

    Args:
      x: Floating-point array of any shape.
      prng_key: PRNG key of the mask.
      rate: Fraction of the entries that is dropped, at least 0 and below 1.

    Returns:
      An array of the shape and dtype of ``x``.

    Raises:
      TypeError: If ``x`` is not a floating-point array.
      ValueError: If the rate is out of range.

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
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be a floating-point array, got {x.dtype}.")
    if not 0 <= rate < 1:
        raise ValueError(f"rate must be at least 0 and below 1, got {rate}.")
    if rate == 0:
        return x
    kept = 1 - float(rate)
    mask = jax.random.bernoulli(prng_key, kept, x.shape)
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        mask = jax.sharding.reshard(mask, sharding)
    # The barrier keeps the compiler from recomputing the mask wherever it is read.
    mask = checkpoint_name(jax.lax.optimization_barrier(mask), DROPOUT_MASK)
    return jnp.where(mask, x / kept, jnp.zeros_like(x))


def sum_bias_gradients_by_products(layer: nnx.LinearGeneral) -> None:
    """Lets a TPU compute the gradient of a layer's bias as a matrix product with ones.

    The bias gradient sums over all tokens. XLA fuses this sum into the operation that produces the
    incoming gradient, unless that is a Pallas kernel, as for the query, key and value layers of
    attention. There XLA estimates ten times as many cycles for the sum as for the product. On other
    devices, inside ``jax.shard_map`` and over Explicit mesh axes the gradient stays a sum.

    A changed layer supports reverse-mode differentiation only: ``jax.jvp`` and ``jax.linearize``
    raise a ``TypeError``.

    Args:
      layer: Layer without batch axes, such as ``attention.query`` of an ``nnx.MultiHeadAttention``.
        It is modified in place, once.

    Raises:
      TypeError: If the layer is not an ``nnx.LinearGeneral``.
      ValueError: If it has batch axes, or a custom ``dot_general`` or ``promote_dtype``.

    Example:
      >>> from flax import nnx
      >>> from simrf_jax.models import sum_bias_gradients_by_products
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, rngs=nnx.Rngs(0))
      >>> for layer in (attention.query, attention.key, attention.value):
      ...     sum_bias_gradients_by_products(layer)
    """
    if not isinstance(layer, nnx.LinearGeneral):
        raise TypeError(f"layer must be an nnx.LinearGeneral, got {type(layer).__name__}.")
    if layer.dot_general is _dot_general_and_bias:
        return
    flax_general = layer.dot_general is None and layer.dot_general_cls is None
    if layer.batch_axis or not flax_general or layer.promote_dtype is not promote_dtype:
        raise ValueError(
            "layer must have no batch axes and Flax's dot_general and promote_dtype, got "
            f"batch_axis={dict(layer.batch_axis)}, dot_general={layer.dot_general}, "
            f"dot_general_cls={layer.dot_general_cls}, promote_dtype={layer.promote_dtype}."
        )
    layer.promote_dtype = cast(Any, _promote_together)  # Its result has another tree structure.
    layer.dot_general = _dot_general_and_bias


def _promote_together(
    arrays: tuple[jax.Array, jax.Array, jax.Array | None], **keywords: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None], None]:
    """Passes the bias to ``_dot_general_and_bias`` together with the kernel."""
    x, kernel, bias = promote_dtype(arrays, **keywords)
    return x, (kernel, bias), None


def _dot_general_and_bias(
    x: jax.Array, kernel_and_bias: tuple[jax.Array, jax.Array | None], *args: Any, **keywords: Any
) -> jax.Array:
    kernel, bias = kernel_and_bias
    y = jax.lax.dot_general(x, kernel, *args, **keywords)
    if bias is None:
        return y
    # Over other axes, the types of a bias and of its gradient depend on the mesh. JAX handles that.
    is_auto = {*jax.typeof(y).sharding.mesh.axis_types} <= {AxisType.Auto}
    return _add_bias_with_gradient(y, bias) if is_auto else _add_bias(y, bias)


def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


@jax.custom_vjp
def _add_bias_with_gradient(y: jax.Array, bias: jax.Array) -> jax.Array:
    return _add_bias(y, bias)


def _add_bias_forward(y: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(y, bias), bias


def _add_bias_backward(bias: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(gradient.ndim - bias.ndim))
    if not jnp.issubdtype(gradient.dtype, jnp.floating):
        return gradient, jnp.sum(gradient, axes).astype(bias.dtype)
    bias_gradient = jax.lax.platform_dependent(
        gradient,
        tpu=functools.partial(_sum_by_product, axes=axes),
        default=functools.partial(jnp.sum, axis=axes),
    )
    return gradient, bias_gradient.astype(bias.dtype)


_add_bias_with_gradient.defvjp(_add_bias_forward, _add_bias_backward)


def _sum_by_product(x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Returns the sum over the first axes, computed in at least float32 as a product with ones."""
    ones = jnp.ones((*x.shape[: len(axes)], ONES_COLUMNS), x.dtype)
    product = jnp.tensordot(
        ones,
        x,
        (axes, axes),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=np.promote_types(x.dtype, jnp.float32),
    )
    return product[0].astype(x.dtype)
