"""Images per second that one process reads, decodes and augments, 500 x 375 to 224 x 224 pixels.

The benchmark follows a worker process of the ViT's ImageNet training, from ArrayRecord files on a
local disk to a batch. It adds the augmentations one after the other. The images are JPEGs of noise
at all scales, with files as large as those of ImageNet. Times are CPU times, so that other programs
on the machine have little effect.

Run: python -m benchmarks.input_pipeline
"""

import io
import pathlib
import tempfile
import time

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

from benchmarks import command_line
from experiments.harness import markdown
from experiments.vit.configs import imagenet2012
from experiments.vit.data import pipeline

NUM_IMAGES, BATCH_SIZE, ROUNDS = 256, 64, 8
QUALITY = 95  # Gives files of about the mean size of ImageNet, 113 KiB.
NONE = {
    "augment.crop_area": 1.0,
    "augment.flip": False,
    "augment.randaugment_layers": 0,
    "augment.mixup": 0.0,
}
CROP = NONE | {"augment.crop_area": 0.05, "augment.flip": True}
STAGES = {
    "center crop, resized": NONE,
    "inception crop, flip": CROP,
    "and RandAugment(2, 10)": CROP | {"augment.randaugment_layers": 2},
    "and mixup: the config": {},
}


def jpeg(rng: np.random.Generator) -> bytes:
    """Returns a JPEG file of noise at every scale, stronger at coarse scales, as in photographs."""
    pixels = np.zeros((375, 500, 3), np.float32)
    for scale in (1, 4, 16, 64):
        size = 500 // scale + 1, 375 // scale + 1
        noise = PIL.Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))
        smooth = np.asarray(noise.resize((500, 375)), np.float32)
        pixels += (smooth - 127.5) * scale**0.5 / 8
    file = io.BytesIO()
    whole = np.clip(127.5 + pixels, 0, 255).astype(np.uint8)
    PIL.Image.fromarray(whole).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


class Imagenet2012(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of ``NUM_IMAGES`` generated images under the name of the real data set."""

    VERSION = tfds.core.Version("5.1.0")
    pkg_dir_path = pathlib.Path(__file__).parent  # A module that runs as __main__ has no package.

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=1000),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples() for split in ("train", "validation")}

    def _generate_examples(self):
        rng = np.random.default_rng(0)
        for i in range(NUM_IMAGES):
            yield i, {"image": io.BytesIO(jpeg(rng)), "label": i}


def images_per_second(data_dir: pathlib.Path, changes: dict) -> np.ndarray:
    """Returns the images per second of CPU time, one number for each round."""
    config = imagenet2012.get_config()
    config.data_dir, config.batch_size = str(data_dir), BATCH_SIZE
    config.update_from_flattened_dict(changes)
    inputs = pipeline.load(config, eval_batch_size=BATCH_SIZE)
    inputs.train_batch(0)
    speeds = []
    for step in range(ROUNDS):
        start = time.process_time()
        inputs.train_batch(step)
        speeds.append(BATCH_SIZE / (time.process_time() - start))
    return np.array(speeds)


def main():
    command_line.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = pathlib.Path(folder)
        Imagenet2012(data_dir=data_dir, file_format="array_record").download_and_prepare()
        size = sum(path.stat().st_size for path in data_dir.glob("*/*/*train*"))
        rows = []
        for name, changes in STAGES.items():
            low, median, high = np.percentile(images_per_second(data_dir, changes), (25, 50, 75))
            rows.append((name, f"{median:.0f}", f"{low:.0f} to {high:.0f}"))
    print(f"{size / NUM_IMAGES / 1024:.0f} KiB an image")
    print(markdown.table(("augmentation", "images/s of one core", "quartiles"), rows))


if __name__ == "__main__":
    main()
