"""Follows the recipes of CONTRIBUTING.md for a coupling and a feature map in a copy of the tree."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, fences

# Tests that know the names of all couplings or maps, and the conformance of the new ones.
SUITES = {
    "tests/test_conformance.py": "mine",
    "tests/test_run_time_types.py": "names",
    "tests/test_package.py": "mine or my_features or import",
    "tests/test_prose.py": "",
    "tests/docs/test_reference.py": "",
    "tests/projections/test_dense.py": "refuses",
    "tests/models/test_vit.py": "refuses",
    "tests/experiments/vit/test_config.py": "refuses or table",
    "simrf_jax/_src/features/mine.py": "",
}


def edit(path, pattern, replacement):
    """Replaces the only match of a pattern in a file."""
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{path} has {count} places for {pattern!r}"
    path.write_text(text)


def append(path, text):
    path.write_text(f"{path.read_text()}\n\n{text}")


def add_to_table(path, name, entry):
    """Adds an entry to a dictionary or list that ends at the beginning of a line."""
    edit(
        path, rf"^({name}\b[^\n]* = [{{\[]\n.*?)^([}}\]])", lambda m: f"{m[1]}    {entry},\n{m[2]}"
    )


def add_to_choices(path, alias):
    edit(path, rf"^({alias}: TypeAlias = Literal\[[^\]]*)\]", r'\1, "mine"]')


def add_coupling(tree, blocks, tables):
    """Follows the recipe for a coupling."""
    source = tree / "simrf_jax" / "_src"
    projections, arguments = source / "projections", source / "theory" / "arguments.py"
    append(projections / "row_blocks.py", blocks)
    couplings = projections / "couplings.py"
    for path, alias in (
        (couplings, "Coupling"),
        (couplings, "FixedCoupling"),
        (arguments, "PairCoupling"),
        (arguments, "ClosedFormCoupling"),
    ):
        add_to_choices(path, alias)
    edit(couplings, "^    orthogonal_blocks,$", "    my_blocks,\n    orthogonal_blocks,")
    add_to_table(couplings, "COUPLED", '"mine": CouplingRule(my_blocks, least_dim=1)')
    fields = tree / "docs" / "reference" / "vit_config.md"
    edit(fields, r"^(\| `model\.attention` .*?)`exact`", r"\1`mine`, `exact`")
    add_lines(tree, tables)


def add_feature_map(tree, module, tables):
    """Follows the recipe for a feature map."""
    library, features = tree / "simrf_jax", tree / "simrf_jax" / "_src" / "features"
    (features / "mine.py").write_text(module)
    append(library / "feature_maps.py", "from simrf_jax._src.features.mine import Mine\n")
    append(features / "__init__.py", "from simrf_jax._src.features.mine import my_features\n")
    append(library / "__init__.py", "from simrf_jax._src.features import my_features\n")
    for path, name in (
        (library / "feature_maps.py", "Mine"),
        (features / "__init__.py", "my_features"),
        (library / "__init__.py", "my_features"),
    ):
        add_to_table(path, "__all__", f'"{name}"')
    reference = tree / "docs" / "reference"
    for page, beside, new in (
        ("feature_maps", "feature_maps.Positive", "feature_maps.Mine"),
        ("features", "positive_features", "my_features"),
    ):
        entry = rf"^   ~simrf_jax\.{beside}$"
        edit(reference / f"{page}.md", entry, rf"\g<0>\n   ~simrf_jax.{new}")
    append(tree / "tests" / "formulas.py", "mine = positive\n")
    add_lines(tree, tables)


def add_lines(tree, tables):
    """Adds the lines that a recipe shows to the tables of the conformance suite."""
    for name, entry in re.findall(r"^(\w+) = \{\.\.\., (.*)\}$", tables, re.MULTILINE):
        add_to_table(tree / "tests" / "conformance.py", name, entry)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_follows_the_recipes_passes_the_suite(tmp_path):
    ignored = shutil.ignore_patterns(".*", "runs", "_build", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    codes = [code for _, code in fences((ROOT / "CONTRIBUTING.md").read_text(), "python")]
    blocks, of_coupling, module, of_map, *_ = codes
    add_coupling(tree, blocks, of_coupling)
    add_feature_map(tree, module, of_map)
    for path, words in SUITES.items():
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow"]
        command += ["--doctest-modules", path, "-k", words]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
