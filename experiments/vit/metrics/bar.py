"""Progress on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import tqdm

# The name and the format of each column.
_FORMATS = {
    "train_loss": ("loss", "{:.3f}".format),
    "train_accuracy": ("accuracy", "{:.3f}".format),
    "images_per_second": ("images/s", "{:.0f}".format),
    "flops_per_second": ("FLOP/s", tqdm.tqdm.format_sizeof),
    "mfu": ("MFU", "{:.1%}".format),
    "held_out_accuracy": ("held-out accuracy", "{:.3f}".format),
    "test_loss": ("test loss", "{:.3f}".format),
    "test_accuracy": ("test accuracy", "{:.3f}".format),
    "attention_error": ("attention error", "{:.2f}".format),
}


class Bar:
    """A bar with the time left, and the last value of what was measured.

    Args:
      num_steps: Number of steps of the run.
      first_step: Number of steps that were done before.
      shows: If true, show the bar; one host of a pod does.
    """

    def __init__(self, num_steps: int, first_step: int, *, shows: bool):
        self._bar = tqdm.tqdm(
            total=num_steps, initial=first_step, unit="step", dynamic_ncols=True, disable=not shows
        )
        self._latest: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, row: Mapping[str, float]) -> None:
        """Moves on to the step of a row of the log."""
        self._latest |= row
        self._bar.set_postfix_str(describe(self._latest), refresh=False)
        self._bar.update(int(row["step"]) - self._bar.n)

    def write(self, text: str) -> None:
        """Writes a line above the bar, where it shows."""
        if not self._bar.disable:
            self._bar.write(text)


def describe(row: Mapping[str, float]) -> str:
    """Describes a row in a line, with FLOP/s only where no MFU is known.

    Example:
      >>> describe({"train_loss": 0.5, "images_per_second": 99.6, "flops_per_second": 3.1e9})
      'loss=0.500, images/s=100, FLOP/s=3.10G'
      >>> describe({"train_loss": 0.5, "flops_per_second": 3.1e13, "mfu": 0.4123})
      'loss=0.500, MFU=41.2%'
    """
    known = [name for name in _FORMATS if name in row]
    if "mfu" in known:
        known.remove("flops_per_second")
    return ", ".join(f"{_FORMATS[name][0]}={_FORMATS[name][1](row[name])}" for name in known)
