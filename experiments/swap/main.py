"""Swaps attention of trained models: ``python -m experiments.swap.main --workdir=runs/swap``."""

import pathlib

from experiments.harness import command_line, memory
from experiments.swap import swap

if __name__ == "__main__":
    memory.keep_freed_memory()
    command_line.launch(swap, pathlib.Path(__file__).parent / "configs" / "paper.py")
