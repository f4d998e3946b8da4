import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.harness import resumable, trials
from experiments.harness.mistakes import UserError
from experiments.kernel_mse import (
    blog,
    kernel_mse,
    mse_ratio,
    other_kernels,
    trigonometric_gap,
)
from experiments.kernel_mse.configs import paper
from tests.experiments.drawing import assert_no_figure_costs_results

TINY = {
    "ratio.dim": 8,
    "ratio.distances": (0.01, 0.5, 1.0, 4.0),
    "ratio.num_trials": 2000,
    "gap.dims": (2, 4),
    "gap.trial_dims": (4,),
    "gap.trial_distances": (1.0, 3.5),
    "gap.num_trials": 4000,
    "kernels.dims": (2, 4),
    "kernels.trial_dims": (4,),
    "kernels.num_trials": 2000,
    "attention.length": 6,
    "attention.dim": 2,
    "attention.num_features": (2,),
    "attention.num_samples": 2,
}


def tiny(**changes):
    config = paper.get_config()
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(TINY | changes)
    return config


@pytest.mark.slow
def test_trials_agree_with_closed_forms(tmp_path):
    config = tiny()
    ratio = mse_ratio.summary(config, resumable.Pieces(tmp_path, config))
    seen = np.array(ratio["visible_share_of_mean"]) > mse_ratio.ENOUGH
    assert seen.tolist() == [True, True, True, False]
    for coupling in ("iid", "orthogonal", "simplex"):
        scores = np.array(ratio[coupling]["mse_z_score"])[seen]
        if coupling != "iid":
            scores = np.append(scores, np.array(ratio[coupling]["ratio_z_score"])[seen])
        assert 0 < np.abs(scores).max() < 5
    assert ratio["simplex"]["ratio"][0] == pytest.approx(ratio["small_distance_limit"], rel=0.1)
    assert ratio["simplex_plus"]["ratio"][0] < 0.01 * ratio["simplex"]["ratio"][0]
    assert "mse_closed_form" not in ratio["simplex_plus"]


@pytest.mark.slow
def test_trials_of_the_gap_agree_with_the_closed_form(tmp_path):
    config = tiny()
    pieces = resumable.Pieces(tmp_path, config)
    [spot] = trigonometric_gap.summary(config, pieces)["trials"]
    assert 0 < np.abs(spot["z_score"]).max() < 5
    assert 0.5 < spot["relative_gap"][0] < 0.7


@pytest.mark.slow
def test_trials_of_other_kernels_agree_with_the_closed_forms(tmp_path):
    config = tiny()
    results = other_kernels.summary(config, resumable.Pieces(tmp_path, config))
    cases = [trial["cases"] for trial in results["trials"]]
    scores = [one["z_score"] for case in cases for one in case.values()]
    assert 0 < np.abs(scores).max() < 5
    assert len(results["theory"]) == 2 * len(other_kernels.KERNELS)
    for row in results["theory"]:
        assert 1 <= row["optimal_up_to"] <= 10
        assert row["ratios"]["orthogonal, stratified norms"][0] < row["ratios"]["orthogonal"][0]


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    computed = []

    def stand_in(name, *shape):
        computed.append(name)
        if len(computed) == stop_at:
            raise KeyboardInterrupt
        return np.random.default_rng(list(name.encode())).gamma(2.0, size=shape)

    def draw_errors(_, num_trials, distances, *, dim, coupling, features):
        return stand_in(f"{features} {dim} {coupling}", num_trials, len(distances))

    monkeypatch.setattr(trials, "draw_errors", draw_errors)

    def draw(_, num_trials, *, dim, case, kernel):
        return stand_in(f"{kernel} {dim} {case}", num_trials, 1)

    monkeypatch.setattr(other_kernels, "_draw", draw)
    monkeypatch.setattr(blog, "_errors_at", lambda *_: stand_in("errors", len(blog.CASES), 5))
    monkeypatch.setattr(blog, "_uniform_errors", lambda *_: stand_in("one", len(blog.SCALES), 5))
    stop_at = None
    whole = kernel_mse.run(tiny(), tmp_path / "whole")
    assert len(set(computed)) == len(computed) == 4 + 2 + 14 + 1 + 1
    computed, stop_at = [], 4
    with pytest.raises(KeyboardInterrupt):
        kernel_mse.run(tiny(), tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "results.json").exists()
    assert kernel_mse.run(tiny(), tmp_path / "stopped") == whole
    assert len(computed) == 4 + 19  # Three pieces were saved before.
    assert_no_figure_costs_results(kernel_mse.run, tiny(), tmp_path / "stopped")
    assert json.loads((tmp_path / "stopped" / "results.json").read_text()) == whole
    for name in ("mse_ratio", "trigonometric_gap", "other_kernels", *blog.FIGURES):
        assert (tmp_path / "stopped" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_main_prints_the_tables(tmp_path):
    # The program needs its own process, because flags are global and every experiment has --config.
    command = [sys.executable, "-m", "experiments.kernel_mse.main", f"--workdir={tmp_path / 'r'}"]
    small = TINY | {"ratio.num_trials": 4, "gap.num_trials": 4, "kernels.num_trials": 4}
    command += [f"--config.{name}={value}" for name, value in small.items()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| v | ORFs | SimRFs | SimRFs+ |" in run.stdout
    assert "| 4 | 3.081 |" in run.stdout
    assert "| Laplace | 4 | orthogonal, stratified norms |" in run.stdout
    assert "| corrected | 0.5 | positive, orthogonal |" in run.stdout
    wrong = subprocess.run(
        [*command, "--config.ratio.dims=4"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "Unknown config field ratio.dims; the known ones are seed, attention.dim" in wrong.stderr


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32 - 1, got -1"),
        ({"ratio__dim": 1}, "config.ratio.dim must be at least 2, got 1"),
        ({"ratio__num_trials": 1}, "config.ratio.num_trials must be at least 2, got 1"),
        ({"gap__num_trials": 1}, "config.gap.num_trials must be at least 2, got 1"),
        ({"gap__dims": ()}, "config.gap.dims must have at least one entry"),
        ({"gap__dims": (4, 3)}, r"config.gap.dims must ascend and have nothing twice, got \(4, 3"),
        ({"gap__trial_dims": (1, 4)}, r"Each of config.gap.trial_dims must be at least 2, got 1"),
        (
            {"ratio__distances": (0.0, 1.0)},
            "config.ratio.distances must be floats above 0",
        ),
        (
            {"gap__trial_distances": (1, 2)},
            "gap.trial_distances must be floats above 0",
        ),
        ({"kernels__num_trials": 1}, "config.kernels.num_trials must be at least 2, got 1"),
        ({"attention__length": 0}, "config.attention.length must be at least 1, got 0"),
        ({"attention__num_samples": 0}, "config.attention.num_samples must be at least 1, got 0"),
        ({"attention__num_features": (0, 2)}, "Each of config.attention.num_features must be at"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        kernel_mse.check(tiny(**changes))


@pytest.mark.fast
def test_refuses_other_types():
    with pytest.raises(UserError, match=r"Each of config.gap.dims must be an integer, got 2.5"):
        kernel_mse.check(tiny(gap__dims=(2.5,)))
    with pytest.raises(UserError, match=r"config.ratio.distances must be floats above 0"):
        kernel_mse.check(tiny(ratio__distances=(1.0, float("inf"))))
