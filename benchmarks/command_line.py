"""The command line of a benchmark: what it takes, what ``--help`` shows, and bars of progress."""

import argparse
import sys
from collections.abc import Iterable
from typing import TypeVar

import tqdm

from experiments.harness import interrupts

Item = TypeVar("Item")


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, which shows the docstring of a module as its help.

    From here on Ctrl-C ends the program with a line.
    """
    spec = sys.modules["__main__"].__spec__  # None unless the module was started by ``python -m``.
    if spec is not None and spec.name.startswith("benchmarks."):  # And not by a test.
        interrupts.end_at_once("Stopped.")
    return argparse.ArgumentParser(
        prog=None if spec is None else f"python -m {spec.name}",
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def bar(items: Iterable[Item], name: str, total: int | None = None) -> Iterable[Item]:
    """Returns the items, with a bar of progress on stderr that goes when they are done."""
    return tqdm.tqdm(items, desc=name, total=total, dynamic_ncols=True, leave=False)


def show(line: str) -> None:
    """Prints a line at once, above the bars."""
    tqdm.tqdm.write(line)
    sys.stdout.flush()
