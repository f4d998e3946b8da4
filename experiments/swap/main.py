"""Swaps attention of trained models: ``python -m experiments.swap.main --workdir=runs/swap``."""

from experiments.harness import command_line, process
from experiments.swap import swap

if __name__ == "__main__":
    process.keep_freed_memory()
    command_line.launch(swap)
