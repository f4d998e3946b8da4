"""The order of the examples of a run: a function of the seed and the position in the run.

``order`` shuffles the whole data set, so every example is a read of its own. ``Windows`` is for
data behind a network: it takes blocks of examples that lie next to each other in a file, and
shuffles within windows of several blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Draws are seeded by (seed, number, index): ORDER and BLOCKS by the epoch, AUGMENTATION and MIXUP
# by the position of the example in the run, and WINDOW by the lane and the number of the window. In
# memory, Grain draws the order and the augmentation instead.
ORDER, AUGMENTATION, MIXUP, BLOCKS, WINDOW = range(5)

LANE = 4  # Images that a lane adds to each batch; they are two pairs of mixup.
BLOCK = 64  # Examples of a block; 7 MiB of ImageNet.


@functools.lru_cache(maxsize=2)  # A batch may begin in one epoch and end in the next.
def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """Returns the order of all examples in an epoch."""
    return np.random.default_rng((seed, ORDER, epoch)).permutation(size)


class Piece(NamedTuple):
    """Examples that lie next to each other in one file, from ``start`` up to ``stop``."""

    start: int
    stop: int


class Place(NamedTuple):
    """The place of a position of the run.

    Attributes:
      lane: Number of its lane.
      window: Number of its window in the lane, counted through all epochs.
      offset: Position in the shuffled window.
    """

    lane: int
    window: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """Shuffles examples in windows, which are made of blocks that one request can read.

    A batch is cut into lanes of ``LANE`` neighboring images. In each epoch the blocks are put into
    a new order, and each lane gets an equal part of it, which it shuffles window by window. So a
    lane reads few files at a time, a host reads the blocks of its own lanes alone, and the batches
    do not depend on how many hosts share the lanes. An epoch leaves out what cannot be shared
    equally, fewer examples than lanes, and each epoch others; no example comes twice.

    Attributes:
      seed: Seed of the run.
      lanes: Number of lanes of a batch.
      window: Examples of a window, or as few more or less as fill an epoch with whole windows.
      starts: First example of each block, and the number of all examples.
    """

    seed: int
    lanes: int
    window: int
    starts: tuple[int, ...]

    @property
    def length(self) -> int:
        """Returns the number of examples of a lane in an epoch."""
        return self.starts[-1] // self.lanes

    @property
    def per_epoch(self) -> int:
        """Returns the number of windows of a lane in an epoch."""
        return max(1, round(self.length / self.window))

    def place(self, position: int) -> Place:
        """Returns the place of a position of the run, step * batch size + row."""
        step, row = divmod(position, self.lanes * LANE)
        lane, of_lane = divmod(row, LANE)
        epoch, index = divmod(step * LANE + of_lane, self.length)
        bounds = self._bounds
        number = int(np.searchsorted(bounds, index, side="right")) - 1
        return Place(lane, epoch * self.per_epoch + number, index - int(bounds[number]))

    def pieces(self, lane: int, window: int) -> list[Piece]:
        """Returns the examples of a window, in the order in which ``shuffled`` counts them."""
        epoch, number = divmod(window, self.per_epoch)
        first = lane * self.length
        begin, end = first + self._bounds[number : number + 2]
        shuffled, ends = _blocks(self, epoch)
        found = []
        first_block, last_block = np.searchsorted(ends, (begin, end - 1), side="right")
        for i in range(first_block, last_block + 1):
            start, stop = self.starts[shuffled[i]], self.starts[shuffled[i] + 1]
            before = ends[i] - (stop - start)
            piece = max(begin, before) - before, min(end, ends[i]) - before
            found.append(Piece(*(int(start + offset) for offset in piece)))
        return found

    def shuffled(self, lane: int, window: int) -> np.ndarray:
        """Returns the order of the examples of a window."""
        size = sum(stop - start for start, stop in self.pieces(lane, window))
        return np.random.default_rng((self.seed, WINDOW, lane, window)).permutation(size)

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """Returns the first index of each window of a lane in an epoch, and the end."""
        return self.length * np.arange(self.per_epoch + 1) // self.per_epoch


def blocks(lengths: Sequence[int], size: int = BLOCK) -> tuple[int, ...]:
    """Cuts files into blocks of about equal size.

    Args:
      lengths: Number of examples of each file.
      size: Largest number of examples of a block.

    Returns:
      The first example of each block, and the number of all examples.

    Example:
      >>> blocks([5, 2], size=3)
      (0, 2, 5, 7)
    """
    starts = [0]
    for length in lengths:
        count = -(-length // size)
        starts += [starts[-1] + length * (i + 1) // count for i in range(count)]
    return tuple(starts)


@functools.lru_cache(maxsize=2)  # While some lanes read the last window, others prefetch the first.
def _blocks(windows: Windows, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of the blocks in an epoch, and where each of them ends in it."""
    sizes = np.diff(windows.starts)
    shuffled = np.random.default_rng((windows.seed, BLOCKS, epoch)).permutation(len(sizes))
    return shuffled, np.cumsum(sizes[shuffled])
