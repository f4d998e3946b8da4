"""What the command line says of input that cannot work: one line, and nothing is written."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from absl.testing import flagsaver

from experiments.harness import interrupts, process
from experiments.vit import config, main, train
from experiments.vit.data import in_memory
from experiments.vit.metrics import curves, log
from experiments.vit.training import train_step
from simrf_jax.models import ViT
from tests.experiments.vit import prepared, tiny

RECORDS = "--config.in_memory=False --config.augment.shift=0.0 --config.dataset=imagenet2012"
EXACT = "--config.model.attention=exact"  # Compiles fastest.
CONFIG_DICT = "from ml_collections.config_dict import *\ndef get_config(): return ConfigDict"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the program with a tiny config in this process, all of it but the allocator."""
    monkeypatch.setattr(process, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # It puts its own there.
    monkeypatch.setenv("PYTHONWARNINGS", "")  # Likewise.
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # Not installed: nothing uses the network.

    def run(flags, config=tiny.__file__):
        argv = ["main", f"--workdir={tmp_path / 'run'}", f"--config={config}", *flags.split()]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.delitem(sys.modules, "config_config", raising=False)  # The last config file.
        with flagsaver.flagsaver():
            main.main(main.parse_flags(argv))

    return run


@pytest.mark.fast
@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--config.dataset=cifar", "config.dataset must be one of 'digits', .* got 'cifar'"),
        (
            "--config.model.attention=simplex_plus --config.model.num_heads=32",
            "attention='simplex_plus' needs heads of at least 2 dimensions",
        ),
        ("--config.image_size=9", "image_size must be multiples of patch_size=2, got"),
        ("--config.image_size=16", "config.image_size must be 8, as the images of digits are 8"),
        pytest.param(
            "--config.mesh.data=9",
            "no more than the 8 devices there are, got 9 x 1 x 1 x 1",
            marks=pytest.mark.cpu,
        ),
        pytest.param(
            "--config.mesh.data=8 --config.batch_size=36",
            "batch_size must be a multiple of 8",
            marks=pytest.mark.devices(8),
        ),
        ("--config.seed=4294967296", r"config.seed must be from 0 to 2\^32 - 1, got 4294967296"),
        ("--compare=linear", "--compare must be one of .* got 'linear'"),
        ("--compare=", "--compare must name attentions, of iid, orthogonal, simplex,"),
        ("--compare=exact,exact", "--compare and --seeds must each name something, and nothing"),
        ("--compare=exact --seeds=4294967296", r"from 0 to 2\^32 - 1, got 4294967296"),
        (f"{RECORDS} --config.data_dir=/nowhere", "There is no imagenet2012 in '/nowhere'. Say"),
        ("--workdir=gs://bucket/run", "--workdir must be a folder of this machine, got gs:"),
        (f"--workdir=/{'x' * 300}", "xxx cannot be written: .*File name too long"),
        (
            "--config.checkpoint.interval=2 --config.checkpoint.folder=/proc/run",
            "^/proc/run cannot be written: ",
        ),
        (
            "--config.checkpoint.interval=2 --config.checkpoint.folder=gs://bucket/run",
            "^Checkpoints cannot be kept in gs://bucket/run: .*gcsfs",
        ),
        (f"{RECORDS} --config.data_dir=gs://bucket/data", "install gcsfs"),
    ],
)
def test_what_cannot_work_ends_the_program_with_a_line(command, tmp_path, flags, match):
    with pytest.raises(SystemExit, match=match):
        command(flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def get_config(:", r"config.py cannot be read: SyntaxError: .*config.py, line 2"),
        ("x = 1", "config.py cannot be read: AttributeError: .* no attribute 'get_config'"),
        ("def get_config(): return x", r"NameError: name 'x' is not defined \(line 2\)$"),
        ("def get_config(a): raise ValueError(a)", r"ValueError: argument \(line 2\)$"),
        ("def get_config(a): return a", "must be an ml_collections.ConfigDict, got 'argument'"),
        ("def get_config(a): return dict()", "must be an ml_collections.ConfigDict, got {}"),
        ("def get_config(): return None", "must be an ml_collections.ConfigDict, got None"),
        ("def get_config(a, b): return a", "TypeError: .* missing 2 required .*. A config is a"),
        ("import no_such_module", r"ModuleNotFoundError: No module .*'no_such_module' \(line 2\)$"),
        ("def get_config(): open('/nowhere')", r"FileNotFoundError: .*'/nowhere' \(line 2\)$"),
        ("import sys; sys.exit(0)", r"SystemExit: 0 \(line 2\)$"),
        ("def get_config(): raise SystemExit", r"SystemExit:  \(line 2\)$"),
        ("def get_config(): return get_config()", r"RecursionError: maximum .* \(line 2\)$"),
        ("def get_config(): return {}[0]\nwrong = 3", r"KeyError: 0 \(line 2\)$"),
        (f"{CONFIG_DICT}({{3: 4}})", "Unknown config field 3; the known ones are seed"),
        (
            f"{CONFIG_DICT}({{'seed': required_placeholder(int)}})",
            "RequiredValueError: None value found",
        ),
        (f"{CONFIG_DICT}({{'model': 3}})", "Unknown config field model; the known ones are seed"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named_with_the_line(command, tmp_path, source, match):
    path = tmp_path / "config.py"
    path.write_text(f"# A comment.\n{source}\n")
    with pytest.raises(SystemExit, match=match):
        command("", f"{path}:argument" if "(a)" in source else path)


@pytest.mark.fast
@pytest.mark.parametrize("flags", ["", "--config.seed=3"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.png", prepared.encode(prepared.halves((8, 8)), "PNG").getvalue()),
        ("config.json", b'{"seed": 3, "model": {"width": 8}}'),
        ("config.yaml", b"seed: 3\nmodel:\n  width: 8\n"),
        ("empty.py", b""),
        ("nul.py", b"x = 1\0\n"),
        ("latin.py", "# é\n".encode("latin-1")),
        ("nested.py", b"(" * 500),
    ],
)
def test_a_config_file_that_is_no_python_is_refused(command, tmp_path, flags, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        command(flags, path)
    told = str(end.value)
    assert told.startswith(f"--config={path} cannot be read: ")
    assert "A config is a Python file with a function get_config" in told
    assert "\n" not in told


@pytest.mark.fast
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_a_config_that_is_no_file_is_refused(command, tmp_path, make):
    make(tmp_path / "config.py")
    with pytest.raises(SystemExit, match=r"config.py: (that is no file|there is no such file)\.$"):
        command("", tmp_path / "config.py")


@pytest.mark.fast
def test_a_config_file_that_is_not_there_is_named(command, tmp_path):
    with pytest.raises(SystemExit, match=r"--config=nowhere.py: there is no such file\.$"):
        command("", "nowhere.py:argument")


@pytest.mark.fast
@pytest.mark.parametrize("flags", ["", "--compare=simplex"])
def test_a_config_without_its_fields_is_refused(command, tmp_path, flags):
    path = tmp_path / "config.py"
    path.write_text(f"{CONFIG_DICT}({{'seed': 3}})")
    with pytest.raises(SystemExit, match=r"^The config lacks dataset, data_dir"):
        command(flags, path)


@pytest.mark.fast
def test_a_comparison_is_refused_before_any_run_trains(command, tmp_path, monkeypatch):
    monkeypatch.setattr(train_step, "train_step", pytest.fail)
    stopped = tmp_path / "run" / "exact-1"
    stopped.mkdir(parents=True)
    (stopped / "metrics.csv").touch()
    (stopped / "config.json").write_text('{"seed": 1}')
    with pytest.raises(SystemExit, match="exact-1 holds a run of another config: dataset is abs"):
        command("--compare=simplex,exact --seeds=0,1 --config.checkpoint.interval=2")


@pytest.mark.fast
@pytest.mark.parametrize(("flags", "run"), [(EXACT, "."), ("--compare=exact", "exact-0")])
def test_checkpoints_are_not_thrown_away(command, tmp_path, flags, run):
    folder = tmp_path / "run" / run
    folder.mkdir(parents=True)
    (folder / "metrics.csv").touch()
    ours = tiny.get_config(model__attention="exact", checkpoint__interval=2)
    (folder / "config.json").write_text(ours.to_json())
    refused = r"with checkpoint\.interval=2, .* checkpoint\.interval=0\. Keep the interval, or"
    with pytest.raises(SystemExit, match=refused):
        command(f"{flags} --config.checkpoint.interval=0")
    assert (folder / "metrics.csv").exists()


@pytest.mark.fast
def test_the_results_of_a_comparison_are_not_written_over(command, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"simplex": []}')
    with pytest.raises(SystemExit, match=r"run already holds a run \(results.json\)"):
        command(EXACT)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["results.json"]


@pytest.mark.fast
def test_an_interrupt_says_how_to_go_on(command, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    lines = []
    monkeypatch.setattr(train, "train", interrupt)
    monkeypatch.setattr(interrupts, "end", lines.append)
    with pytest.raises(KeyboardInterrupt):  # Where the process would be gone.
        command("")
    assert lines == ["Stopped; the same command goes on from the last checkpoint, if any are kept."]


@pytest.mark.fast
def test_a_host_that_finds_no_others_says_so(command, monkeypatch):
    def initialize(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(SystemExit, match=r"^--distributed: coordinator_address should be defined"):
        command("--distributed")


@pytest.mark.fast
def test_a_failure_on_one_of_several_hosts_ends_it_at_once(command, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("a step")

    codes = []
    monkeypatch.setattr(train, "train", fail)
    with pytest.raises(RuntimeError, match="a step"):
        command("")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(SystemExit):  # Where the process would be gone.
        command("")
    assert codes == [1]
    assert "RuntimeError: a step" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_ends_the_program_with_a_line(command, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(SystemExit, match=r"run cannot be written: .*File exists"):
        command(EXACT)


@pytest.mark.fast
@pytest.mark.parametrize("config", [None, "{"])
def test_a_run_whose_config_is_lost_is_refused(command, tmp_path, config):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").touch()
    if config:
        (tmp_path / "run" / "config.json").write_text(config)
    with pytest.raises(SystemExit, match=r"run holds a run whose config is lost \(.*config.json"):
        command("--config.checkpoint.interval=2")


# Where a bug may be, and of which type: those of a user's mistakes, before there was UserError.
BUGS = {
    "check": (config, "_check_diagnostics", ValueError),
    "field": (config, "_check_data", KeyError),
    "data": (in_memory, "load_digits", OSError),
    "model": (ViT, "__init__", TypeError),
    "step": (train_step, "train_step", ValueError),
    "evaluation": (train, "evaluation_means", FloatingPointError),
    "curves": (curves, "draw_curves", ValueError),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_no_mistake_of_the_user(command, monkeypatch, name):
    owner, function, error = BUGS[name]

    def fail(*_, **__):
        raise error("A mistake of ours.")

    monkeypatch.setattr(owner, function, fail)
    if owner is in_memory:
        monkeypatch.setitem(in_memory.DATASETS, "digits", fail)
    with pytest.raises(error, match=r"A mistake of ours\.") as bug:
        command(EXACT)
    assert bug.traceback[-1].path == pathlib.Path(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("drawn_before_the_end", [False, True])
def test_a_drawing_that_fails_loses_no_result_and_is_made_up_for(
    command, tmp_path, monkeypatch, drawn_curves, drawn_before_the_end
):
    def fail(_):
        raise ValueError("A mistake of ours.")

    with monkeypatch.context() as patch:
        patch.setattr(curves, "draw_curves", fail)
        patch.setattr(log, "SECONDS_BETWEEN_DRAWINGS", 0)
        with pytest.raises(
            ValueError, match=r"(?s)ours\..*results.json is whole; the same command"
        ):
            command(EXACT)
    results = (tmp_path / "run" / "results.json").read_text()
    assert json.loads(results)["steps"] == 4
    picture = tmp_path / "run" / "curves.png"
    assert not picture.exists()
    if drawn_before_the_end:
        picture.touch()
        os.utime(picture, (0, 0))
    with pytest.raises(SystemExit, match=r"already holds a run \(results.json\)"):
        command(EXACT)
    assert (tmp_path / "run" / "results.json").read_text() == results
    assert picture.stat().st_size > 10_000


MODIFIED = """
from absl import app
from experiments.vit import main
from experiments.vit.training import train_step

class Modified(train_step.ViT):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs, widht=3)

train_step.ViT = Modified
app.run(main.main, flags_parser=main.parse_flags)
"""


@pytest.mark.slow
def test_the_traceback_of_a_modified_model_is_printed(tmp_path):
    (tmp_path / "modified.py").write_text(MODIFIED)
    root = pathlib.Path(main.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "modified.py", f"--config={tiny.__file__}", "--workdir=run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert re.search(
        r'modified.py", line 8, in __init__\n(?s:.*)TypeError: .*argument \'widht\'', run.stderr
    ), run.stderr
