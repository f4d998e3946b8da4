"""The paper's Performer ViT on Places365.

Shows:     Fig. 9d, simplex against orthogonal random features
Command:   python -m experiments.vit.main --config=experiments/vit/configs/places365.py
           --distributed --workdir=DIR --config.data_dir=DIR --config.checkpoint.folder=gs://DIR
           on every host
Hardware:  a TPU pod; on 16 chips of v3 or v4 add --config.model.remat=dots --config.model.scan;
           its hosts need 221 cores for the images of a step of 0.05 s (README.md, Data)
Time:      not run: needs a pod
Expected:  not run; the paper draws accuracies and gives no number. We test on the 36,500 images of
           validation, as the 328,500 that it tests on have no public labels

``presets.paper`` explains the choices. Only the data set and the steps differ from imagenet2012.py.
"""

from ml_collections import ConfigDict

from experiments.vit.tools import presets


def get_config(argument: str = "") -> ConfigDict:
    return presets.shrunk(argument, presets.paper("places365_small", num_train=1_803_460))
