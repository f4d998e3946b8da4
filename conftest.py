"""Strict settings for every test and doctest; JAX reads them when it is first imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# NumPy's threads wait for each other when several test processes share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Its flags are global, and are defined once in a process. No doctests there.
collect_ignore_glob = ["experiments/vit/main.py"]
