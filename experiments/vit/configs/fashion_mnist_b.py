"""The paper's Performer ViT, a ViT-B, on Fashion-MNIST.

Shows:     Fig. 9b, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/fashion_mnist_b.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           each host needs 5 cores for the images of a step of 0.03 s (docs/how_to/image_data.md)
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number

The comments in imagenet2012.py explain the choices. The comments here are on those that differ.
"""

from ml_collections import ConfigDict

from experiments.vit.config import defaults
from experiments.vit.tools import runlocal


def get_config(argument: str = "") -> ConfigDict:
    config = defaults()
    config.dataset = "fashion_mnist"
    config.held_out = 0.01
    config.image_size = 28
    config.num_workers = 8

    config.batch_size = 4096
    config.eval_batch_size = 4096
    config.num_steps = round(300 * 60_000 / 4096)  # 300 epochs.
    config.learning_rate = 1e-3
    config.warmup_steps = 450  # Ours: a tenth of the run, as 10,000 steps are on ImageNet.
    config.weight_decay = 0.1
    config.b1 = 0.9
    config.clip_norm = 1.0
    config.redraw_interval = 0
    config.log_interval = 50
    config.eval_interval = config.num_steps // 100  # 3 epochs.
    config.augment.update(
        shift=2.0,
        flip=True,
        crop_area=1.0,  # Ours: a crop of 5% of 28 pixels would show nothing.
        randaugment_layers=0,
        randaugment_magnitude=0.0,
        mixup=0.2,
    )

    config.checkpoint.interval = 500
    config.model.update(
        patch_size=2,  # Ours: 14 x 14 patches, as of 224 pixels by 16.
        width=768,
        depth=12,
        num_heads=12,
        mlp_dim=3072,
        dropout_rate=0.1,
        pooling="token",
        attention="simplex",
        num_features=130,
        block="regular",
        dtype="bfloat16",
        scan=False,
    )
    return runlocal.apply(argument, config)
