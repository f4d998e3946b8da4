"""Approximates a Gram matrix: ``python -m experiments.gram.main --workdir=runs/gram``."""

from __future__ import annotations

import pathlib
import time

from absl import app, flags
from ml_collections import config_flags

from experiments import harness
from experiments.gram import gram

_DEFAULT_CONFIG = pathlib.Path(__file__).parent / "configs" / "paper.py"
_CONFIG = config_flags.DEFINE_config_file("config", None, "What to run; configs/paper.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)


def main(argv: list[str]) -> None:
    """Runs the trials and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
    start = time.monotonic()
    results = gram.run(_CONFIG.value, pathlib.Path(_WORKDIR.value))
    print(f"| features | {' | '.join(gram.COUPLINGS)} |")
    print("| --- |" + " --- |" * len(gram.COUPLINGS))
    for number, size in enumerate(results["num_features"]):
        rows = [results[coupling][number] for coupling in gram.COUPLINGS]
        cells = [f"{row['mean']:.3e} ({row['standard_error']:.0e})" for row in rows]
        print(f"| {size} | {' | '.join(cells)} |")
    print(f"{time.monotonic() - start:.0f} seconds")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; a mistake is a usage error."""
    return harness.parse_flags(argv, gram.FIELDS, _DEFAULT_CONFIG)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
