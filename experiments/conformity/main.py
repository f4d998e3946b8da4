"""Compares couplings: ``python -m experiments.conformity.main --workdir=runs/conformity``."""

import pathlib

from experiments import harness
from experiments.conformity import conformity

if __name__ == "__main__":
    harness.launch(
        conformity, conformity.FIELDS, pathlib.Path(__file__).parent / "configs" / "paper.py"
    )
