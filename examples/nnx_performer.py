"""Decoder-only transformer in Flax NNX, in the style of Flax's documentation."""

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax.integrations.nnx import RandomFeatureAttention


class Block(nnx.Module):
    def __init__(self, width: int, num_heads: int, dropout_rate: float, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=num_heads,
            in_features=width,
            decode=False,
            attention_fn=RandomFeatureAttention(num_heads, width // num_heads, 64, is_causal=True, rngs=rngs),
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nnx.Module):
    def __init__(
        self,
        vocabulary: int,
        max_length: int,
        *,
        width: int = 32,
        num_heads: int = 2,
        num_layers: int = 2,
        dropout_rate: float = 0.1,
        rngs: nnx.Rngs,
    ):
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(max_length, width, rngs=rngs)
        self.blocks = nnx.data(
            [Block(width, num_heads, dropout_rate, rngs=rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array, start: int | jax.Array = 0) -> jax.Array:
        """Returns logits of the token after each token; the first is at position ``start``."""
        positions = start + jnp.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(positions)[None]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.logits(self.norm(x))
