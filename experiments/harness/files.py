"""Files that are whole or absent."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.harness.mistakes import UserError, user_mistakes, writing


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the path of a file to write, which becomes ``path`` if no error comes up.

    Raises:
      UserError: If it cannot be written.
    """
    # NumPy and Matplotlib look at the suffix.
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        with writing(path):
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
    with user_mistakes(OSError, prefix=f"{path} cannot be read: "):
        encoded = path.read_bytes()
    with user_mistakes(RecursionError, ValueError, prefix=f"{path} is damaged: "):
        content = json.loads(encoded)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it must hold a JSON object, got {content!r:.80}.")
    return content


def save_figure(path: pathlib.Path, figure: Figure, *, dpi: int = 160) -> None:
    """Draws a figure into a whole file or none; see ``whole_file``."""
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=dpi)


def finish(
    workdir: pathlib.Path, results: dict[str, Any], draw: Callable[[], Mapping[str, Figure]]
) -> dict[str, Any]:
    """Writes ``results.json``, and only then draws the figures, by name, which it saves beside it.

    Returns:
      The results.
    """
    write_json(workdir / "results.json", results)
    with drawing(workdir):
        for name, figure in draw().items():
            save_figure(workdir / f"{name}.png", figure)
    return results


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
