"""Checks that one command writes the repository's address wherever it is shown."""

import ast
import configparser

import nbformat
import pytest

from colabs import publish, store

pytestmark = pytest.mark.fast
ADDRESS = "https://github.com/someone/some-where"
NOTEBOOKS = [path.name for path in store.paths()]


def present_address():
    """Returns the address in setup.cfg, or None before the first publication."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(publish.ROOT / "setup.cfg")
    lines = [line.partition(" = ") for line in config["metadata"]["project_urls"].splitlines()]
    return {name: address for name, _, address in lines}.get("Source")


@pytest.fixture
def root(tmp_path):
    """Returns a copy of the files that show the address, in which there is none."""
    for path, text in publish.written(publish.ROOT, None).items():
        copy = tmp_path / path.relative_to(publish.ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    return tmp_path


def texts(root):
    return {path: path.read_text() for path in root.rglob("*") if path.is_file()}


def write(root, address):
    for path, text in publish.written(root, address).items():
        path.write_text(text)


def test_all_files_show_the_address_of_setup_cfg():
    """Nobody has edited a badge, a first cell or a link by hand."""
    for path, text in publish.written(publish.ROOT, present_address()).items():
        assert path.read_text() == text, f"{path.name} is not as colabs.publish leaves it."


def test_publication_reaches_every_file_and_can_be_repeated(root):
    before = texts(root)
    write(root, ADDRESS)
    after = texts(root)
    assert [path.name for path, text in after.items() if "someone/some-where" not in text] == []
    write(root, ADDRESS)
    assert texts(root) == after
    write(root, "https://github.com/other/name")
    assert not any("someone" in text for text in texts(root).values())
    write(root, None)
    assert texts(root) == before


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_a_badge_and_an_install_line(root, name):
    write(root, ADDRESS)
    notebook = nbformat.read(root / "colabs" / name, as_version=4)
    link = f"https://colab.research.google.com/github/someone/some-where/blob/main/colabs/{name}"
    assert notebook.cells[0].source.endswith(f"({link})")
    assert "%pip install -q git+" + ADDRESS in store.code_cells(notebook)[0].source
    assert store.fingerprint(notebook) == notebook.metadata.fingerprint


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_the_first_cell_installs_nothing_where_the_library_is(address):
    text = (store.FOLDER / "quickstart.ipynb").read_text()
    notebook = nbformat.reads(publish.in_notebook(text, "x.ipynb", address), as_version=4)
    code = store.code_cells(notebook)[0].source
    assert code.count("%pip") == 1
    exec(compile(ast.parse(code.replace("%pip", "raise SystemExit  #")), "cell", "exec"), {})


def test_the_packages_of_the_index_page_and_the_citation_are_valid(root):
    write(root, ADDRESS)
    config = configparser.ConfigParser(interpolation=None)
    config.read(root / "setup.cfg")
    urls = config["metadata"]["project_urls"].split("\n")
    assert f"Source = {ADDRESS}" in urls
    assert f"Issues = {ADDRESS}/issues" in urls
    assert config["metadata"]["license_expression"] == "Apache-2.0"
    assert f"\nrepository-code: {ADDRESS}\n" in (root / "CITATION.cff").read_text()
    readme = (root / "README.md").read_text()
    assert f"\ngit clone {ADDRESS} && cd some-where\npip install -e .\n" in readme


def test_every_link_to_a_notebook_gets_one_badge():
    text = "[a](b.ipynb) | [c](colabs/d.ipynb), [e](f.md)\n"
    assert publish.with_badges(text, None) == text
    twice = publish.with_badges(publish.with_badges(text, ADDRESS), ADDRESS)
    assert twice.count(publish.BADGE) == 2
    assert twice.count("/blob/main/colabs/d.ipynb)") == 1
    assert publish.with_badges(twice, None) == text


@pytest.mark.parametrize("repository", ["someone", "a/b/c", "some one/x", "https://github.com/a/b"])
def test_refuses_what_is_no_repository(repository):
    with pytest.raises(ValueError, match="expected OWNER/NAME, got"):
        publish.address_of(repository)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (publish.with_clone, 'must have the line "pip install -e ."'),
        (publish.in_setup_cfg, "must have project_urls once"),
        (publish.in_citation, "must have a license once"),
    ],
)
def test_refuses_files_without_a_place_for_the_address(edit, match):
    with pytest.raises(ValueError, match=match):
        edit("nothing\n", ADDRESS)


def test_the_command_writes_the_files(root, monkeypatch, capsys):
    monkeypatch.setattr(publish, "ROOT", root)
    monkeypatch.setattr("sys.argv", ["publish", "someone/some-where"])
    publish.main()
    assert "Wrote setup.cfg." in capsys.readouterr().out
    assert publish.written(root, ADDRESS) == texts(root)
    monkeypatch.setattr("sys.argv", ["publish", "nobody"])
    with pytest.raises(SystemExit):
        publish.main()
    assert "got 'nobody'" in capsys.readouterr().err
