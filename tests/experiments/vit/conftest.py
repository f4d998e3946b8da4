"""Runs that are alike have the same programs, in whatever process; each is compiled once."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.2}


@pytest.fixture(scope="package", autouse=True)
def _compile_once(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # Its own is in that of all.
        folder = folder.parent
    settings = SETTINGS | {"jax_compilation_cache_dir": str(folder / "compiled")}
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks once whether there is one.
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
