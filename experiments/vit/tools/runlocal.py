"""``--config=FILE.py:runlocal``: the run of a pod, small enough for a laptop."""

from __future__ import annotations

from ml_collections import ConfigDict

from simrf_jax._src import checks

# Two regular simplices of 17 points a head, as 130 features are two of 65.
_LOCAL = {
    "batch_size": 32,
    "eval_batch_size": 256,
    "num_steps": 100,
    "warmup_steps": 10,
    "log_interval": 10,
    "eval_interval": 100,
    "checkpoint.interval": 50,
    "model.width": 96,
    "model.depth": 2,
    "model.num_heads": 6,
    "model.mlp_dim": 192,
    "model.num_features": 34,
}


def apply(argument: str, config: ConfigDict) -> ConfigDict:
    """Shrinks a config if the argument behind the name of its file asks for it.

    Args:
      argument: ``"runlocal"`` for a hundred steps of a small model on small images, with all else
        as it is; ``""`` for the config itself.
      config: Config of a run on a pod; it is changed.

    Returns:
      The same config.

    Raises:
      ValueError: If the argument is neither.
    """
    checks.one_of("What follows the name of the config file", argument, ("", "runlocal"))
    if not argument:
        return config
    config.update_from_flattened_dict(_LOCAL)
    config.num_workers = 0
    if not config.in_memory:  # Images in memory are not resized.
        config.image_size = 32
        config.num_workers = 2
        config.shuffle_window = 16
    config.model.patch_size = config.image_size // 4  # 16 patches.
    return config
