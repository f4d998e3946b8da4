"""Checks that setup.cfg asks for every package that the code imports."""

import ast
import configparser
import functools
import importlib.metadata
import json
import pathlib
import re
import sys

import pytest

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[1]

# The extra that each folder needs on top of the library's own requirements. The library works
# without it, but for one module (tests/integrations/test_sklearn.py).
EXTRAS = {
    "simrf_jax": "sklearn",
    "examples": "sklearn",
    "colabs": "colab",
    "experiments": "train",
    "benchmarks": "train",
    "tests": "test",
}
# jaxlib is not imported. It is required because jax would accept older versions of it.
NOT_IMPORTED = {"jaxlib"}


@functools.cache
def setup_cfg():
    """Returns the parsed setup.cfg."""
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(ROOT / "setup.cfg")
    return parsed


def normalized(name):
    """Returns a distribution's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(extra):
    """Returns the names of the distributions that an extra and the library ask for."""
    cfg = setup_cfg()
    text = cfg["options"]["install_requires"]
    if extra is not None:
        text += "\n" + cfg["options.extras_require"][extra]
    found = set()
    for line in text.split("\n"):
        if others := re.match(r"simrf_jax\[(.*)\]", line):
            found = found.union(*map(required, others[1].split(",")))
        elif line.strip():
            found.add(normalized(re.match(r"[\w.-]+", line)[0]))
    return found


def sources(folder):
    """Yields the Python code of every module and every cell of a notebook in a folder."""
    for path in (ROOT / folder).rglob("*.py"):
        yield path.read_text()
    for path in (ROOT / folder).rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def imported(folder):
    """Returns the top-level names of the modules of other projects that a folder imports."""
    found = set()
    for source in sources(folder):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {*EXTRAS, "conftest"}


@pytest.fixture(scope="module")
def distributions():
    """Returns the names of the installed distributions that have each top-level module."""
    found = importlib.metadata.packages_distributions()
    return {module: {normalized(name) for name in names} for module, names in found.items()}


@pytest.mark.parametrize("folder", EXTRAS)
def test_everything_imported_is_required(folder, distributions):
    modules = imported(folder)
    assert "jax" in modules
    allowed = required(EXTRAS[folder])
    missing = {module for module in modules if not distributions[module] & allowed}
    assert missing == set(), f"setup.cfg does not ask for what {folder} imports."


def test_the_library_requires_only_what_it_imports(distributions):
    needed = set().union(*(distributions[module] for module in imported("simrf_jax")))
    assert required(None) - needed == NOT_IMPORTED


def test_ci_runs_every_python_that_is_supported():
    versions = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"^ +python: (\[.*\])$", workflow, flags=re.MULTILINE)
    assert json.loads(matrix) == versions
    assert setup_cfg()["options"]["python_requires"] == f">={versions[0]}"
