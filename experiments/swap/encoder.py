"""The sentence encoder all-MiniLM-L6-v2: its files, its tokenizer, and the model in Flax NNX."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.harness.downloads import Place
from experiments.harness.mistakes import user_mistakes

ADDRESS = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/"
PLACE = Place("--config.model_dir", "SIMRF_MODEL_DIR", "all-MiniLM-L6-v2", "the published file")
# SHA-256 of each file of the published snapshot.
FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
# The modules of the encoder and of one layer, under the names that the published file has for them.
ENCODER_NAMES = {
    ("words",): "embeddings.word_embeddings",
    ("positions",): "embeddings.position_embeddings",
    ("types",): "embeddings.token_type_embeddings",
    ("norm",): "embeddings.LayerNorm",
}
LAYER_NAMES = {
    ("attention", "query"): "attention.self.query",
    ("attention", "key"): "attention.self.key",
    ("attention", "value"): "attention.self.value",
    ("attention", "out"): "attention.output.dense",
    ("attention_norm",): "attention.output.LayerNorm",
    ("mlp_in",): "intermediate.dense",
    ("mlp_out",): "output.dense",
    ("mlp_norm",): "output.LayerNorm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of the encoder; the defaults are those of all-MiniLM-L6-v2.

    Attributes:
      vocabulary_size: Number of word pieces.
      max_length: Largest number of tokens of a text.
      width: Width of the tokens.
      depth: Number of transformer layers.
      num_heads: Number of attention heads, a divisor of the width.
      mlp_dim: Hidden width of the MLPs.
    """

    vocabulary_size: int = 30522
    max_length: int = 512
    width: int = 384
    depth: int = 6
    num_heads: int = 12
    mlp_dim: int = 1536


class Encoder(nnx.Module):
    """A BERT that maps a text to the mean of its tokens.

    Each layer's ``attention.attention_fn`` is softmax attention until ``swapping.swapped`` replaces
    it.

    Args:
      config: Shape of the model.
      rngs: Keys of the parameters (``params``).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> config = EncoderConfig(vocabulary_size=9, max_length=8, width=4, num_heads=2, mlp_dim=8)
      >>> Encoder(config, rngs=nnx.Rngs(0))(jnp.zeros((3, 8), int)).shape
      (3, 4)

    References:
      Reimers and Gurevych, Sentence-BERT (EMNLP 2019), https://arxiv.org/abs/1908.10084
      Devlin et al., BERT (NAACL 2019), https://arxiv.org/abs/1810.04805
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.words = nnx.Embed(c.vocabulary_size, c.width, rngs=rngs)
        self.positions = nnx.Embed(c.max_length, c.width, rngs=rngs)
        self.types = nnx.Embed(2, c.width, rngs=rngs)
        self.norm = nnx.LayerNorm(c.width, epsilon=1e-12, rngs=rngs)
        self.blocks = nnx.List([EncoderLayer(c, rngs=rngs) for _ in range(c.depth)])

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns the embeddings of texts, ``[batch, width]``.

        Args:
          tokens: Numbers of word pieces, ``[batch, length]``.
          mask: Booleans ``[batch, length]``, False for padding; None if there is no padding.
        """
        positions = self.positions.embedding[None, : tokens.shape[1]]
        x = self.norm(self.words(tokens) + positions + self.types.embedding[None, :1])
        for block in self.blocks:
            x = block(x, None if mask is None else mask[:, None, None])
        if mask is None:
            return jnp.mean(x, axis=1)
        weights = mask.astype(x.dtype)
        return jnp.einsum("bld,bl->bd", x, weights) / jnp.sum(weights, axis=1, keepdims=True)


class EncoderLayer(nnx.Module):
    """Transformer layer: attention, then an MLP, each followed by a norm of the residual sum."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.attention = nnx.MultiHeadAttention(c.num_heads, c.width, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(c.width, epsilon=1e-12, rngs=rngs)
        self.mlp_in = nnx.Linear(c.width, c.mlp_dim, rngs=rngs)
        self.mlp_out = nnx.Linear(c.mlp_dim, c.width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(c.width, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Maps tokens ``[batch, length, width]`` to the same shape.

        Args:
          x: Tokens.
          mask: Booleans ``[batch, 1, 1, length]``, or None.
        """
        x = self.attention_norm(x + self.attention(x, mask=mask))
        hidden = jax.nn.gelu(self.mlp_in(x), approximate=False)
        return self.mlp_norm(x + self.mlp_out(hidden))


def find(name: str, model_dir: str = "") -> pathlib.Path:
    """Returns the path of a file of the published model, after downloading it if necessary.

    Args:
      name: One of ``FILES``.
      model_dir: Folder with the files. "" stands for the folder in ``SIMRF_MODEL_DIR``, which may
        also hold a folder ``all-MiniLM-L6-v2``, or, without that variable, for a cache to which the
        file is downloaded.

    Raises:
      UserError: If the folder lacks the file, it cannot be downloaded, or it is not the published
        one.
    """
    return PLACE.find(name, ADDRESS + name, FILES[name], model_dir)


def load_tokenizer(path: pathlib.Path) -> Any:
    """Returns a ``tokenizers.Tokenizer`` that neither cuts nor pads texts.

    Raises:
      UserError: If the package is not installed.
    """
    with user_mistakes(ImportError, prefix="requirements/train.txt names tokenizers: "):
        import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_model(path: pathlib.Path, config: EncoderConfig | None = None) -> Encoder:
    """Returns the encoder with the parameters of a file.

    Args:
      path: Path of ``model.safetensors``.
      config: Shape of the model in the file; None for that of all-MiniLM-L6-v2.

    Raises:
      UserError: If the package ``safetensors`` is not installed.
    """
    with user_mistakes(ImportError, prefix="requirements/train.txt names safetensors: "):
        import safetensors.numpy
    tensors = safetensors.numpy.load_file(str(path))
    shape = EncoderConfig() if config is None else config
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Encoder(shape, rngs=nnx.Rngs(0))))
    flat = nnx.to_flat_state(state)
    loaded = [
        (place, variable.replace(_tensor(tensors, place, variable))) for place, variable in flat
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def _tensor(tensors: dict[str, np.ndarray], place: tuple[Any, ...], variable: Any) -> jax.Array:
    """Returns the tensor of a parameter in the layout of Flax, which has ``[in, out]`` kernels."""
    *module, leaf = place
    if module[0] == "blocks":
        name = f"encoder.layer.{module[1]}.{LAYER_NAMES[tuple(module[2:])]}"
    else:
        name = ENCODER_NAMES[tuple(module)]
    tensor = tensors[f"{name}.{'bias' if leaf == 'bias' else 'weight'}"]
    return jnp.asarray(tensor.T if leaf == "kernel" else tensor).reshape(variable.shape)
