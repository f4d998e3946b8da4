import numpy as np
import pytest
from flax import nnx

from examples import hugging_face
from experiments.swap import encoder


@pytest.fixture
def toy_encoder(monkeypatch):
    """Puts a tiny encoder and random texts in the place of the published ones."""
    shape = encoder.EncoderConfig(
        vocabulary_size=9, max_length=8, width=8, depth=2, num_heads=2, mlp_dim=8
    )
    model = encoder.Encoder(shape, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 9, (7, 6))
    monkeypatch.setattr(encoder, "find", lambda name, model_dir: name)
    monkeypatch.setattr(encoder, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(encoder, "load_model", lambda path: model)
    monkeypatch.setattr(hugging_face, "load_texts", lambda tokenizer, length: tokens[:, :length])
    return model
