"""The paper's Performer ViT on Places365.

Shows:     Fig. 9d, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/places365.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host; see imagenet2012.py
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number. We test on the 36,500 images of
           validation, as the 328,500 that it tests on have no public labels
"""

import ml_collections

from experiments.vit.configs import imagenet2012
from experiments.vit.tools import runlocal


def get_config(argument: str = "") -> ml_collections.ConfigDict:
    config = imagenet2012.get_config()
    config.dataset = "places365_small"
    config.num_steps = imagenet2012.num_steps(1_803_460)
    config.eval_interval = config.num_steps // 100  # 3 epochs.
    return runlocal.apply(argument, config)
