"""Tiny data sets with the features of the real ones, written by TensorFlow Datasets itself."""

import io

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

from experiments.vit.data import pipeline
from tests.experiments.vit import tiny

IMAGE = tfds.features.Image()
FEATURES = {
    "imagenet2012": {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "file_name": tfds.features.Text(),
    },
    "fashion_mnist": {"image": tfds.features.Image(shape=(28, 28, 1))},
    "i_naturalist2021": {
        "id": tfds.features.Scalar(dtype=np.int64),
        "file_id": tfds.features.Text(),
        "image": IMAGE,
        "supercategory": tfds.features.ClassLabel(num_classes=11),
    },
    "places365_small": {
        "image": tfds.features.Image(shape=(256, 256, 3)),
        "filename": tfds.features.Text(),
    },
}
OTHERS = {"file_name": "a", "file_id": "a", "filename": "a", "id": 7, "supercategory": 3}


def encode(image, file_format="JPEG"):
    file = io.BytesIO()
    image.save(file, file_format)
    return io.BytesIO(file.getvalue())


def halves(size, mode="RGB"):
    """Dark on the left, bright on the right."""
    pixels = np.full(size[::-1], 40, np.uint8)
    pixels[:, size[0] // 2 :] = 210
    return PIL.Image.fromarray(pixels).convert(mode)


def write(data_dir, name="imagenet2012", *, image=None, first_label=0, **splits):
    """Prepares a data set of so many examples a split, labeled in order from the first label."""
    features = FEATURES[name] | {"label": tfds.features.ClassLabel(num_classes=100)}
    gray = features["image"].shape[-1] == 1
    image = image or encode(halves((28, 28) if gray else (24, 18), "L" if gray else "RGB"), "PNG")
    others = {key: value for key, value in OTHERS.items() if key in features}

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("5.1.0")

        def _info(self):
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(n) for split, n in splits.items()}

        def _generate_examples(self, n):
            for i in range(n):
                label = first_label + i
                yield i, {"image": io.BytesIO(image.getvalue()), "label": label, **others}

    Tiny.name = name
    Tiny(data_dir=data_dir, file_format="array_record").download_and_prepare()


# Reads it in 16 x 16 pixels, eight images a batch.
OPTIONS = {
    "dataset": "imagenet2012",
    "in_memory": False,
    "image_size": 16,
    "batch_size": 8,
    "augment__shift": 0.0,
}


def get_config(data_dir, **changes):
    """A run that reads it from this folder."""
    return tiny.get_config(**(OPTIONS | {"data_dir": str(data_dir)} | changes))


def rows(host, hosts):
    """Neighboring images for each host."""
    return lambda batch_size: np.arange(batch_size).reshape(hosts, -1)[host]


def load(data_dir, host=0, hosts=1, eval_batch_size=8, **changes):
    config = get_config(data_dir, **changes)
    return pipeline.load(config, eval_batch_size=eval_batch_size, rows=rows(host, hosts))
