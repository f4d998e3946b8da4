import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import simrf_jax

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(simrf_jax.__file__).parent


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports by a relative path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Arrows run one way: a room may import those before it.
ROOMS = ["projections", "features", "attention", "integrations", "models"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_comes_before_them(room):
    forbidden = {f"simrf_jax.{name}" for name in ROOMS[ROOMS.index(room) + 1 :]}
    # What the package re-exports is for its users; it comes from later rooms.
    forbidden |= {f"simrf_jax.{name}" for name in simrf_jax.__all__}
    forbidden |= {"experiments", "tests", "optax", "ml_collections"}
    if room in ("projections", "features", "attention"):
        forbidden.add("flax")
    for path in (ROOT / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            prefixes = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            assert not prefixes & forbidden, f"{path} imports {name}"


def test_the_package_itself_does_not_need_flax():
    code = "import simrf_jax, sys; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", simrf_jax.__all__)
def test_public_functions_are_specified(name):
    function = getattr(simrf_jax, name)
    doc = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in doc
    parameters = inspect.signature(function).parameters
    for parameter in parameters:
        assert f"{parameter}:" in doc, f"{name} does not document {parameter}"


def test_public_signatures():
    signatures = {
        name: str(
            inspect.signature(getattr(simrf_jax, name)).replace(
                parameters=[
                    p.replace(annotation=inspect.Parameter.empty)
                    for p in inspect.signature(getattr(simrf_jax, name)).parameters.values()
                ],
                return_annotation=inspect.Signature.empty,
            )
        )
        for name in ("draw_projection", "project", "positive_features", "random_feature_attention")
    }
    assert signatures["project"] == "(x, projection)"
    assert signatures["positive_features"] == "(x, projection, *, kernel='gaussian')"
    assert signatures["draw_projection"].startswith(
        "(key, num_features, dim, *, coupling='simplex', block='regular', rotation='haar', "
        "norms='chi', dtype="
    )
    assert signatures["random_feature_attention"] == (
        "(query, key, value, projection, *, feature_map='positive', mask=None, bias=None, "
        "scale=None, is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None, "
        "implementation=None)"
    )
