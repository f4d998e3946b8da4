import json

import numpy as np
import pytest

from experiments.mistakes import UserError
from experiments.vit import log, report
from tests.experiments.vit import tiny

pytestmark = pytest.mark.fast

NUM_TRAIN = 128
ACCURACIES = {
    ("simplex", 0): [0.5, 0.75],
    ("simplex", 1): [0.25, 0.5],
    ("simplex", 2): [0.75, 0.625],
    ("exact", 0): [0.5, 0.875],
}


def write_run(folder, accuracies, steps=(4, 8), lacks=(), **changes):
    """A finished run of 32 images a step."""
    config = tiny.get_config(**changes)
    for name in lacks:
        del config[name]
    rows = [{"step": s, "test_accuracy": a} for s, a in zip(steps, accuracies, strict=True)]
    with log.Log(folder, config, log.COLUMNS, rows, writes=True):
        pass
    results = {
        "config": config.to_dict(),
        "test_accuracy": accuracies[-1],
        "test_loss": 1 - accuracies[-1],
        "images_per_second": 1000.0,
        "seconds": 10.0,
        "num_train": NUM_TRAIN,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.fixture
def runs(tmp_path):
    """A folder of runs."""
    folder = tmp_path / "runs"
    for (attention, seed), accuracies in ACCURACIES.items():
        changes = {"model__attention": attention, "seed": seed}
        write_run(folder / f"{attention}-{seed}", accuracies, **changes)
    (folder / "figures").mkdir()
    return folder


def test_the_table_has_means_and_deviations_over_seeds(runs):
    lines = report.make_table(report.find_runs([runs])).splitlines()
    last = [0.75, 0.5, 0.625]
    mean, spread = np.mean(last), np.std(last, ddof=1)
    loss = f"{1 - mean:.4f} | {spread:.4f}"
    assert lines[2] == f"| simplex | {mean:.4f} | {spread:.4f} | {loss} | 3 | 1000 | 10 |"
    assert lines[3] == "| exact | 0.8750 | - | 0.1250 | - | 1 | 1000 | 10 |"
    assert len(lines) == 4


def test_the_figure_has_the_mean_and_its_band_against_the_epoch(runs):
    curves, ends = report.draw(report.find_runs([runs])).axes
    simplex, exact = curves.lines
    np.testing.assert_allclose(simplex.get_xdata(), [1, 2])  # 4 and 8 steps of 32 of 128 images.
    np.testing.assert_allclose(simplex.get_ydata(), [0.5, 0.625])
    np.testing.assert_allclose(exact.get_ydata(), [0.5, 0.875])
    [band] = curves.collections
    low, high = band.get_datalim(curves.transData).intervaly
    np.testing.assert_allclose([low, high], [0.25, 0.75])
    assert [label.get_text() for label in ends.get_yticklabels()] == ["SimRFs", "exact"]


def test_runs_may_be_named_one_by_one(runs):
    folders = [runs / "exact-0", runs / "simplex-1"]
    found = report.find_runs(folders)
    assert [run.folder for some in found.values() for run in some] == folders[::-1]


def test_fields_of_one_version_only_are_not_compared(runs, tmp_path):
    older = write_run(tmp_path / "older", [0.5, 0.5], seed=7, lacks=["diagnostics", "eps"])
    assert len(report.find_runs([older, runs])["simplex"]) == 4


def test_how_a_run_was_watched_may_differ(runs, tmp_path):
    changes = {"seed": 7, "log_interval": 2, "checkpoint__folder": "elsewhere", "mesh__data": 8}
    other = write_run(tmp_path / "other", [0.5, 0.5], **changes)
    assert len(report.find_runs([runs, other])["simplex"]) == 4


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"seed": 7, "learning_rate": 0.5, "model__depth": 2},
            "more than the seed and the attention: learning_rate is 0.001 there, 0.5 here; "
            "model.depth is 1 there, 2 here",
        ),
        ({"seed": 2}, "both are of simplex with seed 2; name each run once"),
        ({"seed": 7, "steps": (5, 8)}, "evaluated after other steps"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path, changes, match):
    other = write_run(tmp_path / "other", [0.5, 0.5], **changes)
    with pytest.raises(UserError, match=match):
        report.find_runs([runs, other])


def test_unfinished_and_missing_runs_are_refused(runs, tmp_path):
    (runs / "simplex-1" / "results.json").unlink()
    with pytest.raises(UserError, match=r"Not finished, .*results.json: .*simplex-1\. The"):
        report.find_runs([runs])
    with pytest.raises(UserError, match=r"There is no run in .*nowhere"):
        report.find_runs([tmp_path / "nowhere"])


def test_the_command_prints_the_table_and_draws_the_figure(runs, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    report.main([str(runs), f"--figure={figure}"])
    assert "| simplex | 0.6250 |" in capsys.readouterr().out
    assert figure.stat().st_size > 10_000
    with pytest.raises(SystemExit, match="There is no run in"):
        report.main([str(tmp_path / "nowhere")])
