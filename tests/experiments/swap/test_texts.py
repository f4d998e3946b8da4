import pydoc_data.topics

import numpy as np
import pytest

from experiments.harness.mistakes import UserError
from experiments.swap import texts

pytestmark = pytest.mark.fast


class Encoding:
    """Numbers of the characters of a text, between two that begin and end it."""

    def __init__(self, text):
        self.ids = [1000, *map(ord, text), 2000]


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode_batch(self, pages):
        """Returns the encodings of some texts."""
        return [Encoding(page) for page in pages]


@pytest.fixture
def topics(monkeypatch):
    """Puts six short topics in the place of Python's; two share a paragraph."""
    made_up = {f"topic{i}": f"{i}{i}{i}\n\nmore of {i}" for i in range(5)}
    made_up["topic5"] = "000\n\n  \nmore of 5\n"
    monkeypatch.setattr(pydoc_data.topics, "topics", made_up)
    return made_up


def test_no_paragraph_is_on_two_pages(topics):
    pages = texts.pages()
    assert pages["topic0"] == "000\n\nmore of 0"
    assert pages["topic5"] == "more of 5"


def test_pages_are_cut_and_ended_like_whole_texts(topics):
    rows = texts.load(Characters(), 15)
    assert rows.shape == (5, 15)  # topic5 has 11 tokens.
    np.testing.assert_array_equal(rows[2], [1000, *map(ord, "222\n\nmore of "), 2000])


def test_no_page_may_be_long_enough(topics):
    assert texts.load(Characters(), 100).shape == (0, 100)


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
