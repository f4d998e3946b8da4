"""Decoder-only transformer in Flax Linen, in the style of Flax's documentation."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from simrf_jax.integrations.linen import RandomFeatureAttention


class Block(nn.Module):
    num_heads: int
    dropout_rate: float
    decode: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            attention_fn=RandomFeatureAttention(64, is_causal=True, decode=self.decode, parent=None),
        )(y, mask=mask)
        x = x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        y = nn.LayerNorm()(x)
        y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(y)))
        return x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)


class Transformer(nn.Module):
    vocabulary: int
    max_length: int
    width: int = 32
    num_heads: int = 2
    num_layers: int = 2
    dropout_rate: float = 0.1
    decode: bool = False

    @nn.compact
    def __call__(
        self, tokens: jax.Array, start: int | jax.Array = 0, *, train: bool = False
    ) -> jax.Array:
        """Returns logits of the token after each token; the first is at position ``start``."""
        positions = start + jnp.arange(tokens.shape[1])
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x = x + nn.Embed(self.max_length, self.width)(positions)[None]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, self.dropout_rate, self.decode)(x, mask, train)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))
