"""Draws the figures of the README: ``python -m experiments.beyond.main --workdir=runs/beyond``."""

from experiments.beyond import beyond
from experiments.harness import command_line

if __name__ == "__main__":
    command_line.launch(beyond)
