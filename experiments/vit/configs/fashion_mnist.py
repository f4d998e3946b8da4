"""A small ViT on the 60,000 images of Fashion-MNIST, for a CPU."""

import ml_collections

from experiments.vit.configs import digits


def get_config() -> ml_collections.ConfigDict:
    config = digits.get_config()
    config.dataset = "fashion_mnist"

    config.batch_size = 128
    config.eval_batch_size = 512
    config.learning_rate = 2e-3
    config.num_steps = 3750  # 8 epochs.
    config.warmup_steps = 300
    config.log_interval = 50
    config.eval_interval = 469  # An epoch.
    config.augment = {"shift": 0.5, "flip": True}

    config.model.patch_size = 7  # 16 tokens.
    config.model.dropout_rate = 0.05
    return config
