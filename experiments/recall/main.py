"""Runs the experiment: ``python -m experiments.recall.main --workdir=runs/recall``."""

from experiments.harness import command_line, process
from experiments.recall import recall

if __name__ == "__main__":
    process.keep_freed_memory()
    command_line.launch(recall)
