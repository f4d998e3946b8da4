"""From a checkpoint to its accuracy: ``python -m experiments.vit.evaluate --workdir=DIR``."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import ml_collections
from absl import app, flags

from experiments.vit import checkpoint, sharding, steps
from experiments.vit import input as input_lib
from experiments.vit import program as program_lib


def evaluate(workdir: str | pathlib.Path, *, best: bool) -> dict[str, float]:
    """Evaluates a checkpoint of a run, which may be still training, with its own projections.

    Args:
      workdir: Of the run.
      best: Whether to take the checkpoint of the best test accuracy instead of the newest.

    Returns:
      ``step``, ``test_loss`` and ``test_accuracy``.

    Raises:
      FileNotFoundError: If workdir holds no run, or no checkpoint.
    """
    workdir = pathlib.Path(workdir)
    config = ml_collections.ConfigDict(json.loads((workdir / "config.json").read_text()))
    mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "sequence": 1})
    config.augment.mixup = 0.0  # Of training, on other devices.
    batch_size = sharding.round_up(config.eval_batch_size, mesh)
    rows = functools.partial(sharding.local_rows, mesh)
    inputs = input_lib.load(config, eval_batch_size=batch_size, rows=rows)
    program = program_lib.build(
        config, mesh, channels=inputs.channels, num_classes=inputs.num_classes
    )
    # Only what the forward pass needs.
    wanted = {"params": program.state.params, "projections": program.state.projections}
    folder = config.checkpoint.folder or workdir / "checkpoints"
    found, step = checkpoint.load(folder, wanted, best=best)
    batches = (sharding.global_batch(b, mesh, batch_size) for b in inputs.eval_batches())
    with jax.set_mesh(mesh):
        means = steps.test_means(program.eval_step(**found, batch=batch) for batch in batches)
    return {"step": step, **means}


def main(argv: list[str]) -> None:
    """Prints the accuracy."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
    checkpoint.quiet()
    result = evaluate(flags.FLAGS.workdir, best=flags.FLAGS.best)
    print(f"test accuracy {result['test_accuracy']:.4f} after step {result['step']}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    flags.DEFINE_bool("best", False, "Take the best checkpoint instead of the newest.")
    app.run(main)
