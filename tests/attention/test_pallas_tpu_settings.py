"""The TPU kernels under JAX's global settings, which many programs change."""

import contextlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from simrf_jax import random_feature_attention
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


def program(dtype, sharding=None, **options):
    """Returns attention with its gradient, and abstract arguments."""

    def both_ways(query, key, value, projection, ids):
        segments = {"segment_ids": ids} if options.get("is_packed") else {}
        rest = {name: x for name, x in options.items() if name != "is_packed"}

        def attend(*tokens):
            return random_feature_attention(
                *tokens, projection, implementation="pallas_tpu", **segments, **rest
            )

        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(out)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    token = array((1, 150, 2, 16), dtype)
    w, ids = array((2, 8, 16), jnp.float32), array((1, 150), jnp.int32)
    return jax.jit(both_ways), (token, token, token, w, ids)


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
def v5e():
    """A sharding over one device of a TPU that this machine need not have."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("The wheel libtpu, which holds the compiler for TPUs, is not installed.")
    from jax.experimental import topologies

    jax.devices()  # The CPU's compiler has read XLA_FLAGS, of which libtpu knows only some.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
        yield jax.sharding.SingleDeviceSharding(devices[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("setting", ["none", *SETTINGS])
@pytest.mark.parametrize("mode", MODES)
def test_compiles_for_a_tpu(v5e, mode, setting, dtype):
    function, arguments = program(dtype, v5e, **MODES[mode])
    with SETTINGS.get(setting, contextlib.nullcontext)():
        function.lower(*arguments).compile()
