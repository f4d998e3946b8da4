"""Exports a checkpoint to a file that JAX alone runs.

``python -m experiments.vit.tools.export --workdir=DIR --output=FILE``
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

import simrf_jax
from experiments.harness import config_fields, files, mistakes, process
from experiments.harness.mistakes import UserError
from experiments.vit.training import sharding, trained

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")


def export(
    workdir: str | pathlib.Path,
    output: str | pathlib.Path,
    *,
    best: bool = False,
    platforms: Sequence[str] = PLATFORMS[:3],
) -> dict[str, Any]:
    """Writes a model as StableHLO: images in, logits out, for any number of images.

    The parameters, the projections and the calibrations are constants of it, and it runs on one
    device. ``jax.export.deserialize`` reads it. A damaged checkpoint is passed over with a warning,
    for the newest or the best of the others.

    Args:
      workdir: Folder of the run.
      output: The file to make, and beside it ``output.json``, which says what goes in and comes
        out, and has a SHA-256 of each of the two: JAX reads a damaged file without an error. It is
        written last, so a file without it is that of an export which was stopped.
      best: If true, take the most accurate checkpoint instead of the newest.
      platforms: Platforms that the file shall run on, from ``PLATFORMS``.

    Returns:
      Content of the second file.

    Raises:
      IncompatibleError: If the checkpoints are of another run; the message names what differs.
      UserError: If one of the files is there or cannot be written; workdir holds no run, or no
        checkpoint that can be read; or a platform is unknown, or named twice.
    """
    path, description_path = pathlib.Path(output), pathlib.Path(f"{output}.json")
    _check(platforms, path, description_path)
    with mistakes.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    model = trained.load(workdir, mesh, best=best)
    exported = _export(model, platforms)
    with mistakes.user_mistakes(ImportError):  # JAX does not ask for flatbuffers itself.
        content = exported.serialize()
    description = _with_digests(describe(model, exported), content)
    with files.whole_file(path) as partial:
        partial.write_bytes(content)
    try:
        files.write_json(description_path, description)
    except BaseException:
        path.unlink()
        raise
    return description


def _with_digests(description: dict[str, Any], content: bytes | bytearray) -> dict[str, Any]:
    """Adds the SHA-256 of the file, and that of the description's own text without this one."""
    digests = {"model": hashlib.sha256(content).hexdigest(), "description": ""}
    text = files.json_text(description | {"sha256": digests})
    digests["description"] = hashlib.sha256(text.encode()).hexdigest()
    return description | {"sha256": digests}


def _check(platforms: Sequence[str], *paths: pathlib.Path) -> None:
    """Refuses what cannot be before anything is read."""
    for platform in platforms:
        config_fields.check_one_of("Each of --platforms", platform, PLATFORMS)
    if not platforms or len({*platforms}) < len(platforms):
        raise UserError(f"--platforms must name some, and none twice, got {list(platforms)}.")
    for path in paths:
        with mistakes.writing(path):
            found = path.exists()
        if found:
            raise UserError(f"{path} is there; give another --output or delete it.")


def _export(model: trained.Trained, platforms: Sequence[str]) -> jax.export.Exported:
    def classify(images: jax.Array) -> jax.Array:
        return nnx.merge(model.program.graphdef, *model.states)(images)

    (batch,) = jax.export.symbolic_shape("batch")
    shape = (batch, *model.program.model.image_size, model.program.model.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.export.export(jax.jit(classify), platforms=platforms)(images)


def describe(model: trained.Trained, exported: jax.export.Exported) -> dict[str, Any]:
    """Describes what goes in and comes out of the file, and the run it is from."""
    config = model.config
    return {
        "input": {
            "shape": ["batch", *model.program.model.image_size, model.program.model.channels],
            "dtype": "float32",
            "range": [-1, 1],
            "channels": {1: "gray", 3: "RGB"}.get(model.program.model.channels),
            "preprocessing": (
                f"The square in the middle whose side is {config.eval_crop} of the shorter one, "
                f"resized (bilinear, smoothed where it shrinks) to {config.image_size} x "
                f"{config.image_size}; its darkest value made -1 and its brightest 1, as p / 127.5 "
                "- 1 does with bytes."
            ),
        },
        "output": {
            "shape": ["batch", model.program.model.num_classes],
            "dtype": "float32",
            "meaning": f"logits of the classes of {config.dataset}, in its order",
        },
        "platforms": [*exported.platforms],
        "step": model.step,
        "test_accuracy": model.test_accuracy,
        "versions": {"jax": jax.__version__, "simrf_jax": simrf_jax.__version__},
        "config": json.loads(config.to_json_best_effort()),
    }


def main(argv: list[str]) -> None:
    """Prints what was written."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
    process.quiet_orbax()
    given = flags.FLAGS
    with mistakes.exit_on_user_error():
        written = export(given.workdir, given.output, best=given.best, platforms=given.platforms)
    size = pathlib.Path(given.output).stat().st_size / 1e6
    print(f"{given.output}: {size:.1f} MB, the model after step {written['step']}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
    flags.DEFINE_string("output", None, "File to make.", required=True)
    flags.DEFINE_bool("best", False, "Take the best checkpoint instead of the newest.")
    flags.DEFINE_list("platforms", [*PLATFORMS[:3]], f"To run on: {', '.join(PLATFORMS)}.")
    app.run(main)
