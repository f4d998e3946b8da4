"""Multi-query associative recall: pairs of keys and values, then a query for each key."""

from __future__ import annotations

import numpy as np

from experiments.swap.training import Batch


def draw(
    rng: np.random.Generator,
    *,
    num_sequences: int,
    num_pairs: int,
    num_keys: int,
    num_values: int,
    num_repeats: int = 1,
) -> Batch:
    """Draws sequences k_1 v_1 ... k_N v_N, followed by the N keys in random order.

    The keys of a sequence differ. A value is drawn for each key anew, so that only its own pair
    tells it. No value follows the pairs.

    Args:
      rng: Source of the draws.
      num_sequences: Number of sequences.
      num_pairs: Number N of pairs.
      num_keys: Number of different keys, which are the tokens from 0 on.
      num_values: Number of different values, which are the tokens after those of the keys.
      num_repeats: Number r of times that all pairs are read, and then each key is asked. Easier
        sequences have the length of others with it.

    Returns:
      Tokens ``[num_sequences, 3 r N]``, and the values of the last r N of them,
      ``[num_sequences, r N]``.

    References:
      Arora et al., Zoology (2023), Sec. 3.2, https://arxiv.org/abs/2312.04927
      Their queries are at random distances, with other tokens between them.
    """
    sizes = num_sequences, num_pairs
    keys = rng.permuted(np.tile(np.arange(num_keys), (num_sequences, 1)), axis=1)[:, :num_pairs]
    values = num_keys + rng.integers(0, num_values, sizes)
    pairs = np.stack([keys, values], axis=-1).reshape(num_sequences, 2 * num_pairs)
    places = np.tile(np.arange(num_pairs), (num_sequences, num_repeats))
    order = rng.permuted(places, axis=1)
    queries, answers = (np.take_along_axis(x, order, axis=1) for x in (keys, values))
    tokens = np.concatenate([np.tile(pairs, (1, num_repeats)), queries], axis=1)
    return tokens.astype(np.int32), answers.astype(np.int32)
