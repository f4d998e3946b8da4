"""The paper's Performer ViT on iNaturalist 2021.

Shows:     Fig. 9c, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/inaturalist2021.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host; see imagenet2012.py
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number. We test on the 100,000 images of
           val, as the labels of the 500,000 that it tests on are not public
"""

import ml_collections

from experiments.vit.configs import imagenet2012
from experiments.vit.tools import runlocal


def get_config(argument: str = "") -> ml_collections.ConfigDict:
    config = imagenet2012.get_config()
    config.dataset = "i_naturalist2021"
    config.num_steps = imagenet2012.num_steps(2_686_843)
    config.eval_interval = config.num_steps // 100  # 3 epochs.
    return runlocal.apply(argument, config)
