"""Writes the description that package indexes show; setup.cfg has everything else."""

import configparser
import pathlib
import re

ROOT = pathlib.Path(__file__).parent
RELATIVE = r"(?!https?:|#)"


def index_page(readme: str, source: str | None) -> str:
    """Returns the README for a page that has no files beside it.

    Args:
      readme: Text in Markdown, with links relative to the repository.
      source: Address of the repository, to which links and pictures lead; with None, a link to a
        file becomes its text, and pictures go.
    """
    if source is None:
        readme = re.sub(rf'<img src="{RELATIVE}[^>]*>\n*', "", readme)
        return re.sub(rf"\[([^\]]*)\]\({RELATIVE}[^)]*\)", r"\1", readme)
    readme = re.sub(rf'<img src="({RELATIVE}[^"]*)"', rf'<img src="{source}/raw/HEAD/\1"', readme)
    return re.sub(rf"\]\(({RELATIVE}[^)]*)\)", rf"]({source}/blob/HEAD/\1)", readme)


def source_address() -> str | None:
    """Returns the address named Source among the project_urls of setup.cfg, if there is one."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    found = re.search(r"^Source = (\S+?)/?$", config["metadata"]["project_urls"], re.MULTILINE)
    return found[1] if found else None


if __name__ == "__main__":
    import setuptools

    setuptools.setup(
        long_description=index_page((ROOT / "README.md").read_text(), source_address()),
        long_description_content_type="text/markdown",
    )
