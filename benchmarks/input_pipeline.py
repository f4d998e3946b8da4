"""Images per second of the ViT's ImageNet input, from ArrayRecord files to batches.

Without a folder there are two tables, of JPEGs of noise at all scales, 500 x 375 pixels, with files
as large as those of ImageNet. The first one follows one process and adds the augmentations one
after the other, in CPU time, so that other programs on the machine have little effect. The second
one compares both readers, the exact shuffle and the shuffle in windows, on the disk and in a bucket
of this machine that answers each request after 20 ms, by the clock.

With a folder, or a bucket of Google Cloud Storage, this machine reads the share of one host of a
pod from it, and the last line says whether that feeds the pod.

Run: python -m benchmarks.input_pipeline
     python -m benchmarks.input_pipeline --data_dir=gs://BUCKET/tfds --hosts=64 --step_seconds=0.05
"""

import contextlib
import functools
import io
import pathlib
import tempfile
import time

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds

from benchmarks import command_line, local_bucket
from experiments.harness import markdown
from experiments.harness.mistakes import exit_on_user_error
from experiments.vit.configs import imagenet2012
from experiments.vit.data import pipeline, stream

NUM_IMAGES, NUM_FILES, BATCH_SIZE, ROUNDS = 4096, 256, 64, 8
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
    """``NUM_IMAGES`` images, of ``NUM_FILES`` that differ, under the name of the real data set."""

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
        files = [jpeg(rng) for _ in range(NUM_FILES)]
        for i in range(NUM_IMAGES):
            yield i, {"image": io.BytesIO(files[i % NUM_FILES]), "label": i % 1000}


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


def rows_of_first(hosts, batch_size):
    """Returns the rows of a batch that the first of some hosts reads."""
    return np.arange(batch_size // hosts)


@contextlib.contextmanager
def batches_of_host(config, *, hosts, num_batches):
    """Yields an iterator over a host's rows of batches, whose workers have started.

    Args:
      config: Config of the run.
      hosts: Number of hosts that share a batch; this machine is one of them.
      num_batches: Number of batches to come.
    """
    rows = functools.partial(rows_of_first, hosts)
    inputs = pipeline.load(config, eval_batch_size=hosts, rows=rows)
    first = 2 * config.num_workers + 1  # The workers make some ahead while they start.
    with stream.Batches(
        inputs.train_part,
        num_steps=first + num_batches,
        num_workers=config.num_workers,
        num_parts=inputs.num_parts,
    ) as batches:
        for _ in range(first):
            next(batches)
        yield batches


def batches_per_second(batches):
    """Returns how many of some batches come a second, by the clock."""
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return count / (time.perf_counter() - start)


def reader_rows(data_dir, *, latency=0.02, num_batches=128):
    """Yields the rows of the table of readers: one worker, from a disk and from a bucket."""
    for where, wait in (("disk", 0), (f"bucket, {1000 * latency:.0f} ms a request", latency)):
        for window in (0, imagenet2012.get_config().shuffle_window):
            config = imagenet2012.get_config()
            config.batch_size, config.num_workers, config.shuffle_window = BATCH_SIZE, 1, window
            config.data_dir = local_bucket.BUCKET if wait else str(data_dir)
            with (
                local_bucket.serve(data_dir, wait) as server,
                batches_of_host(config, hosts=1, num_batches=num_batches) as batches,
            ):
                before = server.requests, server.bytes
                speed = BATCH_SIZE * batches_per_second(
                    command_line.bar(batches, f"{where}, {window}", num_batches)
                )
                images = num_batches * BATCH_SIZE
                requests = (server.requests - before[0]) * BATCH_SIZE / images
                kilobytes = (server.bytes - before[1]) / images / 1024
            order = f"windows of {window}" if window else "exact"
            counts = (f"{requests:.2f}", f"{kilobytes:.0f}") if wait else ("", "")
            yield where, order, f"{speed:.0f}", *counts


def measure_generated():
    """Prints the tables of generated images."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = pathlib.Path(folder)
        Imagenet2012(data_dir=data_dir, file_format="array_record").download_and_prepare()
        size = sum(path.stat().st_size for path in data_dir.glob("*/*/*train*"))
        rows = []
        for name, changes in command_line.bar(STAGES.items(), "stages", len(STAGES)):
            low, median, high = np.percentile(images_per_second(data_dir, changes), (25, 50, 75))
            rows.append((name, f"{median:.0f}", f"{low:.0f} to {high:.0f}"))
        print(f"{size / NUM_IMAGES / 1024:.0f} KiB an image")
        print(markdown.table(("augmentation", "images/s of one core", "quartiles"), rows))
        header = ("records", "shuffle", "images/s of one worker")
        header += (f"requests for {BATCH_SIZE} images", "KiB sent an image")
        readers = command_line.bar(reader_rows(data_dir), "readers", total=4)
        print(markdown.table(header, [*readers]))


def verdict(*, images_per_second, batch_size, hosts, step_seconds):
    """Returns the line that says whether a host feeds its part of a pod.

    Example:
      >>> verdict(images_per_second=1000, batch_size=4096, hosts=64, step_seconds=0.05)
      'A host reads 1,000 images/s and needs 1,280: it starves the pod, whose steps take 0.064 s.'
    """
    needed = batch_size / hosts / step_seconds
    line = f"A host reads {images_per_second:,.0f} images/s and needs {needed:,.0f}: "
    if images_per_second >= needed:
        return f"{line}it feeds the pod."
    slowed = batch_size / hosts / images_per_second
    return f"{line}it starves the pod, whose steps take {slowed:.3f} s."


def measure_folder(args):
    """Prints whether the records of a folder or a bucket feed a pod."""
    config = imagenet2012.get_config()
    config.data_dir, config.batch_size = args.data_dir, args.batch_size
    config.num_workers, config.shuffle_window = args.num_workers, args.shuffle_window
    with batches_of_host(config, hosts=args.hosts, num_batches=args.batches) as batches:
        speed = batches_per_second(command_line.bar(batches, "batches", total=args.batches))
    print(
        verdict(
            images_per_second=speed * args.batch_size / args.hosts,
            batch_size=args.batch_size,
            hosts=args.hosts,
            step_seconds=args.step_seconds,
        )
    )


def main():
    config = imagenet2012.get_config()
    parser = command_line.parser(__doc__)
    add = functools.partial(parser.add_argument, type=int)
    add("--data_dir", type=str, help="Folder or gs://bucket/folder that holds imagenet2012/.")
    add("--hosts", default=64, help="Hosts of the pod (%(default)s).")
    add("--batch_size", default=config.batch_size, help="Images of a step (%(default)s).")
    add("--step_seconds", type=float, default=0.05, help="Time of a step (%(default)s).")
    add("--num_workers", default=config.num_workers, help="Workers of a host (%(default)s).")
    add("--shuffle_window", default=config.shuffle_window, help="0 is exact (%(default)s).")
    add("--batches", default=100, help="Batches to take (%(default)s).")
    args = parser.parse_args()
    # A host reads the same number of pairs of images, which mixup mixes.
    if args.hosts < 1 or args.batch_size < 1 or args.batch_size % (2 * args.hosts):
        parser.error(
            "--hosts must be at least 1 and --batch_size a multiple of twice that, got "
            f"{args.hosts} and {args.batch_size}."
        )
    if args.data_dir is None:
        measure_generated()
        return
    with exit_on_user_error():
        measure_folder(args)


if __name__ == "__main__":
    main()
