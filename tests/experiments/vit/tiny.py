"""The digits config, small enough to train in a test."""

import ml_collections

from experiments.vit.configs import digits


def get_config(**changes) -> ml_collections.ConfigDict:
    """A run of four steps of 32 images; dotted names change fields."""
    config = digits.get_config()
    config.update_from_flattened_dict(
        {
            "batch_size": 32,
            "num_steps": 4,
            "warmup_steps": 2,
            "log_interval": 1,
            "eval_interval": 4,
            "diagnostics.images": 0,
            "checkpoint.interval": 0,
            "mesh.data": 1,
            "model.width": 32,
            "model.depth": 1,
            "model.num_heads": 2,
            "model.mlp_dim": 32,
            "model.dropout_rate": 0.1,
        }
        | {name.replace("__", "."): value for name, value in changes.items()}
    )
    return config
