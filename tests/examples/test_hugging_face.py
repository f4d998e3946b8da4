"""The example of a BERT from the Hugging Face Hub, with a tiny one in its place."""

import json
import os
import pydoc_data.topics
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import hugging_face as hf

TINY = hf.EncoderConfig(vocabulary_size=9, max_length=8, width=8, depth=2, num_heads=2, mlp_dim=12)


def published_tensors(config):
    """Returns random tensors with the names and shapes of the published file."""
    c, rng = config, np.random.default_rng(0)
    shapes = {
        "embeddings.word_embeddings.weight": (c.vocabulary_size, c.width),
        "embeddings.position_embeddings.weight": (c.max_length, c.width),
        "embeddings.token_type_embeddings.weight": (2, c.width),
        "embeddings.LayerNorm.weight": (c.width,),
        "embeddings.LayerNorm.bias": (c.width,),
    }
    for layer in range(c.depth):
        linears = {
            "attention.self.query": (c.width, c.width),
            "attention.self.key": (c.width, c.width),
            "attention.self.value": (c.width, c.width),
            "attention.output.dense": (c.width, c.width),
            "intermediate.dense": (c.mlp_dim, c.width),
            "output.dense": (c.width, c.mlp_dim),
            "attention.output.LayerNorm": (c.width,),
            "output.LayerNorm": (c.width,),
        }
        for name, shape in linears.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def normalized(x, tensors, name):
    """Returns the layer norm of x in float64."""
    centered = x - x.mean(-1, keepdims=True)
    unit = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-12)
    return unit * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def bert(tokens, tensors, config):
    """Returns the mean token of one text in NumPy, from BERT's equations."""
    from scipy.special import erf

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    x = tensors["embeddings.word_embeddings.weight"][tokens].astype(np.float64)
    x = x + tensors["embeddings.position_embeddings.weight"][: len(tokens)]
    x = x + tensors["embeddings.token_type_embeddings.weight"][0]
    x = normalized(x, tensors, "embeddings.LayerNorm")
    dim = config.width // config.num_heads
    for layer in range(config.depth):
        at = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{at}.attention.self.{n}") for n in ("query", "key", "value"))
        heads = []
        for head in range(config.num_heads):
            part = slice(head * dim, (head + 1) * dim)
            weights = np.exp(q[:, part] @ k[:, part].T / np.sqrt(dim))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
        attended = linear(np.concatenate(heads, -1), f"{at}.attention.output.dense")
        x = normalized(x + attended, tensors, f"{at}.attention.output.LayerNorm")
        hidden = linear(x, f"{at}.intermediate.dense")
        hidden = hidden / 2 * (1 + erf(hidden / np.sqrt(2)))
        x = normalized(x + linear(hidden, f"{at}.output.dense"), tensors, f"{at}.output.LayerNorm")
    return x.mean(0)


@pytest.fixture(params=["", "bert."])
def tiny_file(tmp_path, request):
    """Makes a file of a BERT, by itself or below a head, and its tensors."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="Needs safetensors.")
    tensors = published_tensors(TINY)
    path = tmp_path / "model.safetensors"
    extra = {"embeddings.position_ids": np.arange(8)[None], "pooler.dense.bias": np.ones(8)}
    saved = {f"{request.param}{name}": tensor for name, tensor in (tensors | extra).items()}
    safetensors.save_file(saved, path)
    return path, tensors


@pytest.mark.slow
def test_a_loaded_encoder_computes_bert(tiny_file):
    path, tensors = tiny_file
    model = hf.load_model(path, TINY)
    tokens = np.array([[1, 5, 2, 8, 0], [3, 3, 7, 1, 4]])
    expected = [bert(row, tensors, TINY) for row in tokens]
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, atol=3e-5)


@pytest.mark.slow
def test_padding_changes_no_embedding():
    model = hf.Encoder(TINY, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 5), 0, 9)
    padded = jnp.pad(tokens, ((0, 0), (0, 3)), constant_values=7)
    mask = jnp.broadcast_to(jnp.arange(8)[None] < 5, (2, 8))
    np.testing.assert_allclose(model(padded, mask), model(tokens), atol=1e-5)


class Encoding:
    """Numbers of the characters of a text, between two that begin and end it."""

    def __init__(self, text):
        self.ids = [1000, *map(ord, text), 2000]


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode_batch(self, pages):
        """Returns the encodings of some texts."""
        return [Encoding(page) for page in pages]


@pytest.fixture
def topics(monkeypatch):
    """Puts six short topics in the place of Python's; two share a paragraph."""
    made_up = {f"topic{i}": f"{i}{i}{i}\n\nmore of {i}" for i in range(5)}
    made_up["topic5"] = "000\n\n  \nmore of 5\n"
    monkeypatch.setattr(pydoc_data.topics, "topics", made_up)
    return made_up


def test_no_paragraph_is_on_two_pages(topics):
    pages = hf.pages()
    assert pages["topic0"] == "000\n\nmore of 0"
    assert pages["topic5"] == "more of 5"


def test_pages_are_cut_and_ended_like_whole_texts(topics):
    rows = hf.load_texts(Characters(), 15)
    assert rows.shape == (5, 15)  # topic5 has 11 tokens.
    np.testing.assert_array_equal(rows[2], [1000, *map(ord, "222\n\nmore of "), 2000])


def test_windows_cover_the_pages(topics):
    rows = hf.load_windows(Characters(), 7)
    texts = ["".join(map(chr, row[1:-1])) for row in rows]
    assert texts[4:6] == ["222\n\n", "more "]  # Of topic2.
    assert {(row[0], row[-1]) for row in rows.tolist()} == {(1000, 2000)}


@pytest.mark.slow
def test_learning_from_embeddings_brings_them_nearer():
    model = hf.Encoder(TINY, rngs=nnx.Rngs(0))
    texts = np.asarray(jax.random.randint(jax.random.key(0), (12, 8), 0, 9))
    exact = np.asarray(model(texts))
    weights = nnx.state(model.blocks[0].mlp_in)
    hf.swap_attention(model, 2, feature_map="learned", rngs=nnx.Rngs(1))
    hf.calibrate(model, [texts])
    before = np.linalg.norm(model(texts) - exact)
    hf.learn_outputs(model, texts, exact, 40)
    assert np.linalg.norm(model(texts) - exact) < 0.8 * before
    chex.assert_trees_all_equal(nnx.state(model.blocks[0].mlp_in), weights)


def test_texts_of_other_kinds():
    assert len(hf.sources()) > 100
    rows = hf.load_texts(Characters(), 5, ["ab", "abcdef"])
    np.testing.assert_array_equal(rows, [[1000, *map(ord, "abc"), 2000]])


def test_no_page_may_be_long_enough(topics):
    assert hf.load_texts(Characters(), 100).shape == (0, 100)


def test_the_shape_is_that_of_the_published_config(tmp_path):
    published = {theirs: getattr(TINY, ours) for ours, theirs in hf.CONFIG_NAMES.items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published | {"model_type": "bert"}))
    assert hf.EncoderConfig.of(path) == TINY
    path.write_text(json.dumps(published | {"hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"hidden_act must be 'gelu' in .*, got 'relu'"):
        hf.EncoderConfig.of(path)


@pytest.mark.slow
def test_each_way_is_undone_and_fits_are_nearer():
    """Queries and keys of a random model are short, so every way comes near."""
    config = hf.EncoderConfig(
        vocabulary_size=50, max_length=40, width=32, depth=2, num_heads=2, mlp_dim=32
    )
    model = hf.Encoder(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(50, size=(6, 40))
    before = [block.attention.attention_fn for block in model.blocks]
    cosines = hf.compare(model, tokens[:3], tokens[3:], 16)
    assert list(cosines) == list(hf.WAYS)
    assert [block.attention.attention_fn for block in model.blocks] == before
    errors = [1 - value for value in cosines.values()]
    assert max(errors) < 0.05
    assert errors[-1] < errors[0]


def test_a_folder_without_the_files_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hugging_face", f"--model_dir={tmp_path}"])
    with pytest.raises(SystemExit):
        hf.main()
    assert "lacks config.json, model.safetensors, tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (9, "--length must be at most 8, the most"),
        (8, "must leave at least 24 texts, got 8, which"),
    ],
)
def test_lengths_that_leave_no_texts_are_refused(tmp_path, monkeypatch, capsys, length, message):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    published = {theirs: getattr(TINY, ours) for ours, theirs in hf.CONFIG_NAMES.items()}
    (tmp_path / "config.json").write_text(json.dumps(published))
    monkeypatch.setattr(hf, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(hf, "load_texts", lambda tokenizer, length: np.zeros((23, length), int))
    arguments = [f"--model_dir={tmp_path}", f"--length={length}"]
    monkeypatch.setattr(sys, "argv", ["hugging_face", *arguments])
    with pytest.raises(SystemExit):
        hf.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=3"], "--steps needs --relative_error or --budget"),
        (["--length=2"], "--length: must be at least 3, got 2"),
        (["--features=0"], "--features: must be at least 1, got 0"),
        (["--relative_error=0.1", "--steps=-3"], "--steps: must be at least 0, got -3"),
        (["--relative_error=nan"], "--relative_error: must be above 0 and finite, got nan"),
        (["--budget=0.9", "--features=112"], "--budget choose features: they take no --features"),
    ],
)
def test_flags_that_nothing_reads_are_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["hugging_face", f"--model_dir={tmp_path}", *flags])
    with pytest.raises(SystemExit):
        hf.main()
    assert message in capsys.readouterr().err


def published_folder():
    """Returns the folder of the published model, and skips the test if it is not there."""
    if not os.environ.get("SIMRF_MODEL_DIR"):
        pytest.skip("Needs all-MiniLM-L6-v2; SIMRF_MODEL_DIR does not say where it is.")
    for package in ("tokenizers", "safetensors"):
        pytest.importorskip(package, reason=f"Needs {package}.")
    return f"{os.environ['SIMRF_MODEL_DIR']}/all-MiniLM-L6-v2"


@pytest.mark.slow
def test_the_published_model_comes_near(monkeypatch, capsys):
    folder = published_folder()
    monkeypatch.setattr(sys, "argv", ["hugging_face", f"--model_dir={folder}"])
    hf.main()
    rows = dict(line.split(": ") for line in capsys.readouterr().out.splitlines()[1:])
    assert list(rows) == list(hf.WAYS)
    assert float(rows["positive features"]) < 0.75
    assert float(rows["calibrated, exact band and keys"]) > 0.96


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["--relative_error=0.1", "--budget=0.9"])
def test_the_published_model_is_converted(monkeypatch, capsys, wish):
    options = [f"--model_dir={published_folder()}", wish]
    monkeypatch.setattr(sys, "argv", ["hugging_face", *options])
    hf.main()
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Output of the model: ")
    assert float(last.rstrip(".").rpartition(" ")[2]) > 0.95
