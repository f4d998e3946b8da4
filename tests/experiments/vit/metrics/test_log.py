import csv
import json
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.vit import train
from experiments.vit.metrics import curves, diagnostics, log, meter
from tests.experiments.vit import tiny


def get_config(**changes):
    """A run of which everything is measured."""
    return tiny.get_config(
        **{
            "num_steps": 5,
            "eval_interval": 2,
            "diagnostics__images": 4,
            "diagnostics__redraws": 2,
            "profile__start": 1,
            "profile__steps": 2,
        }
        | changes
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    train.train(get_config(), workdir)
    return workdir


def read_rows(workdir):
    """Of metrics.csv, without what is empty."""
    with (workdir / "metrics.csv").open(newline="") as file:
        return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file)]


def read_events(workdir):
    """The same from the event files."""
    events = EventAccumulator(str(workdir / "tensorboard"))
    events.Reload()
    rows = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            row = rows.setdefault(event.step, {"step": event.step})
            assert tag not in row  # Nothing twice.
            row[tag] = event.value
    return [rows[step] for step in sorted(rows)]


def assert_same_rows(rows, others):
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(
            [row[name] for name in row], [other[name] for name in row], rtol=1e-6
        )


@pytest.mark.slow
def test_a_run_is_measured_at_every_row_and_compared_with_softmax_at_every_evaluation(workdir):
    rows = read_rows(workdir)
    tests = {"test_loss", "test_accuracy", *diagnostics.columns(depth=1)}
    for row in rows:
        evaluated = row["step"] in (2, 4, 5)
        assert row.keys() == set(log.COLUMNS[:7]) | (tests if evaluated else set())
        operations = json.loads((workdir / "results.json").read_text())["train_flops_per_image"]
        assert row["flops_per_second"] == pytest.approx(operations * row["images_per_second"])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 < row["attention_error"] < 2 for row in rows if "attention_error" in row)


@pytest.mark.slow
def test_tensorboard_shows_what_is_in_the_csv(workdir):
    assert_same_rows(read_events(workdir), read_rows(workdir))


@pytest.mark.slow
def test_the_chosen_steps_leave_a_profile(workdir):
    [trace] = (workdir / "profile").glob("plugins/profile/*/*.xplane.pb")
    content = trace.read_bytes()
    assert b"train_step" in content


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["simplex", "exact"])
@pytest.mark.usefixtures("drawn_curves")
def test_every_column_has_a_curve(workdir, attention):
    metrics = log.read_metrics(workdir)
    if attention == "exact":
        metrics = {name: x for name, x in metrics.items() if name in log.COLUMNS}
    figure = curves.draw_curves(metrics)
    drawn = {tuple(map(float, line.get_ydata())) for axes in figure.axes for line in axes.lines}
    hidden = {"step", "flops_per_second"}
    expected = {tuple(y for _, y in x) for name, x in metrics.items() if x and name not in hidden}
    assert drawn == expected
    # The gradient norm shares a panel, and bars say which layer has which color.
    assert len(figure.axes) == (5 if attention == "exact" else 9)


@pytest.mark.parametrize(("seconds", "pictures"), [(0, [1, 3]), (1e6, [])])
def test_curves_are_drawn_at_an_evaluation_if_the_last_ones_are_old(
    tmp_path, monkeypatch, seconds, pictures
):
    drawn = []
    monkeypatch.setattr(log, "SECONDS_BETWEEN_DRAWINGS", seconds)
    monkeypatch.setattr(
        log, "_draw", lambda folder: drawn.append((folder, opened.rows[-1]["step"]))
    )
    rows = make_rows(1, test_accuracy=0.1) + make_rows(2) + make_rows(3, test_accuracy=0.2)
    with log.Log(tmp_path, tiny.get_config(), log.COLUMNS, [], writes=True) as opened:
        for row in rows:
            opened.write(row)
    assert drawn == [(tmp_path, step) for step in pictures]


@pytest.mark.usefixtures("drawn_curves")
def test_curves_show_held_out_images_while_there_is_no_test_accuracy():
    metrics = {name: [(2, 0.5)] for name in (*log.COLUMNS, *log.HELD_OUT_COLUMNS)}
    metrics |= {"test_loss": [], "test_accuracy": []}
    [accuracy] = (x for x in curves.draw_curves(metrics).axes if "accuracy" in x.get_title())
    assert [line.get_label() for line in accuracy.lines] == ["train", "held-out"]
    assert accuracy.get_title() == "held-out accuracy after step 2: 0.5000"


def make_rows(*steps, **columns):
    return [{"step": step, "train_loss": 1 / step, **columns} for step in steps]


def write_log(workdir, before, rows):
    with log.Log(workdir, tiny.get_config(), log.COLUMNS, before, writes=True) as opened:
        for row in rows:
            opened.write(row)
            on_disk = read_rows(workdir), read_events(workdir)
            assert_same_rows(on_disk[0], opened.rows)
            assert_same_rows(on_disk[1], opened.rows)


@pytest.mark.slow
def test_a_run_that_goes_on_has_each_row_once(tmp_path):
    rows = make_rows(1, 2, 3)
    write_log(tmp_path, [], rows)
    watching = EventAccumulator(str(tmp_path / "tensorboard"))
    watching.Reload()
    time.sleep(1)  # Files are read in the order of their names, which begin with the second.
    write_log(tmp_path, rows[:1], make_rows(2, 3, 4))
    watching.Reload()
    assert [event.step for event in watching.Scalars("train_loss")] == [1, 2, 3, 4]


@pytest.mark.fast
def test_a_run_may_go_on_without_what_it_measured_before(tmp_path):
    write_log(tmp_path, make_rows(1, attention_error=0.5), make_rows(2))
    assert read_rows(tmp_path)[0]["attention_error"] == 0.5


@pytest.mark.fast
def test_other_hosts_keep_rows_and_write_nothing(tmp_path):
    folder = tmp_path / "run"
    with log.Log(folder, tiny.get_config(), log.COLUMNS, [], writes=False) as opened:
        opened.write({"step": 1})
    assert opened.rows == [{"step": 1}]
    assert not folder.exists()


@pytest.mark.slow
def test_mfu_is_a_share_of_the_peak():
    speed = meter.Speed(batch_size=100, flops=10**12, peak=4e12)
    assert speed.row(0.5) == {"images_per_second": 200, "flops_per_second": 2e12, "mfu": 0.5}
    assert "mfu" not in speed._replace(peak=None).row(0.5)
