import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.gram import gram
from experiments.gram.configs import paper
from experiments.harness.mistakes import UserError
from simrf_jax import theory
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.standard_errors import assert_mean


def tiny(**changes):
    config = paper.get_config()
    small = {"dim": 8, "num_points": 6, "multiples": (1, 3), "num_trials": 400, "batch_size": 200}
    config.update(small | changes)
    return config


@pytest.mark.slow
def test_trials_agree_with_the_closed_form_and_order_the_couplings(tmp_path):
    results = gram.run(tiny(), tmp_path)
    for number in range(2):
        rows = {coupling: results[coupling][number] for coupling in gram.COUPLINGS}
        for coupling in ("iid", "orthogonal", "simplex"):
            row = rows[coupling]
            assert abs(row["mean"] - row["closed_form"]) < 5 * row["standard_error"]
        assert rows["simplex_plus"]["closed_form"] is None
        assert rows["simplex"]["mean"] < 0.5 * rows["orthogonal"]["mean"]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "gram.png").stat().st_size > 10_000


@pytest.mark.fast
def test_closed_form_is_the_mean_over_all_pairs():
    x = np.random.default_rng(0).normal(size=(4, 8)) * 0.1
    pairs = [theory.kernel_mse(a, b, 16, coupling="simplex") for a in x for b in x]
    assert gram.expected_error(x, 16, "simplex") == pytest.approx(np.mean(pairs), rel=1e-12)


@pytest.mark.slow
def test_paper_has_the_expected_errors_of_its_figure():
    # The expected errors are means over data sets at m = d.
    config = paper.get_config()
    for coupling, expected in (("iid", 0.01506), ("orthogonal", 0.01097), ("simplex", 0.00506)):
        errors = []
        for config.seed in range(100):
            x = np.asarray(gram.draw_points(config))[:16]
            # Weigh the diagonal and the other entries as among 64 x 64 entries.
            mse = theory.kernel_mse(x[:, None], x[None], 64, coupling=coupling)
            off_diagonal = (mse.sum() - np.trace(mse)) / (16 * 15)
            errors.append((np.trace(mse) / 16 + 63 * off_diagonal) / 64)
        assert_mean(errors, expected)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    config = tiny(num_trials=20, multiples=(1,))
    whole = gram.run(config, tmp_path / "whole")
    trials, calls = gram._all_trials, []

    def stop_after_two(*arguments):
        calls.append(arguments[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return trials(*arguments)

    monkeypatch.setattr(gram, "_all_trials", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        gram.run(config, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "results.json").exists()
    assert gram.run(config, tmp_path / "stopped") == whole
    assert len(calls) == 3 + 2
    assert_no_figure_costs_results(gram.run, config, tmp_path / "stopped")


@pytest.mark.slow
def test_main_prints_the_table(tmp_path):
    # The program needs its own process, because flags are global and every experiment has --config.
    command = [sys.executable, "-m", "experiments.gram.main", f"--workdir={tmp_path / 'run'}"]
    small = ("dim=4", "num_points=3", "multiples=(1,)", "num_trials=4")
    command += [f"--config.{override}" for override in small]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| features | iid | orthogonal | simplex | simplex_plus |" in run.stdout
    wrong = subprocess.run(
        [*command, "--config.dims=4"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "Unknown config field dims; the known ones are batch_size, dim" in wrong.stderr


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dim": 1}, "config.dim must be at least 2, got 1"),
        ({"num_points": 0}, "config.num_points must be at least 1"),
        ({"num_trials": 1}, "config.num_trials must be at least 2"),
        ({"scale": 0.0}, "config.scale must be a float above 0"),
        ({"scale": 2.0}, "config.scale must be a float above 0 and at most 0.73"),
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32"),
        ({"multiples": ()}, "config.multiples must have at least one entry"),
        ({"multiples": (0,)}, "Each of config.multiples must be at least 1"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        gram.check(tiny(**changes))
