"""The command line of a benchmark: what it takes, and ``--help``, which shows what it measures."""

import argparse
import sys


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, which shows the docstring of a module as its help."""
    spec = sys.modules["__main__"].__spec__  # None unless the module was started by ``python -m``.
    return argparse.ArgumentParser(
        prog=None if spec is None else f"python -m {spec.name}",
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
