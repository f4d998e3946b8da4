import collections
import itertools
import re

import numpy as np
import pytest

from experiments.harness.mistakes import UserError
from experiments.swap import texts

pytestmark = pytest.mark.fast


def test_texts_to_test_are_others_than_those_to_fit():
    rows = np.arange(10)[:, None] * np.ones((1, 3), int)
    for seed in (0, 1):
        fit, test = texts.split(rows, num_fit=4, num_test=5, seed=seed)
        assert (fit.shape, test.shape) == ((4, 3), (5, 3))
        assert not set(fit[:, 0]) & set(test[:, 0])
    again = texts.split(rows, num_fit=4, num_test=5, seed=1)
    np.testing.assert_array_equal(again.fit, fit)
    assert not np.array_equal(texts.split(rows, num_fit=4, num_test=5, seed=0).fit, fit)


def test_too_few_texts_are_refused():
    with pytest.raises(UserError, match=r"at most 3 together, the number of help pages of at le"):
        texts.split(np.zeros((3, 7)), num_fit=2, num_test=2, seed=0)


class Tokenizer:
    """Takes each letter for a token, between 1 and 2."""

    def encode_batch(self, found):
        Encoding = collections.namedtuple("Encoding", "ids")
        return [Encoding([1, *map(ord, text), 2]) for text in found]


def test_windows_cover_each_text_without_overlap():
    found = texts.windows(Tokenizer(), ["abcdef", "gh", "ijk", ""], 4)
    letters = ["".join(map(chr, row[1:-1])) for row in found]
    assert letters == ["ab", "cd", "ef", "gh", "ij"]
    assert np.all(found[:, [0, -1]] == [1, 2])
    assert texts.windows(Tokenizer(), ["a"], 4).shape == (0, 4)


def test_all_kinds_but_one_are_fitted_on():
    windows = {kind: np.full((5, 3), n) for n, kind in enumerate(texts.KINDS)}
    fit, test = texts.split_kinds(windows, "licenses", num_fit=6, num_test=4, seed=0)
    assert sorted(fit[:, 0]) == [0, 0, 1, 1, 3, 3]
    assert test.tolist() == [[2] * 3] * 4
    with pytest.raises(UserError, match=r"5 windows of 3 tokens in the licenses .* asks for 6"):
        texts.split_kinds(windows, "licenses", num_fit=6, num_test=6, seed=0)


def test_no_paragraph_is_in_two_texts():
    kinds = texts.kinds()
    assert tuple(kinds) == texts.KINDS
    paragraphs = collections.Counter()
    for text in itertools.chain.from_iterable(kinds.values()):
        paragraphs.update({part.strip() for part in re.split(r"\n\s*\n", text)} - {""})
    assert max(paragraphs.values()) == 1
    assert all(sum(map(len, found)) > 30_000 for found in kinds.values())
