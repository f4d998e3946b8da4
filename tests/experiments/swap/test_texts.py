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
