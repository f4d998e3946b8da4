"""Measures costs: ``python -m experiments.complexity.main --workdir=runs/complexity``."""

import pathlib

from experiments.complexity import complexity
from experiments.harness import command_line

if __name__ == "__main__":
    command_line.launch(complexity, pathlib.Path(__file__).parent / "configs" / "paper.py")
