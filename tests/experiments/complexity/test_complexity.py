import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import simrf_jax
from experiments.complexity import complexity, measure, tables
from experiments.complexity.configs import paper
from experiments.harness.mistakes import UserError
from tests.experiments.drawing import assert_no_figure_costs_results

NAMES = (*measure.MATRICES, *measure.FAST)


def tiny(**changes):
    config = paper.get_config()
    small = {"dims": (2, 4, 8), "fast_dims": (16,), "fit_points": 3, "num_vectors": 3}
    config.update(small | {"rounds": 2, "seconds": 0.0} | changes)
    return config


def fake_measure(names, dim, *, num_vectors, rounds, seconds):
    """Returns times of d^3 to draw and d^2 to apply matrices, and of d log d for fast forms.

    SimRFs take three times as long as ORFs.
    """
    scales = np.array([3.0 if "simplex" in name else 1.0 for name in names])
    fast = tuple(names) == tuple(measure.FAST)
    draw, apply = (dim * np.log(dim),) * 2 if fast else (dim**3, dim**2)
    times = {"draw": draw, "apply": apply, "apply_batch": num_vectors * apply}
    jitter = np.linspace(0.5, 1.5, rounds + 1)  # The median is 1.
    measured = {what: time * scales[:, None] * jitter for what, time in times.items()}
    return measured | {"memory": np.full((len(names), 3), 7 * dim if fast else 4 * dim**2)}


@pytest.fixture
def faked(monkeypatch):
    monkeypatch.setattr(complexity, "measure", fake_measure)


@pytest.mark.fast
def test_exponents_of_power_laws_are_exact():
    dims = 2.0 ** np.arange(6, 13)
    for power in (0.5, 1, 2, 2.81, 3):
        slope, error = complexity.fit_exponent(dims, 1e-7 * dims**power)
        assert slope == pytest.approx(power, rel=1e-12)
        assert error < 1e-7


@pytest.mark.fast
def test_standard_error_of_an_exponent_is_that_of_least_squares():
    dims, noise = 2.0 ** np.arange(4, 10), np.array([0.1, -0.2, 0.3, 0.0, -0.1, 0.2])
    slope, error = complexity.fit_exponent(dims, dims**2 * np.exp(noise))
    design = np.stack([np.ones(6), np.log(dims)], axis=1)
    coefficients, [residual], *_ = np.linalg.lstsq(design, 2 * np.log(dims) + noise, rcond=None)
    covariance = residual / (6 - 2) * np.linalg.inv(design.T @ design)
    assert slope == pytest.approx(coefficients[1], rel=1e-12)
    assert error == pytest.approx(covariance[1, 1] ** 0.5, rel=1e-9)


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [8, 64])
def test_bytes_held_are_those_of_a_matrix_or_of_signs_and_norms(name, dim):
    drawn = jax.eval_shape(lambda key: measure.draw(name, dim, key), jax.random.key(0))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(drawn))
    # A fast form has three int8 signs and a float32 norm for each dimension. The others have a
    # float32 matrix.
    assert held == (7 * dim if name in measure.FAST else 4 * dim**2)


@pytest.mark.slow
def test_measured_memory_is_that_of_the_compiled_programs():
    for names, least_draw in ((measure.MATRICES, 4 * 64**2), (measure.FAST, 7 * 64)):
        measured = measure.measure(names, 64, num_vectors=5, rounds=2, seconds=0.0)
        held, draw, apply = measured["memory"].T
        assert (held == least_draw).all()
        assert (draw >= held).all()  # The projection itself is one of the buffers.
        assert (apply >= 4 * 64).all()
        assert (apply < 100 * 64).all()  # No program forms a matrix to apply W.
        for quantity in measure.TIMES:
            assert measured[quantity].shape == (len(names), 2)
            assert (measured[quantity] > 0).all()


@pytest.mark.slow
def test_what_is_drawn_is_the_square_block_of_the_mechanism():
    fast = measure.draw("fast_simplex", 8, jax.random.key(0))
    assert (fast.rows.coupling, fast.rows.block, fast.shape) == ("simplex", "square", (8, 8))
    drawn = measure.draw("fast_simplex_plus", 8, jax.random.key(0))
    options = {"coupling": "simplex_plus", "block": "square", "rotation": "hadamard"}
    expected = simrf_jax.draw_projection(jax.random.key(0), 8, 8, **options)
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.slow
def test_run_fits_medians_to_the_upper_part_and_finds_the_crossing(tmp_path, faked):
    config = tiny(dims=(2, 4, 8, 16), fast_dims=(32, 64), rounds=4)
    results = complexity.run(config, tmp_path)
    fit = results["exponents"]["simplex"]
    assert (fit["first_dim"], fit["last_dim"]) == (4, 16)
    assert fit["ms"]["draw"][0] == pytest.approx(3)
    assert fit["ms"]["apply"][0] == pytest.approx(2)
    assert fit["bytes"]["held"][0] == pytest.approx(2)
    total = np.log([dim**3 + dim**2 for dim in (4, 8, 16)])
    slope = np.polyfit(np.log([4, 8, 16]), total, 1)[0]
    assert fit["ms"]["draw_and_apply"][0] == pytest.approx(slope)
    fit = results["exponents"]["fast_simplex"]
    assert (fit["first_dim"], fit["last_dim"]) == (16, 64)
    assert fit["ms"]["draw"][0] == pytest.approx(1)  # The logarithm of d log d is divided out.
    assert fit["bytes"]["held"][0] == pytest.approx(1)
    assert [row["quartiles"] for row in results["ratios"]["simplex / orthogonal"]] == [
        [3.0] * 3
    ] * 4
    assert len(results["ratios"]["fast_simplex / fast_orthogonal"]) == 6
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results))
    for name in ("time.png", "memory.png"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.fast
def test_crossings_are_where_the_fast_form_wins_from_there_on():
    def curve(draw, apply):
        pairs = zip((64, 128, 256), draw, apply, strict=True)
        return [
            {
                "dim": dim,
                "ms": {"draw": [a - 0.4, a, a + 0.4], "apply": [0, b, 9], "apply_batch": [0, b, 9]},
            }
            for dim, a, b in pairs
        ]

    # Its median time to apply is lower, but the quartiles overlap.
    curves = {"simplex": curve((3, 1, 3), (3, 3, 3)), "fast_simplex": curve((2, 2, 2), (2, 2, 2))}
    lines = tables.crossings({"curves": curves}).splitlines()
    assert lines[0] == "Fast SimRFs are the faster to draw: from d = 256 on."
    assert lines[1] == "Fast SimRFs are the faster to apply to one vector: at none of these d."


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, faked):
    config = tiny()
    whole = complexity.run(config, tmp_path / "whole")
    calls = []

    def stop_after_two(names, dim, **options):
        calls.append(dim)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fake_measure(names, dim, **options)

    monkeypatch.setattr(complexity, "measure", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        complexity.run(config, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "results.json").exists()
    assert complexity.run(config, tmp_path / "stopped") == whole
    assert calls == [2, 4, 8, 8, 2, 4, 8, 16]
    assert_no_figure_costs_results(complexity.run, config, tmp_path / "stopped")
    assert len(calls) == 8


@pytest.mark.slow
def test_main_goes_on_with_a_run_and_prints_the_tables(tmp_path, faked):
    small = {"dims": (2, 4, 8), "fast_dims": (), "rounds": 1, "fit_points": 3}
    config = paper.get_config()
    config.update(small)
    complexity.run(config, tmp_path / "run")
    for piece in (tmp_path / "run" / "pieces").glob(
        "*-2-*"
    ):  # The other sizes would take long to compile.
        piece.unlink()
    # The program needs its own process, because flags are global and every experiment has --config.
    command = [sys.executable, "-m", "experiments.complexity.main", f"--workdir={tmp_path / 'run'}"]
    command += [f"--config.{name}={value}" for name, value in small.items()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "|  |  | ORFs | SimRFs | SimRFs+ |" in run.stdout
    assert re.search(
        r"\| time, fast \| paper \| O\(d log d\) \| O\(d log d\) \| O\(d\^3\) \|", run.stdout
    )
    space = "| d^1.00 (0.00) | d^1.00 (0.00) | d^2.00 (0.00) |"
    assert f"|  | ours {space}" in run.stdout
    wrong = subprocess.run(
        [*command, "--config.dims=(2,4,6)"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 1
    assert "must be powers of two, got 6" in wrong.stderr


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dims": (2, 4)}, r"at least fit_points=3 dimensions, got \(2, 4\)"),
        ({"dims": (1, 2, 4)}, "must be at least 2, got 1"),
        ({"fast_dims": (24,)}, "must be powers of two, got 24"),
        ({"dims": (2, 4, 8.0)}, "must be an integer, got 8.0"),
        ({"dims": (2, 8, 4)}, "must increase"),
        ({"fast_dims": (8,)}, "must increase"),
        ({"fit_points": 2}, "config.fit_points must be at least 3.*got 2"),
        ({"num_vectors": 0}, "config.num_vectors must be at least 1"),
        ({"rounds": 0}, "config.rounds must be at least 1"),
        ({"seconds": -1.0}, "config.seconds must be at least 0 and finite, got -1.0"),
        (
            {"seconds": float("nan")},
            "config.seconds must be at least 0 and finite",
        ),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        complexity.check(tiny(**changes))
