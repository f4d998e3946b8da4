"""Examples shuffled in windows: their blocks are read ahead, one request for each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np

from experiments.harness.mistakes import user_mistakes
from experiments.vit.data import shuffle
from experiments.vit.data.records import Decoded, Records

# Requests of a process at a time. A block takes its latency and the time of its bytes, so that
# several must be under way; they wait without the interpreter.
_THREADS = 8

_LARGEST_REQUEST = 2**28  # Bytes; ArrayRecord cuts a block that is larger into several requests.


class Blocks:
    """Reads records that lie next to each other in a file, by one request each time.

    Threads may share it. Between two reads it holds indices of files, and no connection.

    Args:
      examples: Examples of a split.
    """

    def __init__(self, examples: Records):
        self._examples = examples
        self._files: dict[str, Any] = {}
        self._opening: dict[str, threading.Lock] = {}

    def read(self, start: int, stop: int) -> list[bytes]:
        """Returns the records of the examples from ``start`` up to ``stop``, all of one file.

        Raises:
          UserError: If they cannot be read; the message names them.
        """
        first = start
        for file in self._examples.files:
            if first < file.stop - file.start:
                break
            first -= file.stop - file.start
        first += file.start
        which = f"Of the examples {start} to {stop - 1} of {self._examples.name} some"
        # Each kind of storage, and of damage, has errors of its own.
        with user_mistakes(Exception, prefix=f"{which} cannot be read in {file.path}: "):
            records = self._open(file.path).read(first, first + stop - start)
            if not all(records):  # Of a file that shrinks while it is read.
                raise OSError("a record is empty")
        return records

    def _open(self, path: str) -> Any:
        from array_record.python import array_record_module

        # One thread opens a file, which takes a request, while others may open other files.
        with self._opening.setdefault(path, threading.Lock()):
            if path not in self._files:
                options = f"readahead_buffer_size:{_LARGEST_REQUEST},max_parallelism:1"
                self._files[path] = array_record_module.ArrayRecordReader(path, options=options)
        return self._files[path]


class _Window:
    """A window of a lane, whose blocks are there, under way, or not asked for yet."""

    def __init__(self, windows: shuffle.Windows, lane: int, number: int):
        self._pieces = windows.pieces(lane, number)
        self._ends = np.cumsum([stop - start for start, stop in self._pieces])
        self._order = windows.shuffled(lane, number)
        self._blocks: list[futures.Future[list[bytes]]] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_blocks(self) -> int:
        return len(self._pieces)

    def start(self, count: int, pool: futures.Executor, blocks: Blocks) -> None:
        """Sees to it that the first ``count`` blocks are there or under way."""
        for piece in self._pieces[len(self._blocks) : count]:
            self._blocks.append(pool.submit(blocks.read, *piece))

    def example(self, offset: int) -> tuple[int, bytes]:
        """Returns the number of an example of the split, and its record."""
        number = int(self._order[offset])
        block = int(np.searchsorted(self._ends, number, side="right"))
        start, stop = self._pieces[block]
        of_block = number - int(self._ends[block]) + stop - start
        return start + of_block, self._blocks[block].result()[of_block]


class WindowReader:
    """Reads the examples of a run in the order of ``shuffle.Windows``, for some of its lanes.

    It holds the window that each lane is in, and of the next one the blocks that must be under way
    to be there in time: a process that reads ``n`` lanes holds up to ``2 * n`` windows of encoded
    images. The same examples come out if positions are asked for in any other order; it then reads
    windows anew. It may be pickled, and then holds nothing.

    Args:
      examples: Examples of the training split.
      windows: Their order.
    """

    def __init__(self, examples: Records, windows: shuffle.Windows):
        self.__setstate__((examples, windows))

    def __getstate__(self) -> tuple[Records, shuffle.Windows]:
        return self._examples, self._windows

    def __setstate__(self, state: tuple[Records, shuffle.Windows]) -> None:
        self._examples, self._windows = state
        self._held: dict[int, dict[int, _Window]] = {}  # By lane and number.
        self._blocks = Blocks(self._examples)
        self._pool: futures.ThreadPoolExecutor | None = None

    def read(self, positions: Sequence[int]) -> list[Decoded]:
        """Returns the images and labels at some positions of the run.

        Raises:
          UserError: If an example cannot be read or decoded, or has a label that is no class.
        """
        places = [self._windows.place(position) for position in positions]
        lanes: dict[int, list[shuffle.Place]] = {}
        for place in places:
            lanes.setdefault(place.lane, []).append(place)
        for lane, found in lanes.items():
            self._load(lane, found)
        examples = (self._held[lane][number].example(offset) for lane, number, offset in places)
        return [self._examples.decode(number, record) for number, record in examples]

    def _load(self, lane: int, places: Sequence[shuffle.Place]) -> None:
        """Starts to read the blocks of a lane that are due, and forgets the windows before."""
        first, last = (pick(place.window for place in places) for pick in (min, max))
        held = self._held.get(lane, {})
        self._held[lane] = windows = {
            number: held.get(number) or _Window(self._windows, lane, number)
            for number in range(first, last + 2)
        }
        if self._pool is None:
            self._pool = futures.ThreadPoolExecutor(_THREADS)
        for number in range(first, last + 1):
            windows[number].start(windows[number].num_blocks, self._pool, self._blocks)
        # The blocks of the next window start one by one, one block before they must, and each lane
        # at a moment of its own, so that the storage is asked evenly.
        done = (max(p.offset for p in places if p.window == last) + 1) / len(windows[last])
        ahead = 1 + lane / self._windows.lanes
        coming = windows[last + 1]
        coming.start(int(done * coming.num_blocks + ahead), self._pool, self._blocks)
