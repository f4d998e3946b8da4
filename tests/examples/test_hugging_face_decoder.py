"""The example of a decoder from the Hugging Face Hub, with a tiny one in its place."""

import inspect
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import hugging_face_decoder as hd
from simrf_jax.integrations.nnx import linearize

pytestmark = pytest.mark.skipif(
    "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters,
    reason="Needs a Flax with grouped queries.",
)
TINY = {
    "vocabulary_size": 11,
    "width": 12,
    "depth": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "mlp_dim": 10,
    "rotary_base": 50.0,
}
KINDS = [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)]


def make(model_type="llama", is_tied=True, **sizes):
    """Returns a config, and a decoder whose parameters are all far from their defaults."""
    config = hd.DecoderConfig(model_type=model_type, is_tied=is_tied, **(TINY | sizes))
    model = hd.Decoder(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.4, x.dtype), nnx.state(model)
    )
    nnx.update(model, state)
    return config, model


def decoder(tokens, tensors, fields):
    """Returns the logits of one text in float64 NumPy, from the equations of Llama and Qwen."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    dim, length = fields["head_dim"], len(tokens)

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def norm(x, name):
        root = np.sqrt((x**2).mean(-1, keepdims=True) + fields["rms_norm_eps"])
        return x / root * tensors[f"{name}.weight"]

    def rotated(x, name, at):
        """Turns each pair of coordinates of a head as one complex number."""
        if f"{at}.{name}.weight" in tensors:
            x = norm(x, f"{at}.{name}")
        turns = np.arange(length)[:, None] * fields["rope_theta"] ** (
            -np.arange(dim // 2) * 2 / dim
        )
        z = (x[:, : dim // 2] + 1j * x[:, dim // 2 :]) * np.exp(1j * turns)
        return np.concatenate([z.real, z.imag], -1)

    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn"
        y = norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (linear(y, f"{at}.{n}_proj") for n in "qkv")
        outputs = []
        for head in range(heads):
            own, shared = (
                slice(n * dim, (n + 1) * dim) for n in (head, head // (heads // kv_heads))
            )
            query, key = rotated(q[:, own], "q_norm", at), rotated(k[:, shared], "k_norm", at)
            logits = np.where(np.tri(length, dtype=bool), query @ key.T / dim**0.5, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + linear(np.concatenate(outputs, -1), f"{at}.o_proj")
        at = f"model.layers.{layer}.mlp"
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm")
        gate = linear(y, f"{at}.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{at}.up_proj"), f"{at}.down_proj")
    x = norm(x, "model.norm")
    is_tied = fields["tie_word_embeddings"]
    return linear(x, "model.embed_tokens" if is_tied else "lm_head")


@pytest.fixture
def numpy_files():
    """Returns the module that reads the files, and skips the test where it is not there."""
    return pytest.importorskip("safetensors.numpy", reason="Needs safetensors.")


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "is_tied"), KINDS)
def test_a_decoder_computes_the_equations(tmp_path, numpy_files, model_type, is_tied):
    config, model = make(model_type, is_tied)
    hd.save_model(model, config, tmp_path)
    loaded = hd.load_model(tmp_path)
    tokens = np.random.default_rng(1).integers(11, size=(2, 9))
    tensors = numpy_files.load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    expected = [decoder(row, tensors, fields) for row in tokens]
    np.testing.assert_allclose(loaded(jnp.asarray(tokens)), expected, atol=1e-4)
    assert len(tensors) == len(nnx.to_flat_state(nnx.state(model)))


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "is_tied"), KINDS)
def test_it_computes_what_transformers_does(tmp_path, numpy_files, model_type, is_tied):
    """Each reads what the other writes."""
    torch = pytest.importorskip("torch", reason="Needs PyTorch.")
    transformers = pytest.importorskip("transformers", reason="Needs transformers.")
    config, model = make(model_type, is_tied)
    hd.save_model(model, config, tmp_path / "ours")
    tokens = np.random.default_rng(1).integers(11, size=(2, 9))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = hd.load_model(tmp_path / "theirs")
    np.testing.assert_allclose(loaded(jnp.asarray(tokens)), expected, atol=1e-4)


@pytest.mark.slow
def test_the_shape_is_that_of_the_published_config(tmp_path):
    published = {theirs: getattr(make()[0], ours) for ours, theirs in hd.CONFIG_NAMES.items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published))
    assert hd.DecoderConfig.of(path) == make()[0]
    base = published.pop("rope_theta")
    newer = published | {"rope_parameters": {"rope_theta": base, "rope_type": "default"}}
    path.write_text(json.dumps(newer | {"head_dim": None}))
    assert hd.DecoderConfig.of(path) == make(head_dim=3)[0]
    scaled = {"rope_parameters": {"rope_theta": base, "rope_type": "llama3"}}
    path.write_text(json.dumps(published | scaled))
    with pytest.raises(ValueError, match=r"rope_type must be default in .*, got llama3"):
        hd.DecoderConfig.of(path)
    path.write_text(json.dumps(newer | {"model_type": "mistral"}))
    with pytest.raises(ValueError, match=r"model_type must be llama or .*got mistral"):
        hd.DecoderConfig.of(path)


def test_what_a_published_config_lacks_has_the_default_of_transformers(tmp_path):
    config = hd.DecoderConfig(norm_epsilon=1e-6)
    published = {theirs: getattr(config, ours) for ours, theirs in hd.CONFIG_NAMES.items()}
    del published["rope_theta"], published["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert hd.DecoderConfig.of(tmp_path / "config.json") == config


def test_bytes_are_no_tokens_of_another_model(tmp_path, monkeypatch, capsys):
    config = hd.DecoderConfig(vocabulary_size=32000)
    published = {theirs: getattr(config, ours) for ours, theirs in hd.CONFIG_NAMES.items()}
    (tmp_path / "config.json").write_text(json.dumps(published))
    monkeypatch.setattr(sys, "argv", ["hugging_face_decoder", f"--model_dir={tmp_path}"])
    with pytest.raises(SystemExit):
        hd.main()
    assert "lacks tokenizer.json, which only models of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_state_gives_the_logits_of_the_whole_call():
    _, model = make()
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 11)
    hd.swap(model, "calibrated, exact band and keys", 8, np.asarray(tokens), 0)
    for block in model.blocks:  # Smaller sizes, so that features matter.
        adapter = block.attention.attention_fn
        adapter.exact_bandwidth, adapter.exact_keys = 2, hd.ExactKeys(3, by="score")
    completed, logits = hd.complete(model, tokens, 6)
    whole = model(completed)
    np.testing.assert_allclose(logits, whole[:, 29:-1], atol=1e-4)
    np.testing.assert_array_equal(completed[:, 30:], jnp.argmax(whole[:, 29:-1], -1))


@pytest.mark.slow
def test_each_way_is_undone_and_exact_weights_are_nearer():
    _, model = make()
    windows = np.random.default_rng(0).integers(11, size=(8, 41))
    before = hd.mean_bits(model, windows)
    found = hd.compare(model, windows[:4, :-1], windows, 16, 2)
    assert hd.mean_bits(model, windows) == before
    errors = {way: abs(np.mean(values) - before) for way, values in found.items()}
    assert list(errors) == list(hd.WAYS)
    assert errors["calibrated, exact band and keys"] < errors["positive features"]


@pytest.mark.slow
def test_linearize_keeps_keys_by_score_in_a_decoder():
    _, model = make()
    tokens = jax.random.randint(jax.random.key(0), (4, 2, 30), 0, 11)
    before = model(tokens[3])
    report = linearize(
        model,
        list(tokens[:2]),
        list(tokens[2:]),
        relative_error=1e-6,
        num_features=(4,),
        exact_bandwidth=(2,),
        exact_keys=(27,),  # With the band, all keys.
        is_causal=True,
        rngs=nnx.Rngs(0),
    )
    choice = report.layers["blocks.1.attention"]
    assert choice.exact_keys == hd.ExactKeys(27, by="score")
    assert choice.far_share.shape == (4,)
    assert report.output_error < 1e-6
    np.testing.assert_allclose(model(tokens[3]), before, atol=1e-3)


@pytest.mark.slow
def test_the_program_trains_writes_and_compares(tmp_path, monkeypatch, capsys, numpy_files):
    sizes = {"length": 24, "features": 4, "seeds": 2}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    monkeypatch.setattr(hd, "NUM_TEST", 4)
    monkeypatch.setattr(
        sys,
        "argv",
        ["hugging_face_decoder", f"--model_dir={tmp_path}", "--train_steps=2", *options],
    )
    hd.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Bits per token of 4 windows of 24 tokens:"
    assert [line.partition(": ")[0] for line in lines[1:-1]] == ["softmax attention", *hd.WAYS]
    assert lines[-1].startswith("Greedy decoding of 12 tokens after 12: logits within ")
    assert hd.DecoderConfig.of(tmp_path / "config.json") == hd.DecoderConfig()


def test_a_folder_without_the_files_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hugging_face_decoder", f"--model_dir={tmp_path}"])
    with pytest.raises(SystemExit):
        hd.main()
    assert "lacks config.json; --train_steps=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=3"], "--steps needs --relative_error"),
        (["--train_steps=-1"], "--train_steps: must be at least 0"),
        (["--length=1"], "--length: must be at least 2"),
        (["--seeds=0"], "--seeds: must be at least 1"),
        (["--features=0"], "--features: must be at least 1"),
        (["--relative_error=-1"], "--relative_error: must be above 0"),
        (
            ["--train_steps=1", "--length=100000"],
            "--length must leave at least 16 windows",
        ),
        (["--train_steps=1", "--model_dir=/dev/null"], "--model_dir=/dev/null cannot be written: "),
        (["--relative_error=0.1", "--features=64"], "it takes no --features and no --seeds"),
        (["--relative_error=0.1", "--seeds=3"], "it takes no --features and no --seeds"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["hugging_face_decoder", f"--model_dir={tmp_path}", *flags])
    with pytest.raises(SystemExit):
        hd.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
)
def test_training_writes_over_no_file(tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).write_text("{}")
    argv = ["hugging_face_decoder", f"--model_dir={tmp_path}", "--train_steps=1"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        hd.main()
    assert f"to a new folder, got {tmp_path / name}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]
