"""Trains at several learning rates and says which are stable.

``python -m experiments.vit.tools.sweep --workdir=runs/sweep`` trains every attention at every rate
with every seed by the trainer's own step. A rate is an argument of the compiled step and a seed one
of the initial state, so an attention is compiled once.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tqdm
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments.harness import (
    command_line,
    config_fields,
    files,
    markdown,
    process,
    resumable,
    style,
    train_state,
)
from experiments.harness.train_state import TrainState
from experiments.vit.config import TYPES, check_config
from experiments.vit.data import pipeline
from experiments.vit.training import sharding
from experiments.vit.training.due import calibrates
from experiments.vit.training.train_step import Metrics, Program, build_program, train_step
from simrf_jax.models import ViT

FIELDS: dict[str, type] = TYPES | {
    "sweep.arms": tuple,  # Names of ARMS.
    "sweep.learning_rates": tuple,  # Peak learning rates, ascending.
    "sweep.seeds": tuple,
}
_POSITIVE = {"model.feature_map": "positive", "calibrate_interval": 0}
# The fields that each attention of the sweep changes.
ARMS: dict[str, dict[str, Any]] = {
    "exact": {"model.attention": "exact", **_POSITIVE},
    "simplex": {"model.attention": "simplex", **_POSITIVE},
    "calibrated": {"model.attention": "simplex", "model.feature_map": "calibrated"},
}
LABELS = {
    "exact": "exact",
    "simplex": f"{style.LABELS['simplex']}, positive",
    "calibrated": f"{style.LABELS['simplex']}, calibrated",
}
STYLES = {
    "exact": {**style.STYLES["exact"], "marker": "o"},
    "simplex": {**style.STYLES["simplex"], "marker": "^"},
    # The color of calibrated features in the figures of experiments/swap.
    "calibrated": {"color": "#D55E00", "linestyle": "--", "marker": "P"},
}

# A loss above the first one by more than this is a spike. The first one is that of a guess.
SPIKE = 0.7
RISE = 0.5  # A mean loss that ends above the lowest one by more than this has risen again.
PROGRESS = 0.05  # A run whose mean loss ends less than this below its first loss has not learned.
WINDOW = 10  # Steps of a mean.
# The rows of a run's piece.
METRICS = ("loss", "accuracy", "gradient_norm")


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    values = config_fields.check_fields(config, FIELDS)
    for arm in config.sweep.arms:
        config_fields.check_one_of("config.sweep.arms", arm, ARMS)
        check_config(arm_config(config, arm))
    for rate in config.sweep.learning_rates:
        config_fields.check_range("sweep.learning_rates", rate, config_fields.above(0))
    config_fields.check_ascending(values, ["sweep.learning_rates"])
    config_fields.check_seeds(config.sweep.seeds)
    config_fields.check_range("num_steps", config.num_steps, config_fields.at_least(WINDOW))


def arm_config(config: ConfigDict, arm: str) -> ConfigDict:
    """Returns the config of the trainer for an attention of the sweep."""
    config = copy.deepcopy(config)
    with config.unlocked():
        del config.sweep
    config.update_from_flattened_dict(ARMS[arm])
    return config


def at_rate(
    optimizer: optax.GradientTransformation, rate: jax.Array
) -> optax.GradientTransformation:
    """Returns an optimizer of rate 1 at another rate, to which AdamW's updates are proportional."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda x: rate * x, updates), state

    return optax.GradientTransformation(optimizer.init, update)


class Arm:
    """An attention of the sweep, compiled once for all rates and seeds.

    Args:
      config: Config of the trainer.
      channels: Number of channels of the images.
      num_classes: Number of classes of the labels.

    Attributes:
      step: Takes a state, which is donated, a batch and a rate; returns the next state and metrics.
    """

    def __init__(self, config: ConfigDict, *, channels: int, num_classes: int):
        self.config = copy.deepcopy(config)
        self.config.learning_rate = 1.0
        mesh = sharding.make_mesh(config.mesh)
        sizes = {"channels": channels, "num_classes": num_classes}
        self.program: Program = build_program(self.config, mesh, **sizes)
        optimizer, _ = train_state.make_optimizer(
            self.config, b1=config.b1, b2=config.b2, eps=config.eps
        )

        options = {"num_microbatches": config.num_microbatches, "graphdef": self.program.graphdef}

        def step(state: TrainState, batch: Any, rate: jax.Array) -> tuple[TrainState, Metrics]:
            return train_step(state, batch, optimizer=at_rate(optimizer, rate), **options)

        # Drawing the projections operation by operation compiles in a tenth of the time.
        self._init = functools.partial(
            train_state.init_state,
            make_model=functools.partial(ViT, self.program.model),
            optimizer=optimizer,
        )
        self._shardings = jax.tree.map(lambda x: x.sharding, self.program.state)
        replicated = NamedSharding(mesh, PartitionSpec())
        self.step = jax.jit(step, out_shardings=(self._shardings, replicated), donate_argnums=0)

    def train(self, inputs: pipeline.Input, *, learning_rate: float, seed: int) -> np.ndarray:
        """Trains once.

        Args:
          inputs: Batches. A seed takes as many as there are steps, after those of the seed before.
          learning_rate: Peak learning rate.
          seed: Seed of parameters, projections and dropout.

        Returns:
          ``METRICS`` of each step, ``[3, steps]``, NaN after a step at which one is not finite.
        """
        config, program = self.config, self.program
        measured = np.full((len(METRICS), config.num_steps), np.nan)
        with jax.set_mesh(program.mesh):
            state = self._init(jax.random.key(seed))
            if program.has_projections:  # The trainer's first step has those of the schedule.
                state = train_state.redraw(state, interval=0, stacked=program.model.scan)
            # Layers may share arrays that were just made, which cannot be donated twice.
            state = jax.device_put(jax.tree.map(lambda x: x.copy(), state), self._shardings)
            bar = f"rate {learning_rate:g}, seed {seed}"
            steps = tqdm.trange(config.num_steps, desc=bar, leave=False, dynamic_ncols=True)
            for step in steps:
                part = inputs.train_batch(seed * config.num_steps + step)
                batch = sharding.global_batch(part, program.mesh, config.batch_size)
                if calibrates(config, step):
                    state = program.calibrate(state, batch["image"])
                state, metrics = self.step(state, batch, np.float32(learning_rate))
                measured[:, step] = [float(metrics[name]) for name in METRICS]
                if not np.isfinite(measured[:, step]).all():
                    break
        return measured


class Stability(NamedTuple):
    """The outcome of a run.

    Attributes:
      final_loss: Mean training loss of the last ``WINDOW`` steps; NaN if the run did not get there.
      largest_loss: Largest loss of a step; infinite if a metric is not finite.
      largest_norm: Largest gradient norm before it is clipped; infinite if a metric is not finite.
      fault: Reason why the run is unstable: ``"not finite"``, ``"spike"``, ``"rise"`` or
        ``"no progress"``; "" if it is stable.
    """

    final_loss: float
    largest_loss: float
    largest_norm: float
    fault: str


def judge(measured: np.ndarray) -> Stability:
    """Says whether a run was stable.

    It is unless a loss or a gradient norm is not finite, a loss is above the first one by more than
    ``SPIKE``, or the mean loss of the last ``WINDOW`` steps is above the lowest mean of as many
    consecutive steps by more than ``RISE`` or not below the first loss by ``PROGRESS``.

    Args:
      measured: ``METRICS`` of each step, ``[3, steps]``.
    """
    losses, norms = measured[0], measured[2]
    if not np.isfinite(measured).all():
        return Stability(math.nan, math.inf, math.inf, "not finite")
    means = np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")
    fault = ""
    if losses.max() > losses[0] + SPIKE:
        fault = "spike"
    elif means[-1] > means.min() + RISE:
        fault = "rise"
    elif means[-1] > losses[0] - PROGRESS:
        fault = "no progress"
    return Stability(float(means[-1]), float(losses.max()), float(norms.max()), fault)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains all that ``workdir`` lacks, and writes results, table and figure there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped sweep of the same config in it is continued, and one
        with other arms, rates or seeds adds to it.

    Returns:
      The content of ``results.json``.

    Raises:
      UserError: If ``check`` refuses the config; if the data set is not there; or if the folder
        cannot be written or holds a sweep of another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config, selection=["sweep", "data_dir"])
    _train_missing(config, pieces)
    sweep = config.sweep
    results: dict[str, Any] = {}
    for arm, rate, seed in itertools.product(sweep.arms, sweep.learning_rates, sweep.seeds):
        entry = _entry(pieces.load(_name(arm, rate, seed)))
        results.setdefault(arm, {}).setdefault(f"{rate:g}", {})[str(seed)] = entry
    with files.whole_file(workdir / "table.md") as partial:
        partial.write_text(f"{report(results)}\n")
    return files.finish(workdir, results, lambda: {"sweep": draw(results)})


def _name(arm: str, rate: float, seed: int) -> str:
    """Returns the name of a run's piece."""
    return f"{arm}-{rate:g}-{seed}"


def _train_missing(config: ConfigDict, pieces: resumable.Pieces) -> None:
    """Trains the runs that are not finished, all of a seed before those of the next."""
    sweep = config.sweep
    runs = itertools.product(sweep.seeds, sweep.arms, sweep.learning_rates)
    missing = [(arm, rate, s) for s, arm, rate in runs if pieces.load(_name(arm, rate, s)) is None]
    if not missing:
        return
    inputs = pipeline.load(
        arm_config(config, missing[0][0]), eval_batch_size=config.eval_batch_size
    )
    arms: dict[str, Arm] = {}
    for arm, rate, seed in tqdm.tqdm(missing, desc="runs", dynamic_ncols=True):
        if arm not in arms:
            arms[arm] = Arm(
                arm_config(config, arm), channels=inputs.channels, num_classes=inputs.num_classes
            )
        name, train = _name(arm, rate, seed), arms[arm].train
        outcome = judge(pieces.get(name, train, inputs, learning_rate=rate, seed=seed))
        tqdm.tqdm.write(f"{name}: {outcome}")


def _entry(measured: np.ndarray | None) -> dict[str, Any]:
    """Returns the results of a finished run; None stands for what is not finite."""
    assert measured is not None
    outcome = judge(measured)._asdict()
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in outcome.items()
    }


def largest_stable(rates: dict[str, dict[str, dict[str, Any]]]) -> str | None:
    """Returns the largest rate of an arm up to which all runs are stable, or None."""
    largest = None
    for rate, seeds in rates.items():
        if any(entry["fault"] for entry in seeds.values()):
            break
        largest = rate
    return largest


def report(results: dict[str, Any]) -> str:
    """Returns the table of all runs and that of the largest stable rates."""
    header = ["attention", "learning rate", "seeds", "final training loss", "mean"]
    header += ["spread (s.d.)", "largest loss", "largest gradient norm", "unstable runs"]
    of_runs, of_arms = [], []
    for arm, rates in results.items():
        of_runs += [_row(arm, rate, seeds) for rate, seeds in rates.items()]
        of_arms.append((LABELS[arm], largest_stable(rates) or "none of these"))
    largest = markdown.table(("attention", "largest stable rate"), of_arms)
    return f"{markdown.table(header, of_runs)}\n\n{largest}"


def _row(arm: str, rate: str, seeds: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """Returns the row of an arm at a rate."""
    losses = [entry["final_loss"] for entry in seeds.values()]
    faults = [f"{entry['fault']} (seed {s})" for s, entry in seeds.items() if entry["fault"]]
    finite = None not in losses
    many = finite and len(losses) > 1
    return (
        LABELS[arm],
        rate,
        ", ".join(seeds),
        ", ".join("-" if loss is None else f"{loss:.3f}" for loss in losses),
        f"{np.mean(losses):.3f}" if finite else "-",
        f"{np.std(losses, ddof=1):.3f}" if many else "-",
        _largest([entry["largest_loss"] for entry in seeds.values()], ".2f"),
        _largest([entry["largest_norm"] for entry in seeds.values()], ".1f"),
        ", ".join(faults) or "none",
    )


def _largest(values: list[float | None], digits: str) -> str:
    """Returns the largest value of a cell, in which None is not finite."""
    finite = [value for value in values if value is not None]
    return f"{max(finite):{digits}}" if len(finite) == len(values) else "not finite"


def draw(results: dict[str, Any]) -> Figure:
    """Draws final loss and largest gradient norm against the rate; crosses mark unstable runs.

    Lines are means over seeds, bands reach from the lowest to the highest seed.
    """
    figure, panels = style.subplots(9, 3.8, 1, 2)
    for arm, rates in results.items():
        for axes, name in zip(panels, ("final_loss", "largest_norm"), strict=True):
            x = np.array([float(rate) for rate in rates])
            values = [[entry[name] for entry in seeds.values()] for seeds in rates.values()]
            y = np.array(values, float)  # None becomes NaN, which is not drawn.
            axes.plot(x, y.mean(axis=1), **STYLES[arm], label=LABELS[arm], markersize=5)
            color = STYLES[arm]["color"]
            style.band(axes, x, y.min(axis=1), y.max(axis=1), color=color)
            faults = [[bool(entry["fault"]) for entry in s.values()] for s in rates.values()]
            at = np.broadcast_to(x[:, None], y.shape)[np.array(faults)]
            axes.plot(at, y[np.array(faults)], "x", color=color, markersize=9)
    panels[0].set(ylabel=f"mean training loss of the last {WINDOW} steps")
    panels[1].set(ylabel="largest gradient norm", yscale="log")
    for axes in panels:
        axes.set(xlabel="peak learning rate", xscale="log")
        style.ticks(axes, map(float, rates), rates)
        style.tidy(axes)
    panels[0].plot([], [], "x", color="gray", markersize=9, label="unstable run")
    panels[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    import sys

    process.keep_freed_memory()
    command_line.launch(sys.modules[__name__], pathlib.Path(__file__).with_name("sweep_config.py"))
