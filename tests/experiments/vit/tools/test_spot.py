"""The restart loop, with a program in place of gcloud that plays slices which are taken away."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from experiments.vit.tools import spot

# Each trained command adds a checkpoint, unless it is told not to; the third one ends the run. A
# slice is taken away after its first training. "broken" holds, for some verbs, the number of calls
# that fail from now on, and "states" what the next descriptions say.
GCLOUD = """#!{python} -SE
import json, pathlib, shutil, sys, time
here = pathlib.Path({folder!r})
words = [word for word in sys.argv[1:] if not word.startswith("--")]
with open(here / "log", "a") as log:
    print(*(word.replace("\\n", " ") for word in sys.argv[1:]), file=log)
state, run, broken, states = (here / name for name in ("state", "run", "broken", "states"))
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
    if "--format=value(state.failedData.error.message)" in sys.argv:
        sys.exit(print("There is no more quota"))
    if states.exists():
        first, *rest = states.read_text().split(",")
        state.unlink(missing_ok=True)
        if first:
            state.write_text(first)
        if rest:
            states.write_text(",".join(rest))
        else:
            states.unlink()
    if not state.exists():
        sys.exit("ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource")
    print(state.read_text())
elif "create" in words:
    state.write_text((here / "created").read_text() if (here / "created").exists() else "ACTIVE")
    [script] = [word.split("startup-script=")[1] for word in sys.argv if "startup-script=" in word]
    shutil.copy(script, here / "startup.sh")
elif "delete" in words:
    state.unlink()
elif "ssh" in words and "experiments.vit.main" in " ".join(sys.argv):
    if (here / "slow").exists():
        time.sleep(60)
    steps = run / "checkpoints"
    steps.mkdir(parents=True, exist_ok=True)
    done = len(list(steps.iterdir())) + 1
    unstable = int((here / "unstable").read_text()) if (here / "unstable").exists() else 0
    if (here / "log").read_text().count("--distributed") <= unstable:
        state.write_text("SUSPENDED")
        sys.exit(255)
    if (here / "halves").exists() and done < 7:
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
ARGV = ["--name=vit", "--zone=z", "--type=v5litepod-256", "--runtime=r", "--max_hours=9"]
ARGV += ["--run=gs://bucket/runs/simplex", "--", "--config.num_steps=9"]


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcloud"
    program.write_text(GCLOUD.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(spot, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(spot, "POLL_SECONDS", 0)
    return tmp_path


def calls(gcloud, *words):
    lines = (gcloud / "log").read_text().splitlines()
    return [line for line in lines if all(word in line for word in words)]


@pytest.mark.slow
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


@pytest.mark.slow
def test_attempts_that_bring_nothing_end_and_delete_the_slice(gcloud):
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "halves").touch()  # A checkpoint without its mark is none.
    match = (
        r"5 attempts in a row brought no new checkpoint\. .* step -1\. There is no slice left\. "
        r"The last attempt: The trainer ended with code 255"
    )
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert len(calls(gcloud, "ssh", "experiments.vit.main")) == 5
    assert not (gcloud / "state").exists()


@pytest.mark.slow
def test_a_creation_and_its_start_are_one_attempt(gcloud, monkeypatch):
    monkeypatch.setattr(spot, "ATTEMPTS", 2)
    (gcloud / "unstable").write_text("2")  # Two slices are taken away before they save anything.
    with pytest.raises(SystemExit, match="2 attempts in a row brought no new checkpoint"):
        spot.main(ARGV)
    assert len(calls(gcloud, "create")) == 2
    monkeypatch.setattr(spot, "ATTEMPTS", 3)
    (gcloud / "log").unlink()
    spot.main(ARGV)
    assert len(calls(gcloud, "create")) == 4  # One more is taken away after its checkpoint.


@pytest.mark.slow
def test_slices_that_fail_are_told_with_their_reason_and_are_limited(gcloud, monkeypatch, capfd):
    waits = []
    monkeypatch.setattr(spot, "POLL_SECONDS", 30)
    monkeypatch.setattr(spot.time, "sleep", waits.append)
    (gcloud / "created").write_text("FAILED")
    match = r"5 attempts .* The last attempt: The slice failed: There is no more quota"
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert len(calls(gcloud, "create")) == 5
    assert capfd.readouterr().out.count("FAILED. The slice failed: There is no more quota") == 4
    assert waits[::2] == [0, 30, 90, 210, 450]  # Before creations; the others are after them.
    assert not (gcloud / "state").exists()


@pytest.mark.slow
def test_hours_are_limited_and_the_trainer_is_left(gcloud):
    (gcloud / "slow").touch()
    start = time.monotonic()
    match = r"The 0\.0005 hours of --max_hours are over.* step -1\. There is no slice left\."
    with pytest.raises(SystemExit, match=match):
        spot.main(["--max_hours=0.0005" if "hours" in word else word for word in ARGV])
    assert time.monotonic() - start < 30
    assert len(calls(gcloud, "ssh", "experiments.vit.main")) == 1
    assert not (gcloud / "state").exists()


@pytest.mark.slow
def test_hours_count_while_a_slice_is_active_and_this_machine_sleeps(gcloud, monkeypatch):
    """Looks at a clock that is an hour later each time, as one does that was asleep."""
    hours = iter(range(100))
    monkeypatch.setattr(spot.time, "time", lambda: 3600.0 * next(hours))
    monkeypatch.setattr(spot.Slice, "train", lambda self, arguments, seconds: left.append(seconds))
    monkeypatch.setattr(spot.Slice, "install", lambda self, seconds: None)
    left = []
    (gcloud / "states").write_text("WAITING_FOR_RESOURCES,PROVISIONING,ACTIVE,SUSPENDED,")
    with pytest.raises(SystemExit, match="The 9 hours of --max_hours are over"):
        spot.main(ARGV)
    # The hours in the queue are free. A start takes a look before and one after it.
    assert [seconds / 3600 for seconds in left] == [8, 5, 3, 1]


def guard(gcloud, *, minutes, busy):
    """Runs the startup script of a host; returns the minutes it slept and what it asked of curl.

    Args:
      gcloud: Folder with the script.
      minutes: Minutes in which its loop is to see no end of the hours.
      busy: Minutes, counted from 1, in which a trainer is found.
    """
    script = (gcloud / "startup.sh").read_text()
    programs = gcloud / "host"
    programs.mkdir()
    for name, code in {
        "sleep": f"echo $1 >> {gcloud}/slept",
        "pgrep": f"case ' {' '.join(map(str, busy))} ' in *\" $(grep -c . {gcloud}/slept) \"*) ;; "
        "*) false;; esac",
        "curl": f'echo "$*" >> {gcloud}/asked\ncase "$*" in\n'
        '*token*) echo \'{"access_token":"ya29.secret","expires_in":3599}\';;\n'
        "*project-id) printf my-project;;\n"
        f"*DELETE*) [ $(grep -c DELETE {gcloud}/asked) -ge 3 ];;\nesac",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], env={"PATH": path}, check=True, timeout=60)
    slept = (gcloud / "slept").read_text().split()
    assert {*slept} == {"60"}
    asked = (gcloud / "asked").read_text().splitlines()
    deleted = [line for line in asked if "DELETE" in line]
    assert len(deleted) == 3  # It asks until it is granted.
    for line in deleted:
        assert "Authorization: Bearer ya29.secret" in line
        address = "https://tpu.googleapis.com/v2/projects/my-project/locations/z/queuedResources/"
        assert f"{address}vit?force=true" in line
    return len(slept) - 2  # Without those between the requests.


def test_a_slice_deletes_itself_when_it_is_idle(gcloud):
    """Installation and two trainings with a pause, and then nobody comes back."""
    spot.Slice("vit", "z", "t", "r").create(9 * 3600)
    assert guard(gcloud, minutes=550, busy=[3, 4, *range(7, 60), *range(65, 90)]) == 89 + 10


def test_a_slice_deletes_itself_when_its_hours_are_over(gcloud):
    spot.Slice("vit", "z", "t", "r").create(3601)
    assert guard(gcloud, minutes=71, busy=range(1, 99)) == 61 + spot.GRACE_MINUTES


def test_a_host_that_trains_or_installs_is_not_idle(gcloud):
    spot.Slice("vit", "z", "t", "r").create(3600)
    [pattern] = re.findall("pgrep -f '(.*)'", (gcloud / "startup.sh").read_text())
    assert re.search(pattern, ".venv/bin/python -m experiments.vit.main --distributed")
    assert re.search(pattern, f"bash -c {spot._INSTALL}")
    assert not re.search(pattern, "/bin/bash /tmp/metadata-scripts1/startup-script")


@pytest.mark.parametrize("state", ["DELETING", "SUSPENDING"])
def test_a_slice_that_deletes_itself_is_waited_for(gcloud, state):
    (gcloud / "run").mkdir()
    (gcloud / "run" / "results.json").touch()
    (gcloud / "states").write_text(f"{state},{state},")
    spot.main(ARGV)
    assert not calls(gcloud, "delete")


def test_a_run_that_is_done_needs_no_slice(gcloud, capfd):
    (gcloud / "run").mkdir()
    (gcloud / "run" / "results.json").touch()
    spot.main(ARGV)
    assert "there is no slice left" in capfd.readouterr().out
    assert not calls(gcloud, "create") + calls(gcloud, "delete")


@pytest.mark.slow
def test_slices_that_cannot_be_created_are_the_reason_told(gcloud, capfd):
    (gcloud / "broken").write_text('{"create": 99}')
    match = r"5 attempts in a row brought .* There is no slice left\..*\nA slice .* delete vit "
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert capfd.readouterr().out.count("failed with code 1: gcloud compute tpus") == 4
    assert not calls(gcloud, "delete")


@pytest.mark.slow
def test_a_slice_that_cannot_be_deleted_hides_no_reason(gcloud):
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "stuck").touch()
    (gcloud / "broken").write_text('{"delete": 99, "ssh": 99}')
    match = r"(?s)5 attempts in a row .* The slice could not be deleted: .*code 1: gcloud"
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)


def test_a_machine_without_gcloud_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="gcloud is not installed here"):
        spot.main(ARGV)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["describe", "ls"])
def test_a_lookup_that_fails_is_no_answer(gcloud, monkeypatch, capfd, verb):
    monkeypatch.setattr(spot, "LOOKUPS", 3)
    (gcloud / "state").write_text("ACTIVE")
    (gcloud / "broken").write_text(json.dumps({verb: 3}))
    match = rf"failed 3 times, with code 1 at last: gcloud .*{verb}.*\nNothing was created or delet"
    with pytest.raises(SystemExit, match=match):
        spot.main(ARGV)
    assert "problem refreshing your tokens" in capfd.readouterr().err
    assert not calls(gcloud, "create") + calls(gcloud, "delete")
    (gcloud / "broken").write_text(json.dumps({verb: 2}))
    spot.main(ARGV)  # It asks again, and goes on with the slice that is there.
    assert len(calls(gcloud, "create")) == 1  # In place of the one that was taken away.


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The command of a host, and the path of the program that stands in for its Python."""
    told = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(spot, "_run", lambda words, **_: told.append(words) or done)
    spot.Slice("vit", "z", "t", "r").train(["--workdir=x"], 60)
    [command] = [w.removeprefix("--command=") for w in told[0] if w.startswith("--command=")]
    trainer = tmp_path / spot.FOLDER / ".venv" / "bin" / "python"
    trainer.parent.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.chdir(tmp_path)

    def write(name, code):
        path = trainer if name == "python" else tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)

    return command, write


@pytest.mark.slow
def test_a_trainer_that_still_runs_is_stopped_first(host, tmp_path):
    """Runs the command of a host with programs that stand in for those of the system."""
    command, write = host
    log = f"echo $(basename $0) $* >> {tmp_path}/log"
    # The trainer before is still there when it is looked for twice.
    write("pgrep", f"{log}\n[ $(grep -c pgrep {tmp_path}/log) -ge 3 ] && exit 1; exit 0")
    for name in ("pkill", "sleep", "python"):
        write(name, log)
    subprocess.run(["bash", "-c", command], check=True)
    ran = (tmp_path / "log").read_text().splitlines()
    names = [" ".join(line.split()[:2]) for line in ran]
    waits = ["pgrep -f", "sleep 1", "pgrep -f", "sleep 1", "pgrep -f"]
    assert names == ["pkill -f", *waits, "pkill -KILL", "python -m"]
    assert ran[-1] == "python -m experiments.vit.main --distributed --workdir=x"
    [pattern] = {line.split(" -f ")[1] for line in ran if " -f " in line}
    assert re.search(pattern, f".venv/bin/{ran[-1]}")
    assert not re.search(pattern, f"bash -c {command}")


def without_processes(write):
    for name in ("pkill", "pgrep"):
        write(name, "exit 1")


@pytest.mark.slow
def test_the_output_and_the_code_of_the_trainer_are_those_of_the_command(host):
    command, write = host
    without_processes(write)
    write("python", "echo one; echo two >&2; exit 7")
    done = subprocess.run(["bash", "-c", command], check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 7
    assert done.stdout.split() == ["one", "two"]


@pytest.mark.slow
def test_the_trainer_outlives_a_connection_that_is_lost(host, tmp_path):
    command, write = host
    without_processes(write)
    write("python", f"for i in 1 2 3 4; do echo $i; sleep 1; done; touch {tmp_path}/trained")
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    process.stdout.close()
    end = time.monotonic() + 30
    while not (tmp_path / "trained").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert process.wait(30) == 0


@pytest.mark.slow
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
    def interrupted(self, arguments, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(spot.Slice, "train", interrupted)
    with pytest.raises(SystemExit, match=r"Stopped\. A slice that is still there costs: gcloud"):
        spot.main(ARGV)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--run=/tmp/run", "--run must be in a bucket, gs://BUCKET/runs/NAME, got /tmp/run"),
        ("--max_hours=0", "--max_hours must be positive and finite, got 0.0"),
        ("--max_hours=nan", "--max_hours must be positive and finite, got nan"),
        ("--max_hours=inf", "--max_hours must be positive and finite, got inf"),
    ],
)
def test_flags_are_checked(capsys, flag, message):
    with pytest.raises(SystemExit):
        spot.main([*ARGV[:6], flag])
    assert message in capsys.readouterr().err


def test_hours_must_be_given(capsys):
    with pytest.raises(SystemExit):
        spot.main([word for word in ARGV if "hours" not in word])
    assert "arguments are required: --max_hours" in capsys.readouterr().err
