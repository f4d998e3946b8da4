"""Texts of equal length: the beginnings of the help pages that Python ships, split by topic."""

from __future__ import annotations

import pydoc_data.topics
import re
from typing import Any, NamedTuple

import numpy as np

from experiments.harness.mistakes import UserError


class Texts(NamedTuple):
    """Tokens of texts to fit feature maps on, and of others to test them on, ``[n, length]``."""

    fit: np.ndarray
    test: np.ndarray


def pages() -> dict[str, str]:
    """Returns the topics of ``help()`` by name.

    Some topics share paragraphs. Each paragraph stays in the first topic only, in alphabetical
    order, so that no two pages have one in common.
    """
    topics = pydoc_data.topics.topics
    seen: set[str] = set()
    result = {}
    for name in sorted(topics):
        paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", topics[name])]
        new = dict.fromkeys(part for part in paragraphs if part not in seen)
        seen.update(new)
        result[name] = "\n\n".join(new)
    return result


def load(tokenizer: Any, length: int) -> np.ndarray:
    """Returns the beginning of each page that is long enough, ``[pages, length]``.

    Args:
      tokenizer: A ``tokenizers.Tokenizer``.
      length: Number of tokens of each text, with those that begin and end it.
    """
    encoded = (np.array(page.ids) for page in tokenizer.encode_batch([*pages().values()]))
    # The last token of a whole page ends it, and so it ends every text.
    texts = [np.append(ids[: length - 1], ids[-1]) for ids in encoded if len(ids) >= length]
    return np.array(texts).reshape(-1, length)


def split(texts: np.ndarray, *, num_fit: int, num_test: int, seed: int) -> Texts:
    """Draws texts to fit on, and others to test on.

    Args:
      texts: Texts that ``load`` returned.
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
