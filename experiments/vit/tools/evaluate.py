"""Evaluates a checkpoint: ``python -m experiments.vit.tools.evaluate --workdir=DIR``."""

from __future__ import annotations

import pathlib

import jax
from absl import app, flags

from experiments.harness import process
from experiments.harness.mistakes import UserError, exit_on_user_error, user_mistakes
from experiments.vit.data import pipeline
from experiments.vit.training import sharding, trained
from experiments.vit.training.train_step import evaluation_means
from simrf_jax._src import checks


def evaluate(
    workdir: str | pathlib.Path,
    *,
    best: bool,
    data_dir: str | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Evaluates a checkpoint of a run, which may be still training, with its own projections.

    A damaged checkpoint is passed over with a warning, for the newest or the best of the others.

    Args:
      workdir: Folder of the run.
      best: If true, take the most accurate checkpoint instead of the newest.
      data_dir: Folder of the data; None for the folder that the run read.
      batch_size: Images of a batch, rounded up to a multiple of the devices; None for the run's.

    Returns:
      ``step``, ``test_loss`` and ``test_accuracy``.

    Raises:
      IncompatibleError: If the checkpoints are of another run; the message names what differs.
      UserError: If workdir holds no run, or no checkpoint; the checkpoint or the data cannot be
        read, or the data is not what the model was trained on; or batch_size is not positive.
    """
    if batch_size is not None:
        with user_mistakes(TypeError, ValueError):
            checks.positive_int("batch_size", batch_size)
    mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1, "sequence": 1})
    model = trained.load(workdir, mesh, best=best)
    config, program = model.config, model.program
    config.data_dir = config.data_dir if data_dir is None else data_dir
    batch_size = sharding.round_up(batch_size or config.eval_batch_size, mesh)
    rows = sharding.rows_of_host(mesh, batch_size)
    inputs = pipeline.load_test(config, eval_batch_size=batch_size, rows=rows)
    if (inputs.channels, inputs.num_classes) != (program.model.channels, program.model.num_classes):
        raise UserError(
            f"The model must be evaluated on images of {program.model.channels} channels and "
            f"{program.model.num_classes} classes, got {inputs.channels} and {inputs.num_classes} "
            f"in {config.dataset}."
        )
    batches = (sharding.global_batch(b, mesh, batch_size) for b in inputs.eval_batches())
    with jax.set_mesh(mesh):
        means = evaluation_means(
            (program.eval_step(model.states, batch) for batch in batches), name="test"
        )
    return {"step": model.step, **means}


def main(argv: list[str]) -> None:
    """Prints the accuracy."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
    process.quiet_orbax()
    with exit_on_user_error():
        given = flags.FLAGS
        result = evaluate(
            given.workdir, best=given.best, data_dir=given.data_dir, batch_size=given.batch_size
        )
    print(f"test accuracy {result['test_accuracy']:.4f} after step {result['step']}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    flags.DEFINE_bool("best", False, "Take the best checkpoint instead of the newest.")
    flags.DEFINE_string("data_dir", None, "Where the data is, unless it is where the run had it.")
    flags.DEFINE_integer("batch_size", None, "Images at a time; as in the run unless given.")
    app.run(main)
