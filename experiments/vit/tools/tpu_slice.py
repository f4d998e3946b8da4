"""A slice of a TPU pod, by ``gcloud compute tpus``: created, installed on, and deleted."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from experiments.harness.mistakes import UserError

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = "simrf_jax"  # On the hosts, in the home folder.
_ARCHIVE = f"{FOLDER}.tar.gz"
_POLL_SECONDS = 30.0

# uv brings this Python, whatever the image of the hosts has.
_INSTALL = f"""set -e
rm -rf {FOLDER}/simrf_jax {FOLDER}/experiments
tar -xzf {_ARCHIVE}
cd {FOLDER}
command -v ~/.local/bin/uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
~/.local/bin/uv venv --clear --python 3.11
~/.local/bin/uv pip install -r requirements/pod.txt
~/.local/bin/uv pip install --no-deps -e ."""


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
        """Returns the state of the queued resource, such as ``ACTIVE``, or "" if there is none."""
        found = self._queued("describe", "--format=value(state.state)", check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    def create(self) -> None:
        """Asks for a spot slice; it may take hours until it is active."""
        self._queued(
            "create",
            f"--node-id={self.name}",
            f"--accelerator-type={self.type}",
            f"--runtime-version={self.runtime}",
            "--spot",
        )

    def delete(self) -> None:
        """Deletes it, so that it no longer costs."""
        self._queued("delete", "--force", "--quiet")

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
        """Runs the trainer on all hosts until it ends; returns 0 if it went well on all of them."""
        command = shlex.join(["-m", "experiments.vit.main", "--distributed", *arguments])
        command = f"cd {FOLDER} && .venv/bin/python {command}"
        return self._vm(
            "ssh", self.name, "--worker=all", f"--command={command}", check=False
        ).returncode

    def _queued(
        self, verb: str, *flags: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        words = ["queued-resources", verb, self.name, f"--zone={self.zone}", *flags]
        return _run(["gcloud", "compute", "tpus", *words], check=check, capture=verb == "describe")

    def _vm(self, verb: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["gcloud", "compute", "tpus", "tpu-vm", verb, *words, f"--zone={self.zone}"]
        return _run(command, check=check)


def listed(folder: str) -> list[str]:
    """Returns the names in a folder of a bucket; none if there is no such folder."""
    found = _run(["gcloud", "storage", "ls", f"{folder}/"], check=False, capture=True)
    return [line.rstrip("/").rpartition("/")[2] for line in found.stdout.splitlines()]


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
