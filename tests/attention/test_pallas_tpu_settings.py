"""The TPU kernels under JAX's global settings, which many programs change, and on each chip."""

import contextlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from simrf_jax import random_feature_attention
from simrf_jax._src.attention.pallas_tpu import choice, operands
from tests.tiers import slow_but
from tests.versions import enable_x64

SETTINGS = {
    "highest": lambda: jax.default_matmul_precision("highest"),
    "high": lambda: jax.default_matmul_precision("high"),
    "BF16_BF16_F32": lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    "x64": lambda: enable_x64(True),
}
MODES = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "packed": {"is_packed": True},
    "band": {"exact_bandwidth": 3},
}


def program(
    dtype,
    sharding=None,
    num_features=8,
    *,
    length=150,
    heads=2,
    key_heads=2,
    dim=16,
    is_packed=False,
    **options,
):
    """Returns attention with its gradient, and abstract arguments."""

    def both_ways(query, key, value, projection, ids):
        segments = {"segment_ids": ids} if is_packed else {}

        def attend(*tokens):
            return random_feature_attention(
                *tokens, projection, implementation="pallas_tpu", **segments, **options
            )

        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(out)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    query, key = (array((1, length, n, dim), dtype) for n in (heads, key_heads))
    w, ids = (
        array((key_heads, num_features, dim), jnp.float32),
        array((1, length), jnp.int32),
    )
    return jax.jit(both_ways), (query, key, key, w, ids)


@pytest.mark.slow
@pytest.mark.parametrize("setting", slow_but(["highest", "x64"], list(SETTINGS)))
@pytest.mark.parametrize("mode", slow_but(["bidirectional", "causal"], list(MODES)))
def test_the_kernels_are_the_same_under_every_setting(mode, setting):
    function, arguments = program(jnp.bfloat16, **MODES[mode])
    expected = kernels(function.trace(*arguments).jaxpr)
    with SETTINGS[setting]():
        found = kernels(function.trace(*arguments).jaxpr)
    assert found == expected
    assert len(found) >= 2


def kernels(jaxpr):
    """Returns the operations of each kernel: name, types and the precision of a product."""
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "pallas_call":
            inside = list(equations(equation.params["jaxpr"]))
            for block in equation.params["grid_mapping"].block_mappings:
                inside += equations(block.index_map_jaxpr.jaxpr)
            found.append([described(one) for one in inside])
    return found


def equations(jaxpr):
    """Yields the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def described(equation):
    precision = equation.params.get("precision")
    return equation.primitive.name, [str(x.aval) for x in equation.invars], precision


@pytest.fixture(scope="module")
def tpu():
    """A function from a topology to a sharding over one of its devices, which need not be here."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("The wheel libtpu, which holds the compiler for TPUs, is not installed.")
    from jax.experimental import topologies
    from jax.experimental.compilation_cache import compilation_cache

    def device(topology):
        # On a v4, JAX sees the two cores of a chip as one device.
        options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
        described = topologies.get_topology_desc(topology, platform="tpu", **options)
        return jax.sharding.SingleDeviceSharding(described.devices[0])

    jax.devices()  # The CPU's compiler has read XLA_FLAGS, of which libtpu knows only some.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        # Otherwise only one process at a time could load the compiler.
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
        # Without a TPU, no program can be read back from the cache.
        is_cached = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield device
        jax.config.update("jax_enable_compilation_cache", is_cached)
        compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("setting", ["none", *SETTINGS])
@pytest.mark.parametrize("mode", MODES)
def test_compiles_under_every_setting(tpu, mode, setting, dtype):
    function, arguments = program(dtype, tpu("v5e:2x4"), **MODES[mode])
    with SETTINGS.get(setting, contextlib.nullcontext)():
        function.lower(*arguments).compile()


CHIPS = ("v4:2x2x4", "v5e:2x4", "v5p:4x4x4", "v6e:4x4", "tpu7x:2x2x2")
SIZES = {
    "ViT": (197, 12, 12, 64),
    "long": (1024, 12, 12, 64),
    "grouped": (1024, 32, 4, 128),
    "whole": (4096, 12, 12, 64),
    "tiled": (8192, 12, 12, 64),
    "wide": (2048, 12, 12, 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", CHIPS)
def test_compiles_for_every_chip(tpu, monkeypatch, topology, mode, size):
    length, heads, key_heads, dim = SIZES[size]
    if topology.startswith("v4:"):
        for module in (choice, operands):
            monkeypatch.setattr(module, "memory", lambda: choice.MEMORY_OF_V4)
    sizes = {"length": length, "heads": heads, "key_heads": key_heads, "dim": dim}
    function, arguments = program(jnp.bfloat16, tpu(topology), 128, **sizes, **MODES[mode])
    function.lower(*arguments).compile()
