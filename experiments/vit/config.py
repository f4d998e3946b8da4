"""The fields of a training config, and the check that a config has them all and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections

from experiments import harness
from experiments.vit.data import DATASETS
from simrf_jax import checks
from simrf_jax.models import ViTConfig

# Every field of every config of this experiment. A config file sets all of them.
FIELDS: dict[str, type] = {
    "seed": int,  # Of everything random: parameters, projections, dropout, data order.
    "dataset": str,  # A name of data.DATASETS.
    "data_dir": str,  # Where prepared TensorFlow Datasets lie; "" for their default folder.
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
    "augment.shift": float,  # Largest random translation, in pixels.
    "augment.flip": bool,  # Random mirror images.
    "checkpoint.interval": int,  # Steps between checkpoints; 0 for none at all.
    "checkpoint.keep": int,  # The last ones to keep; the one of the best test accuracy is, too.
    "checkpoint.folder": str,  # A path or gs://bucket/run; "" for a folder of the workdir.
    "num_microbatches": int,  # Parts of a batch whose gradients are computed one after the other.
    "mesh.data": int,  # Devices the images are split over; -1 for all that the others leave.
    "mesh.fsdp": int,  # Likewise, and the parameters and the optimiser's state too.
    "mesh.tensor": int,  # Devices that heads and MLPs are split over.
    "mesh.sequence": int,  # Devices that the tokens of an image are split over.
    "model.patch_size": int,  # The rest is ViTConfig's; the images' shape comes from the data.
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
    "eval_batch_size",
    "log_interval",
    "eval_interval",
    "checkpoint.interval",
    "checkpoint.keep",
    "mesh",
}


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses a config that is not whole, has an unknown field, or a value that cannot work.

    Raises:
      TypeError: If a field has the wrong type.
      ValueError: If fields are missing or unknown, or a value is out of range.
    """
    given = harness.check_fields(config, FIELDS)
    checks.one_of("config.dataset", config.dataset, DATASETS)
    for name in (
        *("batch_size", "eval_batch_size", "num_steps", "log_interval", "eval_interval"),
        *("num_microbatches", "mesh.fsdp", "mesh.tensor", "mesh.sequence", "checkpoint.keep"),
    ):
        checks.positive_int(f"config.{name}", given[name])
    if given["mesh.data"] != -1:
        checks.positive_int("config.mesh.data, unless it is -1,", given["mesh.data"])
    for name in (
        *("seed", "warmup_steps", "redraw_interval", "weight_decay", "augment.shift"),
        "checkpoint.interval",
    ):
        if not given[name] >= 0:
            raise ValueError(f"config.{name} must be at least 0, got {given[name]}.")
    for name in ("learning_rate", "clip_norm", "eps"):
        if not given[name] > 0:
            raise ValueError(f"config.{name} must be above 0, got {given[name]}.")
    for name in ("b1", "b2"):
        if not 0 <= given[name] < 1:
            raise ValueError(f"config.{name} must be in [0, 1), got {given[name]}.")
    # What does not depend on the data is checked without it.
    side = config.model.patch_size
    ViTConfig(image_size=(side, side), **config.model)
    if config.warmup_steps >= config.num_steps:
        raise ValueError(
            f"config.warmup_steps must be below num_steps={config.num_steps}, "
            f"got {config.warmup_steps}."
        )


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What keeps one config from going on with the run of another, a sentence a field."""

    def what_matters(config: Mapping[str, Any]) -> dict[str, Any]:
        flat = harness.flatten(config)
        return {k: v for k, v in flat.items() if not MAY_CHANGE & {k, k.split(".")[0]}}

    return harness.differences(what_matters(theirs), what_matters(ours))
