"""Skipping of tests that the platform under test cannot run."""

import jax
import pytest

# The number of CPU devices that conftest.py simulates.
SIMULATED = 8


def require_cpu():
    """Skips the test unless JAX runs on the CPU devices that conftest.py simulates."""
    backend, number = jax.default_backend(), jax.device_count()
    if (backend, number) != ("cpu", SIMULATED):
        pytest.skip(f"This test takes {SIMULATED} devices of kind cpu, got {number} of {backend}.")


def require_devices(number):
    """Skips the test if JAX has fewer devices."""
    if jax.device_count() < number:
        pytest.skip(f"This test takes {number} devices and JAX has {jax.device_count()}.")
