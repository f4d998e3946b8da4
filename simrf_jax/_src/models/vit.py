"""The Performer ViT: a vision transformer whose attention is linear in the number of patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from simrf_jax._src.models.config import ViTConfig
from simrf_jax._src.models.layers import dropout
from simrf_jax._src.models.transformer import apply_layers, make_layers


class ViT(nnx.Module):
    """A pre-norm vision transformer with random-feature or exact attention.

    Args:
      config: Shape and arithmetic of the model.
      rngs: PRNG streams ``params`` (parameters) and ``features`` (projections), or a default one.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.models import ViT, ViTConfig
      >>> config = ViTConfig.named("Ti/4", image_size=(28, 28), channels=1, num_classes=10, depth=2)
      >>> model = ViT(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 28, 28, 1))).shape
      (2, 10)

    References:
      Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021),
      https://arxiv.org/abs/2010.11929
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config
        dtype = jnp.dtype(c.dtype)
        self.patch_embedding = nnx.Linear(
            c.patch_size**2 * c.channels, c.width, dtype=dtype, rngs=rngs
        )
        # This is the scale of big_vision. The first ViTs used 0.02, which is too small at small
        # widths.
        init = nnx.initializers.normal(c.width**-0.5)
        shape = (1, c.num_tokens, c.width)
        self.position_embedding = nnx.Param(init(rngs.params(), shape, jnp.float32))
        if c.pooling == "token":
            self.class_token = nnx.Param(jnp.zeros((1, 1, c.width), jnp.float32))
        self.blocks = nnx.data(make_layers(c, rngs=rngs))
        self.norm = nnx.LayerNorm(c.width, epsilon=1e-6, dtype=dtype, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.head = nnx.Linear(c.width, c.num_classes, kernel_init=zeros, rngs=rngs)

    def __call__(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns the class logits of images.

        Args:
          images: Floating array ``[batch, height, width, channels]``.
          rngs: PRNG stream ``dropout``; None for no dropout.

        Returns:
          float32 logits ``[batch, num_classes]``.

        Raises:
          ValueError: If the shape of the images is not that of the config.
        """
        x = self.embed(images, rngs=rngs)
        x = apply_layers(self.blocks, x, config=self.config, rngs=rngs)
        x = self.norm(x)
        x = x[:, 0] if self.config.pooling == "token" else jnp.mean(x, axis=1)
        return self.head(x.astype(jnp.float32))

    def embed(self, images: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns the tokens ``[batch, length, width]`` that enter the first transformer layer.

        Args:
          images: Floating array ``[batch, height, width, channels]``.
          rngs: PRNG stream ``dropout``; None for no dropout.

        Raises:
          ValueError: If the shape of the images is not that of the config.
        """
        expected = (*self.config.image_size, self.config.channels)
        if images.ndim != 4 or images.shape[1:] != expected:
            raise ValueError(
                f"images must be [batch, height, width, channels] = [batch, "
                f"{', '.join(map(str, expected))}], got shape {images.shape}."
            )
        x = self.patch_embedding(_patches(images, self.config.patch_size))
        if self.config.pooling == "token":
            token = self.class_token[...].astype(x.dtype)
            # Padded and not joined, for batches over an Explicit mesh axis.
            after = jnp.pad(token, [(0, 0), (0, x.shape[1]), (0, 0)])
            x = jnp.pad(x, [(0, 0), (1, 0), (0, 0)]) + after
        x = x + self.position_embedding[...].astype(x.dtype)
        if rngs is not None:
            x = dropout(x, rngs.dropout(), self.config.dropout_rate)
        if self.config.sequence_axis is not None:
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(free, self.config.sequence_axis, free)
            x = jax.lax.with_sharding_constraint(x, spec)
        return x


def _patches(images: jax.Array, size: int) -> jax.Array:
    """Cuts ``[B, height, width, channels]`` into ``[B, patches, size * size * channels]``."""
    b, h, w, c = images.shape
    rows, columns = h // size, w // size
    # One axis at a time, for batches over an Explicit mesh axis.
    grid = images.reshape(b, rows, size, w, c).reshape(b, rows, size, columns, size, c)
    patches = jnp.swapaxes(grid, 2, 3).reshape(b, rows * columns, size, size, c)
    patches = patches.reshape(b, rows * columns, size * size, c)
    return patches.reshape(b, rows * columns, size * size * c)
