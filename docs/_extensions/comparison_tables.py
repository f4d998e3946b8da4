"""Gathers the tables "paper | ours" of a Markdown file, so that each is written only once."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import repository_links
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

HEADING = re.compile(r"#+ (.*)")


def comparisons(text: str) -> Iterator[tuple[str, str]]:
    """Yields (heading of its section, table) for each table with cells "paper" and "ours"."""
    heading = ""
    for block in re.split(r"\n\n+", text):
        if found := HEADING.match(block):
            heading = found[1]
        cells = [cell.strip() for cell in block.split("|")]
        if "paper" in cells and any(re.match("ours\\b", cell) for cell in cells):
            yield heading, block


class ComparisonTables(SphinxDirective):
    """Directive with the path of a file, whose tables "paper | ours" it shows."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns a rubric and a table for each comparison."""
        _, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(path)
        # Links inside the file become links to it.
        text = pathlib.Path(path).read_text().replace("](#", f"]({pathlib.Path(path).name}#")
        tables = comparisons(repository_links.of_site(self.env.app, path, text))
        shown = "\n\n".join(f"**{heading}**\n\n{table}" for heading, table in tables)
        if not shown:
            raise self.error(f"{path} has no table with a cell 'paper' and a cell 'ours'.")
        return self.parse_text_to_nodes(shown)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.add_directive("comparison-tables", ComparisonTables)
    return {"parallel_read_safe": True}
