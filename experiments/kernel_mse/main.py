"""Mean squared errors: ``python -m experiments.kernel_mse.main --workdir=runs/kernel_mse``."""

from experiments.harness import command_line
from experiments.kernel_mse import kernel_mse

if __name__ == "__main__":
    command_line.launch(kernel_mse)
