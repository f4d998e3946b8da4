"""Tests what the site's build adds to Sphinx, and the check of its links."""

import doctest
import importlib.util
import pathlib
import sys

import pytest

from tests.docs.pages import DOCS, ROOT, name

pytestmark = pytest.mark.fast


def load(path):
    """Returns a module of the site's build, which is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extension(stem):
    return load(DOCS / "_extensions" / f"{stem}.py")


PAGES = {
    "README.md": "index",
    "colabs/claims.ipynb": "notebooks/claims",
    "experiments/gram/README.md": "results/gram",
}


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        ("", "[a](../../README.md)", "[a](/index.md)"),
        ("", "[a](../gram/README.md#b)", "[a](/results/gram.md#b)"),
        ("", "[a](../../colabs/claims.ipynb)", "[a](/notebooks/claims.ipynb)"),
        ("", "See [main.py](main.py).", "See main.py."),
        (
            "https://b.org/c",
            "[main.py](main.py)",
            "[main.py](https://b.org/c/blob/HEAD/{}/main.py)",
        ),
        ("", "[a](nothing.md)", "[a](nothing.md)"),
        ("", "[a](#b) [c](https://d.org) ![e](main.py)", None),
        (
            "",
            'f(x)[0](main) <img src="figures/a.png">',
            'f(x)[0](main) <img src="/../{}/figures/a.png">',
        ),
    ],
)
def test_links_of_included_files(url, text, expected):
    folder = "experiments/gram"
    rewrite = extension("repository_links").rewrite
    found = rewrite(text, f"{folder}/README.md", PAGES, ROOT, url)
    assert found == (text if expected is None else expected.format(folder))


def test_references_become_a_list():
    lines = [
        "Returns x.",
        "",
        "References:",
        "  A (2020),",
        "  https://a.org",
        "  B (2021).",
        "",
        "End.",
    ]
    expected = [*lines[:3], "  - A (2020),", "    https://a.org", "  - B (2021).", "", "End."]
    as_list = extension("reference_lists").as_list
    assert as_list(lines) == expected
    assert as_list(lines[:2]) == lines[:2]


def test_tables_that_compare_are_found(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    comparisons = extension("comparison_tables").comparisons
    table = "| | paper | ours, faster |\n| --- | --- | --- |\n| time | 1 s | 2 s |"
    text = f"# A\n\n| a | paper |\n| --- | --- |\n\n## B\n\nThe paper | ours\n\n{table}\n\nC.\n"
    assert list(comparisons(text)) == [("B", table)]


def test_names_that_are_clear_are_linked():
    pytest.importorskip("sphinx")
    assert doctest.testmod(extension("name_links")) == (0, 2)


def test_signatures_are_those_of_the_source():
    pytest.importorskip("sphinx")
    shown = extension("source_signatures").on_signature

    def function(x: "Float[Array, '*batch dim']", *, scale: "float" = 1.0) -> "Array":  # noqa: F821
        """Returns x."""

    class Record:
        def __init__(self, x: "Mask"):  # noqa: F821
            """Takes x."""

        @classmethod
        def of(cls, x: "Mask") -> "Record":  # noqa: F821
            """Returns a record."""

    arguments = "(x: Float[Array, '*batch dim'], *, scale: float = 1.0)"
    assert shown(None, "function", "", function, None, "()", None) == (arguments, "Array")
    assert shown(None, "class", "", Record, None, "()", None) == ("(x: Mask)", None)
    assert shown(None, "method", "", Record.__init__, None, "()", None) == ("(x: Mask)", None)
    assert shown(None, "method", "", Record.of, None, "()", None) == ("(x: Mask)", "Record")
    assert shown(None, "data", "", 1, None, None, None) == (None, None)


@pytest.fixture
def site(tmp_path):
    """Returns the folder of a site of two pages, without faults."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">A</h1><a href="folder/b.html#c">b</a><a href="#top">t</a>'
        '<a href="https://d.org/e">d</a><img src="folder/f%20g.png">'
    )
    (tmp_path / "folder" / "b.html").write_text('<p id="c">C</p><a href="../index.html">a</a>')
    (tmp_path / "folder" / "f g.png").write_bytes(b"")
    return tmp_path


@pytest.fixture
def check_links():
    pytest.importorskip("bs4")
    return load(DOCS / "check_links.py")


def test_a_site_without_dead_links(check_links, site, capsys):
    assert check_links.main(site) is None
    assert capsys.readouterr().out == "No dead links in 2 pages.\n"


@pytest.mark.parametrize(
    ("element", "fault"),
    [
        ('<a href="c.html">', "c.html leads to no file."),
        ('<a href="folder/b.html#d">', "folder/b.html#d leads to no element of its page."),
        ('<a href="#bottom">', "#bottom leads to no element of its page."),
        ('<img src="a.png">', "a.png leads to no file."),
        ('<a href="/folder/b.html">', "/folder/b.html leads out of the site."),
        ('<script src="file:///a.js"></script>', "file:///a.js leads out of the site."),
        ('<a href="https://nowhere/a b">', "https://nowhere/a b is no complete address."),
    ],
)
def test_dead_links_are_found(check_links, site, element, fault):
    with (site / "index.html").open("a") as file:
        file.write(element)
    assert check_links.main(site) == f"index.html: {fault}"


def test_a_folder_without_a_site_is_refused(check_links, tmp_path):
    assert "holds no built site" in check_links.main(pathlib.Path(tmp_path))


def test_every_file_of_the_repository_has_its_page(monkeypatch):
    monkeypatch.setattr("sys.path", sys.path[:])  # Which the settings change.
    pages = load(DOCS / "conf.py").repository_pages
    assert [file for file in pages if not (ROOT / file).is_file()] == []
    written = {file: page for file, page in pages.items() if not page.startswith("notebooks/")}
    assert [page for page in written.values() if not (DOCS / f"{page}.md").is_file()] == []


FIGURES = [*ROOT.glob("benchmarks/figures/*.png"), *ROOT.glob("experiments/*/figures/*.png")]


@pytest.mark.parametrize("path", sorted(FIGURES), ids=name)
def test_the_gallery_has_every_figure(path):
    assert f":img-top: ../{name(path)}\n" in (DOCS / "gallery.md").read_text()
