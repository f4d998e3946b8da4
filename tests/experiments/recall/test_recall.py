import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.char_lm import corpus
from experiments.harness.mistakes import UserError
from experiments.recall import equal_time, kinds, library, measure_recall, recall
from experiments.recall.configs import paper
from experiments.swap import training
from tests.experiments.drawing import assert_no_figure_costs_results
from tests.experiments.recall import tiny

TEXT = corpus.split("The question: to be, or not to be, that is the question: " * 20)


@pytest.fixture
def short_text(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: TEXT)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, short_text):
    config, train, names = tiny.get_config(), equal_time.train, []

    def stop_at_the_third(*arguments, seed):
        names.append(seed)
        if len(names) == 3:
            raise KeyboardInterrupt
        return train(*arguments, seed=seed)

    monkeypatch.setattr(equal_time, "train", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        recall.run(config, tmp_path)
    assert not (tmp_path / "results.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "pieces").iterdir()}
    # Each piece has a file of its seconds, and there is one of the text's hash.
    assert len(kept) == 2 * (6 + 1 + 2) + 1
    results = recall.run(config, tmp_path)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert json.loads((tmp_path / "results.json").read_text()) == results
    for name in ("recall", "equal_time"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    found = results["recall"]
    assert [(row["attention"], row["exact_keys"]) for row in found] == [
        ("softmax", 0),
        ("band_keys_learned", 2),
        ("band_more_keys_learned", 3),
    ]
    runs = [run for row in found for run in row["runs"].values()]
    assert all((run["trained"], run["steps"]) == (4, 4) for run in runs)
    models = results["equal_time"]["contexts"]["16"]
    assert all(len(run) == 2 for run in models["softmax"]["bits"].values())
    report = recall.report(results)
    assert "| 4 | 4 | band + keys + learned features | 2 | 0." in report
    assert "| 8 | softmax | " in report
    assert "It is not the text of the README" in report
    assert_no_figure_costs_results(recall.run, config, tmp_path)


class StoppedError(Exception):
    """A run is stopped."""


@pytest.mark.fast
def test_models_of_another_text_are_not_mixed_with_ours(tmp_path, monkeypatch, short_text):
    def stop(*_, **__):
        raise StoppedError

    monkeypatch.setattr(equal_time, "measure", lambda tasks, config: np.ones((len(tasks), 2)))
    monkeypatch.setattr(equal_time, "train", stop)
    config = tiny.get_config(parts=("equal_time",))
    with pytest.raises(StoppedError):
        recall.run(config, tmp_path)
    monkeypatch.setattr(library, "load", lambda: corpus.split("To be, or not to be: " * 20))
    with pytest.raises(
        UserError, match=rf"equal_time-\* of a text with SHA-256 {TEXT.sha256}, but"
    ):
        recall.run(config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("attention", kinds.LABELS)
def test_no_model_sees_later_tokens_and_all_start_with_the_same_parameters(attention):
    def make(name):
        sizes = {"width": 8, "depth": 2, "num_heads": 2, "num_features": 8}
        rngs = nnx.Rngs(params=0, features=1)
        return kinds.make_model(20, name, **sizes, exact_keys=4, bandwidth=2, rngs=rngs)

    model = make(attention)
    ours = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, value in nnx.to_flat_state(nnx.state(make("softmax"), nnx.Param)):
        np.testing.assert_array_equal(ours[path][...], value[...])
    kernel = model.head.kernel  # The kernel starts at zero.
    kernel[...] = jax.random.normal(jax.random.key(0), kernel.shape)
    run = nnx.jit(lambda model, tokens: model(tokens))
    tokens = jnp.arange(24)[None] % 20
    changed = (run(model, tokens) != run(model, tokens.at[0, 12].set(0)))[0].any(axis=-1)
    np.testing.assert_array_equal(changed, np.arange(24) >= 12)


class Solver(nnx.Module):
    """A dictionary: attention to the token after the one that equals the query."""

    def __call__(self, tokens):
        length = tokens.shape[1] // 3
        keys, values = tokens[:, : 2 * length : 2], tokens[:, 1 : 2 * length : 2]
        matches = tokens[:, :, None] == keys[:, None]
        return jnp.einsum("btn,bnv->btv", matches, jax.nn.one_hot(values, 8))


@pytest.mark.fast
def test_an_exact_solver_has_an_accuracy_of_one():
    config = tiny.get_config().recall
    case = measure_recall.Case("softmax", 4, 0, 0)
    task = measure_recall.make_task(config, case, lambda seed: None)
    for padded in (2, 4):
        assert measure_recall.evaluate(config, task, Solver(), 0, 2, padded) == 1
    inputs, values = measure_recall.draw(config, (0, 0), 100, 4, 4)
    logits = task.apply(Solver(), jnp.asarray(inputs), None)
    assert (measure_recall.is_right(logits, values - 1) == 0).all()
    half = np.where(np.arange(4) < 2, values, 0)
    assert (measure_recall.is_right(logits, half) == 0.5).all()


@pytest.mark.fast
def test_the_accuracy_is_of_sequences_that_did_not_end_the_training(monkeypatch):
    seeds, draw = [], measure_recall.draw
    monkeypatch.setattr(
        measure_recall, "draw", lambda config, *args: seeds.append(args[0]) or draw(config, *args)
    )
    monkeypatch.setattr(training, "initial_model", lambda task, seed: Solver())
    monkeypatch.setattr(training, "train", lambda *_, **options: itertools.repeat(Solver()))
    case = measure_recall.Case("softmax", 4, 0, 0)
    optimizers = measure_recall.Optimizers(None, None)
    found = measure_recall.train(tiny.get_config().recall, case, optimizers, seed=0)
    np.testing.assert_array_equal(found, [1, 2, 4])
    assert len({*seeds}) == len(seeds) == 3  # Of two numbers of pairs, and of the accuracy.


@pytest.mark.slow
def test_softmax_attention_learns_to_recall_two_pairs():
    config = tiny.get_config(
        recall__model={"width": 32, "depth": 2, "num_heads": 2},
        recall__batch_tokens=384,
        recall__batch_size=64,
        recall__test_sequences=64,
        recall__num_steps=1500,
        recall__eval_interval=100,
        recall__learning_rate=4e-3,
    ).recall
    optimizers = measure_recall.Optimizers.of(config)
    case = measure_recall.Case("softmax", 2, 0, 0)
    accuracy, _, trained = measure_recall.train(config, case, optimizers, seed=0)
    assert trained == 2
    assert accuracy > 0.9


@pytest.mark.fast
def test_pairs_double_in_sequences_of_two_lengths():
    case = measure_recall.Case("softmax", 32, 0, 0)
    assert case.stages == [(2, 8), (4, 8), (8, 8), (16, 32), (32, 32)]
    assert case._replace(num_pairs=4).stages == [(2, 4), (4, 4)]


@pytest.mark.fast
def test_halves_of_the_features_give_way_to_keys():
    config = tiny.get_config(num_features=(4, 8), exact_keys=(2, 3), attentions=(*kinds.LABELS,))
    found = measure_recall.cases(config)
    assert found["softmax-4-0-0"] == ("softmax", 4, 0, 0)
    assert found["learned-4-8-0"] == ("learned", 4, 8, 0)
    assert found["keys_learned-4-8-4"] == ("keys_learned", 4, 8, 4)
    more = [case for case in found.values() if case.attention == "band_more_keys_learned"]
    assert [case[2:] for case in more] == [(4, 2), (4, 3), (8, 2), (8, 3)]
    assert len(found) == 1 + 2 * (5 + 2)


@pytest.mark.fast
def test_steps_fill_the_seconds():
    config = tiny.get_config(equal_time__seconds=60.0, equal_time__num_evaluations=4).equal_time
    assert equal_time.steps_to_evaluate(config, 100.0) == [150, 300, 450, 600]
    assert equal_time.steps_to_evaluate(config, 1e6) == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_text_of_the_standard_library_is_split_by_file():
    text = library.load()
    pages = corpus.decode(text.train, text.alphabet), corpus.decode(text.validation, text.alphabet)
    assert len(pages[0]) > 5 * len(pages[1]) > 1_000_000
    assert "class NodeVisitor" in pages[0] + pages[1]
    [inside] = [page for page in pages if "def lru_cache(" in page]
    assert "class singledispatchmethod:" in inside


@pytest.mark.fast
def test_the_table_is_right_on_numbers_made_up():
    def row(attention, num_features, *runs):
        names = "accuracy", "steps", "trained"
        by_seed = {str(seed): dict(zip(names, run, strict=True)) for seed, run in enumerate(runs)}
        sizes = {"num_pairs": 4, "num_features": num_features, "exact_keys": 0}
        return {"attention": attention, **sizes, "runs": by_seed}

    section = [
        row("learned", 8, (0.25, 20.0, 2.0), (0.75, 30.0, 4.0)),
        row("softmax", 0, (1.0, 50.0, 4.0)),
    ]
    models = {"milliseconds": [90.0, 100.0, 120.0], "steps": [5, 10], "bits": {"0": [3.0, 2.5]}}
    text = {"sha256": library.SHA256, "train": 90, "validation": 10}
    results = {
        "recall": section,
        "equal_time": {"text": text, "contexts": {"8": {"softmax": models}}},
    }
    report = recall.report(results)
    assert (
        "| 4 | - | softmax | - | 1.000 | 4 | 50 |\n"
        "| 4 | 8 | learned features | - | 0.500 (0.250 to 0.750) | 2, 4 | 20, 30 |"
    ) in report
    assert "| 8 | softmax | 100 (90 to 120) | 10 | 3.000 | 2.500 | 1 |" in report
    assert report.endswith("of the text of the README.")


@pytest.mark.fast
def test_the_paper_config_is_right():
    recall.check(paper.get_config())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"parts": ()}, "config.parts must name at least one of recall, equal_time"),
        ({"attentions": ()}, "config.attentions must name at least one of softmax"),
        ({"equal_time__attentions": ()}, "config.equal_time.attentions must name at least one"),
        ({"parts": ("none",)}, "Each of config.parts must be one of"),
        ({"attentions": ("none",)}, "Each of config.attentions must be one of"),
        ({"equal_time__attentions": ("none",)}, "Each of config.equal_time.attentions must be one"),
        ({"seeds": (0,)}, "config.seeds must be two or more"),
        ({"num_features": (2,)}, "Each of config.num_features must be at least 4"),
        (
            {"num_features": (5,), "attentions": ("learned",)},
            "must be a positive multiple of 2",
        ),
        (
            {"num_features": (6,)},
            "less the 3 that .* multiple of 2 for band_keys_learned",
        ),
        ({"exact_keys": (0,)}, "Each of config.exact_keys must be at least 1, got 0"),
        ({"exact_keys": ("a",)}, "Each of config.exact_keys must be an integer, got 'a'"),
        ({"contexts": (65,)}, "at most equal_time.validation_tokens=64, got 65"),
        ({"contexts": (1,)}, "Each of config.contexts must be at least 2"),
        ({"num_pairs": (6,)}, "Each of config.num_pairs must be a power of two .*, got 6"),
        ({"num_pairs": (8,)}, "at most num_keys=5, got 8"),
        ({"recall__eval_interval": 3}, "num_steps must be a multiple of eval_interval=3"),
        ({"recall__learning_rate": 0.0}, "config.recall.learning_rate must be above 0"),
        ({"recall__clip_norm": -1.0}, "config.recall.clip_norm must be above 0"),
        ({"recall__b2": float("nan")}, r"config.recall.b2 must be in \[0, 1\), got nan"),
        (
            {"recall__warmup_steps": 2},
            "config.recall.warmup_steps must be below num_steps=2, got 2",
        ),
        ({"equal_time__clip_norm": 0.0}, "config.equal_time.clip_norm must be above 0"),
        ({"recall__model__width": 10, "recall__model__num_heads": 4}, "must be a multiple of 2"),
        ({"equal_time__seconds": 0.0}, "config.equal_time.seconds must be above 0"),
        (
            {"equal_time__exact_keys": 5},
            "config.equal_time.num_features less the 5 that",
        ),
    ],
)
def test_refuses(changes, match):
    with pytest.raises(UserError, match=match):
        recall.check(tiny.get_config(**changes))
