"""Time that the digests of a checkpoint take, for the digits ViT and for ViT-B/16 with Adam.

The program saves and restores states of random numbers on a local disk. Saving with digests and
without them alternates in one process.

Run: python -m benchmarks.checkpoints
"""

import pathlib
import tempfile
import time
from unittest import mock

import jax
import numpy as np

from benchmarks import command_line
from experiments.harness import markdown, process
from experiments.vit.configs import digits, imagenet2012
from experiments.vit.training import (
    checkpoint_contents,
    checkpoint_manager,
    digest,
    sharding,
)
from experiments.vit.training.train_step import build_program

# Config, channels, classes and number of rounds of each model.
STATES = {"digits": (digits, 1, 10, 20), "ViT-B/16": (imagenet2012, 3, 1000, 7)}
DIGESTS = {"with": digest.digests, "without": lambda arrays: dict.fromkeys(arrays, "")}


def random_state(state):
    """Returns random arrays like those of a state, because random numbers cannot be compressed."""
    rng = np.random.default_rng(0)

    def random(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(0), x.sharding)
        values = rng.standard_normal(x.shape, np.float32).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    return jax.tree.map(random, state)


def save_and_restore(config, state, folder):
    """Returns the seconds that training waits, until all is on disk, and to restore."""
    progress = checkpoint_contents.Progress([{"step": 1}], 0.0, {"step": 1})
    with checkpoint_manager.Checkpoints(folder, config, keep=1) as checkpoints:
        start = time.perf_counter()
        checkpoints.save(1, state, progress)
        waited = time.perf_counter() - start
        checkpoints.wait()
        saved = time.perf_counter() - start
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with checkpoint_manager.Checkpoints(folder, config, keep=1) as checkpoints:
        start = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(shapes)[0])
        return waited, saved, time.perf_counter() - start


def measure(config, state, rounds):
    """Returns seconds ``{"with": [rounds, 3], "without": ...}``, after a round that compiles."""
    times = {name: [] for name in DIGESTS}
    turns = [
        (round_, name)
        for round_ in range(rounds + 1)
        for name in list(DIGESTS)[:: 1 if round_ % 2 else -1]
    ]
    for round_, name in command_line.bar(turns, "saved and restored"):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(digest, "digests", DIGESTS[name]),
        ):
            seconds = save_and_restore(config, state, pathlib.Path(folder))
        if round_:
            times[name].append(seconds)
    return {name: np.array(rows) for name, rows in times.items()}


def main():
    command_line.parser(__doc__).parse_args()
    process.quiet_orbax()
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    rows, notes = [], []
    states = command_line.bar(STATES.items(), "states", len(STATES))
    for name, (module, channels, classes, rounds) in states:
        config = module.get_config()
        built = build_program(config, mesh, channels=channels, num_classes=classes)
        state = random_state(built.state)
        arrays = checkpoint_contents.by_name(state)
        start = time.perf_counter()
        digests = digest.digests(arrays)
        first = time.perf_counter() - start
        size = sum(x.nbytes for x in arrays.values()) / 1e6
        added = sum(len(f'"{name}": "{value}", ') for name, value in digests.items()) / 1e3
        notes.append(f"{name}: the first digests, {first:.1f} s; {added:.1f} kB of JSON")
        for digested, seconds in measure(config, state, rounds).items():
            quartiles = np.percentile(seconds, [25, 50, 75], axis=0).T
            cells = [f"{median:.3f} ({low:.3f} to {high:.3f})" for low, median, high in quartiles]
            rows.append([f"{name}, {len(arrays)} arrays, {size:.1f} MB", digested, *cells])
    header = ["state", "digests", "training waits, s", "all on disk, s", "restored, s"]
    print(markdown.table(header, rows))
    print("\n".join(notes))


if __name__ == "__main__":
    main()
