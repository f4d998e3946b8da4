"""Classifies: ``python -m experiments.kernel_regression.main --workdir=runs/kernel_regression``."""

from experiments.harness import command_line
from experiments.kernel_regression import kernel_regression

if __name__ == "__main__":
    command_line.launch(kernel_regression)
