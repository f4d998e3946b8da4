import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.export
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from experiments.harness import files, mistakes
from experiments.harness.mistakes import UserError
from experiments.vit.data import pipeline
from experiments.vit.metrics import log
from experiments.vit.tools import evaluate, export
from experiments.vit.training import (
    checkpoint_contents,
    checkpoint_damage,
    checkpoint_manager,
    trained,
)
from tests.experiments.vit import tiny
from tests.experiments.vit.test_train import build
from tests.experiments.vit.training.test_sharding import mesh_of

pytestmark = pytest.mark.cpu

# The models differ in all that changes how they are written and read.
MODELS = {
    "simplex": {"mesh__data": 1},
    "scanned": {
        "mesh__fsdp": 2,
        "mesh__tensor": 2,
        "mesh__sequence": 2,
        "model__scan": True,
        "model__depth": 2,
        "model__attention": "orthogonal",
    },
    "exact": {"model__pooling": "token", "model__attention": "exact", "mesh__data": 8},
    "calibrated": {"model__feature_map": "calibrated", "calibrate_interval": 1, "mesh__tensor": 2},
}
BATCHES = (1, 20)


def make_valid(path, x):
    """Returns an array of a calibration: positive, or if it is a matrix, orthogonal.

    The matrix of the keys is the inverse transpose of that of the queries.
    """
    if not path[-1].name.endswith("_matrix"):
        return np.exp(x)
    matrix, _ = np.linalg.qr(np.random.default_rng(1).standard_normal(x.shape[-2:]))
    return np.broadcast_to(matrix, x.shape).astype(x.dtype)


def make_run(workdir, rows=({"step": 1, "test_accuracy": 0.25},), **changes):
    """A run of one step with random parameters; returns its model, whole on one device."""
    config = tiny.get_config(checkpoint__interval=1, **changes)
    state = build(config, mesh_of(**config.mesh)).state
    names = ("params", "projections", "calibrations")
    wanted = {name: getattr(state, name) for name in names}
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), wanted)
    random["calibrations"] = jax.tree_util.tree_map_with_path(make_valid, random["calibrations"])
    sharded = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), random, wanted)
    log.Log(workdir, config, log.COLUMNS, [], writes=True)  # Writes the config.
    progress = checkpoint_contents.Progress(list(rows), 1.0, {"step": 1})
    with checkpoint_manager.Checkpoints(workdir / "checkpoints", config, keep=1) as checkpoints:
        checkpoints.save(1, sharded, progress)
    return nnx.merge(build(config).graphdef, *random.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of each run, and its model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    return {name: (folder, make_run(folder, **MODELS[name])) for name, folder in folders.items()}


# Run by a Python that has but JAX: neither this package nor Flax.
LOAD = """
import pathlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("simrf_jax", "experiments", "flax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import jax, jax.export, numpy as np

folder = pathlib.Path(sys.argv[1])
for path in folder.glob("*.stablehlo"):
    exported = jax.export.deserialize(bytearray(path.read_bytes()))
    images = np.load(folder / "images.npy")
    for size in map(int, sys.argv[2:]):
        logits = jax.jit(exported.call)(images[:size])
        np.save(folder / f"{path.stem}-{size}.npy", logits)
assert not {"simrf_jax", "experiments", "flax"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_another_process_runs_it_with_jax_alone(runs, tmp_path):
    images = np.random.default_rng(1).uniform(-1, 1, (max(BATCHES), 8, 8, 1)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    for name, (workdir, _) in runs.items():
        export.export(workdir, tmp_path / f"{name}.stablehlo")
    command = [sys.executable, "-I", "-c", LOAD, str(tmp_path), *map(str, BATCHES)]
    subprocess.run(command, check=True, cwd=tmp_path)
    for name, (_, model) in runs.items():
        expected = model(images)
        assert np.std(expected) > 1
        for size in BATCHES:
            logits = np.load(tmp_path / f"{name}-{size}.npy")
            scale = np.abs(expected).max()
            np.testing.assert_allclose(logits / scale, expected[:size] / scale, atol=1e-5)


ROOT = pathlib.Path(__file__).parents[4]
GUIDE = (ROOT / "docs" / "how_to" / "export_a_vit.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
[SNIPPET] = [code for code in BLOCKS if "jax.export" in code]  # What runs an export.


@pytest.fixture(scope="module")
def exports(runs, tmp_path_factory):
    """A folder with the exports of two runs."""
    folder = tmp_path_factory.mktemp("exports")
    for name in ("simplex", "exact"):
        export.export(runs[name][0], folder / name, platforms=["cpu"])
    return folder


@pytest.fixture
def exported(exports, tmp_path, monkeypatch):
    """An export in the working directory, under the name that the guide gives it."""
    monkeypatch.chdir(tmp_path)
    for suffix in ("", ".json"):
        shutil.copy(exports / f"simplex{suffix}", f"digits.stablehlo{suffix}")
    return tmp_path / "digits.stablehlo"


DAMAGED = r"digits\.stablehlo or digits\.stablehlo\.json is damaged, or of another export"


def flip(bit):
    """Flips a bit, counted from the start or the end."""

    def change(content):
        content = bytearray(content)
        content[bit // 8] ^= 1 << bit % 8
        return bytes(content)

    return change


@pytest.mark.slow
def test_the_guide_runs_a_whole_export(exported, capsys):
    exec(SNIPPET, {})
    assert 0 <= float(capsys.readouterr().out) <= 1


FLIPS = [flip(bit) for bit in (0, 12_345, 100_000, 200_001, -9)]


@pytest.mark.slow
@pytest.mark.parametrize("change", [*FLIPS, lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0"])
def test_the_guide_refuses_a_damaged_export(exported, change):
    exported.write_bytes(change(exported.read_bytes()))
    with pytest.raises(SystemExit, match=DAMAGED):
        exec(SNIPPET, {})


def replaced(old, new):
    def change(content):
        assert old in content
        return content.replace(old, new, 1)

    return change


TEXTS = {
    "range": replaced(b"-1,", b"-2,"),
    "accuracy": replaced(b"0.25", b"0.75"),
    "field": replaced(b'"step": 1', b'"stop": 1'),
    "space": replaced(b"\n", b"\n "),
    "line end": replaced(b"\n", b"\r\n"),
    "digest": replaced(b'"description": "', b'"description": "0'),
    "no digest": replaced(b'"sha256"', b'"sha257"'),
    "no digests": replaced(b'"model": "', b'"modem": "'),
    "no text": flip(7),
    "empty": lambda b: b"",
    "cut off": lambda b: b[:-3],
    "no mapping": lambda b: b"[]",
    "other digests": lambda b: b'{"sha256": {"description": 1}}',
    "empty mapping": lambda b: b"{}",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS)
def test_the_guide_refuses_a_damaged_description(exported, change):
    path = exported.with_name("digits.stablehlo.json")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SystemExit, match=DAMAGED):
        exec(SNIPPET, {})


@pytest.mark.slow
def test_no_flipped_bit_of_a_description_passes(exported):
    path = exported.with_name("digits.stablehlo.json")
    check = SNIPPET.split("exported = ")[0]  # What comes before the model is used.
    content = path.read_bytes()
    exec(check, {})
    for bit in random.Random(0).sample(range(8 * len(content)), 500):
        path.write_bytes(flip(bit)(content))
        with pytest.raises(SystemExit, match=DAMAGED):
            exec(check, {})


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".json"])
def test_the_guide_refuses_the_export_of_another_run(exports, exported, suffix):
    shutil.copy(exports / f"exact{suffix}", f"{exported}{suffix}")
    with pytest.raises(SystemExit, match=DAMAGED):
        exec(SNIPPET, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits.stablehlo", "digits.stablehlo.json"])
def test_the_guide_needs_both_files(exported, name):
    exported.with_name(name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}'$"):
        exec(SNIPPET, {})


@pytest.mark.slow
def test_the_guide_refuses_the_export_of_a_jax_that_calls_otherwise(exported):
    model = dataclasses.replace(read(exported), calling_convention_version=99).serialize()
    exported.write_bytes(model)
    path = exported.with_name("digits.stablehlo.json")
    files.write_json(path, export._with_digests(json.loads(path.read_text()), model))
    with pytest.raises(
        SystemExit, match=rf"is of JAX {jax.__version__}, which this JAX cannot run"
    ):
        exec(SNIPPET, {})


@pytest.mark.slow
def test_the_description_says_what_goes_in_and_comes_out(runs, tmp_path):
    workdir, _ = runs["scanned"]
    written = export.export(workdir, tmp_path / "new" / "model", platforms=["tpu", "cpu"])
    assert json.loads((tmp_path / "new" / "model.json").read_text()) == written
    assert written["input"]["shape"] == ["batch", 8, 8, 1]
    assert written["input"]["range"] == [-1, 1]
    assert "resized (bilinear, smoothed where it shrinks) to 8 x 8;" in str(written["input"])
    assert written["output"]["shape"] == ["batch", 10]
    assert (written["step"], written["test_accuracy"]) == (1, 0.25)
    assert written["config"] == json.loads((workdir / "config.json").read_text())
    model = (tmp_path / "new" / "model").read_bytes()
    assert written["sha256"]["model"] == hashlib.sha256(model).hexdigest()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model", "model.json"]


def read(path):
    return jax.export.deserialize(bytearray(path.read_bytes()))


@pytest.mark.slow
def test_each_platform_has_its_own_arithmetic(tmp_path):
    workdir = tmp_path / "run"
    make_run(workdir, model__dtype="bfloat16")
    dots = {}
    for platforms in (["cpu"], ["tpu"], ["cpu", "tpu"]):
        path = tmp_path / "-".join(platforms)
        export.export(workdir, path, platforms=platforms)
        exported = read(path)
        assert exported.platforms == tuple(platforms)
        lines = exported.mlir_module().splitlines()
        dots[path.name] = [line for line in lines if "dot_general" in line]
    mixed = "xbf16>) -> tensor<", "xf32>"  # What the CPU cannot multiply.

    def sums_in_float32(lines):
        return any(mixed[0] in line and line.split(mixed[0])[1].count(mixed[1]) for line in lines)

    assert not sums_in_float32(dots["cpu"])
    assert sums_in_float32(dots["tpu"])
    assert len(dots["cpu-tpu"]) > max(len(dots["cpu"]), len(dots["tpu"]))
    images = np.zeros((2, 8, 8, 1), np.float32)
    with pytest.raises(ValueError, match="exported for platforms '\\('tpu',\\)' but it is used"):
        read(tmp_path / "tpu").call(images)
    assert read(tmp_path / "cpu-tpu").call(images).shape == (2, 10)


@pytest.mark.parametrize(
    ("platforms", "match"),
    [
        (["gpu"], "must be one of 'cpu', 'tpu', 'cuda', 'rocm', got 'gpu'"),
        (["cpu", "cpu"], "must name some, and none twice, got .'cpu', 'cpu'."),
        ([], "must name some, and none twice, got"),
    ],
)
@pytest.mark.fast
def test_platforms_are_refused(tmp_path, platforms, match):
    with pytest.raises(UserError, match=match):
        export.export(tmp_path, tmp_path / "model", platforms=platforms)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["model", "model.json"])
def test_no_file_is_written_over(tmp_path, name):
    (tmp_path / name).write_text("Precious.")
    with pytest.raises(UserError, match=f"{name} is there; give another --output"):
        export.export(tmp_path, tmp_path / "model")
    assert (tmp_path / name).read_text() == "Precious."


@pytest.mark.slow
def test_a_full_disk_leaves_no_part_of_a_file(runs, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match="model cannot be written: "):
            export.export(runs["simplex"][0], tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


EXPORT = """
import os, pathlib, signal, sys
from experiments.vit.tools import export

rename, renamed = pathlib.Path.replace, []

def rename_or_die(path, target):
    if len(renamed) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    renamed.append(target)
    return rename(path, target)

pathlib.Path.replace = rename_or_die
export.export(sys.argv[1], sys.argv[2], platforms=["cpu"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("renamed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_export_that_is_killed_is_refused(runs, tmp_path, monkeypatch, renamed):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", EXPORT, runs["simplex"][0], "digits.stablehlo", str(renamed)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "digits.stablehlo").exists() == bool(renamed)
    assert not (tmp_path / "digits.stablehlo.json").exists()
    with pytest.raises(FileNotFoundError, match=r"digits\.stablehlo"):
        exec(SNIPPET, {})


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_model_whose_description_cannot_be_written_is_removed(runs, tmp_path, monkeypatch, error):
    def fail(path, content):
        with mistakes.writing(path):
            raise error

    monkeypatch.setattr(files, "write_json", fail)
    with pytest.raises((UserError, KeyboardInterrupt)):
        export.export(runs["simplex"][0], tmp_path / "model", platforms=["cpu"])
    assert not list(tmp_path.iterdir())


def refused(workdir, match, *, best=False, error=UserError):
    """By all that load a trained model."""
    with pytest.raises(error, match=match):
        evaluate.evaluate(workdir, best=best)
    with pytest.raises(error, match=match):
        export.export(workdir, workdir.parent / "model", best=best)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*1 is damaged .* it is passed over")
def test_what_holds_no_trained_model_is_refused(runs, tmp_path):
    refused(tmp_path / "none", "none holds no run: .*config.json")
    copy = tmp_path / "copy"
    shutil.copytree(runs["simplex"][0], copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"learning_rate": 0.5}))
    differ = "another run than .*config.json: learning_rate is 0.001 there, 0.5 here"
    refused(copy, differ, error=checkpoint_damage.IncompatibleError)
    (copy / "config.json").write_text(json.dumps(config)[:100])
    refused(copy, "config.json is damaged: ")
    del config["seed"]
    (copy / "config.json").write_text(json.dumps(config))
    refused(copy, r"config\.json is not right: The config lacks seed")
    shutil.copy(runs["simplex"][0] / "config.json", copy)
    for path in (copy / "checkpoints" / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    unreadable = "The checkpoints in .*copy/checkpoints cannot be read: "
    refused(copy, unreadable)
    shutil.rmtree(copy / "checkpoints" / "1" / "run")
    refused(copy, unreadable)
    shutil.rmtree(copy / "checkpoints")
    refused(copy, "There is no checkpoint in .*copy/checkpoints")


PATCHES, LOGITS = "params.patch_embedding.kernel.value", "params.head.bias.value"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"kernel": (16, 32)}, f"step 1 is none of a ViT: .* {PATCHES} and {LOGITS}, got kernel"),
        ({PATCHES: (), LOGITS: (10,)}, "step 1 is none of a ViT: "),
        ({PATCHES: (4, 32), LOGITS: (10,)}, "1 holds other arrays: .* is absent there"),
        (
            {PATCHES: (4, 48), LOGITS: (10,)},
            r"is 'float32\[4, 48\]' there, 'float32\[4, 32\]' here",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(runs, tmp_path, arrays, match):
    workdir = tmp_path / "run"
    shutil.copytree(runs["simplex"][0], workdir, ignore=shutil.ignore_patterns("checkpoints"))
    config = tiny.get_config(checkpoint__interval=1, **MODELS["simplex"])
    state = {name: jax.numpy.zeros(shape) for name, shape in arrays.items()}
    progress = checkpoint_contents.Progress([{"step": 1, "test_accuracy": 0.5}], 1.0, {"step": 1})
    with checkpoint_manager.Checkpoints(workdir / "checkpoints", config, keep=1) as checkpoints:
        checkpoints.save(1, state, progress)
    refused(workdir, match, error=checkpoint_damage.IncompatibleError)


@pytest.mark.slow
def test_a_checkpoint_of_another_program_is_refused(runs, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(runs["simplex"][0], workdir, ignore=shutil.ignore_patterns("checkpoints"))
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        manager.save(1, args=ocp.args.Composite(run=ocp.args.JsonSave({"step": 1, "lr": 0.1})))
    match = "1 is not a checkpoint of this trainer: .* got one with step, lr"
    refused(workdir, match, error=checkpoint_damage.IncompatibleError)


@pytest.mark.slow
def test_the_best_of_none_is_refused(tmp_path):
    make_run(tmp_path / "run", rows=({"step": 1},), **MODELS["exact"])
    refused(tmp_path / "run", "was evaluated; leave out --best", best=True)
    model = trained.load(tmp_path / "run", mesh_of(), best=False)
    assert model.test_accuracy is None


@pytest.mark.slow
def test_images_of_another_kind_are_refused(runs, monkeypatch):
    load = pipeline.load_test
    monkeypatch.setattr(
        pipeline, "load_test", lambda *a, **k: load(*a, **k)._replace(num_classes=7)
    )
    with pytest.raises(UserError, match="of 1 channels and 10 classes, got 1 and 7 in digits"):
        evaluate.evaluate(runs["exact"][0], best=False)
