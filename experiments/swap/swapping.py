"""The attention of a trained model: what enters it, and the model with another one in its place.

A model here has a list ``blocks`` of transformer layers, whose ``attention`` is a
``nnx.MultiHeadAttention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.char_lm.model import Rotary

# A function (query, key, value, **keywords of Flax) that returns attention outputs.
Attention = Callable[..., jax.Array]


class Inputs(NamedTuple):
    """Arguments of the attention of one layer.

    Attributes:
      query: Queries ``[batch, T, N, H]``, as they enter the dot products.
      key: Keys ``[batch, T, N, H]``.
      value: Values ``[batch, T, N, H]``.
      is_causal: True if a query sees no later key.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    is_causal: bool


def swapped(model: nnx.Module, attentions: Sequence[Attention]) -> nnx.Module:
    """Returns the model with another attention in each layer, and the same parameters.

    Args:
      model: Model with softmax attention, or with any other.
      attentions: A function, or an adapter of ``simrf_jax.integrations.nnx``, for each layer.
        Where a model rotates queries and keys first, they still are rotated.
    """
    copy: Any = nnx.merge(*nnx.split(model))
    for block, attention in zip(copy.blocks, attentions, strict=True):
        owner, name = _place(block)
        # Flax must be told which attentions hold arrays, as the attribute held none before.
        is_module = isinstance(attention, nnx.Module)
        setattr(owner, name, nnx.data(attention) if is_module else nnx.static(attention))
    return copy


def _place(block: Any) -> tuple[Any, str]:
    """Returns the module of a layer that holds the attention function, and under which name."""
    attention_fn = block.attention.attention_fn
    if isinstance(attention_fn, Rotary):
        return attention_fn, "attend"
    return block.attention, "attention_fn"


def record(
    model: nnx.Module, apply: Callable[[nnx.Module, jax.Array], jax.Array], inputs: jax.Array
) -> tuple[list[Inputs], jax.Array]:
    """Returns what enters the attention of each layer, and the output of the model.

    Args:
      model: Model with any attention.
      apply: Function of the model and its inputs that returns its output.
      inputs: Inputs of the model.
    """
    recorded: list[Inputs] = []

    def recording(attention: Attention) -> Attention:
        def attend(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            *,
            is_causal: bool = False,
            **keywords: Any,
        ) -> jax.Array:
            recorded.append(Inputs(query, key, value, is_causal))
            return attention(query, key, value, is_causal=is_causal, **keywords)

        return attend

    layers: Any = model
    attentions = [getattr(*_place(block)) for block in layers.blocks]
    output = apply(swapped(model, [recording(attention) for attention in attentions]), inputs)
    return recorded, output


def mean_squared_sum(inputs: Inputs) -> jax.Array:
    """Returns the mean of |x + y|^2 over the pairs that attention sees, for each head, ``[N]``.

    x and y are queries and keys times the fourth root of the scale of attention, so that
    exp(x . y) is the weight. Random features have a relative variance of about exp(|x + y|^2).
    """
    query, key = (x * x.shape[-1] ** -0.25 for x in inputs[:2])
    squares = (jnp.sum(jnp.square(x), axis=-1) for x in (query, key))
    of_queries, of_keys = (jnp.moveaxis(x, -1, -2) for x in squares)
    products = jnp.einsum("btnh,bsnh->bnts", query, key)
    sums = of_queries[..., :, None] + of_keys[..., None, :] + 2 * products
    length = sums.shape[-1]
    seen = np.tri(length) if inputs.is_causal else np.ones((length, length))
    # jnp.mean(..., where=seen) now and then counts too many pairs on a CPU (jax 0.10.2).
    total = jnp.einsum("bnts,ts->n", sums, seen.astype(sums.dtype))
    return total / (len(sums) * seen.sum())


def head_errors(inputs: Inputs, attention: Attention) -> jax.Array:
    """Returns the relative squared error of each head's outputs, ``[N]``.

    It is the sum of squared differences from softmax attention over all texts, tokens and
    dimensions, divided by the sum of squares of softmax attention.
    """
    arrays, is_causal = inputs[:3], inputs.is_causal
    exact = jax.nn.dot_product_attention(*arrays, is_causal=is_causal)
    difference = attention(*arrays, is_causal=is_causal) - exact
    return jnp.sum(jnp.square(difference), (0, 1, 3)) / jnp.sum(jnp.square(exact), (0, 1, 3))


def uniform(query: jax.Array, key: jax.Array, value: jax.Array, **keywords: Any) -> jax.Array:
    """Returns attention that gives every visible key the same weight."""
    return nnx.dot_product_attention(jnp.zeros_like(query), key, value, **keywords)
