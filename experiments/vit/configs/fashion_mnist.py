"""A small ViT on the 60,000 images of Fashion-MNIST, for a CPU.

Shows:     the data set of the paper's Fig. 9b, not its model, which is far larger
Command:   python -m experiments.vit.main --config=experiments/vit/configs/fashion_mnist.py
           --workdir=runs/fashion --config.data_dir=DIR
Hardware:  two CPU cores
Time:      11 minutes with another run on the same cores
Expected:  test accuracy 0.884 (simplex), 0.885 (orthogonal), 0.884 (iid), 0.884 (exact), each
           the mean over seeds 0 to 2 with a standard deviation of 0.001 to 0.003, on a random split
           that is not the official one
"""

from ml_collections import ConfigDict

from experiments.vit.config import defaults


def get_config() -> ConfigDict:
    config = defaults()
    config.dataset = "fashion_mnist"
    config.image_size = 28
    config.batch_size = 128
    config.eval_batch_size = 512
    config.num_steps = 3750  # 8 epochs.
    config.learning_rate = 2e-3
    config.warmup_steps = 300
    config.log_interval = 50
    config.eval_interval = 469  # An epoch.
    config.augment.flip = True
    config.checkpoint.interval = 469
    config.model.patch_size = 7  # 16 tokens.
    config.model.dropout_rate = 0.05
    return config
