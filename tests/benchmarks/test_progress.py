"""Checks that benchmarks which take minutes show how far they are, each at its smallest size."""

import importlib
import re
import types

import jax
import numpy as np
import pytest
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.metrics.pairwise import rbf_kernel

import simrf_jax
from benchmarks import command_line, input_pipeline, pod_compile, sklearn_features, tpu
from tests.tiers import slow_but

BAR = r"\| \d+/(\d+) \["  # The middle of tqdm's lines.


@pytest.fixture
def totals(capsys):
    """Returns a function that returns the totals of the bars that were shown."""
    with jax.numpy_rank_promotion("allow"), jax.debug_key_reuse(False):  # As in a program.
        yield lambda: {int(total) for total in re.findall(BAR, capsys.readouterr().err)}


@pytest.mark.fast
def test_lines_are_printed_above_the_bar(capsys):
    for item in command_line.bar("ab", "letters"):
        command_line.show(f"| {item} |")
    captured = capsys.readouterr()
    assert captured.out == "| a |\n| b |\n"
    assert re.findall(BAR, captured.err) == ["2"] * 3  # Drawn again below each line.
    assert captured.err.endswith("\r")  # The bar is gone.


def values(query, key, value, w, is_causal):
    return value


# For each benchmark: what is made small, what is called, and the total of the bar.
SMALL = {
    "attention_accuracy": (
        {
            "simrf_jax": types.SimpleNamespace(
                draw_projection=simrf_jax.draw_projection, random_feature_attention=values
            ),
            "SCALES": (1, 2),
        },
        lambda module: module.main(),
        8,
    ),
    "attention_cost": ({}, lambda module: module.candidates("forward", 16), 3),
    "causal": ({"LENGTHS": (64,)}, lambda module: module.measure([(64, None)], rounds=1), 2),
    "convergence": (
        {"NUM_FEATURES": (16, 17, 18), "TRIALS": 2, "COUPLINGS": ("iid",)},
        lambda module: module.measure(16, 0.25),
        3,
    ),
    "equal_features": (
        {"NUM_DRAWS": 6, "NUM_PARTS": 3},
        lambda module: module.squared_errors(module.ESTIMATORS[0]),
        3,
    ),
    "exact_keys": ({"LENGTHS": (20,), "ROUNDS": 2}, lambda module: module.main(), 2),
    "rotation_bias": (
        {"DIMS": {4: 20}, "BATCH": 10, "CASES": [("hadamard", "simplex")]},
        lambda module: module.main(),
        2,
    ),
    "variance": (
        {"NUM_DRAWS": 2, "COUPLINGS": ("iid", "simplex"), "DIM": 4},
        lambda module: module.relu(),
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["equal_features", "variance"], [*SMALL]))
def test_a_benchmark_shows_how_far_it_is(name, monkeypatch, totals):
    module = importlib.import_module(f"benchmarks.{name}")
    changes, call, total = SMALL[name]
    for attribute, value in changes.items():
        monkeypatch.setattr(module, attribute, value)
    monkeypatch.setattr("sys.argv", ["program"])
    call(module)
    assert total in totals()


COMPILED = {
    "calibration_cost": (
        ["--tpu=v5e"],
        {
            "TPU_LENGTHS": {8: 1},
            "tokens": lambda *_: (),
            "mechanisms": lambda _: {"positive": 1.0, "calibrated": 2.0},
        },
        {4},
    ),
    "fast_projection": (["--tpu"], {"DIMS": [64, 128, 256]}, {2}),
    "haar": (["--tpu"], {"SIZES": [(4, 1)]}, {5}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_programs_for_a_tpu_are_counted(name, monkeypatch, totals):
    module = importlib.import_module(f"benchmarks.{name}")
    arguments, changes, expected = COMPILED[name]
    for attribute, value in changes.items():
        monkeypatch.setattr(module, attribute, value)
    monkeypatch.setattr(tpu, "compile_for", lambda *_, **__: None)
    monkeypatch.setattr(tpu, "static_cycles", lambda _: (1000.0, []))
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    module.main()
    assert totals() == expected


def test_programs_for_pods_are_counted(tmp_path, monkeypatch, totals):
    class Lowered:
        def as_text(self):
            return "program"

    def product(pod, attention):
        return Lowered(), {}

    monkeypatch.setattr(pod_compile, "PROGRAMS", {product: ("exact", pod_compile.IN_KERNELS[0])})
    monkeypatch.setattr(pod_compile, "compile_and_read", lambda _: {"cycles": 1})
    names = ["v3:4x4:dots:scanned", "v5e:16x16:none:scanned"]
    rows = pod_compile.rows_of(tmp_path / "pods.jsonl", names)
    # Kernels do not compile for a v3.
    assert [(row["pod"][:3], row["attention"]) for row in rows] == [
        ("v3:", "exact"),
        ("v5e", "exact"),
        ("v5e", pod_compile.IN_KERNELS[0]),
    ]
    assert totals() == {3}
    monkeypatch.delattr(pod_compile, "compile_and_read")
    assert pod_compile.rows_of(tmp_path / "pods.jsonl", names) == rows


def test_fits_of_scikit_learn_are_counted(monkeypatch, totals):
    x, labels = np.random.default_rng(0).normal(size=(2, 30, 3)), np.arange(30) % 2
    splits = [sklearn_features.Split(*x, labels, labels, 0.1, rbf_kernel(x[1]), 0.0)] * 2
    monkeypatch.setattr(sklearn_features, "METHODS", {"a": RBFSampler, "b": Nystroem})
    results = sklearn_features.measure(splits, (4, 8, 16))
    assert totals() == {2 * 3 * 2}
    assert results["b"].shape == (3, 2, 3)
    assert np.all(results["b"][..., 2] > 0)  # Seconds.


def test_stages_of_the_input_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(input_pipeline, "NUM_IMAGES", 4)
    monkeypatch.setattr(input_pipeline, "NUM_FILES", 1)
    monkeypatch.setattr(input_pipeline, "images_per_second", lambda *_: np.ones(3))
    monkeypatch.setattr(input_pipeline, "reader_rows", lambda _: iter([("disk",) * 5] * 3))
    input_pipeline.measure_generated()
    error = capsys.readouterr().err
    assert re.search(rf"stages: .*/{len(input_pipeline.STAGES)} \[", error)
    assert re.search(r"readers: .*/4 \[", error)
