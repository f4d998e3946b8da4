"""Writes the address of the public repository everywhere where it is shown.

    python -m colabs.publish OWNER/NAME

The address goes into the first cells and the badges of the notebooks, the links to them in both
README.md, the README's line to clone, the project_urls of setup.cfg, and CITATION.cff. Another run
with another address replaces it. Until the first run, notebooks install the library from a clone or
from a wheel that is uploaded, and nothing names an address.
"""

from __future__ import annotations

import argparse
import pathlib
import re

import nbformat

from colabs import store

ROOT = pathlib.Path(__file__).parents[1]
COLAB = "https://colab.research.google.com/"
BADGE = f"![Open in Colab]({COLAB}assets/colab-badge.svg)"

_INSTALL_UPLOAD = """\
import importlib.util
import pathlib

# Colab has everything but simrf_jax, which has no public address yet. In a clone, this installs the
# clone. In Colab, first upload the wheel that `pip wheel --no-deps .` makes in a clone.
if importlib.util.find_spec("simrf_jax") is None:
    source = ".." if pathlib.Path("../setup.py").exists() else "simrf_jax-*.whl"
    %pip install -q {source}"""
_INSTALL_PUBLIC = """\
import importlib.util

# Colab has everything but simrf_jax.
if importlib.util.find_spec("simrf_jax") is None:
    %pip install -q git+ADDRESS"""


def address_of(repository: str) -> str:
    """Returns the address of a repository on GitHub.

    Args:
      repository: Owner and name, ``"owner/name"``.

    Raises:
      ValueError: If it is anything else.
    """
    if not re.fullmatch(r"[\w-]+/[\w.-]+", repository, re.ASCII):
        raise ValueError(f"expected OWNER/NAME, got {repository!r}")
    return f"https://github.com/{repository}"


def colab_link(notebook: str, address: str) -> str:
    """Returns a badge that opens a notebook of the repository in Colab."""
    repository = address.removeprefix("https://github.com/")
    return f"[{BADGE}]({COLAB}github/{repository}/blob/main/colabs/{notebook})"


def in_notebook(text: str, name: str, address: str | None) -> str:
    """Returns a notebook with its badge and its first cell for an address, or for none."""
    notebook = nbformat.reads(text, as_version=4)
    if address is None:
        badge = f"[{BADGE}]({COLAB}) Choose *Upload* there and take this file."
        install = _INSTALL_UPLOAD
    else:
        badge = colab_link(name, address)
        install = _INSTALL_PUBLIC.replace("ADDRESS", address)
    notebook.cells[0].source = badge
    store.code_cells(notebook)[0].source = install
    return nbformat.writes(notebook) + "\n"


def with_badges(text: str, address: str | None) -> str:
    """Returns a text in Markdown with a badge behind every link to a notebook, or with none."""
    badge = rf" \[{re.escape(BADGE)}\]\([^)]*\)"

    def link(found: re.Match[str]) -> str:
        behind = "" if address is None else f" {colab_link(found[2], address)}"
        return f"{found[1]}{behind}"

    return re.sub(rf"(\[[^]]*\]\((?:colabs/)?(\w+\.ipynb)\))(?:{badge})?", link, text)


def with_clone(text: str, address: str | None) -> str:
    """Returns the README with the address in front of its first line that installs a clone.

    Raises:
      ValueError: If there is no such line.
    """
    clone = "" if address is None else f"git clone {address} && cd {address.rpartition('/')[2]}\n"
    pattern = r"^(?:git clone \S+ && cd \S+\n)?(pip install -e \.)$"
    text, count = re.subn(pattern, rf"{clone}\1", text, count=1, flags=re.MULTILINE)
    if not count:
        raise ValueError('README.md must have the line "pip install -e .".')
    return text


def in_setup_cfg(text: str, address: str | None) -> str:
    """Returns setup.cfg with the addresses of the sources and of the issues.

    Raises:
      ValueError: If there are no project_urls.
    """
    text = re.sub(r"^ +(?:Source|Issues) = .*\n", "", text, flags=re.MULTILINE)
    urls = "" if address is None else f"    Source = {address}\n    Issues = {address}/issues\n"
    text, count = re.subn(
        r"^project_urls =\n(?: +\w+ = .*\n)*", rf"\g<0>{urls}", text, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError("setup.cfg must have project_urls once.")
    return text


def in_citation(text: str, address: str | None) -> str:
    """Returns CITATION.cff with the address of the sources.

    Raises:
      ValueError: If there is no license, which the address follows.
    """
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
    line = "" if address is None else f"repository-code: {address}\n"
    text, count = re.subn(r"^license: .*\n", rf"\g<0>{line}", text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError("CITATION.cff must have a license once.")
    return text


def written(root: pathlib.Path, address: str | None) -> dict[pathlib.Path, str]:
    """Returns the new text of every file that shows the address.

    Args:
      root: Folder of the repository.
      address: Address of the repository, or None for none.
    """
    readme, colabs_readme = root / "README.md", root / "colabs" / "README.md"
    setup_cfg, citation = root / "setup.cfg", root / "CITATION.cff"
    return {
        readme: with_badges(with_clone(readme.read_text(), address), address),
        colabs_readme: with_badges(colabs_readme.read_text(), address),
        setup_cfg: in_setup_cfg(setup_cfg.read_text(), address),
        citation: in_citation(citation.read_text(), address),
        **{
            path: in_notebook(path.read_text(), path.name, address)
            for path in sorted((root / "colabs").glob("*.ipynb"))
        },
    }


def main() -> None:
    """Writes the address that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m colabs.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository on GitHub")
    repository = parser.parse_args().repository
    try:
        address = address_of(repository)
    except ValueError as error:
        parser.error(str(error))
    # All texts are made before the first is written.
    for path, text in written(ROOT, address).items():
        path.write_text(text)
        print(f"Wrote {path.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
