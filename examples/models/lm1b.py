"""Decoder-only language model in Flax Linen, in the style of Flax's lm1b example.

It trains on packed sequences and decodes token by token.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from simrf_jax.integrations.linen import RandomFeatureAttention


@struct.dataclass
class TransformerConfig:
    vocab_size: int = 11
    output_vocab_size: int = 11
    logits_via_embedding: bool = True
    dtype: jnp.dtype = jnp.float32
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 2
    qkv_dim: int = 16
    mlp_dim: int = 32
    max_len: int = 16
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.0  # Random features cannot drop attention weights out.
    deterministic: bool = False
    decode: bool = False
    num_features: int = 18


def shift_right(x: jax.Array, axis: int = 1) -> jax.Array:
    """Shifts the input to the right by padding with a zero on one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (1, 0)
    padded = jnp.pad(x, widths, constant_values=x.dtype.type(0))
    return jax.lax.dynamic_slice_in_dim(padded, 0, padded.shape[axis] - 1, axis)


def shift_inputs(x: jax.Array, segment_ids: jax.Array | None = None, axis: int = 1) -> jax.Array:
    """Shifts inputs to the right, with a zero at the start of each packed sequence."""
    shifted = shift_right(x, axis=axis)
    if segment_ids is not None:
        shifted *= segment_ids == shift_right(segment_ids, axis=axis)
    return shifted


def sinusoidal(max_len: int, dim: int, min_scale: float = 1.0, max_scale: float = 10000.0):
    """Returns sines and cosines of positions, ``[1, max_len, dim]``."""
    half = dim // 2
    position = np.arange(max_len)[:, None]
    angle = position * min_scale * np.exp(np.arange(half) * (-np.log(max_scale / min_scale) / (half - 1)))
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)[None], jnp.float32)


class AddPositionEmbs(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, inputs_positions: jax.Array | None = None) -> jax.Array:
        config = self.config
        pos_embedding = sinusoidal(config.max_len, inputs.shape[-1])
        if config.decode:
            is_initialized = self.has_variable("cache", "cache_index")
            cache_index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.uint32))
            if is_initialized:
                index = cache_index.value
                cache_index.value = index + inputs.shape[1]
                pos_embedding = jax.lax.dynamic_slice_in_dim(pos_embedding, index, inputs.shape[1], axis=1)
        if inputs_positions is None:  # Normal, unpacked sequences.
            return inputs + pos_embedding[:, : inputs.shape[1]]
        return inputs + jnp.take(pos_embedding[0], inputs_positions, axis=0)


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        config = self.config
        x = nn.relu(nn.Dense(config.mlp_dim, dtype=config.dtype)(inputs))
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        output = nn.Dense(inputs.shape[-1], dtype=config.dtype)(x)
        return nn.Dropout(rate=config.dropout_rate)(output, deterministic=config.deterministic)


class EncoderDecoder1DBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, decoder_mask: jax.Array | None = None) -> jax.Array:
        config = self.config
        x = nn.LayerNorm(dtype=config.dtype)(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            dtype=config.dtype,
            qkv_features=config.qkv_dim,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.attention_dropout_rate,
            deterministic=config.deterministic,
            attention_fn=RandomFeatureAttention(config.num_features, is_causal=True, masks="packed", decode=config.decode, parent=None),
        )(x, mask=decoder_mask)
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        x = x + inputs
        return x + MlpBlock(config)(nn.LayerNorm(dtype=config.dtype)(x))


class Decoder(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        inputs_positions: jax.Array | None = None,
        inputs_segmentation: jax.Array | None = None,
        decoder_mask: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        embed = nn.Embed(config.output_vocab_size, config.emb_dim, embedding_init=nn.initializers.normal(stddev=1.0))
        y = inputs.astype("int32")
        if not config.decode:
            y = shift_inputs(y, segment_ids=inputs_segmentation)
        y = embed(y)
        y = AddPositionEmbs(config, name="posembed_output")(y, inputs_positions=inputs_positions)
        y = nn.Dropout(rate=config.dropout_rate)(y, deterministic=config.deterministic)
        y = y.astype(config.dtype)
        for layer in range(config.num_layers):
            y = EncoderDecoder1DBlock(config, name=f"encoderdecoderblock_{layer}")(y, decoder_mask)
        y = nn.LayerNorm(dtype=config.dtype, name="encoderdecoder_norm")(y)
        if config.logits_via_embedding:
            return embed.attend(y.astype(jnp.float32)) / jnp.sqrt(y.shape[-1])
        return nn.Dense(config.output_vocab_size, dtype=config.dtype, name="logitdense")(y)


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        inputs_positions: jax.Array | None = None,
        inputs_segmentation: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits ``[batch, length, vocabulary]`` of each token from those before it.

        Args:
          inputs: Tokens ``[batch, length]``; 0 is padding. With ``decode`` the tokens that follow
            those in the cache, and the logits are those of the next token.
          inputs_positions: Positions in the packed sequences, ``[batch, length]``.
          inputs_segmentation: Numbers of the packed sequences, ``[batch, length]``; 0 is padding.
        """
        config = self.config
        if config.decode:  # For fast autoregressive decoding no mask is needed.
            decoder_mask = None
        else:
            decoder_mask = nn.combine_masks(
                nn.make_attention_mask(inputs > 0, inputs > 0, dtype=config.dtype),
                nn.make_causal_mask(inputs, dtype=config.dtype),
            )
        if inputs_segmentation is not None:  # Packed sequences attend to themselves.
            decoder_mask = nn.combine_masks(
                decoder_mask,
                nn.make_attention_mask(inputs_segmentation, inputs_segmentation, jnp.equal, dtype=config.dtype),
            )
        logits = Decoder(config, name="decoder")(inputs, inputs_positions, inputs_segmentation, decoder_mask)
        return logits.astype(config.dtype)
