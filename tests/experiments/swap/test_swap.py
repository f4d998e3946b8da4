import json
import os
import pydoc_data.topics

import jax
import numpy as np
import pytest
from flax import nnx

from examples import hugging_face
from experiments.harness.mistakes import UserError
from experiments.swap import measure_encoder, measure_task, swap, texts, training
from experiments.swap.configs import paper
from experiments.swap.looks import LABELS, LOOKS
from experiments.swap.methods import METHODS
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.experiments.swap import tiny


@pytest.mark.slow
def test_errors_of_the_encoder_are_those_of_its_test_texts(toy_encoder, tmp_path):
    config = tiny.get_config(parts=("encoder",))
    section = swap.run(config, tmp_path)["encoder"]
    assert json.loads((tmp_path / "results.json").read_text()) == {"encoder": section}
    assert list(section["methods"]["hyperbolic"]) == ["4", "8"]
    errors = []
    for seed in (0, 1):
        drawn = texts.split(hugging_face.load_texts(None, 6), num_fit=2, num_test=3, seed=seed)
        subject = measure_encoder.prepare(toy_encoder, drawn)
        method = METHODS["hyperbolic"]
        attentions = method.attentions(jax.random.key(seed), subject.fit, 8, schedule=tiny.SCHEDULE)
        errors.append(measure_encoder.measure(subject, attentions))
    ours = section["methods"]["hyperbolic"]["8"]
    heads, cosines = (np.array([np.mean(x) for x in each]) for each in zip(*errors, strict=True))
    np.testing.assert_allclose(ours["error"]["mean"], heads.mean(), rtol=1e-5)
    np.testing.assert_allclose(ours["cosine"]["mean"], cosines.mean(), rtol=1e-5)
    expected = np.std(heads, ddof=1) / 2**0.5
    np.testing.assert_allclose(ours["error"]["standard_error"], expected, rtol=1e-4)
    assert "| hyperbolic, orthogonal | " in swap.report({"encoder": section})
    for name in ("encoder_error", "encoder_cosine"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_kinds_are_tested_with_the_fit_of_all_others(toy_encoder, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    found = {length: rng.integers(0, 9, (9, length)) for length in (6, 8)}
    monkeypatch.setattr(texts, "windows", lambda tokenizer, kind, length: found[length])
    methods = ("positive_simplex", "band_keys_calibrated")
    config = tiny.get_config(parts=("kinds",), methods=methods)
    section = swap.run(config, tmp_path)["kinds"]
    assert list(section["lengths"]) == ["6", "8"]
    for by_name in section["lengths"].values():
        assert list(by_name) == ["uniform", "band", *methods]
        assert list(by_name["uniform"]) == [*texts.KINDS, "mean"]
        for by_kind in by_name.values():
            *kinds, mean = (one["error"]["mean"] for one in by_kind.values())
            np.testing.assert_allclose(mean, np.mean(kinds), rtol=1e-6)
        better, worse = (
            np.mean([one["error"]["mean"] for one in by_name[name].values()])
            for name in ("band_keys_calibrated", "uniform")
        )
        assert better < worse
    drawn = texts.split_kinds(
        dict.fromkeys(texts.KINDS, found[8]), "licenses", num_fit=3, num_test=2, seed=1
    )
    subject = measure_encoder.prepare(toy_encoder, drawn)
    method = METHODS["positive_simplex"]
    attentions = method.attentions(jax.random.key(1), subject.fit, 4, schedule=tiny.SCHEDULE)
    errors = measure_encoder.measure(subject, attentions)
    piece = np.load(tmp_path / "pieces" / "kinds-positive_simplex-licenses-8-1.npy")
    np.testing.assert_allclose(piece, [*errors.heads.ravel(), *errors.cosines], rtol=1e-4)
    assert "| exact band and keys, calibrated | " in swap.report({"kinds": section})


@pytest.mark.slow
def test_softmax_in_all_layers_has_no_error(toy_encoder):
    drawn = texts.split(hugging_face.load_texts(None, 6), num_fit=2, num_test=3, seed=0)
    subject = measure_encoder.prepare(toy_encoder, drawn)
    errors = measure_encoder.measure(subject, [nnx.dot_product_attention] * 2)
    np.testing.assert_allclose(errors.heads, np.zeros((2, 2)), atol=1e-10)
    np.testing.assert_allclose(errors.cosines, np.ones(3), rtol=1e-5)


@pytest.mark.slow
def test_a_run_scores_all_models_and_goes_on_where_it_was(tmp_path, monkeypatch):
    config, evaluate, calls = tiny.get_config(parts=("digits",)), training.evaluate, []

    def stop_at_the_ninth(task, model):
        calls.append(model)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return evaluate(task, model)

    monkeypatch.setattr(training, "evaluate", stop_at_the_ninth)
    with pytest.raises(KeyboardInterrupt):
        swap.run(config, tmp_path)
    assert not (tmp_path / "results.json").exists()
    results = swap.run(config, tmp_path)
    # Two fixed attentions, two methods of two sizes, and two models with two milestones; the
    # milestone before the stop is computed again.
    assert len(calls) == 2 * (2 + 4 + 4) + 1
    section = results["digits"]
    assert json.loads((tmp_path / "results.json").read_text()) == results
    for name in ("swapped", "fine_tuned", "spread"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    exact = section["baselines"]["softmax"]
    assert exact["difference"] == {"mean": 0.0, "standard_error": 0.0}
    assert list(section["tuned"]) == ["softmax", "hyperbolic"]
    assert section["tuned"]["softmax"][0]["score"] == exact["score"]
    assert section["tuned"]["softmax"][1]["score"] != exact["score"]
    assert len(section["tuned"]["hyperbolic"][1]["spread_by_layer"]) == 2
    spread = section["tuned"]["hyperbolic"][1]["spread"]["mean"]
    assert np.isclose(spread, np.mean(section["tuned"]["hyperbolic"][1]["spread_by_layer"]))
    report = swap.report(results)
    assert "| attention | m = 4 | m = 8 |" in report
    assert "| attention | 0 steps | 2 steps |" in report
    assert_no_figure_costs_results(swap.run, config, tmp_path)
    # Other methods add to the same folder; they do not make another config.
    more = tiny.get_config(parts=("digits",), methods=("positive_iid",), tuned_methods=())
    assert list(swap.run(more, tmp_path)["digits"]["methods"]) == ["positive_iid"]
    assert len(calls) == 21 + 2 * 2


@pytest.mark.slow
def test_the_language_model_is_scored_too(tmp_path):
    config = tiny.get_config(parts=("char_lm",), methods=("positive_iid",), tuned_methods=())
    section = swap.run(config, tmp_path)["char_lm"]
    assert list(section["baselines"]) == ["softmax", "uniform", "band"]
    assert 0 < section["baselines"]["softmax"]["score"]["mean"] < 7


@pytest.mark.slow
def test_tuning_begins_at_the_score_without_it(tmp_path):
    task = training.task("digits", tiny.get_config())
    config = tiny.get_config(digits__num_features=(6,)).digits
    pieces = Kept()
    swaps = measure_task.Swaps("digits", task, config, pieces)
    assert swaps.tuned("hyperbolic", 0)[0, 0] == swaps.score("hyperbolic", 6, 0)
    names = ["digits-model-0", "digits-swap-hyperbolic-6-0", "digits-tuned-hyperbolic-0"]
    assert sorted(pieces.kept) == names


class Kept:
    """Pieces of a run that are kept in memory."""

    def __init__(self):
        self.kept = {}

    def get(self, name, compute):
        """Returns a piece, which is computed once."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]


class StoppedError(Exception):
    """A run is stopped."""


@pytest.mark.fast
@pytest.mark.parametrize("part", swap.PARTS)
def test_pieces_of_another_text_are_not_mixed_with_ours(part, tmp_path, monkeypatch):
    def stop(part, config, pieces):
        pieces.save(f"{part}-0", np.arange(3))
        raise StoppedError

    monkeypatch.setattr(swap, "_run_part", stop)
    config = tiny.get_config(parts=(part,))
    for _ in range(2):
        with pytest.raises(StoppedError):
            swap.run(config, tmp_path)
    topics = pydoc_data.topics.topics
    monkeypatch.setattr(pydoc_data.topics, "topics", dict([*topics.items()][:60]))
    refused = pytest.raises(UserError, match=rf"holds {part}-\* of a text with SHA-256")
    reads = part in ("predicted_heads", "encoder", "kinds", "char_lm")
    with refused if reads else pytest.raises(StoppedError):
        swap.run(config, tmp_path)


@pytest.mark.slow
def test_fashion_mnist_runs(tmp_path):
    folder = os.environ.get("TFDS_DATA_DIR", "")
    if not folder:
        pytest.skip("Needs Fashion-MNIST, prepared, in TFDS_DATA_DIR.")
    config = tiny.get_config(parts=("fashion_mnist",), methods=("hyperbolic",))
    section = swap.run(config, tmp_path)["fashion_mnist"]
    assert 0 <= section["methods"]["hyperbolic"]["4"]["score"]["mean"] <= 1


@pytest.mark.fast
def test_every_attention_has_a_name_and_a_look():
    assert {*METHODS, "softmax", "uniform", "band"} == {*LABELS} == {*LOOKS}
    looks = [tuple(map(str, look.values())) for look in LOOKS.values()]
    assert len(set(looks)) == len(looks)


@pytest.mark.fast
def test_the_paper_config_is_right():
    swap.check(paper.get_config())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seeds": (0,)}, "config.seeds must be two or more, none twice"),
        ({"seeds": (1, 1)}, "config.seeds must be two or more, none twice"),
        ({"seeds": (-1, 0)}, "Each of config.seeds must be at least 0, got -1"),
        ({"seeds": (0, 2**32)}, r"config.seed must be from 0 to 2\^32 - 1"),
        ({"parts": ()}, "config.parts must name at least one of predicted, predicted_heads"),
        ({"parts": ("vit",)}, "config.parts must be one of"),
        ({"methods": ("simplex",)}, "Each of config.methods must be one of"),
        ({"tuned_methods": ("simplex",)}, "Each of config.tuned_methods must be one of"),
        ({"predicted__dim": 1}, "config.predicted.dim must be at least 2, got 1"),
        ({"predicted__num_keys": 1}, "config.predicted.num_keys must be at least 2, got 1"),
        ({"predicted__lengths": (0.5, 0.25)}, "config.predicted.lengths must ascend"),
        ({"predicted__lengths": (0.0, 1.0)}, "config.predicted.lengths must be floats above 0"),
        ({"predicted__lengths": (1.0, 30.0)}, r"above 0 and at most 5, got \(1.0, 30.0\)"),
        ({"predicted_heads__num_queries": 0}, "config.predicted_heads.num_queries must be at le"),
        (
            {"predicted_heads__num_queries": 7},
            "must be at most encoder.length=6, got 7",
        ),
        ({"predicted_heads__num_features": (8, 4)}, "config.predicted_heads.num_features must as"),
        ({"encoder__learned__num_steps": 0}, "config.encoder.learned.num_steps must be at least 1"),
        ({"digits__learned__batch_size": 0}, "config.digits.learned.batch_size must be at least"),
        ({"encoder__learned__learning_rate": 0.0}, "config.encoder.learned.learning_rate must be "),
        ({"encoder__length": 2}, "config.encoder.length must be at least 3"),
        ({"encoder__length": 600}, "config.encoder.length must be at most 512, got 600"),
        ({"kinds__lengths": (8, 600)}, "config.kinds.lengths must be at most 512, got 600"),
        ({"encoder__num_features": (8, 4)}, "config.encoder.num_features must ascend"),
        (
            {"encoder__exact_keys": 3, "methods": ("keys_learned",)},
            "num_features less the 3 that .* a positive multiple of 2 for keys_learned, got 4",
        ),
        (
            {"kinds__num_features": 2, "methods": ("keys_calibrated",)},
            "config.kinds.num_features less the 2",
        ),
        (
            {"digits__tuned_features": 5},
            "config.digits.tuned_features must be a positive",
        ),
        ({"digits__num_features": (1,)}, "Each of config.digits.num_features must be at least 2"),
        ({"digits__tuned_steps": (2, 0)}, "config.digits.tuned_steps must ascend"),
        ({"digits__learning_rate": 0.0}, "config.digits.learning_rate must be above 0"),
        ({"digits__weight_decay": -0.1}, "config.digits.weight_decay must be at least 0"),
        ({"char_lm__warmup_steps": 3}, "config.char_lm.warmup_steps must be below num_steps=3"),
        ({"char_lm__model__width": 10}, "config.char_lm.model.width must be a multiple of 2 num_"),
        ({"fashion_mnist__num_fit": 0}, "config.fashion_mnist.num_fit must be at least 1"),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        swap.check(tiny.get_config(**changes))
