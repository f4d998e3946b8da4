"""The fused kernels as a TPU runs them: memory that begins as NaN, DMAs, and two cores that race.

Pallas interprets a kernel on a CPU by array operations, where memory begins as zeros and all
happens in one order. Its interpreter for TPUs simulates the rest and reports races.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.attention import test_kernels
from tests.attention.test_kernels import CASES, tokens_of
from tests.attention.test_pallas_tpu import assert_close
from tests.tiers import slow_but

pallas_call = pl.pallas_call


@pytest.fixture(params=slow_but(["two cores"], {"one core": 1, "two cores": 2}))
def cores(request):
    return request.param


@pytest.fixture
def called(cores, monkeypatch):
    """Interprets all kernels as a TPU runs them, and lists their names."""
    names = []

    def call(*arguments, interpret, name, **options):
        if not interpret:  # For a TPU: this branch is traced, too.
            return pallas_call(*arguments, interpret=False, name=name, **options)
        names.append(name)
        params = pltpu.InterpretParams(
            detect_races=True,
            uninitialized_memory="nan",
            out_of_bounds_reads="uninitialized",
            num_cores_or_threads=cores,
            random_seed=3,
        )
        return pallas_call(*arguments, interpret=params, name=name, **options)

    monkeypatch.setattr(pl, "pallas_call", call)
    jax.clear_caches()
    test_kernels.programs.cache_clear()
    yield names
    pltpu.reset_tpu_interpret_mode_state()
    test_kernels.programs.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("name", slow_but(["in several tiles"], CASES.keys()))
def test_memory_of_nan_and_races(called, name, monkeypatch):
    case = CASES[name]
    for place, setting, value in case.settings:
        monkeypatch.setattr(place, setting, value)
    tokens = tokens_of(case)
    got = test_kernels.run(case, *tokens)
    want = test_kernels.run(case, *tokens, by="matrix")
    jax.tree.map(functools.partial(assert_close, tolerance=1e-5), got, want)
    assert len(called) >= 2  # Forward and backward.
    assert not interpret_pallas_call.races.races_found


def test_what_it_finds(called, cores):
    """A block that two cores write is a race, and what no step has written is NaN."""

    def kernel(out, unwritten):
        out[...] = jnp.ones_like(out)
        unwritten[0] = jnp.ones(128)

    rows = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    one_block = pl.BlockSpec((8, 128), lambda step: (0, 0))
    _, unwritten = pl.pallas_call(
        kernel,
        grid=(2,),
        out_specs=[one_block] * 2,
        out_shape=[rows] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=True,
        name="wrong",
    )()
    assert interpret_pallas_call.races.races_found == (cores == 2)
    assert np.isnan(unwritten[1:]).all()
