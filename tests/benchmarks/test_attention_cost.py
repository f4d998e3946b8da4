"""The benchmark of cost by length: its candidates, its rows, and which lengths it leaves out."""

import json

import jax
import numpy as np
import pytest

from benchmarks import attention_candidates, attention_cost, attention_cost_figure

LENGTH = 48


@pytest.mark.slow
@pytest.mark.parametrize("name", attention_cost.PASSES)
def test_each_pass_yields_a_row_of_json_for_each_candidate(name):
    rows = list(attention_cost.measure(name, LENGTH, rounds=1, seconds=0))
    candidates = {row["candidate"] for row in rows} - {"performer_pytorch", "tokamax"}
    both_directions = {"ours", "exact", "textbook"}
    assert candidates == (both_directions if name in ("forward", "backward") else {"ours", "exact"})
    for row in json.loads(json.dumps(rows)):
        assert (row["pass"], row["length"]) == (name, LENGTH)
        assert row["milliseconds"][0] > 0
        assert row["candidate"] != "ours" or row["over_ours"] == [1, 1, 1]


@pytest.mark.slow
def test_the_textbook_form_is_the_same_estimator_but_for_its_epsilon(monkeypatch):
    monkeypatch.setattr(attention_candidates, "EPSILON", 0)
    arrays, programs = attention_cost.inputs(LENGTH), attention_cost.programs("forward", LENGTH)
    ours = programs["ours"](*arrays)
    textbook = programs["textbook"](*arrays)  # Compiled, it might still have its epsilon.
    np.testing.assert_allclose(ours, textbook, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("length", "sizes"), [(128, (2, 4)), (131_072, (1, 4)), (2**20, (1, 1))])
def test_longer_sequences_are_fewer(length, sizes):
    assert attention_cost.sizes(length) == sizes


def test_exact_attention_and_the_backward_pass_end_where_arrays_do_not_fit():
    assert set(
        attention_cost.programs("causal_forward", 2 * attention_candidates.LONGEST_EXACT)
    ) == {"ours"}
    assert set(attention_cost.programs("forward", 2 * attention_cost.LONGEST_BACKWARD)) == {"ours"}
    assert not attention_cost.applies("backward", 2 * attention_cost.LONGEST_BACKWARD)
    assert attention_cost.applies("causal_forward", 2 * attention_cost.LONGEST_BACKWARD)


def test_conditions_name_the_machine_and_the_versions():
    conditions = attention_cost.conditions()
    assert conditions["versions"]["jax"] == jax.__version__
    assert conditions["cores"] > 0


def committed():
    return json.loads(attention_cost_figure.RESULTS.read_text())


def test_rows_that_became_worse_are_named():
    before = committed()["rows"]
    assert attention_cost.regressions(before, before) == []
    slower = [dict(row, over_ours=[0.6 * x for x in row["over_ours"]]) for row in before]
    larger = [dict(row, temporary_mib=1.1 * (row["temporary_mib"] or 0)) for row in before]
    exact, ours = (
        [row for row in before if row["candidate"] == candidate] for candidate in ("exact", "ours")
    )
    assert len(attention_cost.regressions(before, slower)) == len(exact) > 0
    assert len(attention_cost.regressions(before, larger)) == len(ours) > 0


def test_the_figure_shows_every_candidate_of_the_results():
    figure = attention_cost_figure.draw(committed())
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    found = {row["candidate"] for row in committed()["rows"]}
    assert labels == {attention_cost_figure.LOOKS[name][0] for name in found}


@pytest.mark.timing
@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("name", attention_cost.PASSES)
def test_attention_is_as_cheap_as_the_committed_results_say(name, length):
    before, now = committed(), attention_cost.conditions()
    for field in ("device", "cores"):
        if before["conditions"][field] != now[field]:
            pytest.skip(f"the committed results are of {field} {before['conditions'][field]}")
    after = list(attention_cost.measure(name, length, rounds=20, seconds=20))
    assert attention_cost.regressions(before["rows"], after) == []
