"""The fused kernels of packed sequences, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import random_feature_attention
from simrf_jax._src.attention.pallas_tpu import weights
from tests.attention import devices, reference
from tests.attention.inputs import KINDS, inputs, map_and_rows, projection
from tests.attention.test_pallas_tpu import assert_close
from tests.attention.test_pallas_tpu_causal import gradients
from tests.tiers import slow_but

P = jax.P
# A segment ends with a tile, others are inside one, and one is longer than a tile.
SEGMENTS = np.repeat([7, 7, 3, 9, 3, 1, 8], [2, 126, 3, 50, 1, 140, 8])
LENGTH = len(SEGMENTS)
NUMBERS = np.cumsum(np.diff(SEGMENTS, prepend=7) != 0)
in_kernel = functools.partial(random_feature_attention, implementation="pallas_tpu")
by_xla = functools.partial(random_feature_attention, implementation="xla")
# Options, and the exact band or None.
MODES = {
    "causal": {"is_causal": True},
    "bidirectional": {},
    "causal beside a band": {"is_causal": True, "exact_bandwidth": 9},
    "bidirectional beside a band": {"exact_bandwidth": 9},
}


@pytest.fixture(params=[LENGTH, LENGTH - 1], ids=["common units", "units of halves"])
def length(request, monkeypatch):
    """A length whose tiles take the usual way, or another one whose tiles take the rare way.

    Lengths differ, because a program that was compiled with another limit would be used again.
    """
    if request.param != LENGTH:
        monkeypatch.setattr(weights, "LARGEST", -jnp.inf)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 2, 8])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_the_estimator_in_float64(length, options, scale):
    q, k, v = inputs(length, heads=2, key_heads=1, scale=scale)
    w, segments = projection(11), SEGMENTS[:length]
    got = in_kernel(q, k, v, w, segment_ids=segments, **options)
    visible = NUMBERS[:length, None] == NUMBERS[:length]
    if "is_causal" in options:
        visible &= np.tri(length, dtype=bool)
    band = options.get("exact_bandwidth")
    if band is None:
        want = reference.attention(q, k, v, w, visible=visible)
    else:
        want = reference.beside_band(q, k, v, w, band, visible=visible)
    assert_close(got, want, 1e-5)


OPTIONS = {
    "all": {},
    "lengths": {"key_value_seq_lengths": [131, 0], "query_seq_lengths": [148, 17]},
    "mask and bias of heads": {
        "mask": ~np.isin(np.arange(LENGTH), [0, 1, 129, 130, 200]),
        "bias": np.cos(np.arange(2 * 2 * LENGTH)).reshape(2, 2, 1, LENGTH).astype(np.float32),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_and_the_gradients_of_xla(kind, options, extra):
    q, k, v = inputs(LENGTH, heads=2, key_heads=1, batch=(2,))
    feature_map, w = map_and_rows(kind, q, k, heads=1)
    options = {"segment_ids": np.stack([SEGMENTS, SEGMENTS[::-1]])} | options | extra
    run = functools.partial(gradients, feature_map=feature_map, **options)
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [MODES["causal"], MODES["bidirectional"]], ids=str)
def test_the_gradients_in_units_of_halves(length, options):
    q, k, v = inputs(length, heads=2, key_heads=1)
    run = functools.partial(gradients, segment_ids=SEGMENTS[:length], **options)
    w = projection(11)
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [MODES["causal"], MODES["bidirectional"]], ids=str)
def test_small_exponents_beside_large_ones(options):
    """A segment keeps its digits, however large the features of its neighbors are."""
    q, k, v = inputs(LENGTH, heads=1)
    sizes = np.array([30, 0.1, 20, 0.1, 30, 0.1])[NUMBERS]
    k = k * sizes[:, None, None].astype(np.float32)
    w = projection(11)
    got = in_kernel(q, k, v, w, segment_ids=SEGMENTS, **options)
    want = by_xla(q, k, v, w, segment_ids=SEGMENTS, **options)
    assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("planted", [40, jnp.nan])
@pytest.mark.parametrize("segment", [0, 3, 5])
def test_nothing_of_a_segment_reaches_another(segment, planted, dtype, options):
    tokens = [jnp.asarray(x, dtype) for x in inputs(LENGTH, heads=1)]

    @jax.jit
    def run(*tokens):
        def loss(*tokens):
            out = in_kernel(*tokens, projection(), segment_ids=SEGMENTS, **options)
            return jnp.sum(jnp.sin(jnp.where(inside, 0, out).astype(jnp.float32))), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*tokens)

    inside = (segment == NUMBERS)[:, None, None]
    assert 0 < inside.sum() < LENGTH
    (*grads,), out = run(*tokens)
    (*planted_grads,), planted_out = run(
        *(jnp.where(inside, planted * x, x).astype(dtype) for x in tokens)
    )
    others = ~inside[:, 0, 0]
    np.testing.assert_array_equal(planted_out[others], out[others])
    for got, want in zip(planted_grads, grads, strict=True):
        np.testing.assert_array_equal(got[others], want[others])
        assert np.isfinite(np.asarray(got, np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_what_is_not_finite_reaches_those_that_see_it(options):
    q, k, v = (jnp.asarray(x) for x in inputs(LENGTH, heads=1))
    attend = functools.partial(in_kernel, projection=projection(), segment_ids=SEGMENTS, **options)
    time = 190
    sees = NUMBERS[time] == NUMBERS
    if "is_causal" in options:
        sees &= np.arange(LENGTH) >= time
    out, clean = attend(q, k.at[time].set(jnp.nan), v), attend(q, k, v)
    assert np.isnan(out[sees]).all()
    assert_close(out[~sees], clean[~sees], 1e-6)


@pytest.mark.slow
def test_each_device_has_its_part():
    q, k, v = inputs(LENGTH, heads=4, key_heads=2, batch=(2,))
    w = projection(heads=2)
    options = {"segment_ids": np.stack([SEGMENTS, SEGMENTS[::-1]]), "exact_bandwidth": 9}
    want = gradients(by_xla, q, k, v, w, **options)
    options |= {"batch_axis": "data", "head_axis": "tensor"}
    with jax.set_mesh(devices.make_mesh("auto", data=2, tensor=2)):
        tokens = [jax.device_put(x, P("data", None, "tensor")) for x in (q, k, v)]
        run = jax.jit(functools.partial(gradients, in_kernel, **options))
        compiled = run.lower(*tokens, w).compile()
        got = compiled(*tokens, w)
    assert "all-gather" not in compiled.as_text()
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but([jnp.bfloat16], [jnp.float32, jnp.bfloat16]))
@pytest.mark.parametrize("options", slow_but(["bidirectional beside a band"], MODES))
def test_mosaic_takes_the_kernels(options, dtype):
    tokens = jax.ShapeDtypeStruct((2, LENGTH, 4, 64), dtype)
    w, ids = jnp.ones((4, 130, 64)), np.stack([SEGMENTS, SEGMENTS])

    def loss(q, k, v):
        out = in_kernel(q, k, v, w, segment_ids=ids, **options)
        return jnp.sum(out.astype(jnp.float32))

    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(tokens, tokens, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    kernels = 3 * (2 - options.get("is_causal", False)) + 2 * ("exact_bandwidth" in options)
    assert text.count("tpu_custom_call") == kernels
