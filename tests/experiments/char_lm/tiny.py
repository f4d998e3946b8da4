from experiments.char_lm.configs import paper


def get_config(**changes):
    config = paper.get_config()
    config.update(
        {
            "seeds": (0, 1),
            "context": 16,
            "batch_size": 4,
            "num_steps": 4,
            "warmup_steps": 1,
            "eval_interval": 2,
            "calibrate_interval": 2,
            "model": {"width": 8, "depth": 1, "num_heads": 2, "num_features": 5, "bandwidth": 2},
        }
    )
    for name, value in changes.items():  # model__width stands for model.width.
        config.update_from_flattened_dict({name.replace("__", "."): value})
    return config
