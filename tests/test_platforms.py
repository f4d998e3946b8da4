import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import conftest
from tests import compilation, platforms

pytestmark = pytest.mark.fast
ROOT = pathlib.Path(platforms.__file__).parents[1]
PRINT_SETTINGS = "import json, os, conftest; print(json.dumps(dict(os.environ)))"


def settings(**given):
    """Returns the environment variables that conftest.py sets where some are given."""
    ours = ("JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    printed = subprocess.check_output(
        [sys.executable, "-c", PRINT_SETTINGS], cwd=ROOT, env=environment | given, text=True
    )
    return {name: value for name, value in json.loads(printed).items() if name in ours}


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"JAX_PLATFORMS": "cpu"}], ids=["unset", "cpu"])
def test_tests_run_on_eight_simulated_cpu_devices_unless_told_otherwise(given):
    assert settings(**given, XLA_FLAGS="--mine") == {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{compilation.FLAGS} --mine --xla_force_host_platform_device_count=8",
    }


@pytest.mark.slow
def test_programs_are_those_of_users_if_the_flags_say_how_far_to_optimize():
    given = "--xla_backend_optimization_level=3"
    found = settings(JAX_PLATFORMS="cpu", XLA_FLAGS=given)["XLA_FLAGS"]
    assert found == f"{given} --xla_force_host_platform_device_count=8"


def test_a_flag_that_jaxlib_does_not_have_is_not_known():
    assert compilation.is_known("xla_backend_optimization_level")
    assert not compilation.is_known("xla_backend_optimization")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "tpu", "cuda,cpu"])
def test_another_platform_keeps_its_own_flags(given):
    found = settings(JAX_PLATFORMS=given, XLA_FLAGS="--mine")
    assert found == {
        "JAX_PLATFORMS": given,
        "XLA_FLAGS": "--mine",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


@pytest.mark.skipif(conftest.PLATFORMS != "cpu", reason="The tests run on another platform.")
def test_the_cpu_skips_no_test():
    assert (jax.default_backend(), jax.device_count()) == ("cpu", platforms.SIMULATED)
    platforms.require_cpu()
    platforms.require_devices(platforms.SIMULATED)


def test_tests_that_take_more_devices_are_skipped():
    message = rf"takes {jax.device_count() + 1} devices and JAX has {jax.device_count()}\."
    with pytest.raises(pytest.skip.Exception, match=message):
        platforms.require_devices(jax.device_count() + 1)


@pytest.mark.parametrize(("backend", "number"), [("tpu", 8), ("cpu", 1)])
def test_tests_for_the_cpu_are_skipped_elsewhere(monkeypatch, backend, number):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "device_count", lambda: number)
    with pytest.raises(pytest.skip.Exception, match=f"of kind cpu, got {number} of {backend}"):
        platforms.require_cpu()


@pytest.mark.parametrize(
    ("marker", "match"),
    [(pytest.mark.cpu, "8 devices of kind cpu"), (pytest.mark.devices(8), "takes 8 devices")],
    ids=["cpu", "devices"],
)
def test_marked_tests_are_skipped_before_they_run(request, monkeypatch, marker, match):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    conftest.pytest_runtest_setup(request.node)
    request.node.add_marker(marker)
    with pytest.raises(pytest.skip.Exception, match=match):
        conftest.pytest_runtest_setup(request.node)
