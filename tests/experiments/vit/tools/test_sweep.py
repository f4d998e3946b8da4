"""Sweeps of the learning rate."""

import json
import re

import numpy as np
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.config import check_config
from experiments.vit.configs import fashion_mnist_b
from experiments.vit.data import pipeline
from experiments.vit.metrics import log
from experiments.vit.tools import sweep, sweep_config
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.experiments.vit import tiny


def get_config(**changes):
    """A sweep of the tiny config, of two attentions at two rates with two seeds."""
    schedule = {"num_steps": 10, "eval_interval": 10, "calibrate_interval": 4}
    features = {"model__feature_map": "calibrated"}
    config = tiny.get_config(**(schedule | features | changes))
    with config.unlocked():
        config.sweep = {"arms": ("exact",), "learning_rates": (1e-3, 1e-2), "seeds": (0, 1)}
    return config


def measured(losses, largest_norm=2.0):
    """What a run of these losses measures."""
    losses = np.asarray(losses, float)
    return np.stack([losses, np.zeros_like(losses), np.full_like(losses, largest_norm)])


FALLING = np.linspace(2.3, 0.5, 30)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("losses", "fault"),
    [
        (FALLING, ""),
        (np.where(np.arange(30) == 20, 2.3 + 1.1 * sweep.SPIKE, FALLING), "spike"),
        (np.where(np.arange(30) == 20, 2.3 + 0.9 * sweep.SPIKE, FALLING), ""),
        (np.where(np.arange(30) >= 20, 2.2, FALLING), "rise"),
        (np.full(30, 2.3), "no progress"),
        (np.where(np.arange(30) == 20, np.inf, FALLING), "not finite"),
        (np.where(np.arange(30) >= 20, np.nan, FALLING), "not finite"),
    ],
)
def test_a_run_is_stable_unless_its_loss_is_not_finite_or_rises(losses, fault):
    outcome = sweep.judge(measured(losses, 7.0))
    assert outcome.fault == fault
    if fault == "not finite":
        assert np.isnan(outcome.final_loss)
        assert outcome.largest_norm == np.inf
    else:
        assert outcome.final_loss == pytest.approx(np.mean(losses[-10:]))
        assert outcome.largest_loss == np.max(losses)
        assert outcome.largest_norm == 7.0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("faults", "largest"),
    [
        ([["", ""], ["", ""]], "0.01"),
        ([["", ""], ["", "spike"]], "0.001"),
        ([["rise", ""], ["", ""]], None),
    ],
)
def test_no_seed_is_unstable_up_to_the_largest_stable_rate(faults, largest):
    rates = {
        rate: {str(seed): {"fault": fault} for seed, fault in enumerate(of_rate)}
        for rate, of_rate in zip(("0.001", "0.01"), faults, strict=True)
    }
    assert sweep.largest_stable(rates) == largest


@pytest.mark.slow
@pytest.mark.parametrize("arm", sweep.ARMS)
def test_runs_are_those_of_the_trainer_and_share_a_program(tmp_path, arm):
    config = sweep.arm_config(get_config(), arm)
    inputs = pipeline.load(config, eval_batch_size=8)
    ours = sweep.Arm(config, channels=1, num_classes=10)
    for rate in (1e-3, 1e-2):
        config.learning_rate = rate
        train.train(config, tmp_path / f"{rate:g}")
        rows = log.read_metrics(tmp_path / f"{rate:g}")
        theirs = [[x for _, x in rows[f"train_{name}"]] for name in ("loss", "accuracy")]
        theirs.append([x for _, x in rows["gradient_norm"]])
        found = ours.train(inputs, learning_rate=rate, seed=0)
        np.testing.assert_allclose(found, theirs, rtol=2e-3)
    assert ours.step._cache_size() == 1
    assert not np.allclose(ours.train(inputs, learning_rate=rate, seed=1), theirs, rtol=2e-3)


@pytest.mark.slow
def test_a_sweep_is_whole_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    config = get_config()
    train_once, calls = sweep.Arm.train, []

    def stop_at_the_third(self, inputs, **options):
        calls.append(options)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train_once(self, inputs, **options)

    monkeypatch.setattr(sweep.Arm, "train", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(config, tmp_path)
    assert not (tmp_path / "results.json").exists()
    captured = capsys.readouterr()
    assert "runs:  50%|" in captured.err  # Two of the four.
    assert re.search(r"rate 0\.01, seed 0: .*/10 \[", captured.err)
    lines = captured.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["exact-0.001-0", "exact-0.01-0"]
    results = sweep.run(config, tmp_path)
    assert len(calls) == 4 + 1
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert {rate: [*seeds] for rate, seeds in results["exact"].items()} == {
        "0.001": ["0", "1"],
        "0.01": ["0", "1"],
    }
    assert (tmp_path / "table.md").read_text() == f"{sweep.report(results)}\n"
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert_no_figure_costs_results(sweep.run, config, tmp_path)
    assert len(calls) == 5
    config.batch_size = 16
    with pytest.raises(UserError, match="which differs in batch_size"):
        sweep.run(config, tmp_path)


@pytest.mark.fast
def test_the_table_has_every_seed_and_its_spread():
    entry = {"final_loss": 0.5, "largest_loss": 2.3, "largest_norm": 3.0, "fault": ""}
    spiked = {"final_loss": 1.5, "largest_loss": 4.0, "largest_norm": 30.0, "fault": "spike"}
    lost = {"final_loss": None, "largest_loss": None, "largest_norm": None, "fault": "not finite"}
    results = {
        "exact": {"0.001": {"0": entry, "1": spiked}},
        "simplex": {"0.001": {"0": entry, "1": lost}},
    }
    table = sweep.report(results)
    assert (
        "| exact | 0.001 | 0, 1 | 0.500, 1.500 | 1.000 | 0.707 | 4.00 | 30.0 "
        "| spike (seed 1) |" in table
    )
    assert (
        "| SimRFs, positive | 0.001 | 0, 1 | 0.500, - | - | - | not finite | not finite "
        "| not finite (seed 1) |" in table
    )
    assert "| exact | none of these |" in table
    assert sweep.draw(results).axes


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ("exact", "linear")}, "config.sweep.arms must be one of"),
        ({"learning_rates": (1e-2, 1e-3)}, "config.sweep.learning_rates must ascend"),
        ({"learning_rates": (0.0, 1e-3)}, "config.sweep.learning_rates must be above 0"),
        ({"seeds": (0,)}, "config.seeds must be two or more"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(changes, message):
    config = get_config()
    config.sweep.update(changes)
    with pytest.raises(UserError, match=message):
        sweep.check(config)


@pytest.mark.fast
def test_the_sweep_keeps_the_recipe_of_the_pods():
    config = sweep_config.get_config()
    sweep.check(config)
    pod = fashion_mnist_b.get_config()
    check_config(pod)
    shared = ["weight_decay", "b1", "b2", "eps", "clip_norm", "redraw_interval"]
    assert {name: config[name] for name in shared} == {name: pod[name] for name in shared}
    model = ["depth", "dropout_rate", "pooling", "attention", "num_features", "dtype", "block"]
    assert {name: config.model[name] for name in model} == {name: pod.model[name] for name in model}
    assert config.model.width / config.model.num_heads == pod.model.width / pod.model.num_heads
