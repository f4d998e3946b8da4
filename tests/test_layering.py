"""Checks that imports inside the repository run one way, from each module to those below it."""

import ast
import graphlib
import pathlib
import re

import pytest

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(__file__).parents[1]
TOP_FOLDERS = ("simrf_jax", "experiments", "benchmarks", "examples", "tests")

# Parts of a package, modules or packages themselves, from the lowest to the highest. The modules of
# a part may import only that part and those before it.
ORDERED = {
    "simrf_jax._src.models": ("config", "layers", "transformer", "vit"),
    "experiments.vit": (
        "data",
        "config",
        "metrics",
        "training",
        "train",
        "tools",
        "main",
        "configs",
    ),
}
# Experiments whose models another experiment continues.
CONTINUED = {"recall": {"char_lm", "swap"}, "swap": {"char_lm", "vit"}}
MOST_ENTRIES = 9  # Entries of experiments/vit beside its README and its figures.


def module_files(root, folders):
    """Returns the file of every module in some top folders, by the module's dotted name."""
    files = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_modules(path, known):
    """Returns those of the known modules that a file imports anywhere in its code.

    Imports inside functions count, because they hide a circle and do not break it. Imports under
    ``TYPE_CHECKING`` count as well, because a reader has to follow them like any other import.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by a relative path"
            # "from package import name" imports the module package.name, if there is one.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found & known


def import_graph(root, folders):
    """Returns the set of modules that each module imports."""
    files = module_files(root, folders)
    return {name: imported_modules(path, files.keys()) for name, path in files.items()}


def circle(graph):
    """Returns modules of which each is imported by the next, the first one again last, or []."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def graph():
    return import_graph(ROOT, TOP_FOLDERS)


def test_no_imports_form_a_circle(graph):
    assert len(graph) > 200
    assert circle(graph) == []


@pytest.mark.parametrize("package", ORDERED)
def test_modules_import_only_what_stands_below_them(graph, package):
    order = ORDERED[package]
    part_of = {
        name: name.removeprefix(f"{package}.").partition(".")[0]
        for name in graph
        if name.startswith(f"{package}.")
    }
    assert {*part_of.values()} == {*order}
    for name, part in part_of.items():
        below = order[: order.index(part) + 1]
        inside = graph[name] & {package, *part_of}
        above = {other for other in inside if part_of.get(other) not in below}
        assert not above, f"{name} imports {above}"


def test_experiments_import_nothing_of_each_other_but_models_that_they_continue(graph):
    for name in graph:
        package, _, rest = name.partition(".")
        if package == "experiments" and rest:
            folder = rest.partition(".")[0]
            own = {"harness", folder, *CONTINUED.get(folder, ())}
            others = {other for other in graph[name] if other.startswith("experiments.")}
            foreign = {other for other in others if other.split(".")[1] not in own}
            assert not foreign, f"{name} imports {foreign}"


def test_every_config_stands_alone(graph):
    configs = {name for name in graph if ".configs." in name}
    assert len(configs) > 10
    for name in configs:
        assert not graph[name] & configs, f"{name} starts from {graph[name] & configs}"


def test_the_folder_of_the_trainer_is_short():
    names = {path.name for path in (ROOT / "experiments" / "vit").iterdir()}
    entries = names - {"README.md", "figures", "__pycache__"}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


@pytest.mark.parametrize("folder", TOP_FOLDERS)
def test_no_module_has_to_be_imported_under_another_name(folder):
    pattern = re.compile(r"^\s*(?:from \S+ )?import .*\bas \w+_lib\b", re.MULTILINE)
    for path in module_files(ROOT, [folder]).values():
        assert not pattern.search(path.read_text()), path


@pytest.mark.parametrize(
    "statement",
    [
        "import package.low",
        "from package import low",
        "from package.low import NAME",
        "def f():\n    from package import low",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import low",
    ],
)
def test_circles_are_found_wherever_a_module_imports(tmp_path, statement):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package import low, high\n")
    (package / "low.py").write_text("from package import high\n\nNAME = 1\n")
    (package / "high.py").write_text("import os\n")
    assert circle(import_graph(tmp_path, ["package"])) == []
    (package / "high.py").write_text(statement)
    assert {*circle(import_graph(tmp_path, ["package"]))} == {"package.low", "package.high"}


def test_a_module_that_imports_its_own_package_is_a_circle(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.part import NAME\n")
    (package / "part.py").write_text("from package import OTHER\n")
    assert {*circle(import_graph(tmp_path, ["package"]))} == {"package", "package.part"}
