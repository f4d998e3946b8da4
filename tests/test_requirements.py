"""Checks that setup.cfg and requirements ask for every package that the code imports."""

import ast
import configparser
import functools
import importlib.metadata
import json
import pathlib
import re
import sys

import packaging.specifiers
import pytest

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[1]

# The file of requirements that each folder needs beside the library's own, None for no file.
FILES = {
    "simrf_jax": None,
    "examples": "train",
    "colabs": "test_library",
    "experiments": "train",
    "benchmarks": "train",
    "tests": "test",
}

# What benchmarks compare the library with, where it is installed.
PEERS = {"torch", "performer_pytorch", "tokamax"}


@functools.cache
def setup_cfg():
    """Returns the parsed setup.cfg."""
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(ROOT / "setup.cfg")
    return parsed


def normalized(name):
    """Returns a distribution's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(text):
    """Yields the name and the rest of each requirement in a text, and of files that it includes."""
    for line in text.splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement.startswith("-r "):
            yield from named((ROOT / "requirements" / requirement.removeprefix("-r ")).read_text())
        elif requirement:
            name = re.match(r"[\w.-]+", requirement)[0]
            yield normalized(name), requirement.removeprefix(name)


def of_the_library():
    """Returns what the library asks for, the versions by the names of the distributions."""
    return dict(named(setup_cfg()["options"]["install_requires"]))


def of_extras():
    """Returns the names of the distributions that the extras ask for."""
    return {
        name for text in setup_cfg()["options.extras_require"].values() for name, _ in named(text)
    }


def required(file):
    """Returns the names of the distributions that a file and the library ask for."""
    text = "" if file is None else (ROOT / "requirements" / f"{file}.txt").read_text()
    return {*of_the_library(), *dict(named(text))}


def sources(folder):
    """Yields the Python code of every module and every cell of a notebook in a folder."""
    for path in (ROOT / folder).rglob("*.py"):
        yield path.read_text()
    for path in (ROOT / folder).rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        codes = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        # Magics of IPython are no Python.
        yield from (re.sub(r"^( *)%.*", r"\1pass", code, flags=re.MULTILINE) for code in codes)


def imported(folder):
    """Returns the top-level names of the modules of other projects that a folder imports."""
    found = set()
    for source in sources(folder):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {*FILES, "conftest"}


@pytest.fixture(scope="module")
def distributions():
    """Returns the names of the installed distributions that have each top-level module."""
    found = importlib.metadata.packages_distributions()
    return {module: {normalized(name) for name in names} for module, names in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", FILES)
def test_everything_imported_is_required(folder, distributions):
    modules = imported(folder)
    assert "jax" in modules
    allowed = required(FILES[folder])
    if folder in ("simrf_jax", "examples"):  # Parts of which need an extra.
        allowed |= of_extras()
    modules -= PEERS
    missing = {module for module in modules if not distributions[module] & allowed}
    assert missing == set(), f"Nothing asks for what {folder} imports."


def test_the_library_requires_only_what_it_imports(distributions):
    needed = set().union(*(distributions[module] for module in imported("simrf_jax")))
    assert required(None) - needed == set()


def test_ci_runs_every_python_that_is_supported():
    versions = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"^ +python: (\[.*\])$", workflow, flags=re.MULTILINE)
    assert json.loads(matrix) == versions
    assert setup_cfg()["options"]["python_requires"] == f">={versions[0]}"


@pytest.mark.parametrize("name", of_the_library())
def test_the_oldest_versions_are_those_that_the_library_asks_for(name):
    [least] = re.findall(r"^>=([\d.]+)$", of_the_library()[name])
    pinned = named((ROOT / "requirements" / "oldest.txt").read_text())
    versions = [re.match(r"==([\d.]+)", rest)[1] for other, rest in pinned if other == name]
    # A newer Python has no wheels of the oldest versions.
    assert any(f"{version}.".startswith(f"{least}.") for version in versions)


def test_extras_have_only_what_the_library_can_use(distributions):
    used = set().union(*(distributions[module] for module in imported("simrf_jax")))
    assert of_extras() <= used


# Those of Google Colab in the autumn of 2026, under Python 3.13. It also has matplotlib.
COLAB = {"flax": "0.11.2", "jax": "0.7.2", "numpy": "2.1.3", "scipy": "1.16.3"}


@pytest.mark.parametrize("name", COLAB)
def test_an_installation_replaces_nothing_in_colab(name):
    [least] = re.findall(r"^>=([\d.]+)$", of_the_library()[name])
    assert [*map(int, COLAB[name].split("."))] >= [*map(int, least.split("."))]


def test_the_lock_file_of_pods_has_what_is_asked_for():
    locked = dict(named((ROOT / "requirements" / "pod.txt").read_text()))
    asked = [of_the_library().items()]
    asked += [
        named((ROOT / "requirements" / f"{name}.txt").read_text()) for name in ("train", "gcs")
    ]
    assert "libtpu" in locked
    for name, wanted in (pair for some in asked for pair in some):
        version = locked[re.sub(r"\[.*", "", name)].removeprefix("==")
        specifier = re.sub(r"^\[.*?\]", "", wanted).strip()
        assert packaging.specifiers.SpecifierSet(specifier).contains(version), name
