"""The paper's Performer ViT on ImageNet, at its scale.

Shows:     Fig. 9a, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/imagenet2012.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host, and once more with --config.model.attention=orthogonal; on a laptop
           --config=experiments/vit/configs/imagenet2012.py:runlocal --workdir=DIR, not distributed
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           its hosts need 221 cores for the images of a step of 0.05 s (README.md, Data)
Time:      not run: needs a pod
Expected:  not run; in the paper simplex ends 0.5% above orthogonal (Sec. 5.4), and accuracies are
           only drawn

``presets.paper`` has the fields and their reasons: what the paper says, and what is our choice.
"""

from ml_collections import ConfigDict

from experiments.vit.tools import presets


def get_config(argument: str = "") -> ConfigDict:
    return presets.shrunk(argument, presets.paper("imagenet2012", num_train=1_281_167))
