"""Means and speeds of the steps between two rows of a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np


class Speed(NamedTuple):
    """The work of a step, which turns seconds into speeds.

    Attributes:
      batch_size: Images of a step.
      flops: Floating-point operations of a step, ``flops.train_flops`` for each image.
      peak: Peak operations a second of the devices; None if it is not known.
    """

    batch_size: int
    flops: int
    peak: float | None

    def row(self, seconds: float) -> dict[str, float]:
        """Returns the columns of speed, given the seconds of one step."""
        row = {
            "images_per_second": self.batch_size / seconds,
            "flops_per_second": self.flops / seconds,
        }
        return row if self.peak is None else row | {"mfu": row["flops_per_second"] / self.peak}


# The metrics of each step that must be finite: their names in a sentence, and those in the step.
OF_STEPS = {"loss": "loss", "gradient's norm": "gradient_norm"}


class Meter:
    """Gathers the metrics of steps, on the devices, and makes a row of their means."""

    def __init__(self, speed: Speed):
        self._speed = speed
        self.restart()

    def restart(self) -> None:
        """Starts over: no steps, no seconds."""
        self._pending: list[Mapping[str, jax.Array]] = []
        self._start = time.perf_counter()

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Adds the metrics of a step.

        Waits for the step before the last, so that no more batches than two are on the devices.
        """
        jax.block_until_ready(self._pending[-2:-1])
        self._pending.append(metrics)

    def read(
        self, done: int, learning_rate: float
    ) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
        """Waits for the steps since the start.

        Args:
          done: Steps of the run so far.
          learning_rate: Learning rate of the last step.

        Returns:
          Row of the means, and the loss and the norm of the gradient of each step: by name, then by
          the number of steps done.
        """
        fetched: list[Mapping[str, np.ndarray]] = jax.device_get(self._pending)
        seconds = (time.perf_counter() - self._start) / len(fetched)

        def mean(name: str) -> float:
            return float(np.mean([metrics[name] for metrics in fetched]))

        row = {
            "step": done,
            "learning_rate": learning_rate,
            "train_loss": mean("loss"),
            "train_accuracy": mean("accuracy"),
            "gradient_norm": mean("gradient_norm"),
            **self._speed.row(seconds),
        }
        numbers = range(done - len(fetched) + 1, done + 1)
        each = {
            what: {n: float(m[name]) for n, m in zip(numbers, fetched, strict=True)}
            for what, name in OF_STEPS.items()
        }
        return row, each
