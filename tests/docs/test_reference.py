"""Checks that the site's reference has every public name of the library."""

import importlib
import inspect
import pkgutil
import re
import types

import pytest

import simrf_jax
from simrf_jax._src.attention.inspection.report import AttentionReport
from simrf_jax._src.integrations.flax_report import LayerReport
from simrf_jax._src.integrations.linearization.layer_choice import LayerChoice
from simrf_jax._src.integrations.linen.linearize import Linearization as LinenLinearization
from simrf_jax._src.integrations.nnx.linearize import Linearization
from simrf_jax._src.selection.choice import FeatureChoice
from simrf_jax._src.theory.optimum import OptimalDirections
from simrf_jax.integrations import linen, nnx
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
ENTRY = re.compile(r"^   ~(simrf_jax\.[\w.]+)$", re.MULTILINE)
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


# Functions, and the private records that they return.
RETURNED = [
    (simrf_jax.attention_report, AttentionReport),
    (simrf_jax.selection.choose_num_features, FeatureChoice),
    (simrf_jax.theory.optimal_directions, OptimalDirections),
    (linen.attention_report, LayerReport),
    (nnx.attention_report, LayerReport),
    (linen.linearize, LinenLinearization),
    (nnx.linearize, Linearization),
    (nnx.linearize, LayerChoice),
]


@pytest.mark.parametrize(("function", "record"), RETURNED)
def test_functions_document_the_fields_that_they_return(function, record):
    returns = inspect.getdoc(function).partition("Returns:")[2].partition("Raises:")[0]
    names = {name for name in vars(record) if isinstance(vars(record)[name], property)}
    for name in (*inspect.signature(record).parameters, *names):
        assert f"``{name}``" in returns
