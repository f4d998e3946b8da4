"""The paper's Performer ViT, a ViT-B, on Fashion-MNIST.

Shows:     Fig. 9b, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/fashion_mnist_b.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host; see imagenet2012.py
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           a thread of each host moves all 4096 images of a batch, which a large pod may wait for
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number
"""

import ml_collections

from experiments.vit.configs import imagenet2012
from experiments.vit.tools import runlocal


def get_config(argument: str = "") -> ml_collections.ConfigDict:
    config = imagenet2012.get_config()
    config.dataset = "fashion_mnist"
    config.in_memory = True
    config.image_size = 28
    config.num_workers = 0
    config.eval_crop = 1.0

    config.num_steps = imagenet2012.num_steps(60_000)
    config.warmup_steps = 450  # Ours: a tenth of the run, as 10,000 steps are on ImageNet.
    config.eval_interval = config.num_steps // 100  # 3 epochs.
    config.augment.shift = 2.0  # Ours: a crop of 5% of 28 pixels would show nothing.
    config.augment.crop_area = 1.0
    config.augment.randaugment_layers = 0
    config.augment.randaugment_magnitude = 0.0
    config.checkpoint.interval = 500

    config.model.patch_size = 2  # Ours: 14 x 14 patches, as of 224 pixels by 16.
    return runlocal.apply(argument, config)
