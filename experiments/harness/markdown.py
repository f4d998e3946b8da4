"""Markdown, for a terminal or a README."""

from __future__ import annotations

from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Returns a table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
