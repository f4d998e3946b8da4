"""Texts to fit on and others to test on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import sklearn

from examples import hugging_face
from experiments.harness.mistakes import UserError

KINDS = ("help pages", "source code", "licenses", "data sets")


class Texts(NamedTuple):
    """Tokens of texts to fit feature maps on, and of others to test them on, ``[n, length]``."""

    fit: np.ndarray
    test: np.ndarray


def split(texts: np.ndarray, *, num_fit: int, num_test: int, seed: int) -> Texts:
    """Draws texts to fit on, and others to test on.

    Args:
      texts: Texts of equal length, such as ``examples.hugging_face.load_texts`` returns.
      num_fit: Number of texts to fit on.
      num_test: Number of texts to test on.
      seed: Seed of the draw.

    Raises:
      UserError: If there are not so many texts.
    """
    if len(texts) < num_fit + num_test:
        raise UserError(
            "config.encoder.num_fit_texts and num_test_texts must be at most "
            f"{len(texts)} together, the number of help pages of at least {texts.shape[1]} tokens, "
            f"got {num_fit} and {num_test}."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    return Texts(texts[order[:num_fit]], texts[order[num_fit : num_fit + num_test]])


def kinds() -> dict[str, list[str]]:
    """Returns texts of four kinds, which every Python environment of this experiment has.

    Help pages of Python, the source of its standard library, the licenses of the installed
    packages, and scikit-learn's descriptions of data sets. No two texts share a paragraph.
    """
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    descriptions = pathlib.Path(sklearn.__file__).parent / "datasets" / "descr"
    licenses = [
        pathlib.Path(str(file.locate()))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or []
        if re.fullmatch(r"(LICENSE|COPYING|NOTICE)\w*(\.(txt|md|rst))?", file.name)
    ]
    texts = (
        hugging_face.pages().values(),
        _contents(library.glob("[a-z]*.py")),
        _contents(licenses),
        _contents(descriptions.glob("*.rst")),
    )
    seen: set[str] = set()
    return {
        kind: [_without(seen, text) for text in found]
        for kind, found in zip(KINDS, texts, strict=True)
    }


# Texts of this Python environment that the parts of a run read.
READ: dict[str, Callable[[], dict[str, Any]]] = {
    "predicted_heads": hugging_face.pages,
    "encoder": hugging_face.pages,
    "kinds": kinds,
    "char_lm": hugging_face.pages,
}


def sha256(part: str) -> str:
    """Returns the hash of the texts that a part of ``READ`` reads."""
    return hashlib.sha256(json.dumps(READ[part]()).encode()).hexdigest()


def _contents(paths: Iterable[pathlib.Path]) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(set(paths))]


def _without(seen: set[str], text: str) -> str:
    """Returns a text without the paragraphs that others have, and adds its own to them."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip() not in seen]
    seen.update(part.strip() for part in paragraphs)
    return "\n\n".join(paragraphs)


def windows(tokenizer: Any, texts: list[str], length: int) -> np.ndarray:
    """Returns consecutive windows of all texts, ``[n, length]``.

    Args:
      tokenizer: A ``tokenizers.Tokenizer``.
      texts: The texts.
      length: Number of tokens of a window, with the two that begin and end it.
    """
    found = []
    for encoded in tokenizer.encode_batch(texts):
        first, *inside, last = encoded.ids
        starts = range(0, len(inside) - length + 3, length - 2)
        found += [[first, *inside[start : start + length - 2], last] for start in starts]
    return np.array(found, int).reshape(-1, length)


def split_kinds(
    windows_of: dict[str, np.ndarray], tested: str, *, num_fit: int, num_test: int, seed: int
) -> Texts:
    """Draws windows of one kind to test on, and windows of all other kinds to fit on.

    Args:
      windows_of: Windows of each kind.
      tested: The kind to test on.
      num_fit: Number of windows to fit on, an equal number of each of the other kinds.
      num_test: Number of windows to test on.
      seed: Seed of the draw.

    Raises:
      UserError: If there are not so many windows.
    """
    rng, others = np.random.default_rng(seed), [kind for kind in windows_of if kind != tested]
    sizes = dict.fromkeys(others, num_fit // len(others)) | {tested: num_test}
    drawn = {}
    for kind, size in sizes.items():
        found = windows_of[kind]
        if len(found) < size:
            raise UserError(
                f"There are {len(found)} windows of {found.shape[1]} tokens in the {kind} of this "
                f"environment, and config.kinds asks for {size}."
            )
        drawn[kind] = found[rng.permutation(len(found))[:size]]
    return Texts(np.concatenate([drawn[kind] for kind in others]), drawn[tested])
