"""Compares couplings: ``python -m experiments.conformity.main --workdir=runs/conformity``."""

from experiments.conformity import conformity
from experiments.harness import command_line

if __name__ == "__main__":
    command_line.launch(conformity)
