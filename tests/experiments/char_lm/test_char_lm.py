import json
import pydoc_data.topics
import subprocess
import sys

import numpy as np
import pytest

from experiments.char_lm import char_lm, corpus, train
from experiments.char_lm.configs import paper
from experiments.char_lm.model import ATTENTIONS
from experiments.harness.mistakes import UserError
from tests.experiments.char_lm import tiny
from tests.experiments.drawing import assert_no_figure_costs_results


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    config, names = tiny.get_config(), []

    def stop_at_the_sixth(program, pages, config, *, seed, name):
        names.append(name)
        if len(names) == 6:
            raise KeyboardInterrupt
        losses = np.array([3.0 + seed, 2.0 + len(name)])
        return losses, corpus.encode(f"The {name}", pages.alphabet)

    monkeypatch.setattr(train, "make_program", lambda config, attention, vocabulary_size: None)
    monkeypatch.setattr(train, "train", stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        char_lm.run(config, tmp_path)
    assert not (tmp_path / "results.json").exists()
    results = char_lm.run(config, tmp_path)
    runs = [f"{attention}-{seed}" for seed in (0, 1) for attention in ATTENTIONS]
    assert names == [*runs[:6], *runs[5:]]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert (tmp_path / "char_lm.png").stat().st_size > 10_000
    assert results["steps"] == [2, 4]
    assert results["runs"]["near_far"]["1"]["losses"] == [4.0, 2.0 + len("near_far-1")]
    assert results["runs"]["far"]["0"]["sample"] == "The far-0"
    assert results["runs"]["far"]["0"]["seconds"] >= 0
    assert_no_figure_costs_results(char_lm.run, config, tmp_path)
    # More seeds add runs to the same folder; they do not make another config.
    assert list(char_lm.run(tiny.get_config(seeds=(0, 2)), tmp_path)["runs"]["far"]) == ["0", "2"]
    assert names[len(runs) + 1 :] == [f"{attention}-2" for attention in ATTENTIONS]


@pytest.mark.fast
def test_the_models_of_another_text_are_not_mixed_with_ours(tmp_path, monkeypatch):
    losses_and_sample = np.array([3.0, 2.0]), np.array([0])
    monkeypatch.setattr(train, "make_program", lambda config, attention, vocabulary_size: None)
    monkeypatch.setattr(train, "train", lambda *_, **__: losses_and_sample)
    char_lm.run(tiny.get_config(attentions=("near",)), tmp_path)
    topics = pydoc_data.topics.topics
    monkeypatch.setattr(pydoc_data.topics, "topics", dict([*topics.items()][:60]))
    with pytest.raises(UserError, match=rf"near-\* .* SHA-256 .*SHA-256 {corpus.load().sha256}\."):
        char_lm.run(tiny.get_config(attentions=("near", "softmax")), tmp_path)
    assert list(char_lm.run(tiny.get_config(attentions=("far",)), tmp_path)["runs"]) == ["far"]


@pytest.mark.fast
def test_another_text_is_said_to_be_another():
    results = made_up_results()
    results["text"]["sha256"] = "0" * 64
    report = char_lm.report(results)
    assert f"It is not the text of the README ({corpus.SHA256}): expect other numbers." in report


@pytest.mark.slow
def test_main_trains_all_models_and_prints_the_table(tmp_path):
    small = ("context=32", "num_steps=2", "eval_interval=1", "warmup_steps=1", "seeds=(0,1)")
    small += ("model.width=8", "model.depth=1", "model.num_heads=2", "model.num_features=5")
    command = [sys.executable, "-m", "experiments.char_lm.main", f"--workdir={tmp_path}"]
    command += [f"--config.{override}" for override in small]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| attention | bits per character | gap to softmax closed |" in run.stdout
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]["near"]) == 2


def made_up_results():
    # Final bits per character, by seed.
    last = {
        "softmax": (2.0, 2.2, 2.1),
        "far": (3.0, 3.2, 3.3),
        "near": (2.5, 2.7, 2.6),
        "near_far": (2.2, 2.5, 2.3),
        "band_positive": (2.1, 2.4, 2.2),
        "band_calibrated": (2.0, 2.2, 2.2),
        "band_learned": (2.0, 2.1, 2.1),
    }
    runs = {
        attention: {
            str(seed): {"losses": [5.0, value * np.log(2)], "seconds": 10.0 * (seed + 1)}
            for seed, value in enumerate(values)
        }
        for attention, values in last.items()
    }
    return {
        "python": "3.11.7",
        "text": {"sha256": corpus.SHA256, "alphabet": "abc", "train": 90, "validation": 10},
        "steps": [10, 20],
        "runs": runs,
    }


@pytest.mark.fast
def test_the_table_is_right_on_numbers_made_up():
    results = made_up_results()
    report = char_lm.report(results)
    assert "| softmax | 2.1000 ± 0.1000 | - | 3 | 20 s |" in report
    # The gaps are 1, 1 and 1.2 bits, of which 0.8, 0.7 and 1 are closed; the share is a ratio of
    # means.
    closed, residual = 2.5 / 3.2, np.array([0.8, 0.7, 1.0]) - 2.5 / 3.2 * np.array([1, 1, 1.2])
    error = residual.std(ddof=1) / 3**0.5 / (3.2 / 3)
    assert f"| near + far | 2.3333 ± 0.1528 | {100 * closed:.1f} ± {100 * error:.1f} % |" in report
    gains = np.array([0.3, 0.2, 0.3])
    assert (
        f"takes {gains.mean():.4f} (standard error {gains.std(ddof=1) / 3**0.5:.4f}) bits" in report
    )
    assert "Calibration takes 0.1000 (standard error 0.0577) off the positive" in report
    assert "Softmax attention is -0.0333 (standard error 0.0333) above the calibrated" in report
    assert "90 characters to train on and 10 to validate, of 3 kinds" in report
    assert report.endswith("the text of the README.")


@pytest.mark.fast
def test_without_the_far_field_there_is_no_gap_to_close():
    results = made_up_results()
    results["runs"] = {name: results["runs"][name] for name in ("softmax", "band_learned")}
    report = char_lm.report(results)
    assert "| exact band + learned far field | 2.0667 ± 0.0577 | - | 3 | 20 s |" in report
    assert "Softmax attention is 0.0333 (standard error 0.0333) above the learned" in report
    assert "near field" not in report


@pytest.mark.fast
def test_the_paper_config_is_right():
    char_lm.check(paper.get_config())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attentions": ("near", "none")}, "Each of config.attentions must be one of"),
        ({"attentions": ("near", "near")}, "config.attentions must be one or more, none twice"),
        ({"attentions": ()}, "config.attentions must be one or more, none twice"),
        ({"seeds": (0,)}, "config.seeds must be two or more, none twice"),
        ({"seeds": (1, 1)}, "config.seeds must be two or more, none twice"),
        ({"seeds": (-1, 0)}, "Each of config.seeds must be at least 0, got -1"),
        ({"seeds": ("a", "b")}, "Each of config.seeds must be an integer"),
        ({"context": 1}, "config.context must be at least 2"),
        ({"context": 10**6}, "config.context must be below the .* characters"),
        ({"batch_size": 0}, "config.batch_size must be at least 1"),
        ({"warmup_steps": 4}, "config.warmup_steps must be below num_steps=4"),
        ({"eval_interval": 3}, "num_steps must be a multiple of eval_interval=3"),
        ({"learning_rate": 0.0}, "config.learning_rate must be above 0"),
        ({"clip_norm": 0.0}, "config.clip_norm must be above 0"),
        ({"temperature": 0.0}, "config.temperature must be above 0"),
        ({"weight_decay": -0.1}, "config.weight_decay must be at least 0"),
        ({"b2": 1.0}, r"config.b2 must be in \[0, 1\)"),
        ({"prompt": ""}, "config.prompt must have 1 to 16 characters"),
        ({"prompt": "a" * 17}, "config.prompt must have 1 to 16 characters"),
        ({"prompt": "é"}, "The text has no 'é'"),
        ({"model__coupling": "none"}, "config.model.coupling must be one of"),
        ({"model__width": 10}, "config.model.width must be a multiple of 2 num_heads"),
        ({"model__bandwidth": -1}, "config.model.bandwidth must be at least 0"),
        ({"model__num_features": 0}, "config.model.num_features must be at least 1"),
        ({"redraw_interval": -1}, "config.redraw_interval must be at least 0"),
        ({"calibrate_interval": 0}, "config.calibrate_interval must be at least 1"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        char_lm.check(tiny.get_config(**changes))
