"""Associative recall, and language models that are trained for equal time, on two CPU cores.

Shows:     which attentions recall the values of N keys that they read once, and the validation
           loss of language models against the seconds of their training
Command:   python -m experiments.recall.main --workdir=runs/recall
Hardware:  two CPU cores, which other programs used too
"""

from ml_collections import ConfigDict

MODEL = {"width": 64, "depth": 2, "num_heads": 4}
OPTIMIZER = {"weight_decay": 0.1, "b2": 0.99, "clip_norm": 1.0}


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.parts = ("recall", "equal_time")
    config.seeds = (0, 1)
    # Of associative recall.
    config.attentions = (
        "softmax",
        "band_learned",
        "band_keys_learned",
        "band_more_keys_learned",
        "learned",
        "keys_learned",
        "positive",
    )
    config.num_features = (16, 64)  # Of each head; half of them are keys where keys replace them.
    config.exact_keys = (64, 96)  # Where they are added to all the features.
    config.num_pairs = (64, 16, 32, 128)  # N, powers of two.
    config.contexts = (4096, 1024)  # Of the language models.
    config.recall = OPTIMIZER | {
        "bandwidth": 4,
        "num_keys": 128,
        "num_values": 32,
        "batch_tokens": 2048,  # Tokens of a training step, but at most ``batch_size`` sequences.
        "batch_size": 64,
        "test_sequences": 64,
        "num_steps": 600,  # The most steps of each number of pairs.
        "eval_interval": 25,
        "go_on_at": 0.9,  # Accuracy on held-out sequences at which more pairs follow.
        "learned_at": 0.999,  # Accuracy at which training ends.
        "failed_below": 0.5,  # Accuracy after the most steps below which a run ends.
        "learning_rate": 4e-3,
        "warmup_steps": 50,
        "model": MODEL,
    }
    config.equal_time = OPTIMIZER | {
        "attentions": ("softmax", "band_learned", "band_keys_learned"),
        "batch_tokens": 4096,  # Characters of a training step.
        "validation_tokens": 24576,
        "seconds": 180.0,  # Time of the training of each model, by the median time of its steps.
        "timed_rounds": 11,
        "num_evaluations": 6,
        "learning_rate": 6e-3,
        "warmup_steps": 5,
        "num_features": 64,
        "exact_keys": 16,  # In the place of as many features.
        "bandwidth": 16,
        "model": MODEL,
    }
    return config
