import os

import jax.numpy as jnp
import pytest

from experiments.harness import downloads
from experiments.harness.mistakes import UserError
from experiments.swap import encoder


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
    message = r"no model.safetensors in .* by SIMRF_MODEL_DIR or.*--config.model_dir=DIR.*https://"
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
