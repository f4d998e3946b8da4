"""Makes links of the repository's Markdown files work on the pages that include them."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# A link of Markdown, no picture and no address of the web: its text, and its target.
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!\w+:|#)([^()\s]+)\)")
# A picture of HTML. The include directive sees to those of Markdown (:relative-images:).
PICTURE = re.compile(r'(<img src=")(?!\w+:)([^"]+)')


def rewrite(text: str, path: str, pages: Mapping[str, str], root: pathlib.Path, url: str) -> str:
    """Returns the text of a file with links that work on a page of the site.

    Args:
      text: Text of the file, in Markdown.
      path: Path of the file, relative to the repository.
      pages: Document that holds each file that is on the site, by the path of the file.
      root: Folder of the repository.
      url: Address of the repository, or nothing. It is where links to other files lead. Without an
        address, a link to a file becomes its text.
    """
    folder = os.path.dirname(path)

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        file, hash_sign, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(folder, file))
        if not (root / file).exists():
            return match[0]  # Sphinx warns of it.
        if file in pages:
            suffix = os.path.splitext(file)[1]
            return f"[{words}](/{pages[file]}{suffix}{hash_sign}{anchor})"
        return f"[{words}]({url}/blob/HEAD/{file}{hash_sign}{anchor})" if url else words

    def picture(match: re.Match[str]) -> str:
        opening, file = match.groups()
        return f"{opening}/../{os.path.normpath(os.path.join(folder, file))}"

    return PICTURE.sub(picture, LINK.sub(link, text))


def of_site(app: Sphinx, path: str | os.PathLike[str], text: str) -> str:
    """Returns the text of a file, ``path`` from the site's sources, with links that work there."""
    source = pathlib.Path(app.srcdir)
    file = os.path.relpath(source / path, source.parent)
    pages, url = app.config.repository_pages, app.config.repository_url.rstrip("/")
    return rewrite(text, file, pages, source.parent, url)


def on_include(app: Sphinx, path: pathlib.Path, parent: str, content: list[str]) -> None:
    """Rewrites the links of a file that a page includes."""
    content[0] = of_site(app, path, content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.add_config_value("repository_url", "", "env")
    app.add_config_value("repository_pages", {}, "env")
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True}
