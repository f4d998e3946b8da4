"""Texts to fit on and others to test on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.harness.mistakes import UserError


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
