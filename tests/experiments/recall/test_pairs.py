import numpy as np
import pytest

from experiments.recall import pairs

SIZES = {"num_sequences": 50, "num_pairs": 6, "num_keys": 9, "num_values": 4}


def answers_by_a_loop(tokens, num_pairs):
    """Reads the pairs of each sequence in order, and looks up each later token."""
    found = []
    for sequence in tokens:
        memory = {}
        for place in range(0, 2 * num_pairs, 2):
            memory[sequence[place]] = sequence[place + 1]
        found.append([memory[query] for query in sequence[2 * num_pairs :]])
    return np.array(found)


@pytest.mark.fast
@pytest.mark.parametrize("num_repeats", [1, 3])
def test_the_answers_are_those_of_a_loop(num_repeats):
    tokens, answers = pairs.draw(np.random.default_rng(0), **SIZES, num_repeats=num_repeats)
    assert tokens.shape == (50, 18 * num_repeats)
    np.testing.assert_array_equal(answers, answers_by_a_loop(tokens, 6 * num_repeats))
    # A loop over the sequences: keys differ, each is asked equally often, in an order of its own.
    for sequence in tokens:
        keys, queries = sequence[: 12 * num_repeats : 2], sequence[12 * num_repeats :]
        assert len({*keys}) == 6
        assert sorted(queries) == sorted(keys)
    assert len(np.unique(tokens[:, -6:].argsort(axis=1), axis=0)) > 40


@pytest.mark.fast
def test_no_value_follows_the_pairs():
    tokens, answers = pairs.draw(np.random.default_rng(1), **SIZES)
    assert (tokens[:, 12:] < 9).all()
    assert {*tokens[:, 1:12:2].ravel()} == {*range(9, 13)} == {*answers.ravel()}


@pytest.mark.fast
def test_values_are_independent_of_keys():
    sizes = SIZES | {"num_sequences": 20_000}
    tokens, _ = pairs.draw(np.random.default_rng(2), **sizes)
    counts = np.zeros((9, 4))
    np.add.at(counts, (tokens[:, 0:12:2], tokens[:, 1:12:2] - 9), 1)
    shares = counts / counts.sum()
    # 120,000 pairs: a share of 1/36 has a standard error of 0.0005.
    np.testing.assert_allclose(shares, 1 / 36, atol=5 * 0.0005)


@pytest.mark.fast
def test_a_batch_is_a_function_of_its_seed():
    one, same, other = (pairs.draw(np.random.default_rng(seed), **SIZES)[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
