"""Loads a trained model from the folder of its run."""

from __future__ import annotations

import pathlib
import warnings
from typing import NamedTuple

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.harness import files
from experiments.harness.mistakes import UserError, user_mistakes
from experiments.vit.config import check_config, config_differences
from experiments.vit.training import checkpoint_contents, checkpoint_damage
from experiments.vit.training.train_step import Program, build_program

# The arrays whose first axes tell the numbers of channels and classes.
_PATCHES = "params.patch_embedding.kernel.value"
_LOGITS = "params.head.bias.value"


class Trained(NamedTuple):
    """The content of a checkpoint without the state of the optimizer.

    Attributes:
      config: Config of the run.
      program: Model and functions of the run, on the mesh.
      states: Parameters, projections and calibrations of the model at that step, as
        ``TrainState.model``.
      step: Steps that were done when it was saved.
      test_accuracy: Test accuracy at that step, or None if the test set was not evaluated.
    """

    config: ConfigDict
    program: Program
    states: tuple[nnx.State, ...]
    step: int
    test_accuracy: float | None


def load(workdir: str | pathlib.Path, mesh: Mesh, *, best: bool) -> Trained:
    """Loads a checkpoint of a run, which may be still training; the data set is not needed.

    A damaged checkpoint is passed over with a warning, for the newest or the best of the others.

    Args:
      workdir: The folder of the run.
      mesh: Mesh that the arrays go to, whatever mesh they were on.
      best: If true, take the most accurate checkpoint instead of the newest.

    Raises:
      IncompatibleError: If the checkpoints are of another run or another program, and the message
        names what differs; or if they have no digests.
      UserError: If workdir holds no run, or one that keeps no checkpoints or none that can be read;
        or the config is not right.
    """
    workdir = pathlib.Path(workdir)
    config = _read_config(workdir)
    if not config.checkpoint.interval:
        raise UserError(
            f"{workdir / 'config.json'} has checkpoint.interval=0: the run keeps no weights."
        )
    folder = config.checkpoint.folder or workdir / "checkpoints"
    for found in checkpoint_contents.find(folder, best=best):
        if differ := config_differences(found.config, _without_folder(config)):
            raise checkpoint_damage.IncompatibleError(
                f"The checkpoints in {folder} are of another run than {workdir / 'config.json'}: "
                f"{'; '.join(differ)}."
            )
        program = _build(config, mesh, found)
        state = program.state
        wanted = {name: getattr(state, name) for name in ("params", "projections", "calibrations")}
        try:
            arrays = checkpoint_contents.load(folder, found, wanted)
        except checkpoint_damage.DamagedError as error:
            warnings.warn(f"{error}; it is passed over.", stacklevel=2)
            continue
        accuracy = found.test_accuracy
        states = tuple(arrays[name] for name in wanted)
        return Trained(config, program, states, step=found.step, test_accuracy=accuracy)
    which = "each that was evaluated is damaged; leave out --best" if best else "each is damaged"
    raise UserError(f"The checkpoints in {folder} cannot be read: {which}.")


def _build(config: ConfigDict, mesh: Mesh, found: checkpoint_contents.CheckpointRecord) -> Program:
    """Builds the program of a run for images like those it was trained on."""
    lengths = {name: shape[0] for name, shape in found.shapes.items() if shape}
    if not {_PATCHES, _LOGITS} <= lengths.keys():
        raise checkpoint_damage.IncompatibleError(
            f"The checkpoint of step {found.step} is none of a ViT: it must hold the arrays "
            f"{_PATCHES} and {_LOGITS}, got {', '.join(found.shapes):.400}."
        )
    return build_program(
        config,
        mesh,
        channels=lengths[_PATCHES] // config.model.patch_size**2,
        num_classes=lengths[_LOGITS],
    )


def _read_config(workdir: pathlib.Path) -> ConfigDict:
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"{workdir} holds no run: there is no {path}.")
    given = files.read_json(path)
    prefix = f"{path} is not right: "
    with user_mistakes(AttributeError, ValueError, prefix=prefix):  # ConfigDict refuses some names.
        config = ConfigDict(given)
    with user_mistakes(UserError, prefix=prefix):
        check_config(config)
    return config


def _without_folder(config: ConfigDict) -> dict[str, object]:
    """Returns the config as checkpoints hold it; a folder of checkpoints may be moved."""
    flat = config.to_dict()
    del flat["checkpoint"]["folder"]
    return flat
