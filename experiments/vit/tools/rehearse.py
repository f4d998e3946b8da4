"""Rehearses a run of a pod on one host, and prints what to compare before the pod is created.

On a host of 8 chips it trains 200 steps of imagenet2012.py at batch 128, from the bucket and into
the bucket that the pod will use. It sends SIGTERM in the middle, goes on, and evaluates the last
checkpoint. It ends with an error if any of that does not do what docs/how_to/pods.md promises.
However it ends, no trainer is left.

Run: python -m experiments.vit.tools.rehearse --workdir=runs/rehearsal --chips=8 --price=PRICE
     -- --config.data_dir=gs://BUCKET/tfds --config.checkpoint.folder=gs://BUCKET/rehearsal
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.harness import files, interrupts, markdown
from experiments.harness.mistakes import UserError, exit_on_user_error
from experiments.vit.tools import evaluate

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "imagenet2012.py"
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0  # The time to save and stop in, for a trainer whose rehearsal is ended.

# The shares of the chips' peak that a ViT-B/16 is expected to reach (docs/how_to/pod_costs.md).
EXPECTED_MFU = (0.1, 0.2)

# What makes the run a rehearsal; the flags behind "--" may change them.
FIELDS = {
    "batch_size": 128,
    "eval_batch_size": 128,
    "num_steps": 200,
    "warmup_steps": 20,
    "log_interval": 10,
    "eval_interval": 200,
    "checkpoint.interval": 50,
}


class Rehearsal(NamedTuple):
    """The measurements of a rehearsal.

    Attributes:
      stopped_at: Step of the checkpoint that SIGTERM left.
      stop_seconds: Seconds from SIGTERM to the end of the program.
      start_seconds: Seconds from the second start to its first row.
      results: Content of ``results.json``.
      mfu: Median share of the peak after the first row; None where the peak is not known.
    """

    stopped_at: int
    stop_seconds: float
    start_seconds: float
    results: dict[str, Any]
    mfu: float | None


def rehearse(workdir: pathlib.Path, arguments: Sequence[str]) -> Rehearsal:
    """Trains, stops, goes on and evaluates.

    Args:
      workdir: Folder of the run; it must not hold one.
      arguments: Further flags of ``experiments.vit.main``; none is another ``--config``.

    Raises:
      UserError: If workdir is there, or an argument names a config; or if a program does not end as
        it should, the run does not go on where it stopped, or results contradict each other.
    """
    if workdir.exists():
        raise UserError(f"{workdir} is there already; give another --workdir or delete it.")
    for argument in arguments:
        if argument.lstrip("-").partition("=")[0] == "config":
            raise UserError(
                f"A rehearsal is of {CONFIG.name}; change its fields by --config.FIELD=VALUE, got "
                f"{argument}."
            )
    fields = [f"--config.{name}={value}" for name, value in FIELDS.items()]
    train = [f"--workdir={workdir}", f"--config={CONFIG}", *fields, *arguments]

    with _trainer(train) as first:
        _wait_for_rows(first, workdir, after=0)
        steps = files.read_json(workdir / "config.json")["num_steps"]
        _wait_for_rows(first, workdir, after=steps // 2 - 1)
        told = time.monotonic()
        first.send_signal(signal.SIGTERM)
    stop_seconds = time.monotonic() - told
    if (workdir / "results.json").exists():
        raise UserError("The run was done before SIGTERM; give it more steps.")
    before, stopped_at = _rows(workdir), _last_step(workdir)

    again = time.monotonic()
    with _trainer(train) as second:
        _wait_for_rows(second, workdir, after=stopped_at)
        start_seconds = time.monotonic() - again
    results = files.read_json(workdir / "results.json")
    rows = _rows(workdir)
    if rows[: len(before)] != before:  # A run that starts over measures other speeds.
        raise UserError(
            f"{workdir / 'metrics.csv'} must keep the {len(before)} rows up to step {stopped_at}, "
            "got others: the run did not go on after SIGTERM, but started over."
        )

    evaluated = evaluate.evaluate(workdir, best=False)["test_accuracy"]
    if abs(evaluated - results["test_accuracy"]) > 1e-3:
        raise UserError(
            f"tools.evaluate must find the test accuracy {results['test_accuracy']:.4f} of "
            f"results.json, got {evaluated:.4f}."
        )
    shares = sorted(float(row["mfu"]) for row in rows[1:] if row["mfu"])
    mfu = shares[len(shares) // 2] if shares else None
    return Rehearsal(stopped_at, stop_seconds, start_seconds, results, mfu)


def report(measured: Rehearsal, *, chips: int, price: float) -> str:
    """Returns the table of what was expected and measured, and what the whole run costs at that.

    Args:
      measured: The rehearsal.
      chips: Chips of this host.
      price: Dollars of a chip-hour.
    """
    results, mfu = measured.results, measured.mfu
    low, high = EXPECTED_MFU
    whole = runpy.run_path(str(CONFIG))["get_config"]()
    images = whole.num_steps * whole.batch_size
    chip_hours = images / results["images_per_second"] * chips / 3600
    here = results["seconds"] / 3600 * chips
    rows = [
        ("images a second, all chips", "", f"{results['images_per_second']:,.1f}"),
        ("MFU", f"{low:.0%} to {high:.0%}", "no peak known" if mfu is None else f"{mfu:.1%}"),
        ("seconds from SIGTERM to the end", "below 30", f"{measured.stop_seconds:.1f}"),
        ("seconds from a start to a row", "below 600", f"{measured.start_seconds:.1f}"),
        ("step after which it stopped and went on", "", f"{measured.stopped_at}"),
        ("batches that were skipped", "0", f"{results['skipped_batches']}"),
        ("test accuracy, also by tools.evaluate", "", f"{results['test_accuracy']:.4f}"),
        ("dollars of these steps", "", f"{here * price:,.2f}"),
        (f"chip-hours of {whole.num_steps:,} steps at this speed", "", f"{chip_hours:,.1f}"),
        ("dollars of them", "", f"{chip_hours * price:,.2f}"),
    ]
    return markdown.table(("", "expected", "measured"), rows)


@contextlib.contextmanager
def _trainer(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the trainer until it ends, or stops it if the block ends by an error."""
    process = subprocess.Popen([sys.executable, "-m", "experiments.vit.main", *arguments])
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        try:
            yield process
            process.wait()
            _check(process)
        finally:
            process.terminate()  # Nothing happens to one that has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)


def _check(process: subprocess.Popen[bytes]) -> None:
    if process.poll():
        raise UserError(
            f"The trainer must end with code 0, got {process.returncode}; its output says why."
        )


def _rows(workdir: pathlib.Path) -> list[dict[str, str]]:
    path = workdir / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _last_step(workdir: pathlib.Path) -> int:
    return max((int(row["step"]) for row in _rows(workdir)), default=0)


def _wait_for_rows(process: subprocess.Popen[bytes], workdir: pathlib.Path, *, after: int) -> None:
    """Waits until there is a row of a later step, or the process has ended."""
    while _last_step(workdir) <= after and process.poll() is None:
        time.sleep(POLL_SECONDS)
    _check(process)


def main(argv: Sequence[str] | None = None) -> None:
    """Rehearses what the command line says, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="Folder of the run.")
    parser.add_argument("--chips", type=int, default=8, help="Chips of this host (%(default)s).")
    parser.add_argument("--price", type=float, required=True, help="Dollars of a chip-hour.")
    parser.add_argument("arguments", nargs="*", help="After --: flags of experiments.vit.main.")
    given = parser.parse_args(argv)
    if given.chips < 1 or given.price < 0:
        parser.error(
            f"--chips must be at least 1 and --price at least 0, got {given.chips}, {given.price}."
        )
    with exit_on_user_error():
        measured = rehearse(pathlib.Path(given.workdir), given.arguments)
        print(report(measured, chips=given.chips, price=given.price))
    print("Create the pod if the measured values are as expected, and if the dollars are.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # It leaves as Ctrl-C does.
    with interrupts.exit_on_interrupt("Stopped, and so is the trainer."):
        main()
