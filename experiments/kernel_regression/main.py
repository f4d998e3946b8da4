"""Classifies: ``python -m experiments.kernel_regression.main --workdir=runs/kernel_regression``."""

import pathlib

from experiments import harness
from experiments.kernel_regression import kernel_regression

if __name__ == "__main__":
    harness.launch(
        kernel_regression,
        kernel_regression.FIELDS,
        pathlib.Path(__file__).parent / "configs" / "paper.py",
    )
