import jax
import numpy as np
import pytest

from experiments.swap import predicted, swap
from experiments.swap.looks import PREDICTED_LOOKS
from simrf_jax.selection import attention_error
from simrf_jax.theory import optimal_parameter
from tests.experiments.swap import tiny
from tests.tiers import slow_but

CASES = ["simplex", "cross_polytope_optimal", "cross_polytope_shared"]


def test_tokens_have_unit_length_and_one_head():
    config = tiny.get_config().predicted
    query, key, value = predicted.draw_tokens(config, 0)
    assert (query.shape, key.shape, value.shape) == ((2, 1, 4), (3, 1, 4), (3, 1, 4))
    for x in (query, key):
        np.testing.assert_allclose(np.linalg.norm(x, axis=-1), np.ones((len(x), 1)))
    assert not np.allclose(predicted.draw_tokens(config, 1).query, query)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["cross_polytope_optimal"], CASES))
def test_short_vectors_are_predicted_well(name):
    config = tiny.get_config(predicted__num_draws=2000).predicted
    case, tokens = predicted.CASES[name], predicted.draw_tokens(config, 0)
    expected = predicted.predict(tokens, case, config)
    parameter = float(optimal_parameter(2 * 0.2**2, 4)) if case.is_optimal else 0.0
    direct = attention_error(
        0.2 * tokens.query,
        0.2 * tokens.key,
        tokens.value,
        8,
        coupling=case.coupling,
        norms=case.norms,
        parameter=parameter,
        scale=1.0,
    )
    np.testing.assert_allclose(expected[1], direct[0])
    measured = predicted.measure(tokens, case, config, jax.random.key(0))
    np.testing.assert_allclose(measured, expected, rtol=0.2)


@pytest.mark.slow
def test_a_run_sets_predicted_errors_beside_measured_ones(tmp_path, monkeypatch):
    cases = {name: predicted.CASES[name] for name in ("iid", "simplex")}
    monkeypatch.setattr(predicted, "CASES", cases)
    config = tiny.get_config(parts=("predicted",))
    results = swap.run(config, tmp_path)
    section = results["predicted"]
    assert section["lengths"] == [0.1, 0.2]
    assert [*section["cases"]] == ["iid", "simplex"]
    ours = config.predicted
    by_seed = [
        predicted.predict(predicted.draw_tokens(ours, seed), cases["simplex"], ours)[1]
        for seed in config.seeds
    ]
    row = section["cases"]["simplex"][1]
    np.testing.assert_allclose(row["predicted"]["mean"], np.mean(by_seed))
    assert row["measured"]["mean"] > 0
    assert row["measured"]["mean"] < section["cases"]["iid"][1]["measured"]["mean"]
    assert (tmp_path / "predicted.png").stat().st_size > 10_000
    report = swap.report(results)
    assert "| features | length 0.1 | length 0.2 |" in report
    assert "measured over predicted error" in report


def test_every_case_has_a_look():
    assert {*PREDICTED_LOOKS} == {*predicted.CASES}
    looks = {tuple(map(str, look.values())) for look in PREDICTED_LOOKS.values()}
    assert len(looks) == len(PREDICTED_LOOKS)
