"""Checks that the site's reference has every public name of the library."""

import importlib
import pkgutil
import re
import types

import pytest

import simrf_jax
from tests.docs.pages import DOCS

pytestmark = pytest.mark.fast
MODULES = {
    "simrf_jax": simrf_jax,
    "simrf_jax.feature_maps": simrf_jax.feature_maps,
    **{
        name: importlib.import_module(name)
        for name in (
            "simrf_jax.calibration",
            "simrf_jax.fmm",
            "simrf_jax.hybrid",
            "simrf_jax.kernels",
            "simrf_jax.integrations.linen",
            "simrf_jax.integrations.nnx",
            "simrf_jax.models",
            "simrf_jax.selection",
            "simrf_jax.theory",
        )
    },
}
PUBLIC = {f"{module}.{name}" for module, held in MODULES.items() for name in held.__all__}
PUBLIC.add("simrf_jax.integrations.sklearn.RandomFeatures")
ENTRY = re.compile(r"^(?:   ~|```\{py:data\} )(simrf_jax\.[\w.]+)$", re.MULTILINE)
DOCUMENTED = [
    name for path in DOCS.glob("reference/*.md") for name in ENTRY.findall(path.read_text())
]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_reference_has_every_public_name(name):
    public = pkgutil.resolve_name(name)
    if isinstance(public, types.ModuleType):  # It has a page, and its names are among these.
        assert name in MODULES
        return
    # A name that two modules share, such as calibrate, is documented once.
    assert any(pkgutil.resolve_name(other) is public for other in DOCUMENTED)


def test_the_reference_has_public_names_alone_and_none_twice():
    assert {*DOCUMENTED} <= PUBLIC
    assert len({*DOCUMENTED}) == len(DOCUMENTED)


def test_every_page_of_the_reference_is_listed():
    listed = (DOCS / "reference" / "index.md").read_text().split()
    pages = {path.stem for path in DOCS.glob("reference/*.md")} - {"index"}
    assert pages <= {*listed}
