"""What a run measures between two rows of its log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np


class Speed(NamedTuple):
    """What turns seconds into speeds.

    Attributes:
      batch_size: Images a step.
      flops: Floating-point operations a step, ``flops.train_flops`` of each image.
      peak: Operations a second that the devices can do; None if it is not known.
    """

    batch_size: int
    flops: int
    peak: float | None

    def row(self, seconds: float) -> dict[str, float]:
        """The columns of speed; ``seconds`` are those of one step."""
        row = {
            "images_per_second": self.batch_size / seconds,
            "flops_per_second": self.flops / seconds,
        }
        return row if self.peak is None else row | {"mfu": row["flops_per_second"] / self.peak}


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
        """Takes what ``train_step`` returns.

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
          learning_rate: Of the last of them.

        Returns:
          Their means as a row; and the loss and the norm of the gradient, by name, of each of them
          by how many steps were done with it.
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
            for what, name in (("loss", "loss"), ("gradient's norm", "gradient_norm"))
        }
        return row, each
