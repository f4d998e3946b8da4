"""The command line of an experiment: its flags, its config file, and the program they start."""

from __future__ import annotations

import os
import pathlib
import re
import time
import traceback
from typing import Any, Protocol

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.harness import interrupts, locking, mistakes, process
from experiments.harness.config_fields import Fields, field_list, unknown_field_message

# Flags that launch defines are its caller's, and so in its --help.
flags.disclaim_key_flags()

STOPPED = "Stopped; the same command goes on where it was."
# The flags with which absl prints its help as text.
HELP = re.compile(r"--?(help|helpshort|helpfull|h|\?)$")


def overridden(argv: list[str], fields: Fields) -> list[str]:
    """Returns the fields that the command line overrides; an unknown one is a usage error."""
    names = [m[1] for a in argv if (m := re.match(r"--?config\.([\w.]+)", a))]
    if unknown := [name for name in names if name not in fields]:
        raise SystemExit(unknown_field_message(unknown, fields))
    return names


def parse_flags(argv: list[str], fields: Fields, default_config: pathlib.Path) -> list[str]:
    """Parses flags; a mistake ends the program with a line that says what it was.

    Define ``--config`` without a default: ml_collections would read it, and fail on the overrides
    of the command line, while the program is still being imported.
    """
    overridden(argv, fields)
    config = _config_file(argv)
    if config is None:
        config = default_config
        argv = [argv[0], f"--config={config}", *argv[1:]]
    # absl prints its help as soon as it meets the flag. Then the config must have been read.
    argv = [argv[0], *sorted(argv[1:], key=lambda argument: HELP.match(argument) is not None)]
    if not os.path.isfile(config):
        what = "that is no file" if os.path.exists(config) else "there is no such file"
        raise SystemExit(f"--config={config}: {what}.")
    try:
        rest = flags.FLAGS(argv)
        # After an OSError of the file, ml_collections raises at the first use of the config.
        getattr(flags.FLAGS["config"].value, "keys", None)
        if flags.FLAGS["workdir"].value == "":
            raise flags.IllegalFlagValueError("--workdir must name a folder, got ''.")
        return rest
    except SystemExit as end:
        if _line_in(config, end) is None:  # It is from --help.
            if HELP.match(argv[-1]):
                print(f"\n{field_list(flags.FLAGS['config'].value, fields, config)}")
            raise
        raise SystemExit(_config_file_message(config, end)) from None
    except Exception as error:  # noqa: BLE001 - Flags run the config file, which may raise anything.
        if isinstance(error, flags.Error) and "parsing config file" not in str(error):
            raise SystemExit(f"{error}\nPass --help to see the flags.") from None
        raise SystemExit(_config_file_message(config, error)) from None


def _config_file(argv: list[str]) -> pathlib.Path | None:
    """Returns the file of ``--config=FILE``, ``--config=FILE:ARGUMENT`` or ``--config FILE``."""
    for number, argument in enumerate(argv):
        if m := re.match(r"--?config(?:=(.*))?$", argument):
            given = m[1] if m[1] is not None else "".join(argv[number + 1 : number + 2])
            return pathlib.Path(given.split(":")[0])
    return None


def _config_file_message(config: pathlib.Path, error: BaseException) -> str:
    """Says what went wrong in a config file, and where."""
    while not (line := _line_in(config, error)) and (inner := error.__cause__ or error.__context__):
        error = inner  # The outer errors are what ml_collections made of it.
    what = f"--config={config} cannot be read: {type(error).__name__}: {error}"
    if line:
        return f"{what} (line {line})"
    return (
        f"{what}. A config is a Python file with a function get_config that returns an "
        "ml_collections.ConfigDict."
    )


def _line_in(file: pathlib.Path, error: BaseException) -> int | None:
    """Returns the line of a file at which an error came up, or None if it is from elsewhere."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if pathlib.Path(frame.filename).resolve() == file.resolve()
    ]
    return lines[-1] if lines else None


class Experiment(Protocol):
    """A module that ``launch`` can run."""

    __file__: str | None

    FIELDS: dict[str, type]
    """Types of the fields of its config."""

    def check(self, config: ConfigDict, /) -> None:
        """Raises ``UserError`` for a config that cannot work."""

    def run(self, config: ConfigDict, workdir: pathlib.Path, /) -> dict[str, Any]:
        """Leaves ``results.json`` and figures in the folder, and returns the results."""

    def report(self, results: dict[str, Any], /) -> str:
        """Returns the text to print of the results."""


def launch(experiment: Experiment, config_file: pathlib.Path | None = None) -> None:
    """Runs an experiment as a program with ``--config``, by default the paper's, and ``--workdir``.

    A ``UserError`` ends it with one line; every other error keeps its traceback. Of two runs in one
    folder the second is refused.
    """
    paper = pathlib.Path(f"{experiment.__file__}").parent / "configs" / "paper.py"
    default_config = config_file or paper
    config = config_flags.DEFINE_config_file("config", None, f"What to run; {default_config}.")
    workdir = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
        process.quiet_jax()
        start, folder = time.monotonic(), pathlib.Path(workdir.value)
        with interrupts.exit_on_interrupt(STOPPED), mistakes.exit_on_user_error():
            experiment.check(config.value)
            with locking.locked(folder):
                results = experiment.run(config.value, folder)
        print(experiment.report(results))
        print(f"{time.monotonic() - start:.0f} seconds")

    app.run(main, flags_parser=lambda argv: parse_flags(argv, experiment.FIELDS, default_config))
