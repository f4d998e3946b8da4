"""From a checkpoint to its accuracy: ``python -m experiments.vit.evaluate --workdir=DIR``."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import ml_collections
from absl import app, flags
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.vit import checkpoint, data, train
from simrf_jax.models import ViT, ViTConfig


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
    dataset = data.DATASETS[config.dataset](config.data_dir)
    mesh = train.make_mesh(-1)
    batch_size = -(-config.eval_batch_size // mesh.size) * mesh.size
    model_config = ViTConfig(
        image_size=dataset.test.images.shape[1:3],
        channels=dataset.test.images.shape[3],
        num_classes=dataset.num_classes,
        **config.model,
    )
    optimizer, _ = train.make_optimizer(config)
    init = functools.partial(train.init_state, model_config=model_config, optimizer=optimizer)
    # Of the state only what the forward pass needs is read.
    state = jax.eval_shape(init, jax.random.key(0))._replace(step=None, key=None, opt_state=None)
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), state
    )
    folder = config.checkpoint.folder or workdir / "checkpoints"
    state, step = checkpoint.load(folder, state, best=best)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: ViT(model_config, rngs=nnx.Rngs(0))))
    eval_step = jax.jit(functools.partial(train.eval_step, graphdef=graphdef))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    batches = data.eval_batches(dataset.test, batch_size)
    means = train.test_means(eval_step(state, jax.device_put(b, sharded)) for b in batches)
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
