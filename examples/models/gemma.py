"""Decoder-only language model in Flax NNX, in the style of Gemma.

It has grouped queries, rotary positions, gated MLPs, RMS norms and attention code of its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax.integrations.nnx import RandomFeatureAttention


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    num_embed: int = 11
    embed_dim: int = 32
    hidden_dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    final_logit_softcap: float | None = 30.0
    num_features: int = 18


def apply_rope(inputs: jax.Array, positions: jax.Array, *, max_wavelength: float = 10_000.0) -> jax.Array:
    """Turns pairs of coordinates of ``[B, T, N, H]`` by angles in proportion to ``[B, T]``."""
    half = inputs.shape[-1] // 2
    timescale = max_wavelength ** (jnp.arange(half) / half)
    angles = positions[..., None, None] / timescale[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(inputs, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(inputs.dtype)


class Einsum(nnx.Module):
    def __init__(self, einsum_str: str, shape: tuple[int, ...], *, fan_in: int, rngs: nnx.Rngs):
        self.einsum_str = einsum_str
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.einsum_str, x, self.w[...])


class RMSNorm(nnx.Module):
    def __init__(self, dim: int):
        self.scale = nnx.Param(jnp.zeros(dim))

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return normed * (1 + self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,)))


class Attention(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        n, k, d, h = config.num_heads, config.num_kv_heads, config.embed_dim, config.head_dim
        self.query_pre_attn_scalar = h**-0.5
        self.q_einsum = Einsum("BTD,NDH->BTNH", (n, d, h), fan_in=d, rngs=rngs)
        self.kv_einsum = Einsum("BTD,CKDH->CBTKH", (2, k, d, h), fan_in=d, rngs=rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (n, h, d), fan_in=n * h, rngs=rngs)
        self.attend = RandomFeatureAttention(k, h, config.num_features, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        query = apply_rope(self.q_einsum(x), positions) * self.query_pre_attn_scalar
        key, value = self.kv_einsum(x)
        key = apply_rope(key, positions)
        encoded = self.attend(query, key, value, scale=1.0, is_causal=True)
        return self.attn_vec_einsum(encoded)


class FeedForward(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        d, f = config.embed_dim, config.hidden_dim
        self.gate_proj = nnx.Linear(d, f, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(d, f, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(f, d, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.pre_attention_norm = RMSNorm(config.embed_dim)
        self.attn = Attention(config, rngs=rngs)
        self.pre_ffw_norm = RMSNorm(config.embed_dim)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attn(self.pre_attention_norm(x), positions)
        return x + self.mlp(self.pre_ffw_norm(x))


class Transformer(nnx.Module):
    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.embed_dim, self.final_logit_softcap = config.embed_dim, config.final_logit_softcap
        shape = (config.num_embed, config.embed_dim)
        self.input_embedding = nnx.Param(jax.random.normal(rngs.params(), shape) * config.embed_dim**-0.5)
        self.layers = nnx.data([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.embed_dim)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns logits of the token after each of ``[batch, length]`` tokens."""
        x = jnp.take(self.input_embedding[...], tokens, axis=0) * self.embed_dim**0.5
        for layer in self.layers:
            x = layer(x, positions)
        logits = self.final_norm(x) @ self.input_embedding[...].T
        if self.final_logit_softcap is not None:
            logits = jnp.tanh(logits / self.final_logit_softcap) * self.final_logit_softcap
        return logits
