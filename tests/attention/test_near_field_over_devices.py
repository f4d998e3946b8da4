import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from simrf_jax import banded_attention
from simrf_jax.fmm import fmm_attention
from tests import formulas
from tests.attention.devices import collectives, make_mesh, sharded
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, banded, relative_error

LENGTH, HEADS, KEY_HEADS, DIM = 32, 4, 2, 8
# Segments begin and end on borders of devices and inside, one spans five devices, ids come again.
SEGMENTS = np.repeat([0, 1, 2, 1, 3], [3, 1, 19, 5, 4])
RUNS = np.cumsum(np.diff(SEGMENTS, prepend=0) != 0)
CAUSAL, PACKED = {"is_causal": True}, {"segment_ids": SEGMENTS}
P = jax.P


def near(bandwidth):
    return functools.partial(banded_attention, bandwidth=bandwidth)


def expected(q, k, v, bandwidth, *, segment_ids=None, **options):
    runs = None if segment_ids is None else RUNS
    return banded(q, k, v, bandwidth, segment_ids=runs, **options)


@pytest.mark.parametrize(
    ("bandwidth", "kind", "devices", "options"),
    [
        (0, "explicit", 8, {}),
        (3, "explicit", 8, {}),
        (3, "auto", 8, CAUSAL),
        (3, "manual", 2, PACKED),
        (4, "manual", 8, CAUSAL | PACKED),
        (7, "manual", 8, {}),
        (10, "explicit", 8, CAUSAL),
        (21, "auto", 8, PACKED),
        (10**12, "explicit", 8, PACKED),
        (10**12, "auto", 2, {}),
    ],
)
def test_one_length_over_devices(bandwidth, kind, devices, options):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    mask = np.random.default_rng(2).random(LENGTH) < 0.8
    k[~mask], v[~mask] = np.nan, np.nan
    mesh = make_mesh(kind, length=devices)
    call = sharded(near(bandwidth), kind, mesh, P("length"), mask=mask[None, None], **options)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))
    compiled = jax.jit(call).lower(*placed).compile()
    out = compiled(*placed)

    weights = np.broadcast_to(np.where(mask, 0, -np.inf), (HEADS, LENGTH))
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    truth = expected(q, k, v, bandwidth, log_weights=weights, **options)
    np.testing.assert_allclose(out, truth, atol=1e-5)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("length")), 3)

    found = collectives(compiled)
    here, steps = LENGTH // devices, (1,) if options.get("is_causal") else (1, -1)
    reach = min(bandwidth, LENGTH - here)
    pieces = [min(here, reach - start) for start in range(0, reach, here)]
    for count in set(pieces):
        hops = [hop for hop, piece in enumerate(pieces, 1) if piece == count]
        sent = [step * hop for step in steps for hop in hops]
        if count == here:  # Once, where both ways around lead to the same device.
            sent = {by % devices for by in sent}
        keys_and_values = found.pop(("collective-permute", "f32", (1, count, KEY_HEADS, DIM)))
        assert keys_and_values == 2 * len(sent)
    # Log weights of each key head, and segments.
    assert {name for name, _, _ in found} <= {"collective-permute"}
    rest = {(1, n, *heads) for n in pieces for heads in ((), (KEY_HEADS,))}
    assert {shape for _, _, shape in found} <= rest


@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "options"), [(5, {}), (11, CAUSAL), (9, PACKED)])
def test_gradients_are_those_of_one_device_and_move_no_other_keys(bandwidth, options):
    options = dict(options)
    if "segment_ids" in options:
        options["segment_ids"] = np.stack([SEGMENTS, SEGMENTS[::-1]])

    def loss(q, k, v, bias):
        return jnp.sum(near(bandwidth)(q, k, v, bias=bias, **options) ** 2)

    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2,))
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, LENGTH)).astype(np.float32)
    mesh = make_mesh(data=2, length=4)
    specs = (*3 * (P("data", "length"),), P("data", None, None, "length"))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((q, k, v, bias), specs, strict=True)
    ]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    compiled = gradient.lower(*placed).compile()
    for a, e in zip(compiled(*placed), gradient(q, k, v, bias), strict=True):
        assert relative_error(a, e) < 1e-5
    found = collectives(compiled)
    assert {name for name, _, _ in found} == {"collective-permute"}
    # Each device has 8 positions of one sequence.
    largest = min(bandwidth, 8) * KEY_HEADS * DIM
    assert max(np.prod(shape) for _, _, shape in found) == largest


@pytest.mark.parametrize(("kind", "is_causal"), [("explicit", False), ("auto", True)])
def test_batch_heads_and_length_over_devices_with_lengths_and_biases(kind, is_causal):
    batch, length = 2, 12
    q, k, v = inputs(length, heads=4, key_heads=2, width=3, batch=(batch,))
    bias = np.random.default_rng(1).normal(size=(batch, 4, 1, length)).astype(np.float32)
    lengths = np.array([10, 5])
    mesh, spec = make_mesh(kind, data=2, length=2, heads=2), P("data", "length", "heads")
    placed = jax.device_put((q, k, v), NamedSharding(mesh, spec))
    seen = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths - 1}
    call = sharded(near(4), kind, mesh, spec, bias=bias, is_causal=is_causal, **seen)
    out = jax.jit(call)(*placed)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    out = np.asarray(out)
    for i in range(batch):
        weights = np.where(np.arange(length) < lengths[i] - 1, bias[i, :, 0], -np.inf)
        truth = banded(q[i], k[i], v[i], 4, is_causal=is_causal, log_weights=weights)
        truth[lengths[i] :] = 0
        np.testing.assert_allclose(out[i], truth, atol=1e-5)


def test_whole_lengths_inside_shard_map_and_what_padding_holds():
    q, k, v = inputs(LENGTH)
    real = np.uint8(13)  # The last device sees nothing of its own.
    q[real:], k[real:], v[real:] = np.nan, np.nan, np.nan
    seen = {"query_seq_lengths": real, "key_value_seq_lengths": real}
    attend = sharded(near(5), "manual", make_mesh("manual", length=2), P("length"), **seen)

    def loss(*qkv):
        out = attend(*qkv)
        return jnp.sum(out**2), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    assert relative_error(out[:real], banded(*(x[:real] for x in (q, k, v)), 5)) < 1e-5
    for x in (out, *gradients):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x[real:], 0)


def test_bfloat16_over_two_axes_under_vmap_with_a_traced_scale():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(LENGTH, batch=(2,)))
    placed = jax.device_put((q, k, v), NamedSharding(make_mesh(a=2, b=2), P(None, ("a", "b"))))

    @jax.jit
    def attend(q, k, v, scale):
        return jax.vmap(functools.partial(near(6), scale=scale))(q, k, v)

    out = attend(*placed, 0.7)
    assert out.dtype == jnp.bfloat16
    for i in range(2):
        assert relative_error(out[i], banded(q[i], k[i], v[i], 6, scale=0.7)) < 2e-2


@pytest.fixture(scope="module", params=["explicit", "auto", "manual"])
def near_and_far(request):
    """FMM attention compiled for each kind of axis, the causal one for Auto."""
    is_causal = request.param == "auto"
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    w, mesh = projection(), make_mesh(request.param, length=4)

    def attend(q, k, v, **options):
        weights = {"near_weight": 0.7, "far_weights": 0.4, "is_causal": is_causal}
        return fmm_attention(q, k, v, (w,), bandwidth=5, **weights, **options)

    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))
    call = jax.jit(sharded(attend, request.param, mesh, P("length")))
    visible = np.tri(LENGTH, dtype=bool) if is_causal else None
    truth = 0.7 * banded(q, k, v, 5, is_causal=is_causal)
    truth += 0.4 * attention(q, k, v, w, visible=visible)
    compiled = call.lower(*placed).compile()
    return compiled, compiled(*placed), truth


@pytest.mark.slow
def test_near_and_far_field_over_devices(near_and_far):
    _, out, truth = near_and_far
    assert relative_error(out, truth) < 1e-5
    assert out.sharding.is_equivalent_to(NamedSharding(out.sharding.mesh, P("length")), 3)


@pytest.mark.slow
def test_near_and_far_field_gather_nothing(near_and_far):
    found = collectives(near_and_far[0])
    assert {name for name, _, _ in found} <= {"collective-permute", "all-reduce"}


@pytest.mark.slow
def test_near_and_far_field_without_jit():
    q, k, v = inputs(4)
    placed = jax.device_put((q, k, v), NamedSharding(make_mesh(length=2), P("length")))
    options = {"bandwidth": 2, "feature_maps": ("elu",), "is_causal": True, "chunk_size": 1}
    out = fmm_attention(*placed, (None,), **options)
    visible = np.tri(4, dtype=bool)
    truth = attention(q, k, v, None, visible=visible, formula=formulas.elu)
    truth += banded(q, k, v, 2, is_causal=True)
    assert relative_error(out, truth) < 1e-5


@pytest.mark.fast
@pytest.mark.parametrize("attend", [near(2), functools.partial(near(2), is_causal=True)])
def test_refuses_other_keys_than_queries(attend):
    q, k, v = inputs(LENGTH, key_length=16)
    mesh = make_mesh("auto", length=4)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="got 32 queries and 16 keys"):
        attend(q, k, v, sequence_axis="length")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sequence_axis": "time"}, ValueError, r"among the axes \('length',\) .* got 'time'"),
        ({"sequence_axis": 0}, TypeError, "the name of a mesh axis, or a tuple of names, got 0"),
        ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"mask": np.tri(30, dtype=bool)}, ValueError, "may differ between queries"),
        ({}, ValueError, "a multiple of the 4 devices of 'length', got 30 queries"),
    ],
)
def test_refuses(options, error, match):
    options = {"sequence_axis": "length"} | options
    with jax.set_mesh(make_mesh("auto", length=4)), pytest.raises(error, match=match):
        banded_attention(*inputs(30), bandwidth=2, **options)
