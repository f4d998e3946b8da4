"""A BERT of the Hugging Face Hub with attention in linear time: load, swap, calibrate, compare.

``load_model`` puts the weights of a BERT encoder into a Flax NNX model: PyTorch's kernels are
transposed, and every module has another name. ``swap_attention`` then changes the attention of all
layers, and ``calibrate`` fits the features to texts. Nothing is trained. With ``--relative_error``
or ``--budget``, ``linearize`` chooses the features, band and exact keys of each layer instead, and
``--steps`` lets it learn features. It fits to help pages of Python and judges on source code.
``--output_steps`` then learns all learned features again, from the embeddings of the help pages.

Run: python -m examples.hugging_face --model_dir=DIR [--length 128] [--features 112]
     python -m examples.hugging_face --model_dir=DIR --relative_error=0.03 [--steps 100]
         [--output_steps 100]
     python -m examples.hugging_face --model_dir=DIR --budget=0.9

DIR holds ``config.json``, ``model.safetensors`` and ``tokenizer.json``, such as those of
sentence-transformers/all-MiniLM-L6-v2, which this command downloads:
hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir=DIR
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from simrf_jax.integrations.nnx import LearnedRows, calibrate, linearize, swap_attention

Model = TypeVar("Model", bound=nnx.Module)

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
CONFIG_NAMES = {
    "vocabulary_size": "vocab_size",
    "max_length": "max_position_embeddings",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
}
# What a BERT may have otherwise, and ``Encoder`` has not.
ARITHMETIC = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
}
# Options of the adapters, by what the table calls them. 16 keys cost what 16 features do.
CALIBRATED = {"feature_map": "calibrated", "coupling": "cross_polytope"}
WAYS: dict[str, dict[str, Any]] = {
    "positive features": {},
    "calibrated": CALIBRATED,
    "calibrated, exact band": CALIBRATED | {"exact_bandwidth": 16},
    "calibrated, exact band and keys": CALIBRATED | {"exact_bandwidth": 16, "exact_keys": 16},
}
NUM_FIT, NUM_TEST = 8, 16  # Texts.
# Texts for ``linearize``, which learns from two at a time.
NUM_LEARN, NUM_JUDGE, BATCH = 24, 8, 2
# Texts of a step that learns from embeddings, and its rate.
OUTPUT_BATCH, OUTPUT_RATE = 4, 1e-2


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

    @classmethod
    def of(cls, path: pathlib.Path) -> EncoderConfig:
        """Returns the shape that a ``config.json`` says.

        Raises:
          ValueError: If it is of another model than ``Encoder`` is.
        """
        published = read_config(path, ARITHMETIC)
        return cls(**{ours: published[theirs] for ours, theirs in CONFIG_NAMES.items()})


class Encoder(nnx.Module):
    """A BERT that maps a text to the mean of its tokens.

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


def read_config(path: pathlib.Path, arithmetic: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a ``config.json``.

    Args:
      path: Path of the file.
      arithmetic: Required values of fields; the file may lack a field.

    Raises:
      ValueError: If a field is something else.
    """
    published = json.loads(path.read_text())
    for name, expected in arithmetic.items():
        if (given := published.get(name, expected)) != expected:
            raise ValueError(f"{name} must be {expected!r} in {path}, got {given!r}.")
    return published


def load_model(path: pathlib.Path, config: EncoderConfig | None = None) -> Encoder:
    """Returns the encoder with the parameters of a file.

    Args:
      path: Path of ``model.safetensors``.
      config: Shape of the model in the file; None for that of all-MiniLM-L6-v2.

    Raises:
      KeyError: If the file lacks a tensor of a BERT.
    """
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(str(path))
    # Some files name the encoder, beside a head.
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    shape = EncoderConfig() if config is None else config
    return filled(lambda: Encoder(shape, rngs=nnx.Rngs(0)), tensors, _published_name)


def _published_name(module: tuple[Any, ...]) -> str:
    """Returns the name that the published file has for a module of the encoder."""
    if module[0] == "blocks":
        return f"encoder.layer.{module[1]}.{LAYER_NAMES[module[2:]]}"
    return ENCODER_NAMES[module]


def filled(
    make: Callable[[], Model],
    tensors: dict[str, np.ndarray],
    name_of: Callable[[tuple[Any, ...]], str],
) -> Model:
    """Returns a model with the parameters of a published file.

    PyTorch keeps kernels as ``[out, in]``, with the heads of attention in one axis.

    Args:
      make: Function that makes the model, whose parameters are then replaced.
      tensors: Tensors of the file by their names.
      name_of: Function of the path of a module that returns its name in the file.

    Raises:
      KeyError: If the file lacks a tensor of the model.
    """
    graphdef, state = nnx.split(nnx.eval_shape(make))
    loaded = []
    for (*module, leaf), variable in nnx.to_flat_state(state):
        tensor = tensors[f"{name_of(tuple(module))}.{'bias' if leaf == 'bias' else 'weight'}"]
        array = jnp.asarray(tensor.T if leaf == "kernel" else tensor, variable.dtype)
        loaded.append(((*module, leaf), variable.replace(array.reshape(variable.shape))))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def load_tokenizer(path: pathlib.Path) -> Any:
    """Returns a ``tokenizers.Tokenizer`` that neither cuts nor pads texts."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def pages() -> dict[str, str]:
    """Returns the topics of ``help()`` by name.

    Some topics share paragraphs. Each paragraph stays in the first topic only, in alphabetical
    order, so that no two pages have one in common.
    """
    topics = pydoc_data.topics.topics
    seen: set[str] = set()
    result = {}
    for name in sorted(topics):
        paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", topics[name])]
        new = dict.fromkeys(part for part in paragraphs if part not in seen)
        seen.update(new)
        result[name] = "\n\n".join(new)
    return result


def sources() -> list[str]:
    """Returns the second half of each module of the standard library: code, and few docstrings."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_text(errors="replace") for path in sorted(library.glob("[a-z]*.py"))]
    return [module[len(module) // 2 :] for module in modules]


def load_texts(tokenizer: Any, length: int, texts: Iterable[str] | None = None) -> np.ndarray:
    """Returns the beginning of each text that is long enough, ``[texts, length]``.

    Args:
      tokenizer: A ``tokenizers.Tokenizer``.
      length: Number of tokens of each text, with those that begin and end it.
      texts: The texts; None for the topics of ``help()``.
    """
    texts = pages().values() if texts is None else texts
    encoded = (np.array(text.ids) for text in tokenizer.encode_batch([*texts]))
    # The last token of a whole text ends it, and so it ends every beginning.
    cut = [np.append(ids[: length - 1], ids[-1]) for ids in encoded if len(ids) >= length]
    return np.array(cut).reshape(-1, length)


def load_windows(tokenizer: Any, length: int) -> np.ndarray:
    """Returns all topics of ``help()`` in pieces, each begun and ended as a text is.

    Args:
      tokenizer: A ``tokenizers.Tokenizer``.
      length: Number of tokens of each piece; what is left of a topic is dropped.
    """
    found, step = [], length - 2
    for text in tokenizer.encode_batch([*pages().values()]):
        first, *tokens, last = text.ids
        pieces = (tokens[i : i + step] for i in range(0, len(tokens), step))
        found += [[first, *piece, last] for piece in pieces if len(piece) == step]
    return np.array(found).reshape(-1, length)


def learn_outputs(model: Encoder, texts: np.ndarray, exact: np.ndarray, num_steps: int) -> None:
    """Learns the features of all layers from the embeddings of softmax attention.

    The weights of the model stay as they are. Each step takes some of the texts.

    Args:
      model: The encoder, with adapters that have learned features.
      texts: Tokens ``[n, length]``.
      exact: The embeddings of the texts, ``[n, width]``.
      num_steps: Number of steps.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(OUTPUT_RATE, num_steps))
    trainer = nnx.Optimizer(model, optimizer, wrt=LearnedRows)

    @nnx.jit
    def step(model: Encoder, trainer: Any, tokens: jax.Array, exact: jax.Array) -> None:
        def loss(model: Encoder) -> jax.Array:
            return jnp.sum(jnp.square(model(tokens) - exact)) / jnp.sum(jnp.square(exact))

        trainer.update(model, nnx.grad(loss, argnums=nnx.DiffState(0, LearnedRows))(model))

    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        chosen = rng.choice(len(texts), OUTPUT_BATCH, replace=False)
        step(model, trainer, jnp.asarray(texts[chosen]), jnp.asarray(exact[chosen]))


def compare(
    model: Encoder, fit: np.ndarray, test: np.ndarray, num_features: int
) -> dict[str, float]:
    """Returns the mean cosine of embeddings to the exact ones for each way to attend.

    Args:
      model: The encoder; it has softmax attention before and after.
      fit: Texts to calibrate on, ``[n, length]``.
      test: Other texts, ``[n, length]``.
      num_features: Number of features of a head.
    """
    embed = nnx.jit(lambda model, tokens: model(tokens))
    exact = embed(model, test)
    found = {}
    for name, options in WAYS.items():
        swap = swap_attention(model, num_features, rngs=nnx.Rngs(0), **options)
        if "feature_map" in options:
            calibrate(model, [fit])
        found[name] = float(jnp.mean(cosines(embed(model, test), exact)))
        swap.undo()
    return found


def cosines(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosines between the rows of two arrays ``[n, width]``."""
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.sum(x * y, axis=-1) / norms


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of a flag whose integer must not be below the least."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}.")
        return int(text)

    return integer


def positive_number(text: str) -> float:
    """Returns the number of a flag, which must be above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}.")
    return float(text)


def flags() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.hugging_face",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_dir", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=at_least(3), default=128)
    parser.add_argument("--features", type=at_least(1), help="By default 112.")
    parser.add_argument("--relative_error", type=positive_number)
    parser.add_argument("--budget", type=positive_number)
    parser.add_argument("--steps", type=at_least(0), default=0)
    parser.add_argument("--output_steps", type=at_least(0), default=0)
    return parser


def main() -> None:
    """Prints how near each way to attend comes to softmax attention."""
    parser = flags()
    options = parser.parse_args()
    chooses = options.relative_error is not None or options.budget is not None
    if options.steps and not chooses:
        parser.error("--steps needs --relative_error or --budget.")
    if options.output_steps and not options.steps:
        parser.error("--output_steps needs --steps, whose features it learns further.")
    if options.features is not None and chooses:
        parser.error("--relative_error and --budget choose features: they take no --features.")
    num_features = 112 if options.features is None else options.features
    folder = options.model_dir
    if missing := [
        name
        for name in ("config.json", "model.safetensors", "tokenizer.json")
        if not (folder / name).exists()
    ]:
        parser.error(f"--model_dir={folder} lacks {', '.join(missing)}.")
    config = EncoderConfig.of(folder / "config.json")
    if options.length > config.max_length:
        parser.error(
            f"--length must be at most {config.max_length}, the most tokens that the model reads, "
            f"got {options.length}."
        )

    rng, tokenizer = np.random.default_rng(0), load_tokenizer(folder / "tokenizer.json")
    texts = rng.permutation(load_texts(tokenizer, options.length))
    if len(texts) < NUM_LEARN:  # Also NUM_FIT + NUM_TEST.
        parser.error(
            f"--length must leave at least {NUM_LEARN} texts, got {options.length}, which leaves "
            f"{len(texts)}."
        )
    model = load_model(folder / "model.safetensors", config)
    if chooses:
        code = rng.permutation(load_texts(tokenizer, options.length, sources()))[:NUM_JUDGE]
        windows = load_windows(tokenizer, options.length) if options.output_steps else texts[:0]
        embed = nnx.jit(lambda model, tokens: model(tokens))
        exact = [np.asarray(embed(model, x)) for x in np.split(windows, range(8, len(windows), 8))]
        of_code = embed(model, code)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.1, options.steps or 1))
        report = linearize(
            model,
            [jnp.asarray(texts[i : i + BATCH]) for i in range(0, NUM_LEARN, BATCH)],
            [jnp.asarray(code)],
            relative_error=options.relative_error,
            budget=options.budget,
            num_steps=options.steps,
            optimizer=optimizer if options.steps else None,
            rngs=nnx.Rngs(0),
        )
        print(report)
        if options.output_steps:
            learn_outputs(model, windows, np.concatenate(exact), options.output_steps)
            found = jnp.mean(cosines(embed(model, code), of_code))
            print(f"After learning from embeddings: cosine {found:.4f}.")
        return
    fit, test = texts[:NUM_FIT], texts[NUM_FIT : NUM_FIT + NUM_TEST]
    print(f"Cosine of the embeddings of {len(test)} texts to those of softmax attention:")
    for name, value in compare(model, fit, test, num_features).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
