"""A slice of a TPU pod, by ``gcloud compute tpus``: created, installed on, and deleted."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from experiments.harness.mistakes import UserError

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = "simrf_jax"  # On the hosts, in the home folder.
_ARCHIVE = f"{FOLDER}.tar.gz"
_POLL_SECONDS = 30.0
_LOOKUPS = 60  # Half an hour without a network, or until you log in again.

# A connection that is lost may leave a trainer, which holds the chips and the lease. It saves when
# it is told to stop; one that has not ended after two minutes hangs. The shell that runs this does
# not begin like the trainer, so it does not stop itself.
_TRAINER = r"^\.venv/bin/python -m experiments\.vit\.main"
_STOP = f"""pkill -f '{_TRAINER}'
for _ in $(seq 120); do pgrep -f '{_TRAINER}' > /dev/null || break; sleep 1; done
pkill -KILL -f '{_TRAINER}'
"""

# uv brings this Python, whatever the image of the hosts has.
_INSTALL = f"""set -e
rm -rf {FOLDER}/simrf_jax {FOLDER}/experiments
tar -xzf {_ARCHIVE}
cd {FOLDER}
command -v ~/.local/bin/uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
~/.local/bin/uv venv --clear --python 3.11
~/.local/bin/uv pip install -r requirements/pod.txt
~/.local/bin/uv pip install --no-deps -e ."""


class LookupFailedError(UserError):
    """It is not known whether there is a slice, or what is in a bucket."""


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

    def state(self) -> str:
        """Returns the state of the queued resource, such as ``ACTIVE``, or "" if there is none.

        Raises:
          LookupFailedError: If it cannot be known.
        """
        command = self._queued("describe", "--format=value(state.state)")
        return _look_up(command, nothing="NOT_FOUND").strip()

    def create(self) -> None:
        """Asks for a spot slice; it may take hours until it is active."""
        command = self._queued(
            "create",
            f"--node-id={self.name}",
            f"--accelerator-type={self.type}",
            f"--runtime-version={self.runtime}",
            "--spot",
        )
        _run(command)

    def delete(self) -> None:
        """Deletes it, so that it no longer costs."""
        _run(self._queued("delete", "--force", "--quiet"))

    def make_active(self) -> bool:
        """Waits until there is an active slice, creating it if needed, and in place of a lost one.

        Returns:
          True if it was created, so that nothing is installed on it.
        """
        created = False
        while (state := self.state()) != "ACTIVE":
            print(f"{self.name}: {state or 'none'}", flush=True)
            if state in ("SUSPENDED", "FAILED"):
                self.delete()
            if state in ("", "SUSPENDED", "FAILED"):
                self.create()
                created = True
            time.sleep(_POLL_SECONDS)
        return created

    def install(self) -> None:
        """Installs the committed files of this repository on every host, by the lock file."""
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/{_ARCHIVE}"
            _run(["git", "-C", f"{ROOT}", "archive", f"--prefix={FOLDER}/", "-o", archive, "HEAD"])
            self._vm("scp", archive, f"{self.name}:", "--worker=all")
        self._vm("ssh", self.name, "--worker=all", f"--command={_INSTALL}")

    def train(self, arguments: Sequence[str]) -> int:
        """Runs the trainer on all hosts until it ends; one that is still running is stopped first.

        Returns:
          0 if it went well on all of them.
        """
        command = shlex.join(["-m", "experiments.vit.main", "--distributed", *arguments])
        command = f"{_STOP}cd {FOLDER} && .venv/bin/python {command}"
        return self._vm(
            "ssh", self.name, "--worker=all", f"--command={command}", check=False
        ).returncode

    def _queued(self, verb: str, *flags: str) -> list[str]:
        words = ["queued-resources", verb, self.name, f"--zone={self.zone}", *flags]
        return ["gcloud", "compute", "tpus", *words]

    def _vm(self, verb: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["gcloud", "compute", "tpus", "tpu-vm", verb, *words, f"--zone={self.zone}"]
        return _run(command, check=check)


def listed(pattern: str) -> list[str]:
    """Returns the addresses of the objects of a bucket that match a pattern.

    Raises:
      LookupFailedError: If it cannot be known.
    """
    return _look_up(["gcloud", "storage", "ls", pattern], nothing="matched no objects").splitlines()


def _look_up(command: Sequence[str], *, nothing: str) -> str:
    """Returns what a program prints, or "" if its error says that there is ``nothing``.

    Any other error is shown, and the program runs again: a lost network must not look like a slice
    or a checkpoint that is not there.
    """
    for attempt in range(_LOOKUPS):
        if attempt:
            time.sleep(_POLL_SECONDS)
        found = _run(command, check=False, capture=True)
        if found.returncode == 0:
            return found.stdout
        if nothing in found.stderr:
            return ""
        print(found.stderr.strip(), file=sys.stderr, flush=True)
    raise LookupFailedError(
        f"This failed {_LOOKUPS} times, with code {found.returncode} at last: "
        f"{shlex.join(command)}\nNothing was created or deleted for that; the same command goes on."
    )


def _run(
    command: Sequence[str], *, check: bool = True, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a program.

    Raises:
      UserError: If it is not there, or fails and ``check`` is true.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=capture, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not installed here: {error}") from error
    if check and done.returncode:
        raise UserError(f"This failed with code {done.returncode}: {shlex.join(command)}")
    return done
