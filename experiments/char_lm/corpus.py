"""Training and validation text, which are the help pages that Python ships, and batches of it."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import re
from typing import NamedTuple

import numpy as np

VALIDATION = 0.1  # Share of the text, taken from its end.
# Hash of the text of Python 3.11.7, which the README's numbers are for. Other versions of Python
# have other texts.
SHA256 = "155856fec668bf99a996824ce822c597a33aa7bffeb8d245f584e0d068887563"


class Text(NamedTuple):
    """A text as indices of characters.

    Attributes:
      train: Indices of the training text, ``[length]``.
      validation: Indices of the validation text, ``[length]``.
      alphabet: Sorted characters of the text; an index is a position in it.
      sha256: Hash of the whole text.
    """

    train: np.ndarray
    validation: np.ndarray
    alphabet: str
    sha256: str


def load() -> Text:
    """Returns the topics of ``help()`` in alphabetical order: most of the language reference.

    Only printable ASCII is kept. Some topics share paragraphs. Each paragraph is kept once, so that
    none is in both the training and the validation text.
    """
    topics = pydoc_data.topics.topics
    pages = "\n\n".join(topics[name] for name in sorted(topics))
    printable = "".join(c for c in pages if c == "\n" or " " <= c <= "~")
    paragraphs = (part.strip("\n") for part in re.split(r"\n\s*\n", printable))
    return split("\n\n".join(dict.fromkeys(paragraphs)))


def split(text: str) -> Text:
    """Splits a text into training and validation text, which is its last tenth."""
    alphabet = "".join(sorted(set(text)))
    indices = encode(text, alphabet)
    train, validation = np.split(indices, [len(indices) - int(len(indices) * VALIDATION)])
    return Text(train, validation, alphabet, hashlib.sha256(text.encode()).hexdigest())


def encode(text: str, alphabet: str) -> np.ndarray:
    """Returns the indices of characters in an alphabet.

    Raises:
      ValueError: If a character is not in the alphabet.
    """
    index = {character: number for number, character in enumerate(alphabet)}
    if unknown := [repr(character) for character in text if character not in index]:
        raise ValueError(f"The text has no {', '.join(unknown)}, and its models know none.")
    return np.array([index[character] for character in text], np.int32)


def decode(indices: np.ndarray, alphabet: str) -> str:
    """Returns the characters that indices stand for."""
    return "".join(alphabet[index] for index in indices)


def train_batch(
    indices: np.ndarray, *, batch_size: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Draws windows, ``[batch_size, context + 1]``, as a function of (seed, step)."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(indices) - context, batch_size)
    return indices[starts[:, None] + np.arange(context + 1)]


def windows(indices: np.ndarray, context: int) -> np.ndarray:
    """Returns adjacent windows, ``[count, context + 1]``, in which each target occurs once.

    Characters at the end that do not fill a window are left out.
    """
    starts = context * np.arange((len(indices) - 1) // context)
    return indices[starts[:, None] + np.arange(context + 1)]
