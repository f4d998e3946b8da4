"""Trains a ViT from a config: ``python -m experiments.vit.main --workdir=runs/digits``."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import traceback

from experiments.harness import interrupts

if __name__ == "__main__":  # The imports below take seconds.
    interrupts.end_at_once("Stopped before it started.")

import jax
from absl import app, flags
from ml_collections import config_flags

from experiments.harness import command_line, mistakes, process
from experiments.vit import train
from experiments.vit.config import TYPES
from experiments.vit.tools import compare
from simrf_jax._src.models.config import ATTENTIONS

# Ctrl-C ends the program with this line; experiments/vit/train.py handles SIGTERM.
STOPPED = "Stopped; the same command goes on from the last checkpoint, if any are kept."
ONE_OF_SEVERAL = (
    "This process ends with this error. If it is that of a connection, another process is gone, "
    "and its output says why. When all have ended, the same command goes on from the last "
    "checkpoint, if any are kept."
)
START_TIMEOUT = 120  # Seconds in which all processes have to be started.
HEARTBEAT_TIMEOUT = 30  # Seconds until the surviving processes exit after one dies.

_DEFAULT_CONFIG = pathlib.Path(__file__).parent / "configs" / "digits.py"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train; configs/digits.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_COMPARE = flags.DEFINE_list(
    "compare", [], "Train each of these attentions (simplex,orthogonal,iid,exact) over --seeds."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Started on every host of a pod or a cluster: train on all their devices."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where JAX cannot find it out as on a TPU pod."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "With --coordinator.", lower_bound=0)
_SEEDS = flags.DEFINE_list("seeds", [], "Seeds for --compare; 0,1,2,3,4 unless given.")


def main(argv: list[str]) -> None:
    """Trains, and prints the test accuracy."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
    process.keep_freed_memory()
    process.quiet_jax()
    process.quiet_orbax()
    # The resource tracker of multiprocessing cleans up after killed workers. Its warning is noise.
    os.environ["PYTHONWARNINGS"] = (
        f"{os.environ.get('PYTHONWARNINGS', '')},ignore:resource_tracker:UserWarning"
    )
    with interrupts.exit_on_interrupt(STOPPED):
        try:
            run()
        except mistakes.UserError as error:
            leave(mistakes.message(error))
        except SystemExit as end:
            leave(end.code)
        except Exception:
            if not jax.distributed.is_initialized():
                raise
            leave(f"{traceback.format_exc()}\n{ONE_OF_SEVERAL}")


def leave(code: int | str | None) -> None:
    """Ends the program; with an error, one of several processes does so at once."""
    if code and jax.distributed.is_initialized():
        # An orderly exit would wait for the others, which wait for this process.
        print(code, file=sys.stderr, flush=True)
        os._exit(1)
    raise SystemExit(code)


def run() -> None:
    """Trains what the flags say."""
    if _DISTRIBUTED.value:
        # JAX aborts a process that has lost the others. A Python traceback would hide its message.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        print(f"Waits up to {START_TIMEOUT} s for the other processes.", file=sys.stderr)
        with mistakes.user_mistakes(ValueError, prefix="--distributed: "):
            jax.distributed.initialize(
                _COORDINATOR.value,
                _NUM_PROCESSES.value,
                _PROCESS_ID.value,
                initialization_timeout=START_TIMEOUT,
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            )
    if _COMPARE.value:
        seeds = [int(seed) for seed in _SEEDS.value] or [0, 1, 2, 3, 4]
        print(compare.compare(_CONFIG.value, _WORKDIR.value, _COMPARE.value, seeds))
        return
    results = train.train(_CONFIG.value, _WORKDIR.value)
    if jax.process_index() == 0:
        print(f"test accuracy {results['test_accuracy']:.4f}")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; an override of a field that no config has is a usage error like any other."""
    overridden = command_line.overridden(argv, TYPES)
    rest = command_line.parse_flags(argv, TYPES, _DEFAULT_CONFIG)
    if _COMPARE.present and not _COMPARE.value:
        raise SystemExit(f"--compare must name attentions, of {', '.join(ATTENTIONS)}.")
    if not all(seed.isdecimal() for seed in _SEEDS.value):
        raise SystemExit(f"--seeds must be numbers, got {','.join(_SEEDS.value)}.")
    if _SEEDS.value and not _COMPARE.value:
        raise SystemExit("--seeds goes with --compare; a single run has --config.seed.")
    given = [flag.value is not None for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)]
    if any(given) and not (all(given) and _DISTRIBUTED.value):
        raise SystemExit(
            "--coordinator, --num_processes and --process_id go together, with --distributed."
        )
    if _DISTRIBUTED.value and _COMPARE.value:
        raise SystemExit("--compare trains on one host; start a --distributed run for each.")
    if clash := {"seed", "model.attention"}.intersection(overridden if _COMPARE.value else ()):
        raise SystemExit(f"--compare and --seeds choose {', '.join(sorted(clash))}; leave it out.")
    return rest


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
