import json

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.metrics import log
from experiments.vit.tools import compare, report
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
    rows = [
        {"step": step, "test_loss": 1 - accuracy, "test_accuracy": accuracy}
        for step, accuracy in zip(steps, accuracies, strict=True)
    ]
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


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b"", "is damaged: Expecting value"),
        (lambda b: b[: len(b) // 2], "is damaged: "),
        (lambda b: b"test_accuracy: 0.5", "is damaged: Expecting value"),
        (lambda b: b"\xff" + b, "is damaged: .*can't decode"),
        (lambda b: b"[]", r"is damaged: it must hold a JSON object, got \[\]"),
        (lambda b: b"{}", "test_accuracy must be a number of at least 0, got 'nothing'"),
        (lambda b: b.replace(b"0.625", b'"0.625"'), "test_accuracy must be .* got '0.625'"),
        (lambda b: b.replace(b"0.625", b"NaN"), "test_accuracy must be .* got nan"),
        (lambda b: b.replace(b"0.625", b"true"), "test_accuracy must be .* got True"),
        (lambda b: b.replace(b"10.0", b"null"), "seconds must be a number .* got None"),
        (lambda b: b.replace(b"1000.0", b"Infinity"), "images_per_second must be .* got inf"),
        (lambda b: b.replace(b"128", b"0"), "num_train must be .* at least 1, got 0"),
        (lambda b: b.replace(b'"config"', b'"confog"'), "config.seed must be .* got 'nothing'"),
        (lambda b: b.replace(b'"simplex"', b'"linear"'), "attention must be .* got 'linear'"),
    ],
)
def test_damaged_results_are_named_and_refused(runs, change, match):
    path = runs / "simplex-2" / "results.json"
    damage(path, change)
    with pytest.raises(UserError, match=f"{path} .*{match}"):
        report.find_runs([runs])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda b: b"", "its last line is not whole"),
        (lambda b: b[:-9], "line 3 has more or fewer columns than the header"),
        (lambda b: b[:-1], "its last line is not whole"),
        (lambda b: b[:-2] + b",7\n", "line 3 has more or fewer columns than the header"),
        (lambda b: b.replace(b"0.625", b"0.6.5"), "line 3: could not convert .*'0.6.5'"),
        (lambda b: b.replace(b"\n8,", b"\n,"), "line 3 has no step"),
        (lambda b: b.replace(b"\n8,", b"\n7.5,"), "line 3 has no step"),
        (lambda b: b.replace(b"test_accuracy", b"accuracy"), "it has no test_accuracy"),
        (lambda b: b"\xff" + b, "can't decode"),
        (lambda b: b"\0" * 99, "is not whole"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_damaged_metrics_are_named_and_refused(runs, change, match):
    path = runs / "simplex-2" / "metrics.csv"
    damage(path, change) if change else path.unlink()
    with pytest.raises(UserError, match=f"{path} .*{match}"):
        report.find_runs([runs])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda b: b.replace(b"0.625", b"0.875"),
            "test_accuracy is 0.625 in results.json, and 0.875 at the end of metrics.csv, after",
        ),
        (lambda b: b.replace(b"0.375", b"3.75"), "test_loss is 0.375 .* and 3.75 at the end"),
        (lambda b: b[: b.index(b"\n8,") + 1], "test_loss is 0.375 .* 0.25 at the end .* step 4"),
    ],
)
def test_results_that_contradict_the_metrics_are_refused_with_both_numbers(runs, change, match):
    damage(runs / "simplex-2" / "metrics.csv", change)
    with pytest.raises(UserError, match=f"simplex-2 contradicts itself: {match}"):
        report.find_runs([runs])


def test_a_comparison_names_a_damaged_run(runs):
    damage(runs / "simplex-1" / "results.json", lambda b: b[:-9])
    config = tiny.get_config()
    with pytest.raises(UserError, match=r"simplex-1/results\.json is damaged: "):
        compare.compare(config, runs, ["simplex"], [1])


def test_the_table_is_printed_though_the_figure_cannot_be_written(runs, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"nowhere/figure.png cannot be written: .*No such file"):
        report.main([str(runs), f"--figure={tmp_path / 'nowhere' / 'figure.png'}"])
    assert "| simplex | 0.6250 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["figure", "figure.xyz"])
def test_a_figure_of_no_known_format_is_refused(runs, name, capsys):
    with pytest.raises(SystemExit):
        report.main([str(runs), f"--figure={name}"])
    assert "--figure must end in one of .eps, " in capsys.readouterr().err


def test_each_run_of_a_comparison_has_its_own_mirror(tmp_path, monkeypatch):
    def run_without_mirror(config, folder):  # As if the bucket could not be written.
        accuracies = ACCURACIES[config.model.attention, 0]
        changes = {"mirror": config.mirror, "model__attention": config.model.attention}
        write_run(folder, accuracies, **changes)

    monkeypatch.setattr(compare.train, "train", run_without_mirror)
    monkeypatch.setattr(compare.files, "save_figure", lambda path, figure, dpi: plt.close(figure))
    config = tiny.get_config(mirror=str(tmp_path / "mirror"))
    for mirrored in (False, True):  # The same command copies them.
        compare.compare(config, tmp_path / "runs", ["simplex", "exact"], [0])
        for attention in ("simplex", "exact"):
            copy = tmp_path / "mirror" / f"{attention}-0" / "results.json"
            assert copy.exists() == mirrored
            if mirrored:
                assert json.loads(copy.read_text())["config"]["mirror"] == str(copy.parent)
