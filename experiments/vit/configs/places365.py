"""The paper's Performer ViT on Places365.

Shows:     Fig. 9d, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/places365.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           its hosts need 236 cores for the images of a step of 0.05 s (docs/how_to/image_data.md)
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number. We test on the 36,500 images of
           validation, as the 328,500 that it tests on have no public labels

The comments in imagenet2012.py explain the choices. Only the data set and the steps differ.
"""

from ml_collections import ConfigDict

from experiments.vit.config import defaults
from experiments.vit.tools import runlocal


def get_config(argument: str = "") -> ConfigDict:
    config = defaults()
    config.dataset = "places365_small"
    config.in_memory = False
    config.shuffle_window = 256
    config.held_out = 0.01
    config.image_size = 224
    config.num_workers = 16
    config.eval_crop = 0.875

    config.batch_size = 4096
    config.eval_batch_size = 4096
    # 300 epochs. They are 303 of the 99% of the images that held_out leaves to train on.
    config.num_steps = round(300 * 1_803_460 / 4096)
    # In a sweep of a ViT-S, exact attention and calibrated features are stable at this rate with
    # this clip_norm, and positive features with one seed of two. That does not show what a ViT-B
    # takes at this batch and with this warm-up (README.md, Learning rates).
    config.learning_rate = 1e-3
    config.warmup_steps = 10_000
    config.weight_decay = 0.1
    config.b1 = 0.9
    config.clip_norm = 1.0
    config.redraw_interval = 0
    config.log_interval = 50
    config.eval_interval = config.num_steps // 100  # 3 epochs.
    config.augment.update(
        shift=0.0,
        flip=True,
        crop_area=0.05,
        randaugment_layers=2,
        randaugment_magnitude=10.0,
        mixup=0.2,
    )

    config.checkpoint.interval = 1000
    config.model.update(
        patch_size=16,
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
