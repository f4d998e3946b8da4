"""Trains the language models: ``python -m experiments.char_lm.main --workdir=runs/char_lm``."""

from experiments.char_lm import char_lm
from experiments.harness import command_line, process

if __name__ == "__main__":
    process.keep_freed_memory()
    command_line.launch(char_lm)
