import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from scipy import integrate

from experiments.conformity import conformity, couplings, densities, optimization
from experiments.conformity.configs import paper
from experiments.harness import resumable
from experiments.harness.mistakes import UserError
from simrf_jax import draw_projection, theory
from simrf_jax._src.projections.row_blocks import simplex_vertices
from simrf_jax._src.theory.optimum import against_the_rest
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.standard_errors import assert_less, assert_mean

SMALL = {
    "num_iterations": 4,
    "num_couplings": 20,
    "num_projections": 2000,
    "num_draws": 400,
    "num_optimized": 120,
}


def tiny(**changes):
    config = paper.get_config()
    config.update(SMALL | changes)
    return config


def key(seed=0):
    return jax.random.key(seed)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs the program once in its own process; returns its folder and its output."""
    # Flags are global, and every experiment has --config.
    workdir = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "experiments.conformity.main", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in SMALL.items()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return workdir, run.stdout


@pytest.mark.slow
def test_program_prints_the_table_and_leaves_figures(program):
    workdir, printed = program
    assert "| simplex | 2.3491 | 2.181826 |" in printed
    assert "Of what the optimum gains over the simplex, simplex_plus has 0.6" in printed
    for name in ("couplings", "optimization", "densities"):
        assert (workdir / f"{name}.png").stat().st_size > 20_000
    assert_no_figure_costs_results(conformity.run, tiny(), workdir)


@pytest.mark.slow
def test_results_agree_with_closed_forms(program):
    results = json.loads((program[0] / "results.json").read_text())
    drawn, many = results["densities"], results["many_draws"]
    closed = {"iid": 2.718282, "orthogonal": 2.579562, "simplex": 2.181826}
    for coupling, value in closed.items():
        row = drawn[coupling]
        assert row["closed_form"] == pytest.approx(value, abs=1e-6)
        assert row["integral"] == pytest.approx(row["closed_form"], rel=1e-9)
        assert abs(row["mean"] - value) < 5 * row["standard_error"]
        assert np.sum(row["histogram"]) * 0.1 == pytest.approx(1)
    assert drawn["simplex_plus"]["closed_form"] is None
    # The last two numbers are means of many more draws.
    for name, value in (closed | {"simplex_plus": 2.1369, "optimized": 2.1178}).items():
        gain, error = many[name]["gain"], many[name]["gain_standard_error"]
        assert abs(gain - (closed["simplex"] - value)) <= 5 * error
    assert many["optimized"]["num_draws"] == 120
    share = many["share"]
    assert abs(share["mean"] - 0.7) < 5 * share["standard_error"]


@pytest.mark.fast
def test_weight_in_three_dimensions_is_sinh():
    w = np.array([0.1, 1.0, 7.0])
    np.testing.assert_allclose(densities.weight(w, 1.3, 3), np.sinh(1.3 * w) / (1.3 * w))


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
def test_lengths_have_the_density_of_theory(coupling):
    lengths = densities.draw_lengths(key(), 4000, 6, coupling)
    assert lengths.shape == (4000, 15)
    for upper in (2.0, 3.0, 5.0):
        mass, _ = integrate.quad(
            lambda w: float(theory.resultant_norm_pdf(w, 6, coupling=coupling)), 0, upper
        )
        assert_mean(np.mean(lengths < upper, axis=1), mass)


@pytest.mark.fast
def test_iid_conformity_is_the_mean_over_directions():
    norms = optimization.draw_norms(key(), 1, 4)
    directions = optimization.draw_directions(key(1), 4000, 4)
    samples = optimization.conformity(norms, directions, 1.0)
    assert_mean(samples, optimization.iid_conformity(norms, 1.0)[0])


@pytest.mark.fast
def test_norms_are_chi():
    assert_mean(optimization.draw_norms(key(), 4000, 6).ravel() ** 2, 6)


@pytest.mark.slow
def test_sweeps_are_those_of_the_library():
    w = np.asarray(draw_projection(key(), 6, 6, coupling="simplex_plus"), np.float64)
    norms, simplex = np.linalg.norm(w, axis=1), simplex_vertices(6)
    swept = optimization.swept_conformity(norms[None], simplex, np.arange(4), 1.0)
    assert swept[3] == pytest.approx(np.exp(theory.log_conformity_of_rows(1.0, w)), rel=1e-5)
    by_numpy = [
        optimization.conformity(norms, against_the_rest(simplex, norms, n), 1.0) for n in range(4)
    ]
    np.testing.assert_allclose(swept, by_numpy, rtol=1e-5)


def test_curves_go_down_to_where_they_belong():
    curves = optimization.curves(key(), 1.0, 6, 60, 400)
    levels = [curves[name] for name in ("iid", "orthogonal", "simplex")]
    ends = [curves["simplex_plus"][-1], curves["optimized_from_iid"][-1]]
    assert levels + ends == sorted(levels + ends, reverse=True)
    assert curves["simplex_plus"][0] == pytest.approx(curves["simplex"], rel=1e-6)
    error = curves["iid_deviation"] / 400**0.5
    assert abs(curves["iid_sample_mean"] - curves["iid"]) < 5 * error
    way = curves["optimized_from_iid"]
    assert len(way) == 61
    assert np.all(np.diff(way) <= 0)
    assert way[-1] == pytest.approx(curves["optimized"], rel=1e-5)
    assert curves["simplex_plus_from_iid"][0] == pytest.approx(way[0], rel=1e-6)


@pytest.mark.fast
def test_simplex_plus_needs_the_simplex_to_start_from():
    norms = optimization.draw_norms(key(), 1000, 6)
    draws = optimization.of_draws(key(1), norms, 1.0)
    assert_less(draws["simplex_plus"], draws["simplex"])
    assert_less(draws["simplex"], draws["simplex_plus_from_iid"])


@pytest.mark.fast
def test_share_is_a_ratio_of_means():
    simplex = np.array([3.0, 2.0, 4.0])
    draws = {"simplex": simplex, "simplex_plus": simplex - [0.1, 0.3, 0.2]}
    results = optimization.summary(draws, simplex[:2] - [0.2, 0.6])
    assert results["share"]["mean"] == pytest.approx(0.5)
    assert results["share"]["standard_error"] == pytest.approx(0, abs=1e-12)
    assert results["simplex_plus"]["gain"] == pytest.approx(0.2)
    assert results["optimized"]["gain"] == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coupling", "dim", "angle"),
    [("orthogonal", 2, 90), ("orthogonal", 3, 90), ("simplex", 2, 180), ("simplex", 3, 120)],
)
def test_pictures_have_the_angles_of_the_paper(coupling, dim, angle):
    draws = couplings.draw(key(), dim, coupling)
    rows = draws[couplings.clearest(draws)]
    np.testing.assert_allclose(couplings.angles(rows), angle, atol=0.05)
    assert np.linalg.norm(rows[:, :2], axis=1).max() < couplings.LIMIT
    points = couplings.arc(rows[0], rows[1])
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1)
    for end, row in ((points[0], rows[0]), (points[-1], rows[1])):
        np.testing.assert_allclose(end, row / np.linalg.norm(row), atol=1e-6)


@pytest.mark.slow
def test_bigger_norms_subtend_bigger_angles():
    simplex, plus = (couplings.draw(key(), 3, name) for name in ("simplex", "simplex_plus"))
    norms = np.linalg.norm(plus, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(simplex, axis=-1), norms, rtol=1e-5)
    number = couplings.typical(norms)
    flat = couplings.in_their_plane(plus[number])
    np.testing.assert_allclose(flat @ flat.T, plus[number] @ plus[number].T, atol=1e-5)
    longest = np.argmax(norms[number])
    np.testing.assert_allclose(flat[longest], [0, norms[number, longest], 0], atol=1e-5)
    # Pairs come in the order 01, 02, 12, so the k-th pair from the end lacks row k.
    without = couplings.angles(plus[number])[::-1]
    assert np.all(np.argsort(without) == np.argsort(-norms[number]))
    np.testing.assert_allclose(flat.sum(axis=0), 0, atol=1e-5)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    optimum, calls = optimization.optimum, []

    def stop_at_third(norms, v):
        calls.append(len(norms))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return optimum(norms, v)

    monkeypatch.setattr(optimization, "optimum", stop_at_third)
    monkeypatch.setattr(conformity, "BATCH", 4)
    norms = optimization.draw_norms(key(), 10, 6)
    with pytest.raises(KeyboardInterrupt):
        conformity.optima(norms, 1.0, resumable.Pieces(tmp_path, tiny()))
    best = conformity.optima(norms, 1.0, resumable.Pieces(tmp_path, tiny()))
    assert calls == [4, 4, 2, 2]
    np.testing.assert_array_equal(best, optimum(norms, 1.0))
    with pytest.raises(UserError, match="holds a run of another config"):
        conformity.run(tiny(seed=5), tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dim": 2}, "config.dim must be at least 3, got 2: in 2 dimensions"),
        ({"v": 0.0}, "config.v must be at least 0.01.*at most 3,.* got 0.0"),
        ({"v": 3.5}, "config.v must be at least 0.01.*at most 3,.* got 3.5"),
        ({"v": float("nan")}, "config.v must be at least 0.01.*got nan"),
        ({"num_iterations": 0}, "config.num_iterations must be at least 1"),
        ({"num_couplings": 1}, "config.num_couplings must be at least 2, got 1"),
        ({"num_projections": 1}, "config.num_projections must be at least 2, got 1"),
        ({"num_optimized": 1}, "config.num_optimized must be at least 2, got 1"),
        ({"num_draws": 100}, "at least config.num_optimized, 120, got 100"),
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        conformity.check(tiny(**changes))


@pytest.mark.fast
def test_refuses_another_type():
    config = tiny().to_dict() | {"dim": 6.0}
    with pytest.raises(UserError, match=r"config\.dim must be int, got 6\.0"):
        conformity.check(paper.get_config().__class__(config))
