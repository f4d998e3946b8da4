"""Vision transformer in Flax Linen, in the style of google-research/big_vision."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from simrf_jax.integrations.linen import RandomFeatureAttention


def posemb_sincos_2d(h: int, w: int, width: int, temperature: float = 10_000.0) -> jax.Array:
    """Returns sines and cosines of rows and columns, ``[1, h * w, width]``."""
    y, x = (part.reshape(-1, 1) for part in jnp.mgrid[:h, :w])
    omega = 1.0 / temperature ** (jnp.arange(width // 4) / (width // 4 - 1))
    angles = (x * omega[None], y * omega[None])
    return jnp.concatenate([f(one) for one in angles for f in (jnp.sin, jnp.cos)], axis=1)[None]


class MlpBlock(nn.Module):
    mlp_dim: int | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        width = x.shape[-1]
        x = nn.gelu(nn.Dense(self.mlp_dim or 4 * width)(x))
        x = nn.Dropout(rate=self.dropout)(x, deterministic)
        return nn.Dense(width)(x)


class Encoder1DBlock(nn.Module):
    """One layer: attention and an MLP."""

    mlp_dim: int | None = None
    num_heads: int = 2
    num_features: int = 34
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> tuple[jax.Array, dict[str, jax.Array]]:
        out = {}
        y = nn.LayerNorm()(x)
        y = out["sa"] = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            kernel_init=nn.initializers.xavier_uniform(),
            deterministic=deterministic,
            attention_fn=RandomFeatureAttention(self.num_features, parent=None),
        )(y, y)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        x = out["+sa"] = x + y
        y = nn.LayerNorm()(x)
        y = out["mlp"] = MlpBlock(self.mlp_dim, self.dropout)(y, deterministic)
        y = nn.Dropout(rate=self.dropout)(y, deterministic)
        x = out["+mlp"] = x + y
        return x, out


class Encoder(nn.Module):
    depth: int
    mlp_dim: int | None = None
    num_heads: int = 2
    num_features: int = 34
    dropout: float = 0.0
    scan: bool = False
    remat_policy: str = "nothing_saveable"

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> tuple[jax.Array, dict[str, jax.Array]]:
        out = {}
        fields = {"mlp_dim": self.mlp_dim, "num_heads": self.num_heads, "num_features": self.num_features, "dropout": self.dropout}
        if self.scan:
            block = nn.remat(
                Encoder1DBlock,
                prevent_cse=False,
                static_argnums=(2,),  # Which counts self.
                policy=getattr(jax.checkpoint_policies, self.remat_policy, None),
            )
            x, scan_out = nn.scan(
                block,
                variable_axes={"params": 0, "random_features": 0, "attention_calls": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.depth,
            )(name="encoderblock", **fields)(x, deterministic)
            for layer in range(self.depth):
                out[f"block{layer:02d}"] = jax.tree.map(lambda o, layer=layer: o[layer], scan_out)
        else:
            for layer in range(self.depth):
                block = Encoder1DBlock(name=f"encoderblock_{layer}", **fields)
                x, out[f"block{layer:02d}"] = block(x, deterministic)
        out["pre_ln"] = x
        return nn.LayerNorm(name="encoder_norm")(x), out


class ViT(nn.Module):
    num_classes: int | None = None
    patch_size: tuple[int, int] = (2, 2)
    width: int = 32
    depth: int = 2
    mlp_dim: int | None = None
    num_heads: int = 2
    num_features: int = 34
    dropout: float = 0.0
    scan: bool = False
    remat_policy: str = "nothing_saveable"

    @nn.compact
    def __call__(self, image: jax.Array, *, train: bool = False) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns logits of images ``[batch, height, width, channels]``, and what led to them."""
        out = {}
        image = jnp.asarray(image, jnp.float32)
        x = out["stem"] = nn.Conv(self.width, self.patch_size, strides=self.patch_size, padding="VALID", name="embedding")(image)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        x = out["with_posemb"] = x + posemb_sincos_2d(h, w, c)
        x = nn.Dropout(rate=self.dropout)(x, not train)
        x, out["encoder"] = Encoder(
            depth=self.depth,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            num_features=self.num_features,
            dropout=self.dropout,
            scan=self.scan,
            remat_policy=self.remat_policy,
            name="Transformer",
        )(x, deterministic=not train)
        x = out["head_input"] = jnp.mean(x, axis=1)
        if self.num_classes:
            x = out["logits"] = nn.Dense(self.num_classes, name="head", kernel_init=nn.initializers.zeros)(x)
        return x, out
