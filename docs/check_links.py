"""Checks all links of the built site: ``python docs/check_links.py docs/_build/html``.

Links inside the site must lead to a file, and to an element of it if they name one. Addresses of
the web are not visited; they must be complete.
"""

from __future__ import annotations

import pathlib
import sys
import urllib.parse
from collections.abc import Iterator

import bs4

LINKS = {"a": "href", "img": "src", "link": "href", "script": "src"}


def targets(page: bs4.BeautifulSoup) -> Iterator[str]:
    """Yields where the links of a page lead."""
    for name, attribute in LINKS.items():
        for element in page.find_all(name, attrs={attribute: True}):
            yield str(element[attribute])


def fault(target: str, path: pathlib.Path, anchors: dict[pathlib.Path, set[str]]) -> str | None:
    """Returns what is wrong with one link, or None.

    Args:
      target: Address that the link has.
      path: The file that has the link.
      anchors: Names of the elements of each page of the site.
    """
    parts = urllib.parse.urlsplit(target)
    if parts.scheme in ("http", "https"):
        return None if "." in parts.netloc and " " not in target else "is no complete address"
    if parts.scheme or parts.netloc or parts.path.startswith("/"):
        return "leads out of the site"
    file = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
    if not file.is_file():
        return "leads to no file"
    name = urllib.parse.unquote(parts.fragment)
    if name and file in anchors and name not in anchors[file]:
        return "leads to no element of its page"
    return None


def faults(folder: pathlib.Path) -> Iterator[str]:
    """Yields a sentence for each dead link of a site."""
    paths = sorted(folder.resolve().rglob("*.html"))
    pages = {path: bs4.BeautifulSoup(path.read_text(), "html.parser") for path in paths}
    anchors = {
        path: {str(element["id"]) for element in page.find_all(id=True)}
        for path, page in pages.items()
    }
    for path, page in pages.items():
        for target in sorted({*targets(page)}):
            if found := fault(target, path, anchors):
                yield f"{path.relative_to(folder.resolve())}: {target} {found}."


def main(folder: pathlib.Path) -> str | None:
    """Returns all faults of a site, or prints how many pages it has if there is none."""
    if not (folder / "index.html").is_file():
        return f"{folder} holds no built site; sphinx-build makes one."
    if found := list(faults(folder)):
        return "\n".join(found)
    print(f"No dead links in {len([*folder.rglob('*.html')])} pages.")
    return None


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
