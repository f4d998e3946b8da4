"""Decoder-only transformer with softmax attention, a far field, a near field, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import simrf_jax
from simrf_jax._src.projections import Coupling
from simrf_jax.integrations.nnx import FMMAttention, RandomFeatureAttention

ROTARY_BASE = 256
ATTENTIONS = (
    "softmax",
    "far",
    "near",
    "near_far",
    "band_positive",
    "band_calibrated",
    "band_learned",
)


class CharLM(nnx.Module):
    """A pre-norm transformer that predicts the next character.

    Args:
      vocabulary_size: Number of different characters.
      attention: One of ``ATTENTIONS``.
      width: Width of the tokens.
      depth: Number of transformer layers.
      num_heads: Number of attention heads; each has an even number of dimensions.
      num_features: Number of random features of each head in the far field.
      coupling: Coupling of the far field's projections.
      bandwidth: Number of characters that the near field or the exact band looks back.
      rngs: Keys for parameters (``params``) and projections (``features``). Models with different
        attention but the same keys start with the same parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = CharLM(
      ...     94, attention="near", width=64, depth=2, num_heads=4, num_features=34,
      ...     coupling="simplex", bandwidth=8, rngs=nnx.Rngs(0),
      ... )
      >>> model(jnp.zeros((2, 10), int)).shape
      (2, 10, 94)
    """

    def __init__(
        self, vocabulary_size: int, *, width: int, depth: int, rngs: nnx.Rngs, **attention: Any
    ):
        self.embedding = nnx.Embed(
            vocabulary_size, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List([Block(width, rngs=rngs, **attention) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.head = nnx.Linear(width, vocabulary_size, kernel_init=zeros, rngs=rngs)

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Returns logits ``[batch, length, vocabulary]`` of the character after each index."""
        x = self.embedding(indices)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nnx.Module):
    """Transformer layer: attention, then an MLP, both pre-norm and residual."""

    def __init__(self, width: int, *, num_heads: int, rngs: nnx.Rngs, **attention: Any):
        xavier = nnx.initializers.xavier_uniform()
        attend = make_attention(
            num_heads=num_heads, head_dim=width // num_heads, rngs=rngs, **attention
        )
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        options: dict[str, Any] = {"attention_fn": Rotary(attend), "decode": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(num_heads, width, kernel_init=xavier, **options)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, kernel_init=xavier, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, kernel_init=xavier, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, length, width]`` to the same shape, causally."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))


def make_attention(
    attention: str,
    *,
    num_heads: int,
    head_dim: int,
    num_features: int,
    coupling: Coupling,
    bandwidth: int,
    rngs: nnx.Rngs,
) -> Callable[..., jax.Array]:
    """Returns the ``attention_fn`` of one layer for ``nnx.MultiHeadAttention``."""
    sizes = num_heads, head_dim, num_features
    match attention:
        case "softmax":
            return nnx.dot_product_attention
        case "far":
            return RandomFeatureAttention(*sizes, coupling=coupling, rngs=rngs)
        case "near":
            return functools.partial(near_field, bandwidth=bandwidth)
        case "near_far":
            return FMMAttention(*sizes, bandwidth=bandwidth, coupling=coupling, rngs=rngs)
        case "band_positive" | "band_calibrated" | "band_learned":
            name = attention.removeprefix("band_")
            return RandomFeatureAttention(
                *sizes, feature_map=name, coupling=coupling, exact_bandwidth=bandwidth, rngs=rngs
            )
    raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}.")


def near_field(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bandwidth: int,
    is_causal: bool = False,
    **unused: Any,
) -> jax.Array:
    """Computes banded attention; the model has no masks and no dropout."""
    del unused
    return simrf_jax.banded_attention(query, key, value, bandwidth=bandwidth, is_causal=is_causal)


class Rotary(nnx.Module):
    """Attention with rotary position embeddings.

    Args:
      attend: Function that attends to rotated queries and keys.
    """

    def __init__(self, attend: Callable[..., jax.Array]):
        self.attend = attend

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **keywords: Any
    ) -> jax.Array:
        """Rotates queries and keys and attends; all arrays are ``[..., length, heads, dim]``."""
        return self.attend(rotate(query), rotate(key), value, **keywords)


def rotate(x: jax.Array) -> jax.Array:
    r"""Rotates pairs of coordinates by angles proportional to the position.

    Coordinates i and i + H/2 at position t are rotated by :math:`t / 256^{2i/H}`. Dot products then
    depend on the difference of two positions only, and the lengths of vectors do not change.

    Args:
      x: Queries or keys ``[..., T, N, H]``.

    Returns:
      Array of the same shape.

    References:
      Su et al., RoFormer (2021), Sec. 3.2, https://arxiv.org/abs/2104.09864
      They have 10,000 instead of 256, which suits longer contexts.
    """
    length, dim = x.shape[-3], x.shape[-1]
    angles = np.arange(length)[:, None] / ROTARY_BASE ** (np.arange(0, dim, 2) / dim)
    shape = (1,) * (x.ndim - 3) + (length, 1, dim // 2)
    cos, sin = (f(angles).reshape(shape).astype(x.dtype) for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
