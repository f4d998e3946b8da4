"""The pictures of README and site draw the numbers of the tables, and what they say."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks import attention_cost_figure, overview, virtual_tokens

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.fast
def test_the_overview_has_the_numbers_of_the_readme():
    rows = ROOT.joinpath("README.md").read_text().splitlines()
    errors = overview.errors()
    assert list(errors) == list(overview.BARS)
    shown = {
        "positive features": "positive, simplex",
        "calibrated": "calibrated, cross-polytope",
        "calibrated, exact band and keys": "exact band and keys, calibrated",
        "the same with learned features": "exact band and keys, learned",
    }
    for name, row in shown.items():
        mean, _ = errors[row]
        [line] = [line for line in rows if line.startswith(f"| {name} |")]
        assert f"| {name} | {mean:.3f} ± " in line


@pytest.mark.fast
def test_the_overview_draws_both_passes():
    results = json.loads(attention_cost_figure.RESULTS.read_text())
    left, right = overview.draw(results).axes
    assert [text.get_text() for text in left.get_yticklabels()] == list(overview.BARS.values())
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == ["forward", "forward and backward"]
    for line, name in zip(right.lines, overview.PASSES, strict=False):
        speedups = overview.speedups(results["rows"], name)
        assert list(line.get_xdata()) == list(speedups)
        assert list(line.get_ydata()) == [quartiles[1] for quartiles in speedups.values()]


@pytest.mark.slow
def test_more_virtual_tokens_answer_as_the_keys_do():
    key, value = virtual_tokens.tokens()
    query = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    exact = virtual_tokens.answers(query, key, value, np.zeros(virtual_tokens.NUM_KEYS))
    few, many = (
        np.abs(virtual_tokens.answers(query, *virtual_tokens.virtual(key, value, m)) - exact).mean()
        for m in (9, 10_000)
    )
    assert many < 0.25 * few
