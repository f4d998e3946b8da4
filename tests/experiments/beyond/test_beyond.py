import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments.beyond import beyond
from experiments.beyond.configs import paper
from experiments.harness import trials
from experiments.harness.mistakes import UserError
from simrf_jax import theory
from tests.experiments.drawing import assert_no_figure_costs_results


def tiny(**changes):
    config = paper.get_config()
    small = {
        "blocks": {"dim": 4, "num_features": 10},
        "plus": {"dims": (6,), "distances": (0.1, 0.5), "num_entries": 40_000},
        "maps": {"dims": (2,)},
    }
    config.update(small)
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.slow
def test_simplex_plus_removes_the_leading_term(tmp_path):
    results = beyond.run(tiny(), tmp_path)
    row = results["plus"]["6"]
    for ratio, error, closed in zip(
        row["simplex"], row["simplex_standard_error"], row["simplex_closed_form"], strict=True
    ):
        assert abs(ratio - closed) < 5 * error
    # The closed loop of SimRFs+ gives 0.0037; SimRFs have 0.083.
    assert abs(row["simplex_plus"][0] - 0.0037) < 5 * row["simplex_plus_standard_error"][0] + 5e-5
    assert json.loads((tmp_path / "results.json").read_text()) == results
    for name in ("blocks", "simplex_plus", "maps", "reach"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "| 2 | hyperbolic | SimRFs | 1.2500 |" in beyond.report(results)


@pytest.mark.fast
def test_blocks_are_those_of_the_theory():
    blocks = beyond._blocks(4, 0.5, 10)
    number = blocks["sizes"].index(7)
    for name, options in (("square", {"block": "square"}), ("regular", {})):
        expected = theory.mse_ratio(0.5, 7, 4, coupling="simplex", **options)
        assert blocks["against_size"][name][number] == expected
    assert len(blocks["against_distance"]["orthogonal"]) == len(blocks["distances"])
    # Full row blocks of Eq. 9 are regular. Others are worse, and orthogonal rows are worst.
    for m, square, regular, orthogonal in zip(
        blocks["sizes"],
        *(blocks["against_size"][name] for name in ("square", "regular", "orthogonal")),
        strict=True,
    ):
        assert regular == square if m == 4 else regular < square < orthogonal


@pytest.mark.fast
def test_errors_that_reach_trained_models_are_those_of_the_theory():
    reach = beyond._reach(8, 16, (1.0, 2.0))
    number = beyond.REACH_SAMPLES.tolist().index(2)
    x = np.eye(1, 8)  # |x + y| is 2 for y = x, and exp(x . y) is e.
    parameter = theory.optimal_parameter(4.0, 8)
    for name, options in {
        "iid": {"coupling": "iid"},
        "cross_polytope_best": {
            "coupling": "cross_polytope",
            "norms": "antithetic",
            "parameter": parameter,
        },
    }.items():
        expected = theory.kernel_mse(x, x, 16, **options)  # The Gaussian kernel of x and x is 1.
        np.testing.assert_allclose(reach["samples"][name][number], expected, rtol=1e-9)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = beyond.run(tiny(), tmp_path / "whole")
    draw, calls = trials.draw_errors, []

    def stop_after_one(*arguments, **options):
        calls.append(options["coupling"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr(trials, "draw_errors", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        beyond.run(tiny(), tmp_path / "stopped")
    assert beyond.run(tiny(), tmp_path / "stopped") == whole
    assert calls == ["simplex", "simplex_plus", "simplex_plus"]
    assert_no_figure_costs_results(beyond.run, tiny(), tmp_path / "stopped")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32 - 1, got -1"),
        ({"blocks.dim": 1}, "config.blocks.dim must be at least 2, got 1"),
        ({"blocks.num_features": 1}, "config.blocks.num_features must be at least 2, got 1"),
        (
            {"blocks.distance": 0.0},
            "config.blocks.distance must be a float above 0 and at most 3",
        ),
        (
            {"plus.distances": (-1.0,)},
            r"config.plus.distances must be floats above 0 and at most 3, got \(-1",
        ),
        ({"plus.distances": ()}, r"config.plus.distances must have at least one entry, got \(\)"),
        ({"plus.dims": (1,)}, "Each of config.plus.dims must be at least 2, got 1"),
        ({"plus.num_entries": 0}, "config.plus.num_entries must be at least 1"),
        ({"plus.distances": (1.0, 0.1)}, r"plus.distances must ascend and have nothing twice"),
        ({"reach.trained": (1.0,)}, "reach.trained must be the least and the largest"),
        ({"reach.trained": (1.0, 7.0)}, "reach.trained must be floats above 0 and at most 5"),
        ({"maps.dims": ()}, r"config.maps.dims must have at least one entry, got \(\)"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        beyond.check(tiny(**changes))


@pytest.mark.slow
def test_program_prints_the_tables(tmp_path):
    overrides = ("plus.dims=(3,)", "plus.distances=(0.5,)", "plus.num_entries=100")
    command = [sys.executable, "-m", "experiments.beyond.main", f"--workdir={tmp_path / 'run'}"]
    command += [f"--config.{override}" for override in overrides]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| 8 | 0.9884 | 0.8920 | 0.1337 |" in run.stdout


@pytest.mark.fast
@pytest.mark.parametrize(("dim", "gain", "left"), [(32, 0.44, 120), (64, 0.62, 860)])
def test_the_limits_of_couplings_and_of_optimal_features_are_those_of_the_pages(dim, gain, left):
    root = pathlib.Path(beyond.__file__).parents[2]
    names = ("BEYOND.md", "experiments/beyond/README.md")
    pages = [" ".join((root / name).read_text().split()) for name in names]
    ratio = theory.mse_ratio(3.0, 128, dim, coupling="cross_polytope")
    assert 100 * (1 - ratio) == pytest.approx(gain, abs=0.005)
    parameter = float(theory.optimal_parameter(16.0, dim))
    options = {"coupling": "cross_polytope", "parameter": parameter}
    error = theory.mse_ratio(4.0, 128, dim, **options) * np.expm1(16.0) / 128
    assert error == pytest.approx(left, rel=0.005)
    assert all(f"of {left} times" in page for page in pages)
    assert f"{gain} %" in pages[1]
