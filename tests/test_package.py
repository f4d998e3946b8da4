import ast
import inspect
import operator
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


# What users import. All else stands behind an underscore.
FACES = {
    "calibration.py",
    "feature_maps.py",
    "fmm.py",
    "hybrid.py",
    "kernels.py",
    "integrations/linen.py",
    "integrations/nnx.py",
    "integrations/sklearn.py",
    "models.py",
    "selection.py",
    "theory.py",
}


def test_a_path_without_an_underscore_is_public():
    paths = {path.relative_to(ROOT) for path in ROOT.rglob("*.py")}
    public = {path.as_posix() for path in paths if path.parts[0] != "_src"}
    assert {path for path in public if not path.endswith("__init__.py")} == FACES


# Packages from the lowest to the highest. Each may import those before it.
ORDERED = [
    "kernels",
    "projections",
    "features",
    "calibration",
    "attention",
    "integrations",
    "models",
]
# Packages that tests, experiments and users' own checks use, and the packages that each may import.
SIDE = {
    "theory": ["kernels", "projections", "features"],
    "selection": ["kernels", "projections", "features", "calibration", "theory"],
}
# Packages that may use selection, inside functions, because it imports SciPy.
USES_SELECTION = ["integrations"]


@pytest.mark.parametrize("package", [*ORDERED, *SIDE])
def test_packages_import_only_those_before_them(package):
    allowed = SIDE[package] if package in SIDE else ORDERED[: ORDERED.index(package)]
    allowed = [*allowed, "selection"] if package in USES_SELECTION else allowed
    forbidden = {f"simrf_jax._src.{name}" for name in {*ORDERED, *SIDE} - {*allowed, package}}
    forbidden |= {"experiments", "tests", "optax", "ml_collections"}
    if package in ("kernels", "projections", "features", "calibration", "attention", *SIDE):
        forbidden.add("flax")
    if package == "theory":
        forbidden.add("jax")
    for path in (ROOT / "_src" / package).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            # What stands in front of _src is for users, and would make an import circle.
            assert parts[0] != "simrf_jax" or parts[1] == "_src", f"{path} imports {name}"
            prefixes = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            assert not prefixes & forbidden, f"{path} imports {name}"


# Each takes longer to import than this library, or need not be installed.
SLOW_TO_IMPORT = {"flax", "jax.experimental.pallas", "matplotlib", "scipy", "sklearn", "tensorflow"}


def loaded_by(statement):
    """Returns those of the modules above that a statement loads in a new process."""
    code = f"{statement}; import sys; print(*({SLOW_TO_IMPORT} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_the_package_itself_is_quick_to_import():
    assert loaded_by("import simrf_jax") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theory.kernel_mse", "selection.attention_error"])
def test_theory_and_selection_are_imported_when_they_are_first_used(name):
    assert loaded_by(f"import simrf_jax; simrf_jax.{name}") == ["scipy"]
    assert name.partition(".")[0] in dir(simrf_jax)


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="'simrf_jax' has no attribute 'thoery'"):
        _ = simrf_jax.thoery


PUBLIC = [
    getattr(module, name)
    for module in (
        simrf_jax,
        simrf_jax.feature_maps,
        simrf_jax.fmm,
        simrf_jax.hybrid,
        simrf_jax.kernels,
        simrf_jax.selection,
        simrf_jax.theory,
    )
    for name in module.__all__
    if name != "Mechanism" and not inspect.ismodule(getattr(module, name))
]
RECORDS = [public for public in PUBLIC if inspect.isclass(public)]
FUNCTIONS = [public for public in PUBLIC if not inspect.isclass(public)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_public_functions_are_specified(function):
    doc = inspect.getdoc(function)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in doc
    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}:" in doc, f"{function.__name__} does not document {parameter}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_public_records_are_specified(record):
    doc, fields = inspect.getdoc(record), inspect.signature(record).parameters
    assert "Attributes:" in doc or not fields
    for field in fields:
        assert f"{field}:" in doc, f"{record.__name__} does not document {field}"


def signature(function):
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


# Signatures that users rely on. Each may have more keywords at its end.
SIGNATURES = {
    "draw_projection": "(key, num_features, dim, *, coupling='simplex', block='regular', "
    "rotation='haar', norms='chi', dtype=<class 'jax.numpy.float32'>",
    "draw_fast_projection": "(key, num_features, dim, *, coupling='simplex', ",
    "project": "(x, projection)",
    "positive_features": "(x, projection, *, kernel='softmax')",
    "hyperbolic_features": "(x, projection, *, kernel='softmax')",
    "trigonometric_features": "(x, projection, *, kernel='softmax')",
    "phase_features": "(x, projection, phases, *, kernel='softmax')",
    "relu_features": "(x, projection)",
    "elu_features": "(x, ",
    "gaussian_kernel": "(x, y)",
    "softmax_kernel": "(x, y)",
    "random_feature_attention": "(query, key, value, projection, *, feature_map='positive', "
    "mask=None, bias=None, scale=None, is_causal=False, query_seq_lengths=None, "
    "key_value_seq_lengths=None, implementation=None)",
    "banded_attention": "(query, key, value, *, bandwidth, mask=None, bias=None, scale=None, "
    "is_causal=False, query_seq_lengths=None, key_value_seq_lengths=None, segment_ids=None, "
    "block_size=None)",
    "theory.log_conformity": "(v, dim, *, coupling)",
    "theory.kernel_mse": "(x, y, num_features, *, coupling, features='positive', "
    "kernel='gaussian', block='regular', log=False)",
    "theory.mse_ratio": "(v, num_features, dim, *, coupling, features='positive', "
    "baseline='iid', block='regular')",
    "theory.resultant_norm_pdf": "(w, dim, *, coupling)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_signatures(name):
    function = operator.attrgetter(name)(simrf_jax)
    assert signature(function).startswith(SIGNATURES[name].removesuffix(")"))
