import pytest

from experiments.harness import timing


@pytest.mark.fast
def test_the_first_call_is_left_out_and_seconds_end_it_after_the_least_rounds():
    rounds = []
    times = timing.alternate({"a": rounds.append, "b": rounds.append}, 100, seconds=0.0)
    assert rounds == [n for n in range(timing.LEAST_ROUNDS + 1) for _ in range(2)]
    assert {name: len(ms) for name, ms in times.items()} == dict.fromkeys("ab", timing.LEAST_ROUNDS)
    assert len(timing.alternate({"a": rounds.append}, 7)["a"]) == 7


@pytest.mark.fast
def test_a_bar_counts_the_calls_and_goes(capsys):
    timing.alternate({"a": lambda _: None, "b": lambda _: None}, 3)
    error = capsys.readouterr().err
    assert "timed calls:   0%|" in error
    assert "| 0/8 [" in error  # The first round compiles.
    assert error.endswith("\r")


@pytest.mark.fast
def test_table_has_medians_and_quartiles(capsys):
    timing.print_table({"a": [1.0, 2.0, 3.0, 4.0, 5.0]})
    assert capsys.readouterr().out.splitlines()[-1] == "| a | 3.0 | 2.0 to 4.0 |"


def test_candidates_take_turns_to_be_first():
    order = []
    calls = {name: lambda round_, name=name: order.append((round_, name)) for name in "abc"}
    timing.alternate(calls, 3)
    assert ["".join(n for r, n in order if r == round_) for round_ in range(4)] == [
        "abc",
        "bca",
        "cab",
        "abc",
    ]
