"""A small ViT on scikit-learn's handwritten digits: the default, no download.

Shows:     that the whole path works; the paper has no such run
Command:   python -m experiments.vit.main --workdir=runs/digits
Hardware:  two CPU cores
Time:      one to three minutes, by the machine, and as long for the installation; the first
           picture is there after about half a minute of training
Expected:  test accuracy 0.97 or more; 0.9750 or 0.9778 with seed 0, depending on the CPU, and in
           the mean over seeds 0 to 4 (README.md) 0.981 with a standard deviation of 0.007
"""

from ml_collections import ConfigDict

from experiments.vit.config import defaults


def get_config() -> ConfigDict:
    config = defaults()
    config.dataset = "digits"
    config.image_size = 8
    config.batch_size = 64
    config.eval_batch_size = 120
    config.num_steps = 1500  # 67 epochs.
    config.learning_rate = 1e-3
    config.warmup_steps = 100
    config.log_interval = 25
    config.eval_interval = 125
    config.checkpoint.interval = 500
    config.model.patch_size = 2  # 16 tokens.
    config.model.dropout_rate = 0.1
    return config
