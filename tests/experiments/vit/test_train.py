import collections
import contextlib
import csv
import functools
import json
import math
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from experiments.harness import train_state
from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.data import in_memory
from experiments.vit.metrics import log
from experiments.vit.tools import compare, evaluate, report
from experiments.vit.training import checkpoint_contents, sharding, train_step
from experiments.vit.training.train_step import score
from tests.experiments.vit import tiny


def read_losses(workdir):
    with (workdir / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def get_config(**changes):
    """A run of 20 steps, whose program the tests share."""
    schedule = {"num_steps": 20, "eval_interval": 20, "redraw_interval": 6}
    return tiny.get_config(**(schedule | changes))


@pytest.mark.slow
def test_a_run_leaves_its_results_metrics_curves_and_config(tmp_path, drawn_curves):
    config = get_config()
    results = train.train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert results["config"] == json.loads((tmp_path / "run" / "config.json").read_text())
    assert results["config"] == config.to_dict()
    assert (results["num_train"], results["num_test"], results["steps"]) == (1437, 360, 20)
    assert 0 <= results["test_accuracy"] <= 1
    assert len(read_losses(tmp_path / "run")) == 20
    image = np.asarray(Image.open(tmp_path / "run" / "curves.png").convert("RGB"))
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 50  # Something is drawn.
    with pytest.raises(UserError, match="already holds a run"):
        train.train(config, tmp_path / "run")


@pytest.mark.slow
def test_what_is_held_out_chooses_the_best_and_the_test_set_is_evaluated_once(tmp_path):
    changes = {"held_out": 0.1, "eval_interval": 8, "checkpoint__interval": 4}
    results = train.train(get_config(**changes), tmp_path / "run")
    assert (results["num_train"], results["num_held_out"]) == (1293, 144)
    metrics = log.read_metrics(tmp_path / "run")
    assert [step for step, _ in metrics["held_out_accuracy"]] == [8, 16, 20]
    assert metrics["test_accuracy"] == [(20, results["test_accuracy"])]
    step, best = max(metrics["held_out_accuracy"], key=lambda pair: pair[::-1])
    found = next(checkpoint_contents.find(tmp_path / "run" / "checkpoints", best=True))
    assert (found.step, found.accuracy) == (step, best)
    [run] = report.find_runs([tmp_path / "run"])["simplex"]
    assert run.tests.tolist() == [list(pair) for pair in metrics["held_out_accuracy"]]
    assert evaluate.evaluate(tmp_path / "run", best=False)["test_accuracy"] == pytest.approx(
        results["test_accuracy"]
    )


@pytest.fixture(scope="module")
def on_eight_devices(tmp_path_factory):
    """A run on eight devices: its results, its losses, and how often its functions were traced."""
    traces = collections.Counter()

    def counted(name, function):
        def count(*args, **kwargs):
            traces[name] += 1
            return function(*args, **kwargs)

        return count

    functions = {train_state: ("init_state", "redraw"), train_step: ("train_step", "eval_step")}
    workdir = tmp_path_factory.mktemp("eight")
    with pytest.MonkeyPatch.context() as patch:
        for module, names in functions.items():
            for name in names:
                patch.setattr(module, name, counted(name, getattr(module, name)))
        results = train.train(get_config(mesh__data=8, eval_interval=5), workdir)
    return results, read_losses(workdir), traces


@pytest.mark.devices(8)
def test_one_and_eight_devices_train_alike(tmp_path, on_eight_devices):
    results, losses, _ = on_eight_devices
    assert results["device"].startswith("8 x ")
    results = train.train(get_config(), tmp_path)
    assert results["device"].startswith("1 x ")
    expected = read_losses(tmp_path)
    assert len(losses) == 20
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    assert losses[-1] < losses[0]


@pytest.mark.devices(8)
def test_a_run_traces_each_of_its_functions_once(on_eight_devices):
    # The first time for the shapes, from which the shardings follow.
    assert on_eight_devices[2] == {"init_state": 2, "redraw": 1, "train_step": 1, "eval_step": 1}


@pytest.mark.slow
def test_a_run_is_a_function_of_its_seed(tmp_path):
    runs = [
        (train.train(tiny.get_config(seed=seed), tmp_path / name), read_losses(tmp_path / name))
        for seed, name in [(0, "a"), (0, "b"), (1, "c")]
    ]
    assert runs[0][1] == runs[1][1]
    assert runs[0][0]["test_loss"] == runs[1][0]["test_loss"]
    assert runs[0][1] != runs[2][1]


def build(config, mesh=None):
    """The program of digits, on one device unless a mesh is given."""
    mesh = mesh or sharding.make_mesh(dict.fromkeys(sharding.AXES, 1))
    return train.build_program(config, mesh, channels=1, num_classes=10)


def make_batch(n=32):
    split = in_memory.load_digits("").train
    return {"image": jnp.asarray(split.images[:n]), "label": jnp.asarray(split.labels[:n])}


@pytest.mark.slow
def test_soft_labels_that_are_sure_are_scored_as_labels():
    logits = jax.random.normal(jax.random.key(0), (32, 10))
    labels = make_batch()["label"]
    losses, right = score(logits, labels)
    soft_losses, soft_right = score(logits, jax.nn.one_hot(labels, 10))
    np.testing.assert_allclose(losses, soft_losses, rtol=1e-6)
    np.testing.assert_array_equal(right, soft_right)
    mixed = 0.7 * jax.nn.one_hot(labels, 10) + 0.3 * jax.nn.one_hot(labels[::-1], 10)
    expected = 0.7 * losses + 0.3 * score(logits, labels[::-1])[0]
    np.testing.assert_allclose(score(logits, mixed)[0], expected, rtol=1e-5)
    np.testing.assert_array_equal(score(logits, mixed)[1], right)


@pytest.mark.slow
def test_a_batch_that_is_still_on_the_host_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "global_batch", lambda part, *_: part)
    config = get_config()
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        train.train(config, tmp_path)


@pytest.mark.slow
def test_each_step_has_its_number_in_a_profile(tmp_path, monkeypatch):
    noted = []

    def note(name, *, step_num):
        noted.append((name, step_num))
        return contextlib.nullcontext()

    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", note)
    train.train(tiny.get_config(num_steps=3), tmp_path)
    assert noted == [("train", 0), ("train", 1), ("train", 2)]


@pytest.fixture
def program():
    """The program that the runs share, inside its mesh."""
    built = build(get_config())
    with jax.set_mesh(built.mesh):
        yield built


def test_a_step_changes_the_parameters_and_no_projection(program):
    state = program.init()
    before = jax.device_get((state.params, state.projections))
    for _ in range(3):
        batch = sharding.global_batch(make_batch(), program.mesh, 32)
        state, metrics = program.train_step(state, batch)
    assert int(state.step) == 3
    assert np.isfinite(metrics["loss"])
    assert metrics["gradient_norm"] > 0
    chex.assert_trees_all_equal(state.projections, before[1])
    assert not np.allclose(state.params["head"]["kernel"][...], before[0]["head"]["kernel"][...])


@pytest.mark.slow
def test_redraw_is_a_function_of_key_and_step_alone(program):
    state = program.init()
    redraw = jax.jit(functools.partial(train_state.redraw, interval=10))

    def at(step, state=state):
        return redraw(state._replace(step=np.int32(step))).projections

    chex.assert_trees_all_equal(at(0), at(9))
    chex.assert_trees_all_equal(at(10), at(19, state._replace(projections=at(30))))
    different = jax.tree.map(lambda a, b: float(np.abs(a - b).min()) > 0, at(0), at(10))
    assert all(jax.tree.leaves(different))


@pytest.mark.slow
def test_only_kernels_decay():
    config = tiny.get_config(model__pooling="token", weight_decay=0.5, learning_rate=0.1)
    state, (optimizer, _) = build(config).state, train_state.make_optimizer(config)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape), state.params)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), state.params)
    opt_state = optimizer.init(ones)
    update = jax.jit(optimizer.update)
    for _ in range(2):  # The first step of the warm-up has a learning rate of zero.
        updates, opt_state = update(zero, opt_state, ones)
    params = optax.apply_updates(ones, updates)
    for path, x in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        decayed = not any(word in name for word in ("bias", "scale", "position", "token"))
        np.testing.assert_allclose(x, 1 - 0.05 * 0.5 if decayed else 1.0, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_evaluation_counts_every_image_once(program):
    state = program.init()
    head = state.params["head"]["kernel"]
    kernel = np.random.default_rng(1).normal(size=(32, 10)).astype(np.float32)
    head[...] = jax.device_put(kernel, head.sharding)
    split = in_memory.load_digits("").test

    def total(batch_size):
        batches = in_memory.eval_batches(split, batch_size)
        put = (sharding.global_batch(batch, program.mesh, batch_size) for batch in batches)
        sums = [program.eval_step(state.model, batch) for batch in put]
        return {name: sum(float(s[name]) for s in sums) for name in sums[0]}

    whole, parts = total(120), total(77)
    assert whole["weight"] == parts["weight"] == 360
    assert whole["accuracy"] == parts["accuracy"]
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)


class Source:
    """Batches of which some are replaced by others, and some are not finite."""

    def __init__(self, source, number=lambda step: step, poisoned=()):
        self.source, self.number, self.poisoned = source, number, poisoned

    def __getitem__(self, step):
        batch = self.source[self.number(step)]
        return batch | {"image": batch["image"] * np.nan} if step in self.poisoned else batch


@pytest.fixture
def train_on(monkeypatch):
    """Trains on the batches of a ``Source``."""
    batches = in_memory.train_batches

    def run(workdir, *, checkpoints, **source):
        made = lambda *a, **k: Source(batches(*a, **k), **source)  # noqa: E731
        monkeypatch.setattr(in_memory, "train_batches", made)
        intervals = {"log_interval": 4, "eval_interval": 20, "checkpoint__interval": checkpoints}
        return train.train(get_config(**intervals), workdir)

    return run


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, train_on):
    with pytest.raises(UserError, match="The loss is nan at step 6 of 20"):
        train_on(tmp_path, checkpoints=0, poisoned=(5,))
    assert len(read_losses(tmp_path)) == 2
    assert not (tmp_path / "results.json").exists()


# The last one before the batch, and none.
@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_a_bad_batch_is_skipped_once(tmp_path, train_on, checkpoints):
    bad = range(5, 6 if checkpoints == 3 else 8)  # Up to the row that shows it.
    match = f"is nan at step 6 of 20.* skips the batches of the steps 6 to {bad.stop}"
    with pytest.warns(UserWarning, match=match):
        results = train_on(tmp_path / "bad", checkpoints=checkpoints, poisoned=(5,))
    assert results["skipped_batches"] == len(bad)
    shifted = {"number": lambda step: step + len(bad) * (step >= 5)}
    assert train_on(tmp_path / "good", checkpoints=checkpoints, **shifted)["skipped_batches"] == 0
    assert read_losses(tmp_path / "bad") == read_losses(tmp_path / "good")


@pytest.mark.slow
def test_a_second_bad_batch_ends_the_run(tmp_path, train_on):
    with (
        pytest.warns(UserWarning, match="at step 6 of 20"),
        pytest.raises(UserError, match="The loss is nan at step 13 of 20"),
    ):
        train_on(tmp_path, checkpoints=3, poisoned=(5, 13))
    # Nor does the same command go back again: the checkpoints say what was skipped.
    with pytest.raises(UserError, match="The loss is nan at step 13 of 20"):
        train_on(tmp_path, checkpoints=3, poisoned=(5, 13))


def test_a_test_loss_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    means = {"test_loss": math.nan, "test_accuracy": 0.1}
    monkeypatch.setattr(train, "evaluation_means", lambda sums, *, name: means)
    with pytest.raises(UserError, match="The test loss is nan at step 20 of 20"):
        train.train(get_config(), tmp_path)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mesh__data": 9}, "no more than the 8 devices there are, got 9 x 1 x 1 x 1"),
        ({"mesh__data": 2, "mesh__fsdp": 5}, "than the 8 devices there are, got 2 x 5 x 1 x 1"),
        ({"mesh__data": -1, "mesh__tensor": 9}, "than the 8 devices there are, got -1 x 1 x 9 x 1"),
        ({"mesh__data": -1, "mesh__tensor": 3}, "take all 8 devices, with mesh.data=-1"),
        (
            {"mesh__data": 2, "mesh__fsdp": 4, "batch_size": 36},
            "batch_size must be a multiple of 8, the 1 microbatches times the 8 devices",
        ),
        ({"num_microbatches": 3}, "multiple of 3, the 3 microbatches times the 1 devices"),
        ({"mesh__tensor": 4}, r"num_heads must be a multiple of config.mesh.tensor=4, got 2"),
        ({"mesh__tensor": 2, "model__mlp_dim": 33}, "mlp_dim must be a multiple of .*=2, got 33"),
        ({"mesh__fsdp": 3, "batch_size": 33}, "width must be a multiple of .*fsdp=3, got 32"),
        (
            {"mesh__sequence": 2, "model__pooling": "token"},
            "number of tokens must be a multiple of config.mesh.sequence=2, got 17",
        ),
        ({"model__patch_size": 3}, "multiples of patch_size=3"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, changes, match):
    with pytest.raises(UserError, match=match):
        train.train(tiny.get_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_comparison_tabulates_draws_and_goes_on_where_it_was(tmp_path, monkeypatch):
    config = tiny.get_config()
    table = compare.compare(config, tmp_path, ["simplex", "exact"], [0, 1])
    rows = [line.split(" | ")[0] for line in table.splitlines()]
    assert rows == ["| attention", "| ---", "| simplex", "| exact"]
    assert (tmp_path / "table.md").read_text() == table
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["config"]["seed"] for run in results["simplex"]] == [0, 1]
    assert results["exact"][0]["config"]["model"]["attention"] == "exact"
    mean = np.mean([run["test_accuracy"] for run in results["exact"]])
    assert f"| exact | {mean:.4f} |" in table
    assert (tmp_path / "compare.png").stat().st_size > 10_000

    # Stopped before the end of one run: that one is run again, the others are not.
    (tmp_path / "exact-1" / "results.json").unlink()
    trained = []
    monkeypatch.setattr(
        train, "train", lambda c, d, original=train.train: trained.append(d.name) or original(c, d)
    )
    assert "| exact |" in compare.compare(config, tmp_path, ["simplex", "exact"], [0, 1])
    assert trained == ["exact-1"]

    with pytest.raises(UserError, match="was run with another config"):
        compare.compare(tiny.get_config(num_steps=5), tmp_path, ["simplex"], [0])


def test_diagnostics_are_of_the_images_that_are_held_out(monkeypatch):
    diagnosed = []
    program = SimpleNamespace(
        mesh=None,
        diagnose=lambda model, key, image: diagnosed.append(image) or {},
        eval_step=lambda model, batch: {"loss": 1.0, "accuracy": 1.0, "weight": 2.0},
    )
    inputs = SimpleNamespace(
        eval_batches=lambda: [{"image": "test"}], held_out_batches=lambda: [{"image": "held out"}]
    )
    monkeypatch.setattr(sharding, "global_batch", lambda batch, *_: batch)
    monkeypatch.setattr(train.diagnostics, "row", dict)
    state = SimpleNamespace(model=None, key=None)
    row = train.Run(None, None, program, inputs, 2).evaluate(state, is_last=True)
    assert {*row} == {f"{x}_{y}" for x in ("test", "held_out") for y in ("loss", "accuracy")}
    assert diagnosed == ["held out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attentions", "seeds", "match"),
    [
        (["linear"], [0], "one of 'iid', .*'exact', got 'linear'"),
        (["simplex", "simplex"], [0], "and nothing twice"),
        (["simplex"], [0, 0], "and nothing twice"),
        (["simplex"], [], "and nothing twice"),
    ],
)
def test_comparison_refuses(tmp_path, attentions, seeds, match):
    with pytest.raises(UserError, match=match):
        compare.compare(tiny.get_config(), tmp_path, attentions, seeds)
