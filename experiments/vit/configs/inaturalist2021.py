"""The paper's Performer ViT on iNaturalist 2021.

Shows:     Fig. 9c, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/inaturalist2021.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           its hosts need 221 cores for the images of a step of 0.05 s (README.md, Data)
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number. We test on the 100,000 images of
           val, as the labels of the 500,000 that it tests on are not public

``presets.paper`` explains the choices. Only the data set and the steps differ from imagenet2012.py.
"""

from ml_collections import ConfigDict

from experiments.vit.tools import presets


def get_config(argument: str = "") -> ConfigDict:
    return presets.shrunk(argument, presets.paper("i_naturalist2021", num_train=2_686_843))
