"""Trains on spot slices until the run is done: creates, installs, trains, and starts over.

A spot slice may be taken away at any time. This program runs on your own machine, with ``gcloud``.
It waits for a slice, installs the committed files of this repository on its hosts and trains. When
that ends before the run is done, it goes on from the last checkpoint, on the same slice or on a new
one. The slice is deleted at the end, and also if starts bring no new checkpoint, unless it was
taken away each time.

Run: python -m experiments.vit.tools.spot --name=vit --zone=us-west4-a --type=v5litepod-256
     --runtime=v2-alpha-tpuv5-lite --run=gs://BUCKET/runs/simplex
     -- --config=experiments/vit/configs/imagenet2012.py --config.data_dir=gs://BUCKET/tfds
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from experiments.harness.mistakes import UserError, told_in_one_line
from experiments.vit.tools import tpu_slice
from experiments.vit.tools.tpu_slice import Slice

# Hosts that lost another one end within a minute, and a lease is over two minutes after its holder.
PAUSE_SECONDS = 150.0
STARTS_WITHOUT_PROGRESS = 3
_TAKEN_AWAY = ("SUSPENDING", "SUSPENDED")


def train_until_done(pod: Slice, run: str, arguments: Sequence[str]) -> None:
    """Trains until ``results.json`` is in the folder of the run.

    Args:
      pod: Slice to create and to train on.
      run: Folder in a bucket for the mirror and the checkpoints.
      arguments: Flags of ``experiments.vit.main`` but for the folders.

    Raises:
      LookupFailedError: If Google Cloud does not say what there is; nothing is deleted then.
      UserError: If several starts in a row bring no new checkpoint, those not counted after which
        the slice is taken away; it is deleted then.
    """
    folders = [
        f"--workdir=runs/{run.rpartition('/')[2]}",
        f"--config.mirror={run}",
        f"--config.checkpoint.folder={run}/checkpoints",
    ]
    newest, fruitless, is_installed = _newest(run), 0, False
    while not _is_finished(run):
        if fruitless == STARTS_WITHOUT_PROGRESS:
            raise UserError(
                f"{fruitless} starts in a row brought no new checkpoint, the last one being of "
                f"step {newest}; the output above says why. {_given_up(pod)}"
            )
        try:
            if pod.make_active() or not is_installed:
                pod.install()
                is_installed = True
            ended = f"The trainer ended with code {pod.train([*arguments, *folders])}"
        except tpu_slice.LookupFailedError:
            raise
        except UserError as error:  # A slice may be taken away at any moment.
            ended, is_installed = f"{error}", False
        before, newest = newest, _newest(run)
        print(f"{ended}; the last checkpoint is of step {newest}.", flush=True)
        if not _is_finished(run):
            time.sleep(PAUSE_SECONDS)
            if newest > before:
                fruitless = 0
            elif pod.state() not in _TAKEN_AWAY:
                fruitless += 1
    if pod.state():
        pod.delete()
    print(f"The results are in {run}, and there is no slice left.")


def _given_up(pod: Slice) -> str:
    """Deletes the slice if there is one, and returns what came of it."""
    try:
        if not pod.state():
            return "There is no slice."
        pod.delete()
    except UserError as error:
        return f"The slice could not be deleted: {error}"
    return "The slice is deleted."


def _is_finished(run: str) -> bool:
    return bool(tpu_slice.listed(f"{run}/results.json"))


def _newest(run: str) -> int:
    """Returns the step of the newest whole checkpoint in a bucket, or -1 if there is none.

    Orbax writes the mark when all the rest is there.
    """
    marks = tpu_slice.listed(f"{run}/checkpoints/*/commit_success.txt")
    steps = (mark.split("/")[-2] for mark in marks)
    return max((int(step) for step in steps if step.isdecimal()), default=-1)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="Name of the slice.")
    parser.add_argument("--zone", required=True, help="Zone of Google Cloud.")
    parser.add_argument("--type", required=True, help="Accelerator type, as v5litepod-256.")
    parser.add_argument("--runtime", required=True, help="Software, as v2-alpha-tpuv5-lite.")
    parser.add_argument(
        "--run", required=True, help="gs://BUCKET/runs/NAME for all that it leaves."
    )
    parser.add_argument("arguments", nargs="*", help="After --: flags of experiments.vit.main.")
    given = parser.parse_args(argv)
    if not given.run.startswith("gs://"):
        parser.error(f"--run must be in a bucket, gs://BUCKET/runs/NAME, got {given.run}.")
    pod = Slice(given.name, given.zone, given.type, given.runtime)
    left = (
        "A slice that is still there costs: gcloud compute tpus queued-resources delete "
        f"{given.name} --zone={given.zone} --force"
    )
    with told_in_one_line():
        try:
            train_until_done(pod, given.run.rstrip("/"), given.arguments)
        except UserError as error:
            error.add_note(left)
            raise
        except KeyboardInterrupt:
            sys.exit(f"Stopped. {left}")


if __name__ == "__main__":
    main()
