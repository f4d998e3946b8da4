"""The fused kernels for GPUs: what they refuse, and, interpreted, the numbers that they give.

The interpreter simulates the warp groups, barriers and copies of a kernel on a CPU and prints the
races that it finds. It comes with jax 0.11, so that most of these tests are skipped with an older
one; CONTRIBUTING.md says how to run them.
"""

import functools
import re
import subprocess
import sys
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from simrf_jax import (
    Projection,
    RandomFeatureMechanism,
    calibrate,
    feature_maps,
    random_feature_attention,
)
from simrf_jax._src.attention import pallas_inputs
from simrf_jax._src.attention.pallas_gpu import backend, choice
from tests import formulas
from tests.attention import modes, reference
from tests.attention.inputs import inputs, projection

# The interpreter multiplies what is not finite in NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
in_kernel = functools.partial(random_feature_attention, implementation="pallas_gpu")
by_xla = functools.partial(random_feature_attention, implementation="xla")
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Pallas interprets kernels for GPUs from jax 0.11 on."
)
few_examples = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
DIM = 64


def tokens(*shape, dtype=jnp.bfloat16, **options):
    options = {"heads": 2, "key_heads": 1, "dim": DIM} | options
    return [jnp.asarray(x, dtype) for x in inputs(*shape, **options)]


def wide(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.fixture
def interpreter(monkeypatch, capfd):
    """Has the kernels interpreted, and fails if they race."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(choice, "interpret", plgpu.InterpretGPUParams(detect_races=True))
    yield
    # Only the last kernel's races can be asked for, but all are printed.
    assert "RACE DETECTED" not in capfd.readouterr().out


@functools.cache
def program(attend, name):
    """Returns the compiled output and gradients of a map, for any tokens, W and bias."""
    library = modes.LIBRARY.get(name, modes.Library(name))

    @jax.jit
    def run(of_outputs, q, k, v, w, bias):
        def attention(q, k, v, w, bias):
            options = {"feature_map": library.feature_map, "bias": bias}
            out = attend(q, k, v, library.projection(w), **options)
            return out.astype(jnp.float32)

        out, back = jax.vjp(attention, q, k, v, w, bias)
        return out, *back(of_outputs)

    return run


MAPS = ("positive", "hyperbolic", "optimal_positive", "weighted", "calibrated", "learned")


@interpreted
@pytest.mark.parametrize("name", MAPS)
def test_the_estimator_and_its_gradients(interpreter, name):
    q, k, v = tokens(70, 75, heads=4, key_heads=2)
    w, bias = projection(22, DIM), jnp.linspace(-1, 1, 75)
    of_outputs = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    got = program(in_kernel, name)(of_outputs, q, k, v, w, bias)
    plain = program(by_xla, name)(of_outputs, q, k, v, w, bias)
    want = list(program(by_xla, name)(of_outputs, *wide((q, k, v)), w, bias))
    log_weights = np.broadcast_to(bias, (4, 75))
    want[0] = reference.attention(
        *wide((q, k, v)), w, formula=getattr(formulas, name), log_weights=log_weights
    )
    error = reference.relative_error
    assert error(got[0], want[0]) <= 2 * error(plain[0], want[0])
    for ours, exact in zip(got[1:], want[1:], strict=True):
        if np.any(exact):  # Learned features have rows in place of W.
            assert error(ours, exact) <= 1e-2
        else:
            assert not np.any(ours)


@interpreted
def test_folded_features_of_pairs(interpreter):
    q, k, v = tokens(70, 75, key_heads=2)
    pairs = Projection(projection(8, DIM, heads=2), is_paired=True)
    calibration = calibrate(*wide((q, k)))
    want = by_xla(*wide((q, k, v)), pairs, feature_map=calibration)
    folded = feature_maps.Folded.of(calibration, pairs)
    for w, feature_map in ((pairs, calibration), (None, folded)):
        got = in_kernel(q, k, v, w, feature_map=feature_map)
        assert reference.relative_error(got, want) <= 5e-3


SHAPES = {
    "one token": ((1, 1), {"num_features": 1}),
    "split keys": ((5, 1500), {"num_features": 66, "key_heads": 2}),
    "wide heads": ((130, 70), {"num_features": 130, "dim": 128, "batch": (2,)}),
    "wide values": ((70, 70), {"num_features": 64, "width": 128, "batch": (1, 2)}),
}


@interpreted
@pytest.mark.parametrize(("shape", "options"), SHAPES.values(), ids=SHAPES)
def test_any_shape(interpreter, shape, options):
    check_shape(*shape, **options)


@interpreted
@pytest.mark.slow
@few_examples
@hypothesis.given(
    length=st.integers(1, 300),
    key_length=st.integers(2, 600),
    key_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    dim=st.sampled_from([64, 128]),
    width=st.sampled_from([64, 128]),
    num_features=st.integers(2, 200),
    seed=st.integers(0, 99),
)
def test_random_shapes(interpreter, length, key_length, key_heads, groups, **options):
    check_shape(length, key_length, heads=groups * key_heads, key_heads=key_heads, **options)


def check_shape(*shape, num_features, **options):
    q, k, v = tokens(*shape, **options)
    w = projection(num_features, q.shape[-1], heads=k.shape[-2])

    def run(attend, *arrays):
        def attention(*arrays):
            return attend(*arrays).astype(jnp.float32)

        out, back = jax.jit(functools.partial(jax.vjp, attention))(*arrays, w)
        return out, *back(jnp.sin(jnp.arange(out.size)).reshape(out.shape))

    for got, want in zip(run(in_kernel, q, k, v), run(by_xla, *wide((q, k, v))), strict=True):
        # With a single key, the gradients of queries and W are what rounding leaves of zero.
        assert np.linalg.norm(got - want) <= 1e-2 * max(np.linalg.norm(want), 0.01)


OPTIONS = {
    "lengths": {"key_value_seq_lengths": [71, 0], "query_seq_lengths": [69, 17]},
    "mask and bias of heads": {
        "mask": np.arange(75) > np.arange(4)[:, None, None],
        "bias": np.cos(np.arange(2 * 4 * 75)).reshape(2, 4, 1, 75).astype(np.float32),
    },
    "scale": {"scale": -0.3},
    "a low bias": {"bias": np.full(75, np.finfo(np.float32).min)},
}


@interpreted
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(interpreter, options):
    q, k, v = tokens(70, 75, heads=4, key_heads=2, batch=(2,))
    w = projection(22, DIM)
    got, want = in_kernel(q, k, v, w, **options), by_xla(*wide((q, k, v)), w, **options)
    assert reference.relative_error(got, want) <= 5e-3
    np.testing.assert_array_equal(got[want == 0], 0)


def run_with_a_hidden_key(is_bad, q, k, v):
    """Returns outputs, and the gradients of those that are not bad."""
    of_outputs = jnp.where(is_bad[..., None], 0.0, jnp.ones(q.shape))
    bias = jnp.where(jnp.arange(75) == HIDDEN, -jnp.inf, 0)
    return program(in_kernel, "positive")(of_outputs, q, k, v, projection(22, DIM), bias)


HIDDEN, SEEN = 40, 3
POISONED = {
    "query": (0, SEEN),
    "key": (1, SEEN),
    "value": (2, SEEN),
    "hidden key": (1, HIDDEN),
    "hidden value": (2, HIDDEN),
}


@interpreted
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("which", "where"), POISONED.values(), ids=POISONED)
def test_what_is_not_finite_reaches_only_who_sees_it(interpreter, which, where, bad):
    arrays = tokens(70, 75, key_heads=2)
    is_bad = np.zeros((70, 2), bool)
    if where != HIDDEN:
        is_bad[where if which == 0 else slice(None), 0] = True
    clean, *of_clean = run_with_a_hidden_key(is_bad, *arrays)
    arrays[which] = arrays[which].at[where, 0, 7].set(bad)
    out, *of_poisoned = run_with_a_hidden_key(is_bad, *arrays)
    np.testing.assert_array_equal(np.isnan(out).any(-1), is_bad)
    np.testing.assert_array_equal(np.isnan(out).all(-1), is_bad)
    np.testing.assert_array_equal(out[~is_bad], clean[~is_bad])
    for got, want in zip(of_poisoned, of_clean, strict=True):
        np.testing.assert_array_equal(got, want)


def in_order(attend, q, k, v, w, of_outputs, **options):
    """Returns outputs, causal by default, and the gradients of queries, keys and values."""
    options = {"is_causal": True} | options

    @jax.jit
    def run(q, k, v, of_outputs):
        def attention(q, k, v):
            return attend(q, k, v, w, **options).astype(jnp.float32)

        out, back = jax.vjp(attention, q, k, v)
        return out, *back(of_outputs)

    return [np.asarray(x, np.float64) for x in run(q, k, v, of_outputs)]


CAUSAL = {
    # Two chunks, the second one not full; heads share keys.
    "two chunks": (140, {"heads": 2}, 1, {"bias": np.cos(np.arange(140)).astype(np.float32)}),
    # Keys before a query are too small for the unit of its chunk.
    "any scale": (70, {}, 8, {}),
    "lengths": (40, {"batch": (2,)}, 1, {"key_value_seq_lengths": np.array([0, 33])}),
    "one token": (1, {}, 1, {}),
}


@interpreted
@pytest.mark.parametrize(("length", "shape", "scale", "options"), CAUSAL.values(), ids=CAUSAL)
def test_causal_attention_and_its_gradients(interpreter, length, shape, scale, options):
    q, k, v = tokens(length, scale=scale, **({"heads": 1} | shape))
    w, of_outputs = projection(100, DIM), jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    check_in_order(q, k, v, w, of_outputs, **options)


def check_in_order(q, k, v, w, of_outputs, **options):
    got = in_order(in_kernel, q, k, v, w, of_outputs, **options)
    plain = in_order(by_xla, q, k, v, w, of_outputs, **options)
    want = in_order(by_xla, *wide((q, k, v)), w, of_outputs, **options)
    error = reference.relative_error
    assert error(got[0], want[0]) <= max(2 * error(plain[0], want[0]), 4e-3)
    # With a single key, the gradients of queries and keys are what rounding leaves of zero.
    least = np.linalg.norm(of_outputs) if q.shape[-3] == 1 else 0.1
    for ours, exact in zip(got[1:], want[1:], strict=True):
        assert np.linalg.norm(ours - exact) <= 1.5e-2 * max(np.linalg.norm(exact), least)


SEGMENTS = np.searchsorted([20, 50, 133], np.arange(140), side="right")
ORDERED = {
    "band": {"exact_bandwidth": 9, "is_causal": False},
    "causal band": {"exact_bandwidth": 71, "bias": np.cos(np.arange(140)).astype(np.float32)},
    "packed": {"segment_ids": SEGMENTS, "is_causal": False},
    "causal and packed": {"segment_ids": SEGMENTS, "key_value_seq_lengths": 120},
    "packed band": {"segment_ids": SEGMENTS, "exact_bandwidth": 9, "is_causal": False},
    "causal packed band": {"segment_ids": SEGMENTS, "exact_bandwidth": 9},
    "band of all keys": {"exact_bandwidth": 200, "is_causal": False},
}


@interpreted
@pytest.mark.parametrize("scale", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", ORDERED.values(), ids=ORDERED)
def test_bands_and_packed_sequences(interpreter, options, scale):
    q, k, v = tokens(140, heads=2, key_heads=1, scale=scale)
    of_outputs = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    check_in_order(q, k, v, projection(50, DIM), of_outputs, **options)


@interpreted
@pytest.mark.slow
@few_examples
@hypothesis.given(
    length=st.integers(1, 300),
    ends=st.none() | st.lists(st.integers(0, 300), min_size=1, max_size=4),
    bandwidth=st.none() | st.integers(0, 150),
    is_causal=st.booleans(),
    num_features=st.integers(2, 128),
    seed=st.integers(0, 99),
)
def test_random_orders(interpreter, length, ends, bandwidth, is_causal, num_features, seed):
    options = {"is_causal": is_causal, "exact_bandwidth": bandwidth}
    if ends is not None:
        options["segment_ids"] = np.searchsorted(sorted(ends), np.arange(length), side="right")
    q, k, v = tokens(length, heads=1, seed=seed)
    of_outputs = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    check_in_order(q, k, v, projection(num_features, DIM), of_outputs, **options)


@interpreted
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) for x in MAPS[1:]])
def test_causal_maps(interpreter, name):
    q, k, v = tokens(90, key_heads=2)
    library = modes.LIBRARY.get(name, modes.Library(name))
    w, options = library.projection(projection(50, DIM)), {"feature_map": library.feature_map}
    check_in_order(q, k, v, w, jnp.cos(jnp.arange(q.size)).reshape(q.shape), **options)


SHARED = {
    "a chunk for each": (260, 1, {}),
    "two chunks for each": (390, 2, {}),
    "segments": (390, 1, {"segment_ids": np.searchsorted([20, 50, 280], np.arange(390), "right")}),
    "a band": (390, 1, {"exact_bandwidth": 130, "is_causal": False}),
}


@interpreted
@pytest.mark.parametrize(
    ("length", "chunks_of_part", "options"),
    [pytest.param(*x, marks=[pytest.mark.slow] * (x[0] > 260)) for x in SHARED.values()],
    ids=SHARED,
)
def test_programs_that_share_the_chunks_of_a_head(
    interpreter, monkeypatch, length, chunks_of_part, options
):
    from simrf_jax._src.attention.pallas_gpu import chunks

    q, k, v = tokens(length, heads=2, key_heads=1)
    monkeypatch.setattr(chunks, "LEAST_CHUNKS", chunks_of_part)
    of_outputs = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    check_in_order(q, k, v, projection(50, DIM), of_outputs, **options)


ORDERS = {
    "causal": (60, {}),
    "in parts": (60, {}),
    "packed": (60, {"segment_ids": SEGMENTS, "is_causal": False}),
    "causal packed band": (60, {"segment_ids": SEGMENTS, "exact_bandwidth": 9}),
    "causal and packed, in parts": (60, {"segment_ids": SEGMENTS}),
    # The segment ends in its part.
    "packed, in parts, first part": (30, {"segment_ids": SEGMENTS, "is_causal": False}),
    "packed, in parts, last part": (136, {"segment_ids": SEGMENTS, "is_causal": False}),
}


@interpreted
@pytest.mark.parametrize(
    "mode", [pytest.param(x, marks=[pytest.mark.slow] * ("parts" in x)) for x in ORDERS]
)
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_not_finite_reaches_only_who_sees_it_in_order(
    interpreter, monkeypatch, which, mode
):
    from simrf_jax._src.attention.pallas_gpu import chunks

    if "parts" in mode:
        monkeypatch.setattr(chunks, "LEAST_CHUNKS", 1)
    (place, options), arrays, index = ORDERS[mode], tokens(140, heads=1), np.arange(140)
    is_bad = index == place if which == "query" else index >= place * options.get("is_causal", True)
    if "segment_ids" in options:
        is_bad &= SEGMENTS[place] == SEGMENTS
    of_outputs = jnp.where(jnp.asarray(is_bad)[:, None, None], 0.0, 1.0) * jnp.ones(arrays[0].shape)
    clean = in_order(in_kernel, *arrays, projection(50, DIM), of_outputs, **options)
    i = ("query", "key", "value").index(which)
    arrays[i] = arrays[i].at[place, 0, 7].set(jnp.nan)
    out, *gradients = in_order(in_kernel, *arrays, projection(50, DIM), of_outputs, **options)
    np.testing.assert_array_equal(np.isnan(out).all((-1, -2)), is_bad)
    # A chunk with a token that is not finite is computed key by key, which rounds in another way.
    np.testing.assert_allclose(out[~is_bad], clean[0][~is_bad], atol=0.02)
    for got, want in zip(gradients, clean[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@interpreted
def test_learned_rows_and_scales_have_the_causal_gradient_of_xla(interpreter):
    q, k, v = tokens(20, heads=1)

    def gradients(attend, q, k, v):
        def total(w, scale):
            out = attend(q, k, v, w, scale=scale, is_causal=True)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return [jax.grad(total, i)(projection(20, DIM), 0.2) for i in range(2)]

    # Only the gradient of the output has another rounding.
    got, want = gradients(in_kernel, q, k, v), gradients(by_xla, q, k, v)
    for ours, exact in zip(got, want, strict=True):
        assert reference.relative_error(ours, exact) <= 2e-2


@interpreted
def test_vmap(interpreter):
    q, k, v = tokens(20, batch=(2,))
    w = projection(11, DIM)
    mapped = jax.vmap(lambda q, k: in_kernel(q, k, v[0], w))(q, k)
    want = jax.vmap(lambda q, k: by_xla(q, k, v[0], w))(q, k)
    assert reference.relative_error(mapped, want) <= 5e-3


@interpreted
def test_other_derivatives_name_the_implementation_that_has_them(interpreter):
    q, k, v = tokens(5)

    def total(q):
        return jnp.sum(in_kernel(q, k, v, projection(11, DIM)))

    with pytest.raises(NotImplementedError, match=r'got a second derivative .*tion="xla"'):
        jax.grad(lambda q: jnp.sum(jnp.square(jax.grad(total)(q))))(q)
    with pytest.raises(TypeError, match=r'got a derivative in forward mode .*tion="xla"'):
        jax.jvp(total, (q,), (q,))


@pytest.fixture
def hopper(monkeypatch):
    """Has the choice of implementations believe that there is an H100."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA H100", compute_capability="9.0")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    return gpu


REFUSED = {
    "exact keys": ({"exact_keys": 2}, "its kernels have no exact_keys"),
    "sharded": ({"sequence_axis": "data"}, "got a call with a sequence_axis"),
    "axis": ({"head_axis": "data"}, "have no batch_axis or head_axis; call them in jax.shard_map"),
    "map": ({"feature_map": "relu"}, "Relu features are not exponentials"),
}


@pytest.mark.fast
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_calls_that_the_kernels_cannot_take(hopper, options, message):
    with pytest.raises(ValueError, match=message):
        in_kernel(*tokens(9, key_heads=2), projection(11, DIM), **options)


ORDERED_ARRAYS = {
    "wide heads": ((9,), {"dim": 128}, 11, "heads 64 wide .*, got 128 and 128, and 11"),
    "many rows": ((9,), {}, 130, "at most 128 rows of W, got 64 and 64, and 130"),
    "lengths": ((9, 8), {}, 11, "as many keys as queries, got 8 and 9"),
}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("lengths", "options", "rows", "message"), ORDERED_ARRAYS.values(), ids=ORDERED_ARRAYS
)
@pytest.mark.parametrize("mode", [{"is_causal": True}, {"exact_bandwidth": 2}], ids=str)
def test_calls_in_order_that_the_kernels_cannot_take(hopper, mode, lengths, options, rows, message):
    q, k, v = tokens(*lengths, **options)
    with pytest.raises(ValueError, match=message):
        in_kernel(q, k, v, projection(rows, q.shape[-1]), **mode)


@interpreted
def test_long_queries_attend_to_their_band(interpreter):
    q, k, v = tokens(40, heads=1)
    q = q.at[20].multiply(1e24)
    options = {"is_causal": True, "exact_bandwidth": 5}
    got, want = (attend(q, k, v, projection(22, DIM), **options) for attend in (in_kernel, by_xla))
    assert reference.relative_error(got[20], want[20]) <= 5e-3


@interpreted
def test_a_band_may_be_wider_than_packed_sequences(interpreter):
    q, k, v = tokens(20, heads=1)
    options = {"segment_ids": np.arange(20) // 9, "exact_bandwidth": 2**20}
    got, want = (attend(q, k, v, projection(22, DIM), **options) for attend in (in_kernel, by_xla))
    assert reference.relative_error(got, want) <= 5e-3


@pytest.mark.fast
def test_positions_that_float32_does_not_hold(hopper):
    q, k, v = (jax.ShapeDtypeStruct((2**20, 1, DIM), jnp.bfloat16) for _ in range(3))
    call = functools.partial(in_kernel, segment_ids=np.zeros(2**20, int), exact_bandwidth=20)
    with pytest.raises(ValueError, match="must be less than 16777216, got up to 23068672"):
        jax.eval_shape(call, q, k, v, projection(11, DIM))


ARRAYS = {
    "float32": ({"dtype": jnp.float32}, "are float32, not all bfloat16"),
    "narrow": ({"dim": 32}, "must be 64 or 128 wide, got 32 and 32"),
    "values": ({"width": 80}, "must be 64 or 128 wide, got 64 and 80"),
}


@pytest.mark.fast
@pytest.mark.parametrize(("options", "message"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_the_kernels_cannot_take(hopper, options, message):
    q, k, v = tokens(9, **options)
    with pytest.raises(ValueError, match=message):
        in_kernel(q, k, v, projection(11, q.shape[-1]))
    with pytest.raises(ValueError, match="an array is empty"):
        in_kernel(*tokens(9, dtype=jnp.bfloat16)[:1], *(x[:0] for x in tokens(9)[1:]), None)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "capability"), [("NVIDIA A100", "8.0"), ("NVIDIA B200", "10.0"), ("MI300", "gfx942")]
)
def test_gpus_without_its_instructions_are_refused(hopper, kind, capability):
    hopper.device_kind, hopper.compute_capability = kind, capability
    with pytest.raises(ValueError, match=f"capability 9, .* got {kind} of .* {capability}"):
        in_kernel(*tokens(9), projection(11, DIM))


@pytest.mark.fast
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_platforms_are_refused(hopper, monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(ValueError, match=f"an H100 or H200, got the backend {platform}"):
        in_kernel(*tokens(9), projection(11, DIM))


@pytest.mark.fast
def test_older_versions_of_jax_are_refused(hopper, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ValueError, match=r"its kernels need jax 0\.11 or newer, got"):
        in_kernel(*tokens(9), projection(11, DIM))


@pytest.mark.fast
def test_which_calls_they_take_unasked(hopper, monkeypatch):
    taken = []
    monkeypatch.setattr(backend, "attend", lambda estimator, call: taken.append(call) or call.query)
    w = projection(11, DIM)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    random_feature_attention(*tokens(9), w)
    random_feature_attention(*tokens(9), w, is_causal=True)  # May round by later tokens.
    random_feature_attention(*tokens(9), w, exact_bandwidth=2)  # Was not timed.
    random_feature_attention(*tokens(9), w, segment_ids=np.zeros(9, int))
    random_feature_attention(*tokens(9, dtype=jnp.float32), w)
    monkeypatch.setattr(jax, "device_count", lambda: 2)  # XLA cannot partition a kernel.
    random_feature_attention(*tokens(9), w)
    monkeypatch.setattr(hopper, "compute_capability", "8.0")
    random_feature_attention(*tokens(9), w)
    assert len(taken) == 1


@pytest.mark.fast
def test_the_next_implementation_takes_what_they_cannot():
    arrays = (*tokens(9, dtype=jnp.float32), projection(11, DIM))
    several = random_feature_attention(*arrays, implementation=("pallas_gpu", "xla"))
    np.testing.assert_array_equal(several, by_xla(*arrays))


@pytest.mark.fast
def test_decoding_takes_xla():
    q, k, v = tokens(9)
    outputs = []
    for implementation in ("pallas_gpu", "xla"):
        w = projection(11, DIM)
        mechanism = RandomFeatureMechanism(w, implementation=implementation)
        state = mechanism.init(num_key_heads=1, head_dim=DIM, value_dim=DIM, dtype=q.dtype)
        outputs.append(mechanism.step(state, q, k, v)[0])
    np.testing.assert_array_equal(*outputs)


@pytest.mark.slow
def test_pallas_is_not_loaded_with_the_library():
    code = "import simrf_jax, sys; sys.exit('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fast
@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_add_up_to_the_bits_of_a_number(count):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    split = functools.partial(pallas_inputs.bfloat16_parts, count=count)
    # By an operation of its own; see the next test.
    assert str(jax.make_jaxpr(split)(x)).count("reduce_precision") == count
    parts = jax.jit(split)(x)
    assert all(part.dtype == jnp.bfloat16 for part in parts)
    rest = abs(sum(np.asarray(part, np.float64) for part in parts) - x)
    assert (rest <= abs(x) * 2.0 ** (-8 * count)).all()


def test_a_compiler_for_gpus_leaves_the_rounding_of_parts_in_place():
    pytest.importorskip("jax_cuda13_plugin", reason="CONTRIBUTING.md says how to install it.")
    from benchmarks import gpu

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    parts = functools.partial(pallas_inputs.bfloat16_parts, count=3)
    program = gpu.compile_for("H200", parts, x).as_text()
    # A conversion and its inverse would be left out, so that all parts but the first were zero.
    subtracted = re.findall(r" subtract\((%\S+), (%\S+)\)", program)
    assert subtracted
    assert program.count(" reduce-precision(") == 3
    assert all(one != other for one, other in subtracted)
