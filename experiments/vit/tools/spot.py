"""Trains on spot slices of a TPU pod until the run is done, within limits on hours and attempts.

A spot slice may be taken away at any time. This program runs on your own machine, with ``gcloud``.
It waits for a slice, installs the committed files of this repository on its hosts and trains. When
that ends before the run is done, it goes on from the last checkpoint, on the same slice or on a new
one. It deletes the slice when the run is done, when --max_hours are over, and when attempts in a
row bring no new checkpoint.

Your machine may sleep, or lose its network: the trainer goes on without it, and a slice that this
program created deletes itself when its hours are over or its hosts have been idle for ten minutes.

Run: python -m experiments.vit.tools.spot --name=vit --zone=us-west4-a --type=v5litepod-256
     --runtime=v2-alpha-tpuv5-lite --run=gs://BUCKET/runs/simplex --max_hours=HOURS
     -- --config=experiments/vit/configs/imagenet2012.py --config.data_dir=gs://BUCKET/tfds
"""

from __future__ import annotations

import argparse
import math
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.harness.mistakes import UserError, exit_on_user_error

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = "simrf_jax"  # On the hosts, in the home folder.

# In a row without a new checkpoint: creations of a slice with a start, and further starts on it.
ATTEMPTS = 5
LOOKUPS = 60  # Half an hour without a network, or until you log in again.
POLL_SECONDS = 30.0
PAUSE_SECONDS = 60.0  # Hosts that lost another one end within a minute.
IDLE_MINUTES = 10
GRACE_MINUTES = 10  # A slice waits for this program to delete it before it does so itself.
# The states in which something can be tried; the others change by themselves.
_TO_TRY = ("ACTIVE", "", "FAILED", "SUSPENDED")

# uv brings this Python, whatever the image of the hosts has.
_INSTALL = f"""set -e
rm -rf {FOLDER}/simrf_jax {FOLDER}/experiments
tar -xzf {FOLDER}.tar.gz
cd {FOLDER}
command -v ~/.local/bin/uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
~/.local/bin/uv venv --clear --python 3.11
~/.local/bin/uv pip install -r requirements/pod.txt
~/.local/bin/uv pip install --no-deps -e ."""

# The trainer outlives a connection that is lost. The next start stops it, as it holds the chips: it
# saves when it is told to, and one that has not ended after two minutes hangs. The
# shell that runs this does not begin like the trainer, so it does not stop itself. On a busy host,
# tail may run before the shell in the background has made the log.
_TRAINER = r"^\.venv/bin/python -m experiments\.vit\.main"
_TRAIN = f"""pkill -f '{_TRAINER}'
for _ in $(seq 120); do pgrep -f '{_TRAINER}' > /dev/null || break; sleep 1; done
pkill -KILL -f '{_TRAINER}'
cd {FOLDER} || exit
: > spot.log
nohup .venv/bin/python -m experiments.vit.main --distributed %s > spot.log 2>&1 < /dev/null &
tail -n +1 -f --pid=$! spot.log
wait $!"""

# Every host runs this from its start on; it needs nothing of the machine that created the slice.
_GUARD = """#!/bin/bash
ask() {{ curl -sf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/$1"; }}
idle=0
for ((minute = 0; minute < {minutes} && idle < {idle}; minute++)); do
  sleep 60
  idle=$((idle + 1))
  if pgrep -f 'experiments\\.vit\\.main|bin/uv ' > /dev/null; then idle=0; fi
done
while
  slice="projects/$(ask computeMetadata/v1/project/project-id)/locations/{zone}"
  token=$(ask computeMetadata/v1/instance/service-accounts/default/token | cut -d'"' -f4)
  ! curl -sf -X DELETE -H "Authorization: Bearer $token" \\
    "https://tpu.googleapis.com/v2/$slice/queuedResources/{name}?force=true"
do sleep 60; done
"""


class Slice(NamedTuple):
    """A slice, made of a queued resource and a node of one name.

    Attributes:
      name: Name of both.
      zone: Zone of Google Cloud.
      type: Accelerator type, such as ``v5litepod-256``.
      runtime: Version of the TPU's software.
    """

    name: str
    zone: str
    type: str
    runtime: str

    def describe(self, field: str = "state.state") -> str:
        """Returns a field, by default the state such as ``ACTIVE``, or "" if there is no slice."""
        command = self._gcloud("queued-resources", "describe", f"--format=value({field})")
        return _look_up(command, "NOT_FOUND").strip()

    def create(self, seconds: float) -> None:
        """Asks for a spot slice that deletes itself when it was active for so many seconds.

        It may take hours until it is active.
        """
        minutes = math.ceil(seconds / 60) + GRACE_MINUTES
        guard = _GUARD.format(minutes=minutes, idle=IDLE_MINUTES, zone=self.zone, name=self.name)
        flags = [f"--node-id={self.name}", f"--accelerator-type={self.type}"]
        flags += [f"--runtime-version={self.runtime}", "--spot"]
        with tempfile.NamedTemporaryFile("w") as script:
            script.write(guard)
            script.flush()
            flags.append(f"--metadata-from-file=startup-script={script.name}")
            _run(self._gcloud("queued-resources", "create", *flags))

    def delete(self) -> None:
        """Deletes it, so that it no longer costs; waits for one that is deleting itself."""
        while state := self.describe():
            if state in ("DELETING", "SUSPENDING"):
                time.sleep(POLL_SECONDS)
            else:
                _run(self._gcloud("queued-resources", "delete", "--force", "--quiet"))

    def install(self, seconds: float) -> None:
        """Installs the committed files of this repository on every host, by the lock file."""
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/{FOLDER}.tar.gz"
            _run(["git", "-C", f"{ROOT}", "archive", f"--prefix={FOLDER}/", "-o", archive, "HEAD"])
            copy = ["gcloud", "compute", "tpus", "tpu-vm", "scp", archive, f"{self.name}:"]
            _run([*copy, f"--zone={self.zone}", "--worker=all"], timeout=seconds)
        self._on_all(_INSTALL, timeout=seconds)

    def train(self, arguments: Sequence[str], seconds: float) -> int:
        """Runs the trainer on all hosts until it ends, and returns 0 if it went well on all.

        One that is still running is stopped first. One that takes more seconds goes on.
        """
        command = _TRAIN % shlex.join(arguments)
        return self._on_all(command, check=False, timeout=seconds).returncode

    def _on_all(self, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        # A connection that broke while this machine slept must not seem to be there.
        flags = ["--worker=all", f"--command={command}", "--ssh-flag=-oServerAliveInterval=30"]
        return _run(self._gcloud("tpu-vm", "ssh", *flags), **options)

    def _gcloud(self, group: str, verb: str, *flags: str) -> list[str]:
        return ["gcloud", "compute", "tpus", group, verb, self.name, f"--zone={self.zone}", *flags]


def train_until_done(pod: Slice, run: str, arguments: Sequence[str], hours: float) -> None:
    """Trains until ``results.json`` is in the folder of the run.

    Args:
      pod: Slice to create and to train on.
      run: Folder in a bucket for the mirror and the checkpoints.
      arguments: Flags of ``experiments.vit.main`` but for the folders.
      hours: Time that slices may be active for, all of them together.

    Raises:
      UserError: If the hours are over, or ``ATTEMPTS`` in a row bring no new checkpoint; the slice
        is deleted then. If Google Cloud does not say what there is; nothing is deleted then.
    """
    folders = [f"--workdir=runs/{run.rpartition('/')[2]}", f"--config.mirror={run}"]
    folders.append(f"--config.checkpoint.folder={run}/checkpoints")
    results = f"{run}/results.json"
    newest, attempts, why, state = _newest(run), 0, "", ""
    is_new = is_installed = False
    # Unlike a monotonic clock, this one goes on while the machine sleeps.
    left, looked = 3600 * hours, time.time()
    while not _listed(results):
        before, state, now = state, pod.describe(), time.time()
        left -= now - looked if "ACTIVE" in (before, state) else 0.0
        looked = now
        if state == "FAILED":
            why = f"The slice failed: {pod.describe('state.failedData.error.message')}"
        if state in _TO_TRY and not (state == "ACTIVE" and is_new):
            attempts += 1
        if left <= 0 or attempts > ATTEMPTS:
            reason = f"{ATTEMPTS} attempts in a row brought no new checkpoint."
            if left <= 0:
                reason = f"The {hours:g} hours of --max_hours are over."
            last = f"The last checkpoint is of step {newest}."
            raise UserError(f"{reason} {last} {_given_up(pod)} The last attempt: {why}")
        print(f"{pod.name}: {state or 'none'}. {why}", flush=True)
        try:
            if state == "ACTIVE":
                is_new = False
                if not is_installed:
                    pod.install(left)
                is_installed = True
                why = f"The trainer ended with code {pod.train([*arguments, *folders], left)}."
            elif state in _TO_TRY:
                time.sleep(POLL_SECONDS * (2 ** (attempts - 1) - 1))
                pod.delete()
                pod.create(left)
                is_new, is_installed = True, False
        except UserError as error:  # A slice may be taken away at any moment.
            why, is_installed = f"{error}", False
        if state != "ACTIVE":
            time.sleep(POLL_SECONDS)
        elif not _listed(results):
            reached, newest = newest, _newest(run)
            attempts = 0 if newest > reached else attempts
            print(f"{why} The last checkpoint is of step {newest}.", flush=True)
            time.sleep(max(0.0, min(PAUSE_SECONDS, looked + left - time.time())))
    pod.delete()
    print(f"The results are in {run}, and there is no slice left.")


def _given_up(pod: Slice) -> str:
    """Deletes the slice if there is one, and returns what came of it."""
    try:
        pod.delete()
    except UserError as error:
        return f"The slice could not be deleted: {error}."
    return "There is no slice left."


def _newest(run: str) -> int:
    """Returns the step of the newest whole checkpoint in a bucket, or -1 if there is none.

    Orbax writes the mark when all the rest is there.
    """
    marks = _listed(f"{run}/checkpoints/*/commit_success.txt")
    steps = (mark.split("/")[-2] for mark in marks)
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def _listed(pattern: str) -> list[str]:
    return _look_up(["gcloud", "storage", "ls", pattern], "matched no objects").splitlines()


def _look_up(command: Sequence[str], nothing: str) -> str:
    """Returns what a program prints, or "" if its error says that there is ``nothing``.

    Any other error is shown, and the program runs again: a lost network must not look like a slice
    or a checkpoint that is not there.
    """
    for attempt in range(LOOKUPS):
        if attempt:
            time.sleep(POLL_SECONDS)
        found = _run(command, check=False, capture_output=True)
        if found.returncode == 0:
            return found.stdout
        if nothing in found.stderr:
            return ""
        print(found.stderr.strip(), file=sys.stderr, flush=True)
    raise UserError(
        f"This failed {LOOKUPS} times, with code {found.returncode} at last: "
        f"{shlex.join(command)}\nNothing was created or deleted for that; the same command goes on."
    )


def _run(
    command: Sequence[str], *, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program with options of ``subprocess.run``.

    Raises:
      UserError: If it is not there, runs into its timeout, or fails and ``check`` is true.
    """
    try:
        done = subprocess.run(command, check=False, text=True, **options)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not installed here: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} was stopped after {error.timeout:.0f} s") from error
    if check and done.returncode:
        raise UserError(f"This failed with code {done.returncode}: {shlex.join(command)}")
    return done


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, meaning in (
        ("name", "Name of the slice."),
        ("zone", "Zone of Google Cloud."),
        ("type", "Accelerator type, as v5litepod-256."),
        ("runtime", "Software, as v2-alpha-tpuv5-lite."),
        ("run", "gs://BUCKET/runs/NAME for all that it leaves."),
    ):
        parser.add_argument(f"--{name}", required=True, help=meaning)
    hours = "Hours that slices may be active for, all of them together."
    parser.add_argument("--max_hours", required=True, type=float, help=hours)
    parser.add_argument("arguments", nargs="*", help="After --: flags of experiments.vit.main.")
    given = parser.parse_args(argv)
    if not given.run.startswith("gs://"):
        parser.error(f"--run must be in a bucket, gs://BUCKET/runs/NAME, got {given.run}.")
    if not 0 < given.max_hours < math.inf:
        parser.error(f"--max_hours must be positive and finite, got {given.max_hours}.")
    pod = Slice(given.name, given.zone, given.type, given.runtime)
    delete = shlex.join(pod._gcloud("queued-resources", "delete", "--force"))
    left = f"A slice that is still there costs: {delete}"
    with exit_on_user_error():
        try:
            train_until_done(pod, given.run.rstrip("/"), given.arguments, given.max_hours)
        except UserError as error:
            error.add_note(left)
            raise
        except KeyboardInterrupt:
            sys.exit(f"Stopped. {left}")


if __name__ == "__main__":
    main()
