"""Approximates a Gram matrix: ``python -m experiments.gram.main --workdir=runs/gram``."""

import pathlib

from experiments import harness
from experiments.gram import gram

if __name__ == "__main__":
    paper = pathlib.Path(__file__).parent / "configs" / "paper.py"
    harness.launch(gram, gram.FIELDS, paper)
