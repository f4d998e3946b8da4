"""The batches of a run, made ahead of it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from typing import Self

import grain
import numpy as np
from absl import flags

# {"image": [rows, height, width, channels] in [-1, 1], "label": [rows] or soft, [rows, classes]},
# and "weight": [rows] in evaluation.
Batch = dict[str, np.ndarray]


class Batches:
    """Iterates over the batches of a run, made ahead of it.

    Its state is how many were taken, and which were skipped: a run may go on with another number of
    workers or hosts.

    Args:
      make: Function that returns a part of a batch, given its number: step * num_parts + part.
      num_steps: Number of batches.
      num_workers: Number of processes that make batches; 0 uses a thread of this process.
      num_parts: Parts of a batch, of which each worker always makes the same one: 1, or the number
        of workers.

    Attributes:
      skipped: Numbers of the batches that are skipped.
    """

    def __init__(
        self,
        make: Callable[[int], Batch],
        *,
        num_steps: int,
        num_workers: int,
        num_parts: int = 1,
    ):
        self._make, self._num_steps, self._num_workers = make, num_steps, num_workers
        self._num_parts = num_parts
        self._step, self.skipped = 0, range(0)
        self._iterator: grain.DatasetIterator | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            alone = _signals_to_this_process_alone() if self._num_workers else nullcontext()
            with alone:
                self._iterator = self._start()
                batch = next(self._iterator)  # It starts the workers.
        else:
            batch = next(self._iterator)
        self._step += 1
        return batch

    def skip(self, batches: range) -> None:
        """Leaves out some batches to come; those after them come instead, and more at the end."""
        self.close()
        self.skipped = batches

    def get_state(self) -> dict[str, int]:
        """Returns the state that belongs in a checkpoint."""
        skipped = {"skipped_from": self.skipped.start, "skipped_to": self.skipped.stop}
        return {"step": self._step} | (skipped if self.skipped else {})

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
        self._step = state["step"]
        self.skipped = range(state.get("skipped_from", 0), state.get("skipped_to", 0))

    def close(self) -> None:
        """Ends the workers."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _start(self) -> grain.DatasetIterator:
        numbers = (step * self._num_parts for step in (self._step, self._num_steps))
        # Workers take turns, so each gets the same part of every batch.
        first, missing = (n * self._num_parts for n in (self.skipped.start, len(self.skipped)))
        make = functools.partial(_make_shifted, self._make, first, missing)
        parts = grain.MapDataset.range(*numbers).map(make)
        ahead = parts.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        if not flags.FLAGS.is_parsed():  # By a notebook, or a test; Grain asks flags of its own.
            flags.FLAGS.mark_as_parsed()
        workers = grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=1)
        init = _end_with_the_trainer if self._num_workers else None
        made = ahead.mp_prefetch(workers, worker_init_fn=init)
        return iter(made.batch(self._num_parts, batch_fn=concatenate))


def _make_shifted(make: Callable[[int], Batch], first: int, missing: int, number: int) -> Batch:
    """Makes a part of a batch, of which ``missing`` numbers from ``first`` on are left out."""
    return make(number if number < first else number + missing)


def concatenate(parts: Sequence[Batch]) -> Batch:
    """Returns the batch of some parts."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@contextmanager
def _signals_to_this_process_alone() -> Iterator[None]:
    """Starts workers with SIGINT and SIGTERM blocked, which they inherit from this thread.

    A signal to the whole process group then reaches the trainer alone, which ends its workers. A
    signal that arrives meanwhile is handled here afterwards.
    """
    resource_tracker.ensure_running()  # When it starts it unblocks the signals.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _end_with_the_trainer(worker: int, num_workers: int) -> None:
    """Ends a worker when the trainer is gone, which cannot end it if it was killed."""
    del worker, num_workers
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def wait() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
