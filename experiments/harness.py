"""What all experiments share: configs, flags, the program, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import matplotlib.figure
import ml_collections
import numpy as np
from absl import app, flags
from ml_collections import config_flags

import simrf_jax
from experiments import interrupts, locking, mistakes
from experiments.mistakes import UserError, user_mistakes
from simrf_jax import checks

# Flags that launch defines are its caller's, and so in its --help.
flags.disclaim_key_flags()

STOPPED = "Stopped; the same command goes on where it was."

# Type of each field of a config by its dotted name: {"model.width": int, ...}.
Fields = Mapping[str, type]


def check_fields(config: ml_collections.ConfigDict, fields: Fields) -> dict[str, Any]:
    """Refuses a config that has not these fields and no other, each of its type.

    Returns:
      The values by dotted name.

    Raises:
      UserError: If it is no config, fields are missing or unknown, or one has the wrong type.
    """
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f"The config must be an ml_collections.ConfigDict, got {config!r}.")
    given = flatten(config)
    if unknown := sorted(given.keys() - fields.keys()):
        raise UserError(unknown_field_message(unknown, fields))
    if missing := [name for name in fields if name not in given]:
        raise UserError(f"The config lacks {', '.join(missing)}.")
    for name, value in given.items():
        if type(value) is not fields[name]:
            raise UserError(f"config.{name} must be {fields[name].__name__}, got {value!r}.")
    return given


def check_least(values: Mapping[str, Any], least: Mapping[str, int]) -> None:
    """Refuses integers, and entries of tuples of integers, below the least that makes sense.

    Args:
      values: As ``check_fields`` returns them.
      least: The bounds, by dotted name.

    Raises:
      UserError: If a number is too small, a tuple is empty, or an entry of it is not an integer.
    """
    for name, bound in least.items():
        value, what = values[name], f"config.{name}"
        if value == ():
            raise UserError(f"{what} must have at least one entry, got ().")
        if isinstance(value, tuple):
            what = f"Each of {what}"
        for number in value if isinstance(value, tuple) else (value,):
            with user_mistakes(TypeError, ValueError):
                checks.integer(what, number, least=bound)


def check_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Refuses what is not one of the known names.

    Raises:
      UserError: If it is another.
    """
    with user_mistakes(ValueError):
        checks.one_of(name, value, known)


def check_seed(values: Mapping[str, Any]) -> None:
    """Accepts what ``jax.random.key`` tells apart."""
    if not 0 <= values["seed"] < 2**32:
        raise UserError(f"config.seed must be from 0 to 2^32 - 1, got {values['seed']}.")


def check_distances(values: Mapping[str, Any], names: Iterable[str], *, most: float) -> None:
    """Refuses distances that are not floats above 0 and up to ``most``.

    At larger ones squared errors leave the range of their type, or their means have tails that no
    number of trials finds.
    """
    for name in names:
        value = values[name]
        for distance in value if isinstance(value, tuple) else (value,):
            if not isinstance(distance, float) or not 0 < distance <= most:
                raise UserError(
                    f"config.{name} must be floats above 0 and at most {most:g}, got {value}."
                )


def check_ascending(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses lists of numbers that are empty or do not ascend."""
    for name in names:
        value = values[name]
        if not value:
            raise UserError(f"config.{name} must have at least one entry, got ().")
        if not all(isinstance(number, (int, float)) for number in value):
            raise UserError(f"config.{name} must be numbers, got {value}.")
        if list(value) != sorted(set(value)):
            raise UserError(f"config.{name} must ascend and have nothing twice, got {value}.")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns ``{"model.width": 64, ...}``."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, (Mapping, ml_collections.ConfigDict)):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What two flat mappings do not share, one sentence an entry."""

    def value(mapping: Mapping[str, Any], name: str) -> str:
        return repr(mapping[name]) if name in mapping else "absent"

    return [
        f"{name} is {value(theirs, name)} there, {value(ours, name)} here"
        for name in {**theirs, **ours}
        if name not in theirs or name not in ours or theirs[name] != ours[name]
    ]


def unknown_field_message(names: list[str], fields: Fields) -> str:
    """Says which fields there are."""
    plural = "s" if len(names) > 1 else ""
    return (
        f"Unknown config field{plural} {', '.join(names)}; the known ones are {', '.join(fields)}."
    )


def overridden(argv: list[str], fields: Fields) -> list[str]:
    """The fields that the command line overrides; one that no config has is a usage error."""
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
    if not os.path.isfile(config):
        what = "that is no file" if os.path.exists(config) else "there is no such file"
        raise SystemExit(f"--config={config}: {what}.")
    try:
        rest = flags.FLAGS(argv)
        # After an OSError of the file, ml_collections raises at the first use of the config.
        getattr(flags.FLAGS["config"].value, "keys", None)
        return rest
    except SystemExit as end:
        if _line_in(config, end) is None:  # It is from --help.
            raise
        raise SystemExit(_config_file_message(config, end)) from None
    except Exception as error:  # noqa: BLE001 - Flags run the config file, which may raise anything.
        if isinstance(error, flags.Error) and "parsing config file" not in str(error):
            raise SystemExit(f"{error}\nPass --help to see the flags.") from None
        raise SystemExit(_config_file_message(config, error)) from None


def _config_file(argv: list[str]) -> pathlib.Path | None:
    """What ``--config=FILE``, ``--config=FILE:ARGUMENT`` or ``--config FILE`` names."""
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

    def check(self, config: ml_collections.ConfigDict, /) -> None:
        """Raises ``UserError`` for a config that cannot work."""

    def run(self, config: ml_collections.ConfigDict, workdir: pathlib.Path, /) -> dict[str, Any]:
        """Leaves ``results.json`` and figures in the folder, and returns the results."""

    def report(self, results: dict[str, Any], /) -> str:
        """What to print of the results."""


def launch(experiment: Experiment, fields: Fields, default_config: pathlib.Path) -> None:
    """Runs an experiment as a program, with ``--config`` and ``--workdir``.

    A ``UserError`` ends it with one line; every other error keeps its traceback. Of two runs in one
    folder the second is refused.
    """
    config = config_flags.DEFINE_config_file("config", None, f"What to run; {default_config}.")
    workdir = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
        start, folder = time.monotonic(), pathlib.Path(workdir.value)
        with interrupts.told_in_one_line(STOPPED), mistakes.told_in_one_line():
            experiment.check(config.value)
            with locking.locked(folder):
                results = experiment.run(config.value, folder)
        print(experiment.report(results))
        print(f"{time.monotonic() - start:.0f} seconds")

    app.run(main, flags_parser=lambda argv: parse_flags(argv, fields, default_config))


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table for a terminal or a README."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the path of a file to write, which becomes ``path`` if no error comes up.

    Raises:
      UserError: If it cannot be written.
    """
    # NumPy and Matplotlib look at the suffix.
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        with mistakes.writing(path):
            yield partial
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # It became the file, or could not be made.
            partial.unlink()


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a whole file or none; see ``whole_file``."""
    text = json_text(content)
    with whole_file(path) as partial:
        partial.write_text(text)


def json_text(content: dict[str, Any]) -> str:
    """Returns the text that ``write_json`` writes."""
    return f"{json.dumps(content, indent=2, allow_nan=False)}\n"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that ``write_json`` wrote.

    Raises:
      UserError: If it cannot be read, or is not a whole JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it must hold a JSON object, got {content!r:.80}.")
    return content


def save_figure(path: pathlib.Path, figure: matplotlib.figure.Figure, *, dpi: int = 160) -> None:
    """Draws a figure into a whole file or none; see ``whole_file``."""
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=dpi)


@contextlib.contextmanager
def drawing(workdir: pathlib.Path) -> Iterator[None]:
    """Adds to an error that comes up in drawing that no result is lost with it.

    Enter it after ``results.json`` is written.
    """
    try:
        yield
    except Exception as error:
        results = workdir / "results.json"
        error.add_note(f"{results} is whole; the same command draws what is missing.")
        raise


# What there is to compute, by the name of the piece that keeps it.
Tasks = dict[str, Callable[[], np.ndarray]]


class Pieces:
    """The finished pieces of a run, so that one that was stopped goes on where it was.

    Args:
      workdir: Folder to make; it keeps ``config.json`` and one file for each piece.
      config: What the pieces belong to.
      selection: Fields that say which pieces to make, or where data are, but change none of them.

    Raises:
      UserError: If the folder cannot be written, or holds the pieces of another config or of
        another version of this package.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: ml_collections.ConfigDict,
        *,
        selection: Iterable[str] = (),
    ):
        self._folder = workdir / "pieces"
        with mistakes.writing(workdir):
            self._folder.mkdir(parents=True, exist_ok=True)
        path = workdir / "config.json"
        ours = {"version": simrf_jax.__version__, **json.loads(config.to_json())}
        if path.exists():
            theirs = read_json(path)
            names = [n for n in ours | theirs if ours.get(n) != theirs.get(n)]
            if differ := [name for name in names if name not in selection]:
                raise UserError(
                    f"{workdir} holds a run of another config ({path}), which differs in "
                    f"{', '.join(differ)}. Give another --workdir or delete it."
                )
        write_json(path, ours)

    def load(self, name: str) -> np.ndarray | None:
        """Returns a finished piece, or None.

        Raises:
          UserError: If its file is damaged.
        """
        path = self._folder / f"{name}.npy"
        if not path.exists():
            return None
        try:
            return np.load(path)
        except (EOFError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is damaged ({error}). Delete it; the same command computes it again."
            ) from error

    def save(self, name: str, values: np.ndarray) -> None:
        """Keeps a piece, whole or not at all."""
        with whole_file(self._folder / f"{name}.npy") as partial:
            np.save(partial, values)

    def get(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """A piece, computed and kept unless it is finished."""
        values = self.load(name)
        if values is None:
            start = time.monotonic()
            values = compute()
            self.save(f"{name}.seconds", np.array(time.monotonic() - start))
            self.save(name, values)
        return values

    def seconds(self, names: str) -> float:
        """How long the pieces took, in this run and in those it goes on with; a glob of names."""
        kept = (self.load(path.stem) for path in self._folder.glob(f"{names}.seconds.npy"))
        return sum(float(seconds) for seconds in kept if seconds is not None)
