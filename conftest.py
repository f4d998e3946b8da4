"""Settings for every test and doctest, which JAX reads when it is first imported."""

import collections
import ctypes
import functools
import gc
import os
import pathlib
import resource

from tests import compilation

# An accelerator is used only if it is asked for, as in JAX_PLATFORMS=cuda,cpu pytest.
PLATFORMS = os.environ.setdefault("JAX_PLATFORMS", "cpu")
# NumPy's threads wait for each other when several test processes share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if PLATFORMS.split(",")[0] == "cpu":
    # Compilation takes most of the tests' time, and a fraction of it with these flags. CONTRIBUTING
    # says how to test the programs that users get.
    os.environ["XLA_FLAGS"] = " ".join(
        (
            compilation.flags(os.environ.get("XLA_FLAGS", "")),
            "--xla_force_host_platform_device_count=8",
        )
    )
else:
    # Otherwise the first test process would take most of a GPU's memory from the others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Programs are lowered faster without the places in the source that their operations come from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Test processes, the programs that they start, and later runs share what they compile.
for name, value in {
    "DIR": pathlib.Path(__file__).parent / ".cache" / "programs",
    "MIN_COMPILE_TIME_SECS": 0,
    "MIN_ENTRY_SIZE_BYTES": -1,
}.items():
    kind = "COMPILATION" if name == "DIR" else "PERSISTENT"
    os.environ.setdefault(f"JAX_{kind}_CACHE_{name}", str(value))

import jax
import pytest

from tests import platforms

jax.config.update("jax_numpy_rank_promotion", "raise")
# The annotations of these packages, including shapes, are checked in every call, and so are PRNG
# keys, if SIMRF_CHECK_TYPES=1 asks for it. It takes an eighth of the tests' time. The hook must be
# installed before anything imports the packages.
if os.environ.get("SIMRF_CHECK_TYPES") == "1":
    import jaxtyping

    import tests.run_time_types  # noqa: F401

    jax.config.update("jax_debug_key_reuse", True)
    jaxtyping.install_import_hook(
        [
            f"simrf_jax._src.{package}"
            for package in ("attention", "features", "projections", "selection", "theory")
        ],
        "tests.run_time_types.checked",
    )

# This module has no doctests, and its global flags can be defined only once in a process.
collect_ignore_glob = ["experiments/vit/main.py"]

MOST_TOGETHER = 10  # Tests of one file that one part has; some files take half an hour.
MOST_MEMORY = 1.45 * 2**30  # Bytes of a test process above which it forgets its programs.
LEAST_ROOM = 0.45 * 2**30  # For programs, before they are forgotten; those of one test take 0.35.


def pytest_addoption(parser):
    """Adds an option that splits a run over several machines."""
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="run the K-th of N parts of the tests"
    )


class _Memory:
    """The memory above which a test process forgets its programs."""

    limit = MOST_MEMORY


@pytest.fixture(autouse=True)
def _keep_compiler_flags():
    """Fails a test that leaves other flags behind: what follows would find no cached program."""
    before = _compiler_flags()
    yield
    assert _compiler_flags() == before


def _compiler_flags():
    return {name: os.environ.get(name) for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")}


@pytest.fixture(autouse=True)
def _forget_programs():
    """Frees the programs that JAX has cached, and what hangs on them, once they fill the memory."""
    yield
    if _resident_bytes() > _Memory.limit:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # Otherwise glibc keeps most of it.
        # What is left are arrays of the tests, for which no program need be compiled again.
        _Memory.limit = max(MOST_MEMORY, _resident_bytes() + LEAST_ROOM)


@pytest.fixture(autouse=True, scope="module")
def _forget_what_a_module_shares(request):
    """Frees the arrays that a file's cached functions hold; clearing JAX's caches does not."""
    yield
    for member in vars(request.module).values():
        if isinstance(member, functools._lru_cache_wrapper):
            member.cache_clear()


def pytest_collection_finish():
    """Spares the garbage collector what is there as long as the process is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps the tests of one part: neighbors together, and about as many in each part."""
    part, parts = map(int, config.getoption("--part").split("/"))
    if parts == 1:
        return
    seen, groups = collections.Counter(), collections.defaultdict(list)
    for item in items:
        groups[item.path, seen[item.path] // MOST_TOGETHER].append(item)
        seen[item.path] += 1
    sizes, chosen = [0] * parts, set()
    for _, group in sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(group)
        if smallest == part - 1:
            chosen.update(item.nodeid for item in group)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_setup(item):
    """Skips a test that the platform under test cannot run."""
    if item.get_closest_marker("cpu"):
        platforms.require_cpu()
    for marker in item.iter_markers("devices"):
        platforms.require_devices(*marker.args)
