"""The fields of a training config in one table, and the checks that follow from it.

``python -m experiments.vit.config`` prints the table of docs/reference/vit_config.md.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.harness import config_fields, markdown
from experiments.harness.config_fields import BELOW_ONE, SEEDS, Range, above, at_least, one_of
from experiments.harness.mistakes import UserError, user_mistakes
from experiments.vit.data import in_memory, records, shuffle
from simrf_jax._src.attention.implementations import IMPLEMENTATIONS
from simrf_jax._src.models.config import ATTENTIONS, DTYPES, FEATURE_MAPS, POOLINGS, REMATS
from simrf_jax._src.projections import BLOCK_MODES
from simrf_jax.models import ViTConfig


class Field(NamedTuple):
    """A field of the config.

    Attributes:
      default: Value in a small run on the digits, which also says the type.
      meaning: Meaning of the value, in one sentence.
      allowed: Range of the value; None allows every value of the type, or leaves it to
        ``check_config``, where the range depends on other fields.
    """

    default: bool | int | float | str
    meaning: str
    allowed: Range | None = None

    @property
    def type(self) -> builtins.type:
        """Returns the type of the value."""
        return type(self.default)


_SHARE = Range("in (0, 1]", lambda x: 0 < x <= 1)
_MAGNITUDE = Range("from 0 to 10", lambda x: 0 <= x <= 10)
_REDRAWS = Range("at least 2, as a variance is estimated from them", lambda x: x >= 2)

NO_BAND = -1
DEFAULT_IMPLEMENTATION = "default"

# Every field of every config of this experiment.
FIELDS: dict[str, Field] = {
    "seed": Field(0, "Seed of parameters, projections, dropout and the data order.", SEEDS),
    "dataset": Field("digits", "Name of the data set."),
    "data_dir": Field("", "Folder of the prepared data sets; empty for the default folder."),
    "in_memory": Field(True, "True decodes a small data set once; false reads records."),
    "shuffle_window": Field(
        0,
        f"Records that are shuffled together, for each {shuffle.LANE} images of a batch, and read "
        "in blocks; 0 shuffles the whole data set.",
        at_least(0),
    ),
    "held_out": Field(
        0.0,
        "Share of the training images, the last ones, that choose the best checkpoint instead of "
        "the test set, which is then evaluated once, at the end; 0 trains on all.",
        BELOW_ONE,
    ),
    "image_size": Field(8, "Side in pixels of the square images.", at_least(1)),
    "num_workers": Field(
        0, "Processes that read and augment images; 0 uses a thread of the trainer.", at_least(0)
    ),
    "batch_size": Field(64, "Images in the batch of a step, over all devices.", at_least(1)),
    "eval_batch_size": Field(
        120,
        "Images in an evaluation batch, rounded up to a multiple of mesh.data * mesh.fsdp.",
        at_least(1),
    ),
    "num_steps": Field(1500, "Training steps.", at_least(1)),
    "learning_rate": Field(1e-3, "Peak learning rate.", above(0)),
    "warmup_steps": Field(
        100, "Steps of linear warm-up, below num_steps; a cosine to 0 follows.", at_least(0)
    ),
    "weight_decay": Field(0.1, "Decoupled weight decay of the kernels.", at_least(0)),
    "b1": Field(0.9, "Decay rate of Adam's first moment.", BELOW_ONE),
    "b2": Field(0.999, "Decay rate of Adam's second moment.", BELOW_ONE),
    "eps": Field(1e-8, "Epsilon of Adam.", above(0)),
    "clip_norm": Field(1.0, "Largest norm of the whole gradient.", above(0)),
    "redraw_interval": Field(
        0, "Steps between redraws of all projections; 0 never redraws.", at_least(0)
    ),
    "calibrate_interval": Field(
        0,
        "Steps between fits of calibrated features, the first one before the first step; 0 for "
        "other features.",
        at_least(0),
    ),
    "log_interval": Field(25, "Steps that a row of metrics.csv averages.", at_least(1)),
    "eval_interval": Field(
        125, "Steps between evaluations on the test set, or on what is held out.", at_least(1)
    ),
    "eval_crop": Field(
        1.0, "Evaluation center crop: crop side divided by the shorter image side.", _SHARE
    ),
    "augment.shift": Field(0.5, "Largest random translation in pixels.", at_least(0)),
    "augment.flip": Field(False, "True mirrors images at random."),
    "augment.crop_area": Field(
        1.0,
        "Smallest area of a random crop, relative to the image; 1.0 crops the center.",
        _SHARE,
    ),
    "augment.randaugment_layers": Field(0, "RandAugment operations for each image.", at_least(0)),
    "augment.randaugment_magnitude": Field(0.0, "RandAugment magnitude.", _MAGNITUDE),
    "augment.mixup": Field(
        0.0, "Both parameters of mixup's Beta distribution; 0 switches it off.", at_least(0)
    ),
    "diagnostics.images": Field(
        16,
        "Images of an evaluation on which attention is compared with softmax; 0 for none.",
        at_least(0),
    ),
    "diagnostics.redraws": Field(8, "Redraws from which the variance is estimated.", _REDRAWS),
    "profile.start": Field(0, "First step to profile, counted from 0.", at_least(0)),
    "profile.steps": Field(0, "Number of steps to profile; 0 for none.", at_least(0)),
    "checkpoint.interval": Field(
        500,
        "Steps between checkpoints; 0 keeps none, and is refused for a stopped run that kept some.",
        at_least(0),
    ),
    "checkpoint.keep": Field(
        2,
        "Number of latest checkpoints to keep, in addition to the most accurate one.",
        at_least(1),
    ),
    "checkpoint.folder": Field(
        "", "Path or gs://bucket/run of the checkpoints; empty for a folder of the workdir."
    ),
    "mirror": Field(
        "",
        "Path or gs://bucket/run that metrics, TensorBoard's files and results are copied to, at "
        "each evaluation and checkpoint; empty for none.",
    ),
    "num_microbatches": Field(
        1, "Parts of a batch whose gradients are computed one after the other.", at_least(1)
    ),
    "mesh.data": Field(
        -1,
        "Devices that share the images; -1 takes all that the other axes leave.",
        at_least(1, also=-1),
    ),
    "mesh.fsdp": Field(
        1, "Devices that share the images, the parameters and the optimizer's state.", at_least(1)
    ),
    "mesh.tensor": Field(1, "Devices that share the heads and the MLPs.", at_least(1)),
    "mesh.sequence": Field(1, "Devices that share the tokens of an image.", at_least(1)),
    "model.patch_size": Field(2, "Side of a square patch in pixels.", at_least(1)),
    "model.width": Field(96, "Width of the tokens.", at_least(1)),
    "model.depth": Field(4, "Number of transformer layers.", at_least(1)),
    "model.num_heads": Field(6, "Number of heads, a divisor of the width.", at_least(1)),
    "model.mlp_dim": Field(192, "Hidden width of the MLPs.", at_least(1)),
    "model.dropout_rate": Field(0.1, "Dropout rate.", BELOW_ONE),
    "model.pooling": Field(
        "average",
        "Input of the classifier: the mean of the tokens or a class token.",
        one_of(POOLINGS),
    ),
    "model.attention": Field(
        "simplex", "Coupling of the random features, or softmax attention.", one_of(ATTENTIONS)
    ),
    "model.num_features": Field(34, "Random features of each head.", at_least(1)),
    "model.feature_map": Field(
        "positive", "Feature map of random-feature attention.", one_of(FEATURE_MAPS)
    ),
    "model.exact_bandwidth": Field(
        NO_BAND,
        "Distance in tokens over which random-feature attention is exact; -1 for no band.",
        at_least(0, also=NO_BAND),
    ),
    "model.implementation": Field(
        DEFAULT_IMPLEMENTATION,
        "How random-feature attention is computed; default takes kernels for a TPU or a GPU where "
        "they apply.",
        one_of((*IMPLEMENTATIONS, DEFAULT_IMPLEMENTATION)),
    ),
    "model.block": Field("regular", "Row-block mode of the projections.", one_of(BLOCK_MODES)),
    "model.dtype": Field("float32", "Type of the computation.", one_of(DTYPES)),
    "model.remat": Field(
        "none", "Values that a layer computes again for the gradient.", one_of(REMATS)
    ),
    "model.scan": Field(False, "True scans over the layers, which compiles one layer only."),
}
TYPES = {name: field.type for name, field in FIELDS.items()}
# Fields and groups of fields that may change when a stopped run is resumed.
MAY_CHANGE = {"data_dir", "num_workers", "eval_batch_size", "log_interval", "eval_interval"}
MAY_CHANGE |= {"diagnostics", "profile", "checkpoint.interval", "checkpoint.keep", "mirror", "mesh"}
MAY_CHANGE |= {"model.implementation"}
# Fields that have no effect, by ``in_memory``, and the value that each must then have.
WITHOUT_EFFECT: dict[bool, dict[str, float]] = {
    True: {
        "shuffle_window": 0,
        "eval_crop": 1.0,
        "augment.crop_area": 1.0,
        "augment.randaugment_layers": 0,
        "augment.randaugment_magnitude": 0.0,
    },
    False: {"augment.shift": 0.0},
}


def check_config(config: ConfigDict) -> None:
    """Refuses a config that is not whole, has an unknown field, or a value that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    given = config_fields.check_fields(config, TYPES)
    for name, field in FIELDS.items():
        if field.allowed is not None:
            config_fields.check_range(name, given[name], field.allowed)
    _check_data(given)
    _check_diagnostics(given)
    # ViTConfig checks what does not depend on the data.
    with user_mistakes(ValueError):
        model_config(config, channels=1, num_classes=1)
    _check_calibration(given)
    config_fields.check_training(given)


def model_config(config: ConfigDict, *, channels: int, num_classes: int) -> ViTConfig:
    """Returns the shape of a config's model.

    Args:
      config: Config with all the fields of ``FIELDS``.
      channels: Number of channels of the images.
      num_classes: Number of classes of the labels.

    Raises:
      ValueError: If ``ViTConfig`` refuses it.
    """
    fields = config.model.to_dict()
    for name, default in (("exact_bandwidth", NO_BAND), ("implementation", DEFAULT_IMPLEMENTATION)):
        if fields[name] == default:
            fields[name] = None
    size = (config.image_size, config.image_size)
    return ViTConfig(image_size=size, channels=channels, num_classes=num_classes, **fields)


def defaults() -> ConfigDict:
    """Returns the config of the default values, which a config file changes."""
    nested: dict[str, Any] = {}
    for name, field in FIELDS.items():
        group, _, leaf = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[leaf] = field.default
    return ConfigDict(nested)


def config_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describes each difference that keeps one config from going on with the run of another."""

    def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
        flat = config_fields.flatten(config)
        return {name: value for name, value in flat.items() if not may_change(name)}

    return config_fields.differences(fixed(theirs), fixed(ours))


def may_change(name: str) -> bool:
    """Returns whether a run that was stopped may go on with another value of a field.

    It may be a field of an earlier version, in a group of this one.
    """
    return not MAY_CHANGE.isdisjoint({name, name.partition(".")[0]})


def describe_fields() -> str:
    """Returns the table of all fields in Markdown."""
    header = ("field", "type", "allowed", "may change on resume", "meaning")
    return markdown.table(header, (_row(name, field) for name, field in FIELDS.items()))


def _row(name: str, field: Field) -> tuple[str, ...]:
    """Returns the row of a field in the table."""
    allowed = "" if field.allowed is None else str(field.allowed).replace("'", "`")
    meaning = field.meaning
    for decoded, where in ((True, "images in memory"), (False, "records")):
        if (only := WITHOUT_EFFECT[decoded].get(name)) is not None:
            meaning += f" Must be {only} for {where}."
    return f"`{name}`", field.type.__name__, allowed, "yes" if may_change(name) else "", meaning


def _check_data(given: dict[str, Any]) -> None:
    """Refuses data sets that are not known, and what has no effect on how they are read."""
    known = in_memory.DATASETS if given["in_memory"] else records.DATASETS
    config_fields.check_one_of("config.dataset", given["dataset"], known)
    for name, only in WITHOUT_EFFECT[given["in_memory"]].items():
        if given[name] != only:
            raise UserError(
                f"config.{name} must be {only} where in_memory is {given['in_memory']}, got "
                f"{given[name]}."
            )
    if given["shuffle_window"] and given["batch_size"] % shuffle.LANE:
        raise UserError(
            f"config.batch_size must be a multiple of {shuffle.LANE} with a shuffle_window, got "
            f"{given['batch_size']}."
        )


def _check_calibration(given: dict[str, Any]) -> None:
    """Refuses calibrated features that are never fitted, and fits of other features."""
    interval, feature_map = given["calibrate_interval"], given["model.feature_map"]
    if (feature_map == "calibrated") != bool(interval):
        raise UserError(
            "config.calibrate_interval must be at least 1 with model.feature_map='calibrated', and "
            f"0 with any other, got {interval} with {feature_map!r}."
        )


def _check_diagnostics(given: dict[str, Any]) -> None:
    """Refuses diagnostics of more images, and profiles of more steps, than there are."""
    images, batch_size = given["diagnostics.images"], given["eval_batch_size"]
    if images > batch_size:
        raise UserError(
            f"config.diagnostics.images must be at most eval_batch_size={batch_size}, got {images}."
        )
    end = given["profile.start"] + given["profile.steps"]
    if given["profile.steps"] and end > given["num_steps"]:
        raise UserError(
            f"config.profile must end by num_steps={given['num_steps']}, got start + steps = {end}."
        )


if __name__ == "__main__":
    print(describe_fields())
