"""The configs of the paper's runs, and what ``:runlocal`` makes of them."""

import importlib
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.vit import main, train
from experiments.vit.config import check_config
from experiments.vit.configs import imagenet2012
from experiments.vit.data import pipeline, records
from tests.experiments.vit import prepared

# As the catalog of TensorFlow Datasets has them.
NUM_TRAIN = {
    "imagenet2012": 1_281_167,
    "fashion_mnist_b": 60_000,
    "inaturalist2021": 2_686_843,
    "places365": 1_803_460,
}


def get_config(name, argument=""):
    return importlib.import_module(f"experiments.vit.configs.{name}").get_config(argument)


@pytest.mark.fast
@pytest.mark.parametrize("name", NUM_TRAIN)
def test_numbers_are_those_of_the_paper(name):
    config = get_config(name)
    assert config.batch_size == 4096
    assert config.num_steps * 4096 / NUM_TRAIN[name] == pytest.approx(300, abs=0.1)
    assert config.weight_decay == 0.1
    model = {
        "depth": 12,
        "num_heads": 12,
        "mlp_dim": 3072,
        "dropout_rate": 0.1,
        "num_features": 130,
        "attention": "simplex",
    }
    assert {field: config.model[field] for field in model} == model
    tokens = (config.image_size // config.model.patch_size) ** 2
    assert (config.model.width, tokens) == (768, 14**2)


@pytest.mark.fast
@pytest.mark.parametrize("name", NUM_TRAIN)
def test_runlocal_is_whole_and_another_suffix_is_refused(name):
    check_config(get_config(name, "runlocal"))
    with pytest.raises(ValueError, match="must be one of '', 'runlocal', got 'local'"):
        get_config(name, "local")


@pytest.mark.fast
@pytest.mark.parametrize("compare", [(), ("--compare=simplex,exact", "--seeds=0,1")])
def test_the_command_line_takes_the_suffix_and_fields(monkeypatch, compare):
    path = imagenet2012.__file__
    argv = ["main", f"--config={path}:runlocal", "--workdir=x", "--config.num_steps=7", *compare]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver():
        assert main.parse_flags(argv) == ["main"]
        config = flags.FLAGS.config.to_dict()
    assert config == imagenet2012.get_config("runlocal").to_dict() | {"num_steps": 7}


@pytest.mark.fast
def test_the_command_line_refuses_another_suffix(monkeypatch):
    argv = ["main", f"--config={imagenet2012.__file__}:local", "--workdir=x"]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver(), pytest.raises(SystemExit, match="'', 'runlocal', got 'local'"):
        main.parse_flags(argv)


def prepare(data_dir, name):
    """Ten images to train on, five to test on; returns the runlocal config that reads them."""
    config = get_config(name, "runlocal")
    splits = {"train": 10, records.DATASETS[config.dataset].test_split: 5}
    prepared.write(data_dir, config.dataset, **splits)
    config.data_dir, config.held_out = str(data_dir), 0.2
    config.batch_size = config.eval_batch_size = 8
    config.diagnostics.images = 2
    return config


@pytest.mark.fast
@pytest.mark.parametrize("name", NUM_TRAIN)
def test_runlocal_reads_its_data_set(tmp_path, name):
    config = prepare(tmp_path, name)
    inputs = pipeline.load(config, eval_batch_size=8)
    image = inputs.train_batch(0)["image"]
    side = 28 if name == "fashion_mnist_b" else 32
    assert image.shape == (8, side, side, inputs.channels)
    assert np.abs(image).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_TRAIN)
def test_runlocal_trains(tmp_path, name):
    config = prepare(tmp_path / "data", name)
    config.num_steps, config.warmup_steps, config.mesh.data = 2, 1, 1
    config.model.depth = 1
    config.num_workers = min(config.num_workers, 1)
    results = train.train(config, tmp_path / "run")
    assert (results["num_train"], results["num_test"], results["steps"]) == (8, 5, 2)
    assert np.isfinite(results["test_loss"])
