"""Approximates a Gram matrix: ``python -m experiments.gram.main --workdir=runs/gram``."""

from experiments.gram import gram
from experiments.harness import command_line

if __name__ == "__main__":
    command_line.launch(gram)
