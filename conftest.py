"""Strict settings for every test and doctest, which JAX reads when it is first imported."""

import collections
import gc
import os
import zlib

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

import jax
import jaxtyping
import pytest

import tests.run_time_types  # noqa: F401
from tests import platforms

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The annotations of these packages, including shapes, are checked in every call. The hook must be
# installed before anything imports them.
jaxtyping.install_import_hook(
    ["simrf_jax.attention", "simrf_jax.features", "simrf_jax.projections", "simrf_jax.theory"],
    "tests.run_time_types.checked",
)

# This module has no doctests, and its global flags can be defined only once in a process.
collect_ignore_glob = ["experiments/vit/main.py"]


@pytest.fixture(scope="module", autouse=True)
def _leave_what_stays_out_of_collections():
    """Keeps the garbage collector away from the programs that JAX has cached.

    Each of its passes would visit all their objects, millions in the end, which takes longer than
    many a test.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases of large products that only the slow suite runs.

    The choice depends on the names of the cases alone, so that it is spread over all values of all
    parameters. Every test keeps at least one case.
    """
    cases = collections.defaultdict(list)
    for item in items:
        for marker in item.iter_markers("sampled"):
            cases[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (_, number), group in cases.items():
        ranked = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in ranked[-(-len(ranked) // number) :]:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    """Skips a test that the platform under test cannot run."""
    if item.get_closest_marker("cpu"):
        platforms.require_cpu()
    for marker in item.iter_markers("devices"):
        platforms.require_devices(*marker.args)
