"""What a reader must know to change the library does not grow: counts are what they are today."""

import ast
import collections
import importlib
import pathlib

import pytest

import simrf_jax
from tests.test_package import FACES

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(simrf_jax.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
PROJECTIONS = {
    "StructuredProjection",
    "Projection",
    "FastRows",
    "BipolarProjection",
    "ClusteredProjection",
}
MECHANISMS = {"Mechanism", "RandomFeatureMechanism", "Band", "Blend"}


def nodes(kind, folder=ROOT):
    """Yields the nodes of a kind, and the files that they are in."""
    for path, tree in TREES.items():
        if path.is_relative_to(folder):
            yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def places_that_ask_for(classes):
    """Returns the places that ask ``isinstance`` for one of these classes."""
    return [
        (path, node.lineno)
        for path, node in nodes(ast.Call)
        if isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and classes & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    ]


def test_public_names():
    modules = [face.removesuffix(".py").replace("/", ".") for face in FACES]
    faces = [simrf_jax, *(importlib.import_module(f"simrf_jax.{name}") for name in modules)]
    assert sum(len(face.__all__) for face in faces) <= 106


def test_few_signatures_spell_out_the_arguments_of_a_call():
    found = [
        (path, node.name)
        for path, node in nodes(ast.FunctionDef)
        if "key_value_seq_lengths" in {x.arg for x in (*node.args.args, *node.args.kwonlyargs)}
    ]
    assert len(found) <= 5, found


def test_kinds_of_projections_are_asked_for_in_few_places():
    found = places_that_ask_for(PROJECTIONS)
    assert len(found) <= 4, found


def test_kinds_of_mechanisms_are_asked_for_in_their_package_alone():
    inside = ROOT / "_src" / "attention"
    assert [
        place for place in places_that_ask_for(MECHANISMS) if inside not in place[0].parents
    ] == []


def test_at_most_two_modules_of_attention_share_a_name():
    inside = ROOT / "_src" / "attention"
    names = collections.Counter(path.name for path in inside.rglob("*.py"))
    del names["__init__.py"]
    assert max(names.values()) <= 2, names
