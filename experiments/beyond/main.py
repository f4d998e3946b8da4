"""Draws the figures of BEYOND.md: ``python -m experiments.beyond.main --workdir=runs/beyond``."""

import pathlib

from experiments import harness
from experiments.beyond import beyond

if __name__ == "__main__":
    paper = pathlib.Path(__file__).parent / "configs" / "paper.py"
    harness.launch(beyond, beyond.FIELDS, paper)
