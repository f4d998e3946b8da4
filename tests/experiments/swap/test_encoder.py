import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.harness import downloads
from experiments.harness.mistakes import UserError
from experiments.swap import encoder

TINY = encoder.EncoderConfig(
    vocabulary_size=9, max_length=8, width=8, depth=2, num_heads=2, mlp_dim=12
)


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


@pytest.fixture
def tiny_file(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="Needs safetensors.")
    tensors = published_tensors(TINY)
    path = tmp_path / "model.safetensors"
    extra = {"embeddings.position_ids": np.arange(8)[None], "pooler.dense.bias": np.ones(8)}
    safetensors.save_file(tensors | extra, path)
    return path, tensors


@pytest.mark.slow
def test_a_loaded_encoder_computes_bert(tiny_file):
    path, tensors = tiny_file
    model = encoder.load_model(path, TINY)
    tokens = np.array([[1, 5, 2, 8, 0], [3, 3, 7, 1, 4]])
    expected = [bert(row, tensors, TINY) for row in tokens]
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, atol=3e-5)


@pytest.mark.slow
def test_padding_changes_no_embedding():
    model = encoder.Encoder(TINY, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 5), 0, 9)
    padded = jnp.pad(tokens, ((0, 0), (0, 3)), constant_values=7)
    mask = jnp.broadcast_to(jnp.arange(8)[None] < 5, (2, 8))
    np.testing.assert_allclose(model(padded, mask), model(tokens), atol=1e-5)


def published(name):
    """Returns the path of a file of the published model, or skips the test."""
    if not os.environ.get("SIMRF_MODEL_DIR"):
        pytest.skip("Needs all-MiniLM-L6-v2; SIMRF_MODEL_DIR does not say where it is.")
    return encoder.find(name)


@pytest.mark.slow
def test_the_published_model_has_its_documented_cosine():
    pytest.importorskip("tokenizers", reason="Needs tokenizers.")
    pytest.importorskip("safetensors", reason="Needs safetensors.")
    tokenizer = encoder.load_tokenizer(published("tokenizer.json"))
    model = encoder.load_model(published("model.safetensors"))
    sentences = ("A man is eating food.", "A man is eating a piece of bread.")
    x, y = (model(jnp.array([tokenizer.encode(text).ids]))[0] for text in sentences)
    cosine = float(x @ y / jnp.linalg.norm(x) / jnp.linalg.norm(y))
    assert abs(cosine - 0.7553) < 5e-5


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Puts a toy in the place of the published tokenizer, and returns its folder."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}\n")
    monkeypatch.setitem(encoder.FILES, "tokenizer.json", downloads.pooch.file_hash(str(path)))
    monkeypatch.delenv("SIMRF_MODEL_DIR", raising=False)
    return tmp_path


def test_a_folder_is_found_by_flag_and_environment(toy, monkeypatch):
    assert encoder.find("tokenizer.json", str(toy)) == toy / "tokenizer.json"
    monkeypatch.setenv("SIMRF_MODEL_DIR", str(toy))
    assert encoder.find("tokenizer.json") == toy / "tokenizer.json"
    inner = toy / "all-MiniLM-L6-v2"
    inner.mkdir()
    (toy / "tokenizer.json").rename(inner / "tokenizer.json")
    assert encoder.find("tokenizer.json") == inner / "tokenizer.json"


def test_a_folder_without_the_file_is_refused(toy):
    message = r"no model.safetensors in .*--config.model_dir=DIR or SIMRF_MODEL_DIR.*https://"
    with pytest.raises(UserError, match=message):
        encoder.find("model.safetensors", str(toy))


def test_another_file_is_refused(toy):
    (toy / "tokenizer.json").write_text("{} \n")
    with pytest.raises(UserError, match=r"is not the published file: its SHA-256 is"):
        encoder.find("tokenizer.json", str(toy))


def test_a_download_is_kept_in_the_cache(toy, monkeypatch):
    retrieve, fetched = downloads.pooch.retrieve, []

    def download(url, output_file, pooch):
        fetched.append(url)
        with open(output_file, "wb") as file:
            file.write((toy / "tokenizer.json").read_bytes())

    monkeypatch.setattr(downloads.pooch, "os_cache", lambda name: toy / "cache" / name)
    monkeypatch.setattr(
        downloads.pooch, "retrieve", lambda *a, **kw: retrieve(*a, **kw, downloader=download)
    )
    path = encoder.find("tokenizer.json")
    assert path == toy / "cache" / "simrf_jax" / "all-MiniLM-L6-v2" / "tokenizer.json"
    assert encoder.find("tokenizer.json") == path
    assert fetched == [f"{encoder.ADDRESS}tokenizer.json"]
    path.unlink()
    (toy / "tokenizer.json").write_text("another\n")
    with pytest.raises(UserError, match=r"tokenizer.json is not what it was.*hash of downloaded"):
        encoder.find("tokenizer.json")


def test_no_network_says_both_ways(toy, monkeypatch):
    def offline(*arguments, **keywords):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(downloads.pooch, "retrieve", offline)
    message = "Cannot download tokenizer.json: no route to host.*--config.model_dir=DIR"
    with pytest.raises(UserError, match=message):
        encoder.find("tokenizer.json")


@pytest.mark.parametrize(
    ("package", "load"),
    [("tokenizers", encoder.load_tokenizer), ("safetensors", encoder.load_model)],
)
def test_a_missing_package_is_named(package, load, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, f"{package}.numpy", None)
    with pytest.raises(UserError, match=f"requirements/train.txt names {package}"):
        load(tmp_path / "file")
