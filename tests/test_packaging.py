"""Checks what a package index and a citation manager are told."""

import importlib.util
import pathlib
import re

import pytest

import simrf_jax

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ADDRESS = r'\]\(([^)]*)\)|src="([^"]*)"'


@pytest.fixture(scope="module")
def setup():
    """Returns setup.py as a module."""
    spec = importlib.util.spec_from_file_location("simrf_jax_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def addresses(text):
    """Returns the addresses of all links and pictures of a text in Markdown."""
    return ["".join(found) for found in re.findall(ADDRESS, text)]


def test_links_of_the_readme_lead_somewhere():
    inside = [one.partition("#")[0] for one in addresses(README) if not one.startswith("http")]
    assert "CONTRIBUTING.md" in inside
    assert [one for one in inside if not (ROOT / one).exists()] == []


@pytest.mark.parametrize("source", [None, "https://example.org/simrf_jax"])
def test_the_index_page_has_absolute_links_alone(setup, source):
    page = setup.index_page(README, source)
    assert [one for one in addresses(page) if not one.startswith("https://")] == []
    assert page.count("```") == README.count("```")


def test_the_index_page_leads_to_the_repository(setup):
    text = '<img src="a/b.png" width="480">\n\n[c](d/e.md#f) [g](https://h.org/i)\n'
    source = "https://example.org/j"
    assert setup.index_page(text, source) == (
        '<img src="https://example.org/j/raw/HEAD/a/b.png" width="480">\n\n'
        "[c](https://example.org/j/blob/HEAD/d/e.md#f) [g](https://h.org/i)\n"
    )
    assert setup.index_page(text, None) == "c [g](https://h.org/i)\n"


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("Paper = https://a.org\n  Source = https://b.org/c/", "https://b.org/c"),
        ("Paper = https://a.org", None),
    ],
)
def test_the_source_address_is_that_of_setup_cfg(setup, tmp_path, monkeypatch, urls, expected):
    (tmp_path / "setup.cfg").write_text(f"[metadata]\nproject_urls =\n  {urls}\n")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert setup.source_address() == expected


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall("^version: (.*)$", citation, re.MULTILINE) == [simrf_jax.__version__]
