"""Measures costs: ``python -m experiments.complexity.main --workdir=runs/complexity``."""

from experiments.complexity import complexity
from experiments.harness import command_line

if __name__ == "__main__":
    command_line.launch(complexity)
