"""A Llama or Qwen of the Hugging Face Hub with attention in linear time: load, swap, compare.

``load_model`` puts the weights of a decoder into a Flax NNX model with rotary positions and grouped
queries. ``swap_attention`` then changes the attention of all layers to calibrated features with an
exact band and exact keys by score, and nothing is trained. With ``--relative_error``, ``linearize``
chooses the features, band and exact keys of each layer instead, and ``--steps`` lets it learn
features. Maps are fitted to help pages of Python, and all numbers are for other help pages.

Run: python -m examples.hugging_face_decoder --model_dir=DIR --train_steps=800
     python -m examples.hugging_face_decoder --model_dir=DIR [--length 256] [--features 64]
     python -m examples.hugging_face_decoder --model_dir=DIR --relative_error=0.05 [--steps 100]

The first command trains a small model of bytes and writes it into DIR as transformers would, with
``config.json`` and ``model.safetensors``. The others read such files, and ``tokenizer.json`` if DIR
has one. Models of the types llama, qwen2 and qwen3 can be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.hugging_face import (
    at_least,
    filled,
    load_tokenizer,
    pages,
    positive_number,
    read_config,
)
from simrf_jax import ExactKeys
from simrf_jax.integrations.nnx import (
    RandomFeatureAttention,
    calibrate,
    linearize,
    swap_attention,
    view,
)

DECODER_NAMES = {
    ("words",): "model.embed_tokens",
    ("norm",): "model.norm",
    ("head",): "lm_head",
}
LAYER_NAMES = {
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("attention", "query_norm"): "self_attn.q_norm",
    ("attention", "key_norm"): "self_attn.k_norm",
    ("attention_norm",): "input_layernorm",
    ("mlp_gate",): "mlp.gate_proj",
    ("mlp_in",): "mlp.up_proj",
    ("mlp_out",): "mlp.down_proj",
    ("mlp_norm",): "post_attention_layernorm",
}
CONFIG_NAMES = {
    "model_type": "model_type",
    "vocabulary_size": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "rotary_base": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "is_tied": "tie_word_embeddings",
}
# What such a decoder may have otherwise, and ``Decoder`` has not.
ARITHMETIC = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
}
MODEL_TYPES = ("llama", "qwen2", "qwen3")
CALIBRATED = {"feature_map": "calibrated", "coupling": "cross_polytope", "is_causal": True}
KEYS = ExactKeys(16, by="score")
WAYS: dict[str, dict[str, Any]] = {
    "positive features": {"is_causal": True},
    "calibrated": CALIBRATED,
    "calibrated, exact band": CALIBRATED | {"exact_bandwidth": 16},
    "calibrated, exact band and keys": CALIBRATED | {"exact_bandwidth": 16, "exact_keys": KEYS},
}
NUM_FIT, NUM_JUDGE, NUM_TEST = 16, 8, 32  # Windows.
BATCH = 4  # Sequences that a model reads at a time, except while it is trained.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of the decoder; the defaults are those of the model that ``--train_steps`` trains.

    Attributes:
      model_type: One of ``MODEL_TYPES``: qwen2 has biases of queries, keys and values, and qwen3
        has norms of queries and keys.
      vocabulary_size: Number of tokens.
      width: Width of the tokens.
      depth: Number of transformer layers.
      num_heads: Number of query heads.
      num_kv_heads: Number of key heads, a divisor of the number of query heads.
      head_dim: Width of a head.
      mlp_dim: Hidden width of the MLPs.
      rotary_base: Base of the wavelengths of the rotary positions.
      norm_epsilon: Added to mean squares in norms.
      is_tied: True if the embeddings of the tokens also give the logits.
    """

    model_type: str = "llama"
    vocabulary_size: int = 128
    width: int = 64
    depth: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_dim: int = 176
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    is_tied: bool = True

    @classmethod
    def of(cls, path: pathlib.Path) -> DecoderConfig:
        """Returns the shape that a ``config.json`` says.

        Raises:
          ValueError: If it is of another model than ``Decoder`` is.
        """
        published = read_config(path, ARITHMETIC)
        rotary = published.get("rope_parameters") or {}  # Newer files have the base in here.
        for name, given, expected in (
            ("model_type", published["model_type"], MODEL_TYPES),
            ("rope_type", rotary.get("rope_type", "default"), ("default",)),
        ):
            if given not in expected:
                raise ValueError(f"{name} must be {' or '.join(expected)} in {path}, got {given}.")
        heads = published["num_attention_heads"]
        may_lack = {
            "num_key_value_heads": heads,
            "head_dim": published["hidden_size"] // heads,
            "tie_word_embeddings": False,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
        }
        # A field may be there and null.
        published = may_lack | rotary | {k: v for k, v in published.items() if v is not None}
        return cls(**{ours: published[theirs] for ours, theirs in CONFIG_NAMES.items()})


class Decoder(nnx.Module):
    """A Llama or Qwen, which predicts the next token.

    Args:
      config: Shape of the model.
      rngs: Keys of the parameters (``params``).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = Decoder(DecoderConfig(vocabulary_size=9), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((3, 8), int)).shape
      (3, 8, 9)

    References:
      Touvron et al., Llama 2 (2023), https://arxiv.org/abs/2307.09288
      Qwen Team, Qwen2.5 (2024), https://arxiv.org/abs/2412.15115
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.words = nnx.Embed(c.vocabulary_size, c.width, rngs=rngs)
        self.blocks = nnx.List([DecoderLayer(c, rngs=rngs) for _ in range(c.depth)])
        self.norm = nnx.RMSNorm(c.width, epsilon=c.norm_epsilon, rngs=rngs)
        if not c.is_tied:
            self.head = nnx.Linear(c.width, c.vocabulary_size, use_bias=False, rngs=rngs)
        self.is_tied = c.is_tied

    def __call__(self, tokens: jax.Array, start: int | jax.Array = 0) -> jax.Array:
        """Returns logits of the token after each token, ``[batch, length, vocabulary]``.

        Args:
          tokens: Numbers of tokens, ``[batch, length]``.
          start: Position of the first of them, which is above 0 if a state has read others.
        """
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, start)
        x = self.norm(x)
        return self.words.attend(x) if self.is_tied else self.head(x)


class DecoderLayer(nnx.Module):
    """Transformer layer: attention, then a gated MLP, both pre-norm and residual."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, options = config, {"use_bias": False, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(c.width, epsilon=c.norm_epsilon, rngs=rngs)
        self.attention = RotaryAttention(c, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(c.width, epsilon=c.norm_epsilon, rngs=rngs)
        self.mlp_gate = nnx.Linear(c.width, c.mlp_dim, **options)
        self.mlp_in = nnx.Linear(c.width, c.mlp_dim, **options)
        self.mlp_out = nnx.Linear(c.mlp_dim, c.width, **options)

    def __call__(self, x: jax.Array, start: int | jax.Array) -> jax.Array:
        """Maps tokens ``[batch, length, width]`` to the same shape, from a position on."""
        x = x + self.attention(self.attention_norm(x), start)
        hidden = self.mlp_norm(x)
        return x + self.mlp_out(jax.nn.silu(self.mlp_gate(hidden)) * self.mlp_in(hidden))


class RotaryAttention(nnx.MultiHeadAttention):
    """Causal attention with rotary positions and grouped queries.

    ``swap_attention`` and ``linearize`` find it because it is an ``nnx.MultiHeadAttention`` that
    calls its ``attention_fn`` with the queries and keys that are compared.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        super().__init__(
            c.num_heads,
            c.width,
            c.num_heads * c.head_dim,
            num_kv_heads=c.num_kv_heads,
            use_bias=c.model_type == "qwen2",
            decode=False,
            rngs=rngs,
        )
        shape = (c.num_heads, c.head_dim)
        self.out = nnx.LinearGeneral(shape, c.width, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.has_norms, self.rotary_base = c.model_type == "qwen3", c.rotary_base
        if self.has_norms:
            self.query_norm = nnx.RMSNorm(c.head_dim, epsilon=c.norm_epsilon, rngs=rngs)
            self.key_norm = nnx.RMSNorm(c.head_dim, epsilon=c.norm_epsilon, rngs=rngs)

    def __call__(self, x: jax.Array, start: int | jax.Array) -> jax.Array:
        """Maps tokens ``[batch, length, width]`` to the same shape, from a position on."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.has_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotate(one, start, self.rotary_base) for one in (query, key))
        return self.out(self.attention_fn(query, key, value, is_causal=True))


def rotate(x: jax.Array, start: int | jax.Array, base: float) -> jax.Array:
    r"""Rotates coordinates i and i + H/2 at position t by the angle :math:`t / base^{2i/H}`.

    Args:
      x: Queries or keys, ``[batch, length, heads, H]``.
      start: Position of the first.
      base: Base of the wavelengths.
    """
    length, dim = x.shape[1], x.shape[-1]
    frequencies = jnp.asarray(base ** (-np.arange(0, dim, 2) / dim), jnp.float32)
    angles = (start + jnp.arange(length))[:, None] * frequencies[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def load_model(folder: pathlib.Path) -> Decoder:
    """Returns the decoder with the parameters of the ``model*.safetensors`` of a folder, in float32.

    Raises:
      KeyError: If the files lack a tensor of the model.
      ValueError: If ``config.json`` is of another model.
    """
    import safetensors.numpy

    config, tensors = DecoderConfig.of(folder / "config.json"), {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= safetensors.numpy.load_file(str(path))
    return filled(lambda: Decoder(config, rngs=nnx.Rngs(0)), tensors, published_name)


def save_model(model: Decoder, config: DecoderConfig, folder: pathlib.Path) -> None:
    """Writes what ``load_model`` reads, which transformers can read too."""
    import safetensors.numpy

    tensors = {}
    for (*module, leaf), variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(variable[...])
        if leaf == "kernel":
            rows = -1 if module[-1] == "out" else array.shape[0]
            array = array.reshape(rows, array.shape[-1] if rows == -1 else -1).T
        name = f"{published_name(tuple(module))}.{'bias' if leaf == 'bias' else 'weight'}"
        tensors[name] = np.ascontiguousarray(array.reshape(-1) if leaf == "bias" else array)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = {theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()}
    class_name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.model_type]
    fields |= {"architectures": [f"{class_name}ForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2))


def published_name(module: tuple[Any, ...]) -> str:
    """Returns the name that the published file has for a module of the decoder."""
    if module[0] == "blocks":
        return f"model.layers.{module[1]}.{LAYER_NAMES[module[2:]]}"
    return DECODER_NAMES[module]


class Texts(NamedTuple):
    """Windows of help pages, ``[n, length + 1]``; no two fields share a paragraph.

    Attributes:
      train: Windows to train on, and to fit features to.
      judge: Windows to choose the sizes of layers on.
      test: Windows to measure on.
    """

    train: np.ndarray
    judge: np.ndarray
    test: np.ndarray

    @classmethod
    def load(cls, folder: pathlib.Path, length: int) -> Texts:
        """Returns windows of tokens; of bytes, if the folder has no ``tokenizer.json``."""
        tokenizer, path = None, folder / "tokenizer.json"
        if path.exists():
            tokenizer = load_tokenizer(path)
        texts = np.random.default_rng(0).permutation([*pages().values()])
        first, second = 8 * len(texts) // 10, 9 * len(texts) // 10
        parts = []
        for part in (texts[:first], texts[first:second], texts[second:]):
            text = "\n\n".join(part)
            tokens = tokenizer.encode(text).ids if tokenizer else [*text.encode("ascii", "ignore")]
            count = (len(tokens) - 1) // length
            starts = length * np.arange(count)[:, None]
            parts.append(np.array(tokens)[starts + np.arange(length + 1)])
        return cls(*parts)


def train(
    texts: np.ndarray, config: DecoderConfig, num_steps: int, *, batch_size: int = 8
) -> Decoder:
    """Returns a decoder that is trained to predict the next token of windows."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0, 4e-3, num_steps // 10, num_steps)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer[Decoder], batch: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda model: bits(model, batch))(model)
        optimizer.update(model, grads)
        return value

    for number in range(num_steps):
        chosen = np.random.default_rng(number).integers(len(texts), size=batch_size)
        value = step(model, optimizer, jnp.asarray(texts[chosen]))
        if (number + 1) % 50 == 0:
            print(f"step {number + 1}: {float(value):.3f} bits", flush=True)
    return model


def bits(model: Decoder, windows: jax.Array) -> jax.Array:
    """Returns the mean bits per token that a model needs for windows ``[batch, length + 1]``."""
    logits = model(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return jnp.mean(losses) / jnp.log(2)


_bits = nnx.jit(bits)


def mean_bits(model: Decoder, windows: np.ndarray) -> float:
    """Returns the bits per token of all windows, ``BATCH`` at a time."""
    batches = np.split(windows[: len(windows) // BATCH * BATCH], len(windows) // BATCH)
    return float(np.mean([_bits(model, jnp.asarray(batch)) for batch in batches]))


def swap(model: Decoder, way: str, num_features: int, fit: np.ndarray, seed: int) -> Any:
    """Swaps the attention of all layers to one of ``WAYS``, and calibrates it."""
    swapped = swap_attention(model, num_features, rngs=nnx.Rngs(seed), **WAYS[way])
    if "feature_map" in WAYS[way]:
        calibrate(model, [jnp.asarray(fit[i : i + BATCH]) for i in range(0, len(fit), BATCH)])
    return swapped


def compare(
    model: Decoder, fit: np.ndarray, test: np.ndarray, num_features: int, num_seeds: int
) -> dict[str, list[float]]:
    """Returns the bits per token of each way to attend, one for each seed of W.

    Args:
      model: The decoder; it has softmax attention before and after.
      fit: Windows to calibrate on, ``[n, length]``.
      test: Other windows, ``[n, length + 1]``.
      num_features: Number of features of a head.
      num_seeds: Number of draws of W.
    """
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for way, seed in itertools.product(WAYS, range(num_seeds)):
        swapped = swap(model, way, num_features, fit, seed)
        found[way].append(mean_bits(model, test))
        swapped.undo()
    return found


def complete(model: Decoder, prompt: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the likeliest continuation of a prompt, token by token with a state, and its logits.

    Args:
      model: A decoder with random-feature attention.
      prompt: Tokens, ``[batch, length]``.
      count: Number of tokens to add.

    Returns:
      The tokens with those added, ``[batch, length + count]``, and the logits that chose these,
      ``[batch, count, vocabulary]``.
    """
    decoder = view(model, only=RandomFeatureAttention, decode=True, batch_size=len(prompt))
    step = nnx.jit(lambda decoder, tokens, start: decoder(tokens, start)[:, -1])
    tokens, logits = prompt, []
    new = prompt
    for _ in range(count):
        logits.append(step(decoder, new, jnp.asarray(tokens.shape[1] - new.shape[1])))
        new = jnp.argmax(logits[-1], axis=-1)[:, None]
        tokens = jnp.concatenate([tokens, new], axis=1)
    return tokens, jnp.stack(logits, axis=1)


def flags() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.hugging_face_decoder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model_dir", type=pathlib.Path, required=True)
    parser.add_argument("--train_steps", type=at_least(0), default=0)
    parser.add_argument("--length", type=at_least(2), default=256)
    parser.add_argument("--features", type=at_least(1), help="By default 64.")
    parser.add_argument("--seeds", type=at_least(1), help="By default 3.")
    parser.add_argument("--relative_error", type=positive_number)
    parser.add_argument("--steps", type=at_least(0), help="By default 0.")
    return parser


def check_folder(parser: argparse.ArgumentParser, folder: pathlib.Path, *, trains: bool) -> None:
    """Refuses a folder to which no model can be written, or whose model lacks files."""
    own_size = DecoderConfig().vocabulary_size
    if trains:
        if found := [*folder.glob("*.json"), *folder.glob("*.safetensors")]:
            parser.error(f"--train_steps writes a model of bytes to a new folder, got {found[0]}.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"--model_dir={folder} cannot be written: {error}")
    elif not (folder / "config.json").exists():
        parser.error(f"--model_dir={folder} lacks config.json; --train_steps=800 makes a model.")
    elif not (folder / "tokenizer.json").exists():
        size = DecoderConfig.of(folder / "config.json").vocabulary_size
        if size != own_size:
            parser.error(
                f"--model_dir={folder} lacks tokenizer.json, which only models of {own_size} bytes "
                f"do not need, got one of {size} tokens."
            )


def main() -> None:
    """Trains a model if asked to, and prints how near each way to attend comes to softmax."""
    parser = flags()
    options = parser.parse_args()
    chooses = options.relative_error is not None
    if options.steps is not None and not chooses:
        parser.error("--steps needs --relative_error.")
    if chooses and (options.features, options.seeds) != (None, None):
        parser.error("--relative_error chooses features: it takes no --features and no --seeds.")
    num_features = 64 if options.features is None else options.features
    num_seeds = 3 if options.seeds is None else options.seeds
    num_steps = options.steps or 0
    folder = options.model_dir
    check_folder(parser, folder, trains=options.train_steps > 0)
    texts = Texts.load(folder, options.length)
    counts, least = tuple(map(len, texts)), (NUM_FIT, NUM_JUDGE if chooses else 0, BATCH)
    if any(count < number for count, number in zip(counts, least, strict=True)):
        parser.error(
            f"--length must leave at least {least[0]} windows to fit to, {least[1]} to choose by "
            f"and {least[2]} to test on, got {options.length}, which leaves {counts}."
        )
    if options.train_steps:
        config = DecoderConfig()
        save_model(train(texts.train, config, options.train_steps), config, folder)
    model = load_model(folder)
    fit, test = texts.train[:NUM_FIT, :-1], texts.test[:NUM_TEST]
    before = mean_bits(model, test)
    print(f"Bits per token of {len(test)} windows of {options.length} tokens:")
    print(f"softmax attention: {before:.4f}")
    if chooses:
        report = linearize(
            model,
            [jnp.asarray(fit[i : i + 2]) for i in range(0, NUM_FIT, 2)],
            [jnp.asarray(texts.judge[i : i + 2, :-1]) for i in range(0, NUM_JUDGE, 2)],
            relative_error=options.relative_error,
            num_steps=num_steps,
            optimizer=optax.adam(optax.cosine_decay_schedule(0.1, num_steps))
            if num_steps
            else None,
            is_causal=True,
            rngs=nnx.Rngs(0),
        )
        print(f"linearized: {mean_bits(model, test):.4f}", report, sep="\n")
        return
    for way, found in compare(model, fit, test, num_features, num_seeds).items():
        error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.nan
        print(f"{way}: {np.mean(found):.4f} ± {error:.4f}", flush=True)
    swap(model, way, num_features, fit, 0)
    length = options.length // 2
    tokens, logits = complete(model, jnp.asarray(test[:1, :length]), length)
    whole = model(tokens)[:, length - 1 : -1]
    print(
        f"Greedy decoding of {length} tokens after {length}: logits within "
        f"{float(jnp.max(jnp.abs(logits - whole))):.1e} of those of the whole call."
    )


if __name__ == "__main__":
    main()
