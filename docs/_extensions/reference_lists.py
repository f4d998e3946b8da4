"""Makes a list of each section ``References:`` of docstrings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

TITLE = "References:"
END = re.compile(r"(https?://\S+|\.)$")  # An entry ends with an address or a period.


def as_list(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring with a bullet before each reference."""
    if TITLE not in lines:
        return lines
    start = lines.index(TITLE) + 1
    done, begins = lines[:start], True
    for number, line in enumerate(lines[start:], start):
        if not line.startswith(" "):  # The section ends.
            return [*done, *lines[number:]]
        done.append(f"  {'- ' if begins else '  '}{line.strip()}")
        begins = bool(END.search(line))
    return done


def on_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Changes a docstring before napoleon reads it."""
    lines[:] = as_list(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.connect("autodoc-process-docstring", on_docstring, priority=400)  # Napoleon has 500.
    return {"parallel_read_safe": True}
