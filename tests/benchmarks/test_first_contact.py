"""First contact with an accelerator: what is wrong is found, and what is done is kept."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention_candidates, contact_checks, first_contact
from experiments.harness.mistakes import UserError
from tests.tiers import slow_but

SIZE = {"checked": (), "lengths": (), "before": ()}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that runs some pieces, and the file that it writes."""
    output = tmp_path / "contact.json"

    def run(pieces, minutes=8):
        monkeypatch.setattr(first_contact, "pieces", lambda size: iter(pieces.items()))
        return first_contact.run(output, SIZE, minutes)

    return run, output


def refuse():
    raise AssertionError("It was done before.")


def fail():
    raise RuntimeError("no device\nand more")


def test_what_is_done_is_kept_and_what_fails_is_a_row(run, capsys):
    run, output = run
    row = {"candidate": "ours", "milliseconds": [1.0, 2.0, 3.0], "temporary_mib": 4.0}
    first = run({"times, 197 tokens": lambda: [row], "decoding": fail})
    assert first["pieces"]["decoding"] == [{"failure": "RuntimeError: no device"}]
    assert "decoding: RuntimeError: no device" in capsys.readouterr().out
    again = run({"times, 197 tokens": refuse, "decoding": refuse, "training": lambda: [row]})
    assert again == json.loads(output.read_text())
    assert list(again["pieces"]) == ["times, 197 tokens", "decoding", "training"]
    text = first_contact.tables(again)
    assert "| times, 197 tokens | ours | 2 (1 to 3) | 4.0 |" in text
    assert "| decoding |  | RuntimeError: no device |  |" in text


def test_it_ends_when_the_time_is_over(run, capsys):
    run, _ = run
    assert run({"decoding": refuse}, minutes=-1)["pieces"] == {}
    assert "before 'decoding'; the same command goes on there" in capsys.readouterr().out


def test_another_machine_or_size_is_refused(run, monkeypatch):
    run, output = run
    run({"decoding": list})
    monkeypatch.setitem(SIZE, "heads", 12)
    with pytest.raises(UserError, match="of another machine, size or version"):
        run({})
    output.write_text(json.dumps({"conditions": {"device": "another"}, "pieces": {}}))
    with pytest.raises(UserError, match="of another machine, size or version"):
        run({})


def test_a_file_that_cannot_be_used_is_refused_before_anything_is_measured(run, tmp_path):
    run, output = run
    output.write_text('{"conditions": ')
    with pytest.raises(UserError, match=r"contact.json is damaged"):
        run({"decoding": refuse})
    assert output.read_text() == '{"conditions": '
    with pytest.raises(UserError, match=r"fc.json cannot be written"):
        first_contact.run(tmp_path / "nowhere" / "fc.json", SIZE, 8)


def test_every_piece_has_a_name_of_its_own():
    for size in first_contact.SIZES.values():
        names = [name for name, _ in first_contact.pieces(size)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("mode", slow_but(["causal, exact band"], list(contact_checks.MODES)))
def test_attention_of_this_machine_is_right(mode):
    row = contact_checks.check(mode, "xla", "float32", 70)
    assert row["faults"] == []
    assert row["error"] < 1e-5


def test_what_is_wrong_is_found(monkeypatch):
    real = contact_checks.program
    monkeypatch.setattr(contact_checks, "program", lambda mode, *rest: real("bidirectional", *rest))
    row = contact_checks.check("causal", "xla", "float32", 40)
    assert row["faults"] == [
        "the output differs from float64",
        "a gradient differs from float64",
        "a NaN reaches an output that does not see it",
        "a NaN reaches a gradient of outputs that do not see it",
    ]


def test_a_nan_that_is_swallowed_is_found():
    value = jnp.ones((1, 6, 1, 4))

    def run(value, cotangent):
        out = jnp.nan_to_num(jnp.cumsum(value, axis=1))
        return out, (out * cotangent,)

    found = contact_checks.leaks(run, value, np.ones(value.shape), np.tri(6, dtype=bool))
    assert found == ["a NaN does not reach a query that sees it"]


@pytest.mark.slow
def test_the_rehearsal_measures_everything(tmp_path):
    size = first_contact.SIZES["small"] | {"checked": (60,), "lengths": (64,), "before": (10,)}
    size |= {"model": "Ti/32", "batch": 1}
    results = first_contact.run(tmp_path / "contact.json", size, 30)
    rows = [row for rows in results["pieces"].values() for row in rows]
    assert not [row for row in rows if row.get("failure") or row.get("faults")]
    assert {len(row["milliseconds"]) for row in rows if "milliseconds" in row} == {3}
    assert len(jax.tree.leaves(rows)) > 100


def test_on_a_gpu_its_kernels_are_checked_and_timed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    size = {"checked": (150,), "lengths": (197,), "before": ()}
    checks = [name for name, _ in first_contact.pieces(size) if "pallas" in name]
    modes = contact_checks.MODES
    assert checks == [f"check, 150 tokens, {mode}, bfloat16, pallas_gpu" for mode in modes]
    for is_causal, other in ((False, "xla"), (True, "pallas_gpu")):
        found = attention_candidates.programs(197, is_causal=is_causal)
        assert {"ours", other, "cudnn"} <= {*found}
