import importlib
import pathlib
import sys

import pytest
from absl import app
from absl.testing import flagsaver

from experiments.harness.mistakes import UserError
from experiments.vit import configs, main
from experiments.vit.config import (
    FIELDS,
    check_config,
    config_differences,
    describe_fields,
    may_change,
)
from tests.experiments.vit import tiny

pytestmark = pytest.mark.fast
CONFIGS = sorted(
    path.stem for path in pathlib.Path(configs.__file__).parent.glob("*.py") if path.stem[0] != "_"
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_is_whole_and_says_what_it_is(name):
    module = importlib.import_module(f"experiments.vit.configs.{name}")
    check_config(module.get_config())
    for word in ("Shows:", "Hardware:", "Time:", "Expected:", "python -m experiments.vit.main"):
        assert word in module.__doc__


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dataset": "cifar"}, "'digits', 'fashion_mnist', got 'cifar'"),
        ({"shuffle_window": 5}, "shuffle_window must be 0 where in_memory is True, got 5"),
        (
            {
                "dataset": "imagenet2012",
                "in_memory": False,
                "shuffle_window": 5,
                "batch_size": 30,
                "augment__shift": 0.0,
            },
            "batch_size must be a multiple of 4 with a shuffle_window, got 30",
        ),
        ({"num_steps": 0}, "config.num_steps must be at least 1"),
        ({"warmup_steps": 4}, "warmup_steps must be below num_steps=4, got 4"),
        ({"redraw_interval": -1}, "config.redraw_interval must be at least 0, got -1"),
        ({"model__feature_map": "calibrated"}, "at least 1 with .*'calibrated', .*, got 0 with"),
        ({"calibrate_interval": 5}, "and 0 with any other, got 5 with 'positive'"),
        ({"model__exact_bandwidth": -2}, "exact_bandwidth, unless it is -1, must be at least 0"),
        (
            {"model__exact_bandwidth": 2, "model__feature_map": "relu"},
            "exact_bandwidth is for .*, got 2 for feature_map='relu'",
        ),
        (
            {
                "model__attention": "exact",
                "model__feature_map": "calibrated",
                "calibrate_interval": 5,
            },
            "feature_map is for random-feature attention, got 'calibrated'",
        ),
        (
            {"checkpoint__interval": -1},
            "checkpoint.interval must be at least 0, got -1",
        ),
        ({"checkpoint__keep": 0}, "config.checkpoint.keep must be at least 1, got 0"),
        ({"seed": -1}, r"config.seed must be from 0 to 2\^32 - 1, got -1"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0, got nan"),
        ({"b2": 1.0}, r"config.b2 must be in \[0, 1\), got 1.0"),
        ({"model__attention": "linear"}, "one of 'iid', .*'exact', got 'linear'"),
        ({"model__remat": "all"}, "'none', 'block', 'dots', got 'all'"),
        ({"mesh__data": 0}, "config.mesh.data, unless it is -1, must be at least 1"),
        ({"mesh__tensor": -1}, "config.mesh.tensor must be at least 1, got -1"),
        ({"num_microbatches": 0}, "config.num_microbatches must be at least 1, got 0"),
        ({"dataset": "digits", "in_memory": False}, "'imagenet2012', .* got 'digits'"),
        ({"image_size": 0}, "config.image_size must be at least 1"),
        ({"image_size": 9}, "multiples of patch_size=2"),
        ({"num_workers": -1}, "config.num_workers must be at least 0, got -1"),
        ({"augment__crop_area": 0.0}, r"crop_area must be in \(0, 1\], got 0.0"),
        ({"augment__crop_area": 0.05}, "crop_area must be 1.0 where in_memory is True"),
        ({"augment__randaugment_magnitude": 15.0}, "must be from 0 to 10, got 15.0"),
        (
            {"augment__randaugment_magnitude": 5.0},
            "must be 0.0 where in_memory is True",
        ),
        ({"augment__mixup": -0.1}, "config.augment.mixup must be at least 0"),
        (
            {"dataset": "imagenet2012", "in_memory": False},
            "config.augment.shift must be 0.0 where in_memory is False, got 0.5",
        ),
        ({"learning_rate": 0.0}, "config.learning_rate must be above 0, got 0.0"),
        ({"diagnostics__images": -1}, "diagnostics.images must be at least 0, got -1"),
        ({"diagnostics__images": 121}, "at most eval_batch_size=120, got 121"),
        ({"diagnostics__redraws": 1}, "redraws must be at least 2, .* got 1"),
        ({"profile__start": -1}, "config.profile.start must be at least 0, got -1"),
        ({"profile__steps": -1}, "config.profile.steps must be at least 0, got -1"),
        (
            {"profile__start": 3, "profile__steps": 2},
            r"profile must end by num_steps=4, got start \+ steps = 5",
        ),
    ],
)
def test_check_refuses_values(changes, match):
    with pytest.raises(UserError, match=match):
        check_config(tiny.get_config(**changes))


def test_check_refuses_unknown_missing_and_mistyped_fields():
    config = tiny.get_config()
    config.model.widht = 3
    with pytest.raises(UserError, match=r"field model.widht; the known .* model.width"):
        check_config(config)
    config = tiny.get_config()
    del config.clip_norm
    with pytest.raises(UserError, match="The config lacks clip_norm"):
        check_config(config)
    config = tiny.get_config()
    with config.ignore_type():
        config.seed = "0"
    with pytest.raises(UserError, match=r"config\.seed must be int, got '0'"):
        check_config(config)


@pytest.mark.parametrize(
    ("flag", "match"),
    [
        ("--config.model.widht=3", "Unknown config field model.widht; the known ones are seed,"),
        ("--config.widht=3", "Unknown config field widht"),
        ("--config.num_steps=many", "invalid literal for int"),
        ("--seeds=1,2", "--seeds goes with --compare"),
        ("--compare=exact --seeds=a", "--seeds must be numbers, got a"),
        ("--compare=exact --config.seed=3", "--compare and --seeds choose seed; leave it out"),
        ("--process_id=1", "--process_id go together, with --distributed"),
        ("--coordinator=a:1 --num_processes=2 --process_id=0", "go together, with --distributed"),
        ("--distributed --compare=exact", "start a --distributed run for each"),
        ("--workdir=", "--workdir must name a folder, got ''"),
        ("--workdri=x", "Unknown command line flag 'workdri'. Did you mean: workdir"),
    ],
)
def test_flags_refuse(flag, match, monkeypatch):
    argv = ["main", "--workdir=x", *flag.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver(), pytest.raises(SystemExit, match=match):
        main.parse_flags(argv)


def test_main_refuses_arguments_that_are_no_flags():
    with pytest.raises(app.UsageError, match="Unknown arguments: digits"):
        main.main(["main", "digits"])


def test_the_reference_has_the_table_of_all_fields():
    root = pathlib.Path(main.__file__).parents[2]
    assert describe_fields() in (root / "docs" / "reference" / "vit_config.md").read_text()
    assert all(f"| `{name}` | " in describe_fields() for name in FIELDS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data_dir", True),
        ("mesh.fsdp", True),
        ("checkpoint.keep", True),
        ("checkpoint.folder", False),
        ("seed", False),
        # Fields of no version of today.
        ("mesh.expert", True),
        ("checkpoint.every", False),
        ("model.experts", False),
        ("epochs", False),
    ],
)
def test_a_run_may_go_on_with_other_values_of_some_fields(name, expected):
    assert may_change(name) is expected


def test_differences_name_the_fields_that_may_not_change():
    theirs, ours = ({"seed": seed, "mesh": {"data": seed}} for seed in (1, 2))
    assert config_differences(theirs, ours) == ["seed is 1 there, 2 here"]


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].type in (int, float)])
def test_a_number_out_of_its_range_is_refused(name):
    with pytest.raises(UserError, match=rf"config\.{name}.* must be .*, got -7"):
        check_config(tiny.get_config(**{name: FIELDS[name].type(-7)}))
