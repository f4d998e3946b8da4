"""The paper's Performer ViT, a ViT-B, on Fashion-MNIST.

Shows:     Fig. 9b, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/fashion_mnist_b.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           each of its hosts needs 5 cores for the images of a step of 0.03 s (README.md, Data)
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number

``presets.paper`` explains the choices. Here are those that differ.
"""

from ml_collections import ConfigDict

from experiments.vit.tools import presets


def get_config(argument: str = "") -> ConfigDict:
    config = presets.paper("fashion_mnist", num_train=60_000)
    config.in_memory = True
    config.shuffle_window = 0
    config.image_size = 28
    config.num_workers = 8
    config.eval_crop = 1.0
    config.warmup_steps = 450  # Ours: a tenth of the run, as 10,000 steps are on ImageNet.
    config.augment.shift = 2.0
    config.augment.crop_area = 1.0  # Ours: a crop of 5% of 28 pixels would show nothing.
    config.augment.randaugment_layers = 0
    config.augment.randaugment_magnitude = 0.0
    config.checkpoint.interval = 500
    config.model.patch_size = 2  # Ours: 14 x 14 patches, as of 224 pixels by 16.
    return presets.shrunk(argument, config)
