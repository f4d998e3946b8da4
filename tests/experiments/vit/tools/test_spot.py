"""The restart loop, with a program in place of gcloud that plays slices which are taken away."""

import os
import re
import subprocess
import sys

import pytest

from experiments.vit.tools import spot, tpu_slice

# Each trained command adds a checkpoint, unless it is told not to; the third one ends the run. A
# slice is taken away after its first training. "broken" holds, for some verbs, the number of calls
# that fail from now on.
GCLOUD = """#!{python} -SE
import json, pathlib, sys
here = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith("--")]
with open(here / "log", "a") as log:
    print(*(word.replace("\\n", " ") for word in sys.argv[1:]), file=log)
state, run, broken = here / "state", here / "run", here / "broken"
failures = json.loads(broken.read_text()) if broken.exists() else {{}}
for verb in {{*words}} & {{*failures}}:
    if failures[verb]:
        failures[verb] -= 1
        broken.write_text(json.dumps(failures))
        sys.exit("ERROR: (gcloud) There was a problem refreshing your tokens")
if words[0] == "storage":
    folder = "gs://bucket/runs/simplex/"
    found = sorted(run.glob(sys.argv[3].removeprefix(folder)))
    if not found:
        sys.exit("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
    print(*(f"{{folder}}{{path.relative_to(run)}}" for path in found), sep="\\n")
elif "describe" in words:
    if not state.exists():
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource")
    print(state.read_text())
elif "create" in words:
    state.write_text("ACTIVE")
elif "delete" in words:
    state.unlink()
elif "ssh" in words and "experiments.vit.main" in sys.argv[-2]:
    steps = run / "checkpoints"
    steps.mkdir(parents=True, exist_ok=True)
    done = len(list(steps.iterdir())) + 1
    if (here / "unstable").exists() and len((here / "log").read_text().split("--distributed")) < 3:
        state.write_text("SUSPENDED")
        sys.exit(255)
    if (here / "halves").exists() and done < 5:
        (steps / str(1000 * done)).mkdir()
        sys.exit(255)
    if not (here / "stuck").exists():
        (steps / str(1000 * done)).mkdir()
        (steps / str(1000 * done) / "commit_success.txt").touch()
    if done >= 3:
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
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "halves").touch()  # A checkpoint without its mark is none.
    match = r"3 starts in a row brought no new checkpoint.* step -1.* The slice is deleted\."
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert len(calls(gcloud, "ssh", "experiments.vit.main")) == 3
    assert not (gcloud / "state").exists()


def test_starts_whose_slice_is_taken_away_do_not_count(gcloud, monkeypatch):
    monkeypatch.setattr(spot, "STARTS_WITHOUT_PROGRESS", 1)
    (gcloud / "unstable").touch()
    spot.main(ARGV)
    assert len(calls(gcloud, "ssh", "experiments.vit.main")) == 1 + 3


def test_a_run_that_is_done_needs_no_slice(gcloud, capfd):
    (gcloud / "run").mkdir()
    (gcloud / "run" / "results.json").touch()
    spot.main(ARGV)
    assert "there is no slice left" in capfd.readouterr().out
    assert not calls(gcloud, "create") + calls(gcloud, "delete")


def test_slices_that_cannot_be_created_are_the_reason_told(gcloud, capfd):
    (gcloud / "broken").write_text('{"create": 99}')
    match = r"3 starts in a row brought .* There is no slice\.\nA slice .* delete vit "
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert capfd.readouterr().out.count("failed with code 1: gcloud compute tpus") == 3
    assert not calls(gcloud, "delete")


def test_a_slice_that_cannot_be_deleted_hides_no_reason(gcloud):
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "stuck").touch()
    (gcloud / "broken").write_text('{"delete": 99, "ssh": 99}')
    match = r"(?s)3 starts in a row brought .* The slice could not be deleted: .*code 1: gcloud"
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)


def test_a_machine_without_gcloud_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="gcloud is not installed here"):
        spot.main(ARGV)


@pytest.mark.parametrize("verb", ["describe", "ls"])
def test_a_lookup_that_fails_is_no_answer(gcloud, monkeypatch, capfd, verb):
    monkeypatch.setattr(tpu_slice, "_LOOKUPS", 3)
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "broken").write_text(f'{{"{verb}": 3}}')
    match = rf"failed 3 times, with code 1 at last: gcloud .*{verb}.*\nNothing was created or delet"
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert "problem refreshing your tokens" in capfd.readouterr().err
    assert not calls(gcloud, "create") + calls(gcloud, "delete")
    (gcloud / "broken").write_text(f'{{"{verb}": 2}}')
    spot.main(ARGV)  # It asks again, and goes on with the slice that is there.
    assert len(calls(gcloud, "create")) == 1  # In place of the one that was taken away.


def test_a_trainer_that_still_runs_is_stopped_first(tmp_path, monkeypatch):
    """Runs the command of a host with programs that stand in for those of the system."""
    told = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(tpu_slice, "_run", lambda words, **_: told.append(words) or done)
    tpu_slice.Slice("vit", "z", "t", "r").train(["--workdir=x"])
    [command] = [w.removeprefix("--command=") for w in told[0] if w.startswith("--command=")]
    trainer = tmp_path / tpu_slice.FOLDER / ".venv" / "bin" / "python"
    trainer.parent.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for program in (trainer, *(tmp_path / "bin" / name for name in ("pkill", "pgrep", "sleep"))):
        # The trainer before is still there when it is looked for twice.
        program.write_text(
            f"#!/bin/sh\necho $(basename $0) $* >> {tmp_path}/log\n"
            f"[ $(basename $0) != pgrep ] || [ $(grep -c pgrep {tmp_path}/log) -lt 3 ]\n"
        )
        program.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"PATH": path}, check=True)
    ran = (tmp_path / "log").read_text().splitlines()
    names = [" ".join(line.split()[:2]) for line in ran]
    waits = ["pgrep -f", "sleep 1", "pgrep -f", "sleep 1", "pgrep -f"]
    assert names == ["pkill -f", *waits, "pkill -KILL", "python -m"]
    assert ran[-1] == "python -m experiments.vit.main --distributed --workdir=x"
    [pattern] = {line.split(" -f ")[1] for line in ran if " -f " in line}
    assert re.search(pattern, f".venv/bin/{ran[-1]}")
    assert not re.search(pattern, f"bash -c {command}")


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
