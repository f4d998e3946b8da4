"""The fields of a training config, and the check that a config has them all and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections

from experiments.harness import config_fields
from experiments.harness.mistakes import UserError, user_mistakes
from experiments.vit.data import in_memory, records
from simrf_jax.models import ViTConfig

# Every field of every config of this experiment. A config file sets all of them.
FIELDS: dict[str, type] = {
    "seed": int,  # Of everything random: parameters, projections, dropout, data order.
    "dataset": str,  # A name of in_memory.DATASETS if in_memory, else of records.DATASETS.
    "data_dir": str,  # Where prepared TensorFlow Datasets lie; "" for their default folder.
    "in_memory": bool,  # Decode small data sets once and keep them, as they are; else read records.
    "image_size": int,  # Side of the square images that the model sees.
    "num_workers": int,  # Processes that read and augment records; 0 for a thread of the trainer.
    "batch_size": int,  # Images a step, over all devices.
    "eval_batch_size": int,  # Rounded up to a multiple of mesh.data * mesh.fsdp.
    "num_steps": int,
    "learning_rate": float,  # At its peak.
    "warmup_steps": int,  # Linear from 0, then a cosine to 0 at num_steps.
    "weight_decay": float,  # Decoupled, on the kernels only.
    "b1": float,  # Adam's.
    "b2": float,
    "eps": float,
    "clip_norm": float,  # Of the gradient of all parameters together.
    "redraw_interval": int,  # Steps between redraws of all projections; 0 for never.
    "log_interval": int,  # Steps a row of metrics.csv is the mean of.
    "eval_interval": int,  # Steps between evaluations on the whole test set.
    "eval_crop": float,  # Side of the middle square that is evaluated, over the shorter side.
    "augment.shift": float,  # Largest random translation, in pixels; in memory.
    "augment.flip": bool,  # Random mirror images.
    "augment.crop_area": float,  # Least area of a random crop; 1.0 for the middle; of records.
    "augment.randaugment_layers": int,  # Random operations an image; of records.
    "augment.randaugment_magnitude": float,  # From 0 to 10.
    "augment.mixup": float,  # Weights of images in pairs are Beta(mixup, mixup); 0 for none.
    "diagnostics.images": int,  # Test images to compare attention with softmax on; 0 for none.
    "diagnostics.redraws": int,  # Of the projections, for the variance of attention.
    "profile.start": int,  # The first step to profile, counted from 0.
    "profile.steps": int,  # How many; 0 for no profile.
    "checkpoint.interval": int,  # Steps between checkpoints; 0 for none at all.
    "checkpoint.keep": int,  # The last ones to keep; the one of the best test accuracy is, too.
    "checkpoint.folder": str,  # A path or gs://bucket/run; "" for a folder of the workdir.
    "num_microbatches": int,  # Parts of a batch whose gradients are computed one after the other.
    "mesh.data": int,  # Devices the images are split over; -1 for all that the others leave.
    "mesh.fsdp": int,  # Likewise, and the parameters and the optimiser's state too.
    "mesh.tensor": int,  # Devices that heads and MLPs are split over.
    "mesh.sequence": int,  # Devices that the tokens of an image are split over.
    "model.patch_size": int,  # The rest is ViTConfig's; channels and classes come from the data.
    "model.width": int,
    "model.depth": int,
    "model.num_heads": int,
    "model.mlp_dim": int,
    "model.dropout_rate": float,
    "model.pooling": str,
    "model.attention": str,
    "model.num_features": int,
    "model.block": str,
    "model.dtype": str,
    "model.remat": str,
    "model.scan": bool,
}

# Fields, and groups of fields, of which a run that was stopped may go on with other values.
MAY_CHANGE = {
    "data_dir",
    "num_workers",
    "eval_batch_size",
    "log_interval",
    "eval_interval",
    "diagnostics",
    "profile",
    "checkpoint.interval",
    "checkpoint.keep",
    "mesh",
}

_POSITIVE = (
    "batch_size",
    "eval_batch_size",
    "num_steps",
    "log_interval",
    "eval_interval",
    "image_size",
    "checkpoint.keep",
    "num_microbatches",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.sequence",
)
_NOT_NEGATIVE = (
    "warmup_steps",
    "redraw_interval",
    "weight_decay",
    "num_workers",
    "augment.shift",
    "augment.randaugment_layers",
    "augment.mixup",
    "diagnostics.images",
    "profile.start",
    "profile.steps",
    "checkpoint.interval",
)
# What has no effect on images in memory, and on records, with the value that says so.
_OF_RECORDS = {
    "num_workers": 0,
    "eval_crop": 1.0,
    "augment.crop_area": 1.0,
    "augment.randaugment_layers": 0,
    "augment.randaugment_magnitude": 0.0,
}
_OF_MEMORY = {"augment.shift": 0.0}


def check_config(config: ml_collections.ConfigDict) -> None:
    """Refuses a config that is not whole, has an unknown field, or a value that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    given = config_fields.check_fields(config, FIELDS)
    config_fields.check_seed(given)
    config_fields.check_least(given, dict.fromkeys(_POSITIVE, 1))
    if given["mesh.data"] != -1 and given["mesh.data"] < 1:
        raise UserError(
            f"config.mesh.data, unless it is -1, must be at least 1, got {given['mesh.data']}."
        )
    for name in _NOT_NEGATIVE:
        if not given[name] >= 0:
            raise UserError(f"config.{name} must be at least 0, got {given[name]}.")
    for name in ("learning_rate", "clip_norm", "eps"):
        if not given[name] > 0:
            raise UserError(f"config.{name} must be above 0, got {given[name]}.")
    for name in ("b1", "b2"):
        if not 0 <= given[name] < 1:
            raise UserError(f"config.{name} must be in [0, 1), got {given[name]}.")
    _check_input(given)
    _check_seeing(given)
    # What does not depend on the data is checked without it.
    with user_mistakes(ValueError):
        ViTConfig(image_size=(config.image_size, config.image_size), **config.model)
    if config.warmup_steps >= config.num_steps:
        raise UserError(
            f"config.warmup_steps must be below num_steps={config.num_steps}, "
            f"got {config.warmup_steps}."
        )


def config_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What keeps one config from going on with the run of another, a sentence a field."""

    def what_matters(config: Mapping[str, Any]) -> dict[str, Any]:
        flat = config_fields.flatten(config)
        return {k: v for k, v in flat.items() if not MAY_CHANGE & {k, k.split(".")[0]}}

    return config_fields.differences(what_matters(theirs), what_matters(ours))


def _check_input(given: dict[str, Any]) -> None:
    """Refuses data sets that are not known, and what has no effect on how they are read."""
    known = in_memory.DATASETS if given["in_memory"] else records.DATASETS
    config_fields.check_one_of("config.dataset", given["dataset"], known)
    for name in ("augment.crop_area", "eval_crop"):
        if not 0 < given[name] <= 1:
            raise UserError(f"config.{name} must be in (0, 1], got {given[name]}.")
    if not 0 <= given["augment.randaugment_magnitude"] <= 10:
        raise UserError(
            "config.augment.randaugment_magnitude must be from 0 to 10, got "
            f"{given['augment.randaugment_magnitude']}."
        )
    for name, none in (_OF_RECORDS if given["in_memory"] else _OF_MEMORY).items():
        if given[name] != none:
            raise UserError(
                f"config.{name} must be {none} where in_memory is {given['in_memory']}, got "
                f"{given[name]}."
            )


def _check_seeing(given: dict[str, Any]) -> None:
    """Refuses diagnostics and profiles that there is too little for."""
    images, batch_size = given["diagnostics.images"], given["eval_batch_size"]
    if images > batch_size:
        raise UserError(
            f"config.diagnostics.images must be at most eval_batch_size={batch_size}, got {images}."
        )
    if given["diagnostics.redraws"] < 2:
        raise UserError(
            "config.diagnostics.redraws must be at least 2, as a variance is estimated from them, "
            f"got {given['diagnostics.redraws']}."
        )
    end = given["profile.start"] + given["profile.steps"]
    if given["profile.steps"] and end > given["num_steps"]:
        raise UserError(
            f"config.profile must end by num_steps={given['num_steps']}, got start + steps = {end}."
        )
