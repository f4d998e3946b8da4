"""Batches by their number: the rows that a host reads, and an iterator that makes them ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import grain
import numpy as np
from absl import flags

# {"image": [rows, height, width, channels] in [-1, 1], "label": [rows] or soft, [rows, classes]}.
Batch = dict[str, np.ndarray]


class Host(NamedTuple):
    """One of the processes of a run: it reads as many neighbouring rows of a batch as any other.

    Attributes:
      process_index: As in JAX.
      process_count: As in JAX.
    """

    process_index: int = 0
    process_count: int = 1

    def rows(self, batch_size: int) -> slice:
        """Its rows of a batch."""
        per_host = batch_size // self.process_count
        return slice(self.process_index * per_host, (self.process_index + 1) * per_host)

    def positions(self, number: int, batch_size: int) -> range:
        """Its rows of a batch, counted from the first row of batch 0."""
        rows = self.rows(batch_size)
        return range(number * batch_size + rows.start, number * batch_size + rows.stop)


class Batches:
    """Iterates over the batches of a run, made ahead of it.

    Its state is how many were taken: a run may go on with another number of workers or hosts.

    Args:
      make: From a step to its batch.
      num_steps: How many there are.
      num_workers: Processes that make them; with 0 it is a thread of this one.
    """

    def __init__(self, make: Callable[[int], Batch], *, num_steps: int, num_workers: int):
        self._make, self._num_steps, self._num_workers = make, num_steps, num_workers
        self._iterator = self._start(0)
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """What belongs in a checkpoint."""
        return {"step": self._step}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Goes on after the batches that were taken when this state was.

        Raises:
          ValueError: If there are not that many.
        """
        if not 0 <= state["step"] <= self._num_steps:
            raise ValueError(
                f"The state must be of a step from 0 to {self._num_steps}, got {state['step']}."
            )
        self.close()
        self._iterator = self._start(state["step"])
        self._step = state["step"]

    def close(self) -> None:
        """Ends the workers."""
        self._iterator.close()

    def _start(self, step: int) -> grain.DatasetIterator:
        steps = grain.MapDataset.range(step, self._num_steps).map(self._make)
        # A worker makes whole batches, so how many there are changes none of them.
        ahead = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        if not flags.FLAGS.is_parsed():  # By a notebook, or a test; Grain asks flags of its own.
            flags.FLAGS.mark_as_parsed()
        workers = grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=1)
        return iter(ahead.mp_prefetch(workers))
