import re

import numpy as np
import pytest

from experiments.char_lm import corpus


@pytest.fixture(scope="module")
def pages():
    return corpus.load()


@pytest.mark.fast
def test_the_text_is_printable_and_long(pages):
    assert len(pages.train) + len(pages.validation) > 300_000
    assert all(c == "\n" or " " <= c <= "~" for c in pages.alphabet)
    assert pages.alphabet == "".join(sorted(set(pages.alphabet)))
    assert re.fullmatch("[0-9a-f]{64}", pages.sha256)
    assert 0.09 < len(pages.validation) / len(pages.train) < 0.12


@pytest.mark.fast
def test_no_paragraph_is_in_both_parts(pages):
    # Leave out the paragraph that the split cuts in two, and the shortest ones.
    train, validation = (
        {p for p in corpus.decode(part, pages.alphabet).split("\n\n")[1:-1] if p}
        for part in (pages.train, pages.validation)
    )
    assert len(validation) > 100
    assert not train & validation


@pytest.mark.fast
def test_parts_are_the_text_in_order():
    parts = corpus.split("the cat sat on the mat, and the dog")
    assert corpus.decode(np.concatenate([parts.train, parts.validation]), parts.alphabet) == (
        "the cat sat on the mat, and the dog"
    )
    assert corpus.decode(parts.validation, parts.alphabet) == "dog"
    np.testing.assert_array_equal(corpus.encode("dog", parts.alphabet), parts.validation)


@pytest.mark.fast
def test_refuses_characters_that_the_text_lacks():
    with pytest.raises(ValueError, match=r"no 'é', '!'"):
        corpus.encode("aé!", alphabet="abc")


@pytest.mark.fast
def test_batches_are_a_function_of_seed_and_step():
    indices = np.arange(1000)

    def draw(**changes):
        options = {"batch_size": 5, "context": 7, "seed": 3, "step": 11}
        return corpus.train_batch(indices, **(options | changes))

    batch = draw()
    assert batch.shape == (5, 8)
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(8))
    np.testing.assert_array_equal(batch, draw())
    for changes in ({"seed": 4}, {"step": 12}):
        assert (batch != draw(**changes)).any()
    # Windows start anywhere between the first position and the last.
    starts = draw(batch_size=100_000)[:, 0]
    assert (starts.min(), starts.max()) == (0, 992)


@pytest.mark.fast
@pytest.mark.parametrize(("length", "count"), [(9, 2), (12, 2), (13, 3)])
def test_windows_have_every_target_once(length, count):
    windows = corpus.windows(np.arange(length), 4)
    assert windows.shape == (count, 5)
    np.testing.assert_array_equal(windows[:, 1:].ravel(), np.arange(1, 4 * count + 1))
