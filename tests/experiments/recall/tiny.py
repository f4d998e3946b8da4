from experiments.recall.configs import paper

MODEL = {"width": 8, "depth": 1, "num_heads": 2}


def get_config(**changes):
    """Returns a config of tiny models; recall__num_keys stands for recall.num_keys."""
    config = paper.get_config()
    config.update(
        {
            "attentions": ("softmax", "band_keys_learned", "band_more_keys_learned"),
            "num_features": (4,),
            "exact_keys": (3,),
            "num_pairs": (4,),
            "contexts": (8, 16),
            "recall": {
                "bandwidth": 1,
                "num_keys": 5,
                "num_values": 3,
                "batch_tokens": 30,
                "batch_size": 4,
                "test_sequences": 4,
                "num_steps": 2,
                "eval_interval": 1,
                "go_on_at": 0.9,
                "failed_below": 0.0,
                "warmup_steps": 1,
                "model": MODEL,
            },
            "equal_time": {
                "attentions": ("softmax", "band_keys_learned"),
                "batch_tokens": 32,
                "validation_tokens": 64,
                "seconds": 1e-3,
                "timed_rounds": 2,
                "num_evaluations": 2,
                "warmup_steps": 5,
                "num_features": 6,
                "exact_keys": 2,
                "bandwidth": 2,
                "model": MODEL,
            },
        }
    )
    for name, value in changes.items():
        config.update_from_flattened_dict({name.replace("__", "."): value})
    return config
