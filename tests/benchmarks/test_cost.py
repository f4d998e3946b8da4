"""The benchmark of cost by length: its candidates, its rows, and which lengths it leaves out."""

import json

import jax
import numpy as np
import pytest

from benchmarks import cost

LENGTH = 48


@pytest.mark.parametrize("name", cost.PASSES)
def test_each_pass_yields_a_row_of_json_for_each_candidate(name):
    rows = list(cost.measure(name, LENGTH, rounds=1, seconds=0))
    candidates = {row["candidate"] for row in rows} - {"performer_pytorch"}
    both_directions = {"ours", "exact", "textbook"}
    assert candidates == (both_directions if name in ("forward", "backward") else {"ours", "exact"})
    for row in json.loads(json.dumps(rows)):
        assert (row["pass"], row["length"]) == (name, LENGTH)
        assert row["milliseconds"][0] > 0
        assert row["candidate"] != "ours" or row["over_ours"] == [1, 1, 1]


def test_the_textbook_form_is_the_same_estimator_but_for_its_epsilon(monkeypatch):
    monkeypatch.setattr(cost, "EPSILON", 0)
    arrays, programs = cost.inputs(LENGTH), cost.programs("forward", LENGTH)
    ours = programs["ours"](*arrays)
    textbook = programs["textbook"](*arrays)  # Compiled, it might still have its epsilon.
    np.testing.assert_allclose(ours, textbook, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("length", "sizes"), [(128, (2, 4)), (131_072, (1, 4)), (2**20, (1, 1))])
def test_longer_sequences_are_fewer(length, sizes):
    assert cost.sizes(length) == sizes


def test_exact_attention_and_the_backward_pass_end_where_arrays_do_not_fit():
    assert set(cost.programs("causal_forward", 2 * cost.LONGEST_EXACT)) == {"ours"}
    assert set(cost.programs("forward", 2 * cost.LONGEST_BACKWARD)) == {"ours"}
    assert not cost.applies("backward", 2 * cost.LONGEST_BACKWARD)
    assert cost.applies("causal_forward", 2 * cost.LONGEST_BACKWARD)


def test_conditions_name_the_machine_and_the_versions():
    conditions = cost.conditions()
    assert conditions["versions"]["jax"] == jax.__version__
    assert conditions["cores"] > 0
