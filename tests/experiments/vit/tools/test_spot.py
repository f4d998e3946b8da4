"""The restart loop, with a program in place of gcloud that plays slices which are taken away."""

import sys

import pytest

from experiments.vit.tools import spot, tpu_slice

# Each trained command adds a checkpoint, unless it is told not to; the third one ends the run. A
# slice is taken away after its first training.
GCLOUD = """#!{python}
import pathlib, sys
here = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith("--")]
with open(here / "log", "a") as log:
    print(*sys.argv[1:], file=log)
state, run = here / "state", here / "run"
if words[0] == "storage":
    folder = run / sys.argv[3].removeprefix("gs://bucket/runs/simplex").strip("/")
    if not folder.is_dir():
        sys.exit(1)
    print(*(f"{{sys.argv[3]}}{{path.name}}/" for path in folder.iterdir()), sep="\\n")
elif "describe" in words:
    if not state.exists():
        sys.exit(1)
    print(state.read_text())
elif "create" in words:
    state.write_text("ACTIVE")
elif "delete" in words:
    state.unlink()
elif "ssh" in words and "experiments.vit.main" in sys.argv[-2]:
    steps = run / "checkpoints"
    steps.mkdir(parents=True, exist_ok=True)
    done = len(list(steps.iterdir())) + 1
    if not (here / "stuck").exists():
        (steps / str(1000 * done)).touch()
    if done == 3:
        (run / "results.json").touch()
        sys.exit(0)
    if done == 1:
        state.write_text("SUSPENDED")
    sys.exit(255)
"""
ARGV = ["--name=vit", "--zone=z", "--type=v5litepod-256", "--runtime=r"]
ARGV += ["--run=gs://bucket/runs/simplex", "--", "--config.num_steps=9"]


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcloud"
    program.write_text(GCLOUD.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(spot, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(tpu_slice, "_POLL_SECONDS", 0)
    return tmp_path


def calls(gcloud, *words):
    lines = (gcloud / "log").read_text().splitlines()
    return [line for line in lines if all(word in line for word in words)]


def test_a_run_is_done_on_two_slices(gcloud, capfd):
    spot.main(ARGV)
    assert "The results are in gs://bucket/runs/simplex" in capfd.readouterr().out
    trained = calls(gcloud, "ssh", "experiments.vit.main")
    assert len(trained) == 3
    for word in (
        "--worker=all",
        "--distributed --config.num_steps=9 --workdir=runs/simplex",
        "--config.mirror=gs://bucket/runs/simplex ",
        "--config.checkpoint.folder=gs://bucket/runs/simplex/checkpoints",
    ):
        assert word in trained[0]
    assert len(calls(gcloud, "create", "--accelerator-type=v5litepod-256", "--spot")) == 2
    assert len(calls(gcloud, "delete")) == 2  # The one that was taken away, and the last one.
    assert len(calls(gcloud, "scp", "simrf_jax.tar.gz")) == 2
    assert not (gcloud / "state").exists()


def test_starts_that_bring_nothing_end_and_delete_the_slice(gcloud):
    (gcloud / "stuck").touch()
    with pytest.raises(SystemExit, match=r"3 starts in a row brought no new checkpoint.* step -1"):
        spot.main(ARGV)
    assert len(calls(gcloud, "ssh", "experiments.vit.main")) == 3
    assert not (gcloud / "state").exists()


def test_a_machine_without_gcloud_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="gcloud is not installed here"):
        spot.main(ARGV)


def test_a_command_that_fails_is_named(gcloud):
    (gcloud / "bin" / "gcloud").write_text("#!/bin/sh\nexit 3\n")
    match = r"failed with code 3: gcloud compute tpus queued-resources .*\nA slice .* delete vit "
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)


def test_an_installation_that_fails_is_tried_again(gcloud):
    program = gcloud / "bin" / "gcloud"
    once = """elif "scp" in words and not (here / "failed").exists():
    (here / "failed").touch()
    sys.exit(1)
elif "ssh" in words and "experiments"""
    program.write_text(program.read_text().replace('elif "ssh" in words and "experiments', once))
    spot.main(ARGV)
    assert (gcloud / "failed").exists()
    assert len(calls(gcloud, "scp")) == 3


def test_ctrl_c_says_what_still_costs(gcloud, monkeypatch):
    def interrupted(self, arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tpu_slice.Slice, "train", interrupted)
    with pytest.raises(SystemExit, match=r"Stopped\. A slice that is still there costs: gcloud"):
        spot.main(ARGV)


def test_a_run_on_a_disk_is_refused(capsys):
    with pytest.raises(SystemExit):
        spot.main([*ARGV[:4], "--run=/tmp/run"])
    assert (
        "--run must be in a bucket, gs://BUCKET/runs/NAME, got /tmp/run" in capsys.readouterr().err
    )
