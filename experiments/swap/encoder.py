"""The sentence encoder all-MiniLM-L6-v2: its files, its tokenizer, and its model."""

from __future__ import annotations

import pathlib
from typing import Any

from examples import hugging_face
from examples.hugging_face import Encoder, EncoderConfig
from experiments.harness.downloads import Place
from experiments.harness.mistakes import user_mistakes

ADDRESS = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main/"
PLACE = Place("--config.model_dir", "SIMRF_MODEL_DIR", "all-MiniLM-L6-v2", "the published file")
# SHA-256 of each file of the published snapshot.
FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


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
        return hugging_face.load_tokenizer(path)


def load_model(path: pathlib.Path, config: EncoderConfig | None = None) -> Encoder:
    """Returns the encoder with the parameters of a file.

    Args:
      path: Path of ``model.safetensors``.
      config: Shape of the model in the file; None for that of all-MiniLM-L6-v2.

    Raises:
      UserError: If the package ``safetensors`` is not installed.
    """
    with user_mistakes(ImportError, prefix="requirements/train.txt names safetensors: "):
        return hugging_face.load_model(path, config)
