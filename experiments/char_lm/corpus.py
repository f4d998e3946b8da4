"""The text, the help pages that Python ships, and batches of it."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import re
from typing import NamedTuple

import numpy as np

VALIDATION = 0.1  # Of the text, at its end.
# Of Python 3.11.7, on which the README's numbers were measured; each version has its own text.
SHA256 = "155856fec668bf99a996824ce822c597a33aa7bffeb8d245f584e0d068887563"


class Text(NamedTuple):
    """A text as numbers.

    Attributes:
      train: ``[length]``, indices of characters.
      validation: ``[length]``, what follows it.
      alphabet: The characters, in order.
      sha256: Digest of both parts.
    """

    train: np.ndarray
    validation: np.ndarray
    alphabet: str
    sha256: str


def load() -> Text:
    """Loads the topics of ``help()`` in alphabetical order: most of the language reference.

    Only printable ASCII is kept. Topics share paragraphs, of which the first is kept, so that none
    is in both parts.
    """
    topics = pydoc_data.topics.topics
    pages = "\n\n".join(topics[name] for name in sorted(topics))
    printable = "".join(c for c in pages if c == "\n" or " " <= c <= "~")
    paragraphs = (part.strip("\n") for part in re.split(r"\n\s*\n", printable))
    return split("\n\n".join(dict.fromkeys(paragraphs)))


def split(text: str) -> Text:
    """Returns a text as numbers, its last tenth for validation."""
    alphabet = "".join(sorted(set(text)))
    indices = encode(text, alphabet)
    train, validation = np.split(indices, [len(indices) - int(len(indices) * VALIDATION)])
    return Text(train, validation, alphabet, hashlib.sha256(text.encode()).hexdigest())


def encode(text: str, alphabet: str) -> np.ndarray:
    """Returns the indices of characters in their alphabet.

    Raises:
      ValueError: If a character is not in it.
    """
    index = {character: number for number, character in enumerate(alphabet)}
    if unknown := [repr(character) for character in text if character not in index]:
        raise ValueError(f"The text has no {', '.join(unknown)}, and its models know none.")
    return np.array([index[character] for character in text], np.int32)


def decode(indices: np.ndarray, alphabet: str) -> str:
    """Returns the characters of indices."""
    return "".join(alphabet[index] for index in indices)


def train_batch(
    indices: np.ndarray, *, batch_size: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Draws windows from anywhere, ``[batch_size, context + 1]``, given (seed, step)."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(indices) - context, batch_size)
    return indices[starts[:, None] + np.arange(context + 1)]


def windows(indices: np.ndarray, context: int) -> np.ndarray:
    """Cuts windows side by side, ``[count, context + 1]``; each target is in one of them only.

    Too few characters for a window at the end are left out.
    """
    starts = context * np.arange((len(indices) - 1) // context)
    return indices[starts[:, None] + np.arange(context + 1)]
