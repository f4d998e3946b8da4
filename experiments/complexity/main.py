"""Measures costs: ``python -m experiments.complexity.main --workdir=runs/complexity``."""

import pathlib

from experiments import harness
from experiments.complexity import complexity

if __name__ == "__main__":
    harness.launch(
        complexity, complexity.FIELDS, pathlib.Path(__file__).parent / "configs" / "paper.py"
    )
