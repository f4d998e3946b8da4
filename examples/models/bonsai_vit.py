"""Vision transformer in Flax NNX, in the style of jax-ml/bonsai."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax.integrations.nnx import RandomFeatureAttention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    image_size: int = 8
    patch_size: int = 2
    num_channels: int = 1
    hidden_dim: int = 32
    mlp_dim: int = 64
    num_heads: int = 2
    num_layers: int = 2
    num_labels: int = 10
    dropout_prob: float = 0.1
    eps: float = 1e-12
    num_features: int = 34


class Embeddings(nnx.Module):
    """Patches by a convolution, a class token, and learned positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        patch = (config.patch_size, config.patch_size)
        num_patches = (config.image_size // config.patch_size) ** 2
        self.projection = nnx.Conv(
            config.num_channels, config.hidden_dim, kernel_size=patch, strides=patch, padding="VALID", rngs=rngs
        )
        self.cls_token = nnx.Param(jnp.zeros((1, 1, config.hidden_dim)))
        shape = (1, num_patches + 1, config.hidden_dim)
        self.position_embeddings = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape))
        self.dropout = nnx.Dropout(config.dropout_prob, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.projection(images)
        x = patches.reshape(len(images), -1, patches.shape[-1])
        cls_token = jnp.broadcast_to(self.cls_token[...], (len(images), 1, x.shape[-1]))
        x = jnp.concatenate([cls_token, x], axis=1)
        return self.dropout(x + self.position_embeddings[...])


class TransformerEncoder(nnx.Module):
    """One layer: attention and an MLP, each after a norm and beside a residual."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.layernorm_before = nnx.LayerNorm(config.hidden_dim, epsilon=config.eps, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.num_heads,
            in_features=config.hidden_dim,
            decode=False,
            attention_fn=RandomFeatureAttention(config.num_heads, config.hidden_dim // config.num_heads, config.num_features, rngs=rngs),
            rngs=rngs,
        )
        self.layernorm_after = nnx.LayerNorm(config.hidden_dim, epsilon=config.eps, rngs=rngs)
        self.linear1 = nnx.Linear(config.hidden_dim, config.mlp_dim, rngs=rngs)
        self.linear2 = nnx.Linear(config.mlp_dim, config.hidden_dim, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_prob, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.layernorm_before(x))
        hidden = nnx.gelu(self.linear1(self.layernorm_after(x)), approximate=False)
        return x + self.dropout(self.linear2(self.dropout(hidden)))


class ViTClassificationModel(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        self.layers = nnx.data([TransformerEncoder(config, rngs=rngs) for _ in range(config.num_layers)])
        self.layernorm = nnx.LayerNorm(config.hidden_dim, epsilon=config.eps, rngs=rngs)
        self.classifier = nnx.Linear(config.hidden_dim, config.num_labels, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits ``[batch, num_labels]`` of images ``[batch, height, width, channels]``."""
        x = self.embeddings(images)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.layernorm(x)[:, 0])
