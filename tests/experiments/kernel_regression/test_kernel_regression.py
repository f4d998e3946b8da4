import json
import os
import subprocess
import sys

import pytest

from experiments.harness.mistakes import UserError
from experiments.kernel_regression import classify, kernel_regression, tables
from experiments.kernel_regression import paper as paper_values
from experiments.kernel_regression.configs import paper
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.experiments.kernel_regression import toy


def tiny(**changes):
    config = paper.get_config()
    small = {
        "datasets": ("car",),
        "num_trials": 200,
        "curve_trials": 20,
        "multiples": (1, 3),
        "search_trials": 5,
        "search_multiple": 2,
        "num_sigmas": 3,
    }
    config.update(small | changes)
    return config


@pytest.fixture
def config(monkeypatch, tmp_path):
    toy.add(monkeypatch, tmp_path, num_rows=401)
    return tiny(data_dir=str(tmp_path))


@pytest.mark.slow
def test_run_leaves_tables_and_figures(config, tmp_path):
    results = kernel_regression.run(config, tmp_path / "run")
    table = results["tables"]["car"]
    assert (table["dim"], table["num_train"], table["num_test"]) == (4, 380, 20)
    # With as many features as dimensions, simplex rows help much on this data, in paired trials.
    gain = table["table_2_paired"]["simplex - orthogonal"]
    means = [table["table_2"][method]["mean"] for method in ("simplex", "orthogonal")]
    assert gain["mean"] == pytest.approx(means[0] - means[1])
    assert gain["mean"] > 3 * gain["standard_error"]
    # Four dimensions are a power of two, so nothing is padded.
    assert table["table_2"]["simplex"] == table["table_3"]["simplex"]

    curves = results["curves"]["car"]
    for method in ("iid", "orthogonal", "simplex"):
        few, many = curves[method]
        assert few["mean"] < many["mean"] < curves["exact"] + 0.02

    search = results["search"]["car"]
    assert search["sigmas"] == pytest.approx([0.1, 0.2**0.5, 2])
    assert search["validation"]["best"] in search["sigmas"]
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    for name in ("accuracy", "sigma"):
        assert (tmp_path / "run" / f"{name}.png").stat().st_size > 10_000

    report = kernel_regression.report(results)
    ours = table["table_3"]["iid"]
    cell = f"0.6768(6) / {ours['mean']:.4f}({1e4 * ours['standard_error']:.0f}) / "
    assert cell in report
    score = gain["mean"] / gain["standard_error"]
    assert f"| {gain['mean']:+.4f} / {score:+.1f} |" in report
    assert "tables: " in report
    gain = curves["simplex - orthogonal"][0]["mean"]
    assert f"| car | {gain:+.4f} / " in report
    assert_no_figure_costs_results(kernel_regression.run, config, tmp_path / "run")


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(config, tmp_path, monkeypatch):
    config.parts = ("tables",)
    config.num_trials = 10
    whole = kernel_regression.run(config, tmp_path / "whole")
    accuracies, calls = classify.accuracies, []

    def stop_after_two(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return accuracies(*arguments)

    monkeypatch.setattr(classify, "accuracies", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        kernel_regression.run(config, tmp_path / "stopped")
    stopped = kernel_regression.run(config, tmp_path / "stopped")
    assert stopped["tables"] == whole["tables"]
    assert len(calls) == 9 + 1
    assert stopped["seconds"]["tables"] > 0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"datasets": ()}, r"config.datasets must name at least one of abalone, .*got \(\)"),
        ({"datasets": ("iris",)}, "Each of config.datasets must be one of 'abalone'.*got 'iris'"),
        ({"parts": ("table",)}, "Each of config.parts must be one of 'tables'.*got 'table'"),
        ({"num_trials": 1}, "config.num_trials must be at least 2, got 1"),
        ({"curve_trials": 1}, "config.curve_trials must be at least 2, got 1"),
        ({"search_trials": 0}, "config.search_trials must be at least 2, got 0"),
        ({"num_sigmas": 1}, "config.num_sigmas must be at least 2, got 1"),
        ({"search_multiple": 0}, "config.search_multiple must be at least 1"),
        ({"multiples": ()}, "config.multiples must have at least one entry"),
        ({"multiples": (0,)}, "Each of config.multiples must be at least 1"),
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32 - 1, got -1"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        kernel_regression.check(tiny(**changes))


def program(*overrides):
    return subprocess.run(
        [sys.executable, "-m", "experiments.kernel_regression.main", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_program_without_data_ends_with_a_line_that_says_what_to_do(tmp_path):
    run = program(f"--workdir={tmp_path / 'run'}", f"--config.data_dir={tmp_path}")
    assert run.returncode == 1
    assert "There is no abalone.data" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_program_prints_the_tables(tmp_path):
    if not os.environ.get("SIMRF_DATA_DIR"):
        pytest.skip("Needs the UCI files; SIMRF_DATA_DIR does not say where they are.")
    overrides = ("datasets=('banknote',)", "parts=('tables',)", "num_trials=4")
    run = program(f"--workdir={tmp_path / 'run'}", *(f"--config.{o}" for o in overrides))
    assert run.returncode == 0, run.stderr
    assert "| banknote | 1302 | 68 | 4 | 2.6 | 2.64 | 0.9412 |" in run.stdout


@pytest.mark.fast
def test_differences_without_spread_have_no_score():
    assert tables._score(paper_values.Entry(0.01, 0.0)) == "+0.0100"
    assert tables._score(paper_values.Entry(-0.01, 0.004)) == "-0.0100 / -2.5"
