import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import simrf_jax
from simrf_jax import random_feature_attention, relu_features
from tests import formulas
from tests.attention.devices import KINDS, collectives, make_mesh, sharded
from tests.attention.inputs import inputs, projection
from tests.attention.modes import learned
from tests.attention.reference import attention, relative_error
from tests.tiers import slow_but
from tests.versions import enable_x64

LENGTH, HEADS, KEY_HEADS, DIM, FEATURES = 32, 4, 2, 8, 11
# Of one sequence; segments begin and end on borders of devices and inside, one spans five devices.
SEGMENTS = np.repeat([0, 1, 2, 1, 3], [3, 1, 19, 5, 4])
MODES = {
    "bidirectional": {},
    "causal": {"is_causal": True, "chunk_size": 2},
    "packed": {"segment_ids": SEGMENTS, "chunk_size": 1},
    "packed_causal": {"segment_ids": SEGMENTS, "chunk_size": 2, "is_causal": True},
}
P = jax.P


def estimator(w):
    return functools.partial(random_feature_attention, projection=w)


near_field = functools.partial(simrf_jax.banded_attention, bandwidth=2)


def visible(options):
    """Who sees whom, ``[T, T]``."""
    seen = np.ones((LENGTH, LENGTH), bool)
    if options.get("is_causal"):
        seen = np.tril(seen)
    if (ids := options.get("segment_ids")) is not None:
        run = np.cumsum(np.diff(ids, prepend=ids[0]) != 0)
        seen &= run[:, None] == run[None, :]
    return seen


@pytest.mark.parametrize("mode", slow_but(["packed"], ["causal", "packed"]))
def test_float32_stays_float32_where_float64_is_the_default(mode):
    with enable_x64(True):
        x = tuple(jnp.asarray(one, jnp.float32) for one in inputs(LENGTH))
        w, mesh = jnp.asarray(projection(FEATURES), jnp.float32), make_mesh("auto", length=2)
        call = sharded(estimator(w), "auto", mesh, P("length"), **MODES[mode])
        qkv = jax.device_put(x, NamedSharding(mesh, P("length")))
        out = jax.jit(call)(*qkv)
        mechanism = simrf_jax.RandomFeatureMechanism(w)
        heads, dim = x[1].shape[-2:]
        state = mechanism.init(
            batch=(), num_key_heads=heads, head_dim=dim, value_dim=dim, dtype=jnp.float32
        )
    assert out.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("attend", [estimator(projection(FEATURES)), near_field])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_calls_without_jit_share_a_program(kind, attend):
    call = sharded(attend, kind, mesh := make_mesh(kind, length=2), P("length"))
    qkv = jax.device_put(inputs(LENGTH), NamedSharding(mesh, P("length")))
    out = call(*qkv)
    with jax.no_tracing():
        np.testing.assert_array_equal(call(*qkv), out)


@pytest.mark.parametrize(
    ("mode", "kind", "devices"),
    [
        *((mode, kind, 8) for mode in ("bidirectional", "causal") for kind in KINDS),
        ("causal", "explicit", 2),
        ("packed", "manual", 8),
        ("packed", "explicit", 2),
        ("packed_causal", "auto", 8),
    ],
)
def test_one_length_over_devices(mode, kind, devices):
    options = dict(MODES[mode])
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    mask = np.random.default_rng(2).random(LENGTH) < 0.8
    k[~mask], v[~mask] = np.nan, np.nan
    w, mesh = projection(FEATURES), make_mesh(kind, length=devices)
    call = sharded(estimator(w), kind, mesh, P("length"), mask=mask[None, None], **options)
    qkv = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))
    compiled = jax.jit(call).lower(*qkv).compile()
    out = compiled(*qkv)

    weights = np.broadcast_to(np.where(mask, 0, -np.inf), (HEADS, LENGTH))
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    expected = attention(q, k, v, w, log_weights=weights, visible=visible(options))
    assert relative_error(out, expected) < 1e-5
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("length")), 3)

    found = collectives(compiled)
    sums, maxima = (1, KEY_HEADS, FEATURES, DIM + 1), (1, KEY_HEADS, FEATURES)
    if mode == "bidirectional":
        assert found == {("all-reduce", "f32", sums): 1, ("all-reduce", "f32", maxima): 1}
    else:
        rounds = int(np.log2(devices)) * (2 if mode == "packed" else 1)
        for shape in (sums, maxima):
            assert found.pop(("collective-permute", "f32", shape)) == rounds
        # Where segments begin.
        assert {(name, shape) for name, _, shape in found} <= {("collective-permute", (1,))}


@pytest.fixture(
    scope="module",
    params=slow_but(["bidirectional", "causal"], ["bidirectional", "causal", "packed"]),
)
def gradients(request):
    """Forward and backward pass with the batch over devices too, and on one device."""
    options = dict(MODES[request.param])
    if "segment_ids" in options:
        options["segment_ids"] = np.stack([SEGMENTS, SEGMENTS[::-1]])
    w = projection(FEATURES)

    def loss(q, k, v, w):
        return jnp.sum(random_feature_attention(q, k, v, w, **options) ** 2)

    mesh = make_mesh(data=2, length=4)
    arguments = (*inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2,)), w)
    placed = [
        *jax.device_put(arguments[:3], NamedSharding(mesh, P("data", "length"))),
        jax.device_put(w, NamedSharding(mesh, P())),
    ]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    compiled = gradient.lower(*placed).compile()
    return request.param, compiled, compiled(*placed), gradient(*arguments)


@pytest.mark.slow
def test_gradients_are_those_of_one_device(gradients):
    _, _, actual, expected = gradients
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.slow
def test_gradients_move_states_and_no_keys(gradients):
    mode, compiled, _, _ = gradients
    found = collectives(compiled)
    sums = (1, KEY_HEADS, FEATURES, DIM + 1)
    assert {name for name, _, _ in found} <= {"all-reduce", "collective-permute"}
    # Nothing is larger than the sums (that of W is of all devices).
    assert max(np.prod(shape) for _, _, shape in found) <= np.prod(sums)
    if mode == "bidirectional":
        of_sums = sum(count for (_, _, shape), count in found.items() if shape == sums)
        assert of_sums == 2  # The sums and their cotangents.


@pytest.fixture(scope="module")
def compiled_for_any_scale():
    mesh = make_mesh("manual", length=8)
    w = projection(FEATURES)
    return {
        name: jax.jit(sharded(estimator(w), "manual", mesh, P("length"), **MODES[name]))
        for name in ("bidirectional", "causal")
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["bidirectional", "causal"])
@pytest.mark.parametrize("scale", [0.5, 1, 2, 4, 8, 16])
def test_any_scale(compiled_for_any_scale, mode, scale):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, scale=scale)
    expected = attention(q, k, v, projection(FEATURES), visible=visible(MODES[mode]))
    assert relative_error(compiled_for_any_scale[mode](q, k, v), expected) < 1e-5


@pytest.mark.parametrize("scale", [1, 30])
def test_nothing_of_the_future_reaches_the_past(compiled_for_any_scale, scale):
    attend = compiled_for_any_scale["causal"]
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, scale=scale)
    out = attend(q, k, v)
    for t in (1, 4, 15, 16, 31):
        changed = [x.copy() for x in (q, k, v)]
        for x, by in zip(changed, (-3, 7, 1e6), strict=True):
            x[t] *= by
        np.testing.assert_array_equal(attend(*changed)[:t], out[:t])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_batch_heads_and_length_over_devices_with_lengths_and_biases(kind, is_causal):
    batch, length = 2, 12
    q, k, v = inputs(length, heads=4, key_heads=2, width=3, batch=(batch,))
    w = projection(FEATURES, heads=2)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(batch, 4, 1, length)).astype(np.float32)
    lengths = np.array([10, 5])
    mesh = make_mesh(kind, data=2, length=2, heads=2)
    spec = P("data", "length", "heads")
    placed = jax.device_put((q, k, v), NamedSharding(mesh, spec))
    options = {
        "is_causal": is_causal,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": lengths - 1,
    }
    call = sharded(estimator(w), kind, mesh, spec, bias=bias, **options)
    out = jax.jit(call)(*placed)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    out = np.asarray(out)
    for i in range(batch):
        weights = np.where(np.arange(length) < lengths[i] - 1, bias[i, :, 0], -np.inf)
        triangle = np.tri(length, dtype=bool) if is_causal else None
        expected = attention(q[i], k[i], v[i], w, log_weights=weights, visible=triangle)
        expected[lengths[i] :] = 0
        np.testing.assert_allclose(out[i], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["trigonometric", "elu", "relu", "learned"])
def test_feature_maps(name, is_causal):
    q, k, v = inputs(LENGTH, scale=0.5)
    w = None if name in ("elu", "learned") else projection(64)
    mesh = make_mesh(length=2)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))

    def holds_an_array(x, _):
        return relu_features(x, w)

    maps = {"relu": holds_an_array, "learned": learned(DIM)}
    options = {"is_causal": is_causal, "feature_map": maps.get(name, name)}
    out = jax.jit(sharded(estimator(w), "explicit", mesh, P("length"), **options))(*placed)
    formula = getattr(formulas, name)
    expected = attention(q, k, v, w, formula=formula, visible=visible(options))
    assert relative_error(out, expected) < 1e-4


@pytest.mark.slow
def test_bfloat16():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(LENGTH))
    w, mesh = projection(FEATURES), make_mesh(length=4)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))
    for mode in ("bidirectional", "causal"):
        out = jax.jit(sharded(estimator(w), "explicit", mesh, P("length"), **MODES[mode]))(*placed)
        assert out.dtype == jnp.bfloat16
        assert relative_error(out, attention(q, k, v, w, visible=visible(MODES[mode]))) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_lengths_inside_shard_map_and_what_padding_holds(is_causal):
    q, k, v = inputs(LENGTH)
    real = np.uint8(13)  # The last device sees nothing of its own.
    q[real:], k[real:], v[real:] = np.nan, np.nan, np.nan
    w, mesh = projection(FEATURES), make_mesh("manual", length=2)
    options = {"is_causal": is_causal, "chunk_size": 1 if is_causal else None}
    seen = {"query_seq_lengths": real, "key_value_seq_lengths": real}
    attend = sharded(estimator(w), "manual", mesh, P("length"), **options, **seen)

    def loss(*qkv):
        out = attend(*qkv)
        return jnp.sum(out**2), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    few = [x[:real] for x in (q, k, v)]
    triangle = np.tri(real, dtype=bool) if is_causal else None
    assert relative_error(out[:real], attention(*few, w, visible=triangle)) < 1e-5
    for x in (out, *gradients):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x[real:], 0)


@pytest.mark.parametrize("spec", [P(), P("length")])
def test_cross_attention_of_queries_that_lie_elsewhere(spec):
    q, k, v = inputs(6, key_length=LENGTH)
    w, mesh = projection(FEATURES), make_mesh(length=2)
    q = jax.device_put(q, NamedSharding(mesh, spec))
    placed = jax.device_put((k, v), NamedSharding(mesh, P("length")))
    compiled = jax.jit(random_feature_attention).lower(q, *placed, w).compile()
    out = compiled(q, *placed, w)
    assert relative_error(out, attention(q, k, v, w)) < 1e-5
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert not any(name == "all-gather" for name, _, _ in collectives(compiled))


@pytest.mark.slow
def test_keys_on_all_devices():
    q, k, v = inputs(LENGTH)
    w, mesh = projection(FEATURES), make_mesh(length=2)
    q = jax.device_put(q, NamedSharding(mesh, P("length")))
    k, v = jax.device_put((k, v), NamedSharding(mesh, P()))
    for options in (MODES["bidirectional"], MODES["causal"]):
        call = jax.jit(functools.partial(random_feature_attention, **options))
        out = call(q, k, v, w)
        assert relative_error(out, attention(q, k, v, w, visible=visible(options))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_one_length_over_two_axes_under_vmap_with_a_traced_scale(kind):
    q, k, v = inputs(LENGTH, batch=(2,))
    w, mesh = projection(FEATURES), make_mesh(kind, a=2, b=4)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P(None, ("a", "b"))))
    axis = ("a", "b") if kind == "auto" else None

    @jax.jit
    def attend(q, k, v, scale):
        call = functools.partial(
            random_feature_attention,
            projection=w,
            scale=scale,
            sequence_axis=axis,
            **MODES["causal"],
        )
        return jax.vmap(call)(q, k, v)

    out = attend(*placed, 0.7)
    for i in range(2):
        expected = attention(q[i], k[i], v[i], w, scale=0.7, visible=visible({"is_causal": True}))
        assert relative_error(out[i], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"data": 2, "length": 2}, {"length": 2, "heads": 2}])
@pytest.mark.parametrize("mode", ["bidirectional", "packed_causal"])
def test_a_length_of_type_auto_beside_explicit_axes(mode, shape):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2,))
    options = dict(MODES[mode])
    if "segment_ids" in options:
        options["segment_ids"] = np.stack([SEGMENTS, SEGMENTS])
    w = projection(FEATURES)
    types = tuple(KINDS["auto" if axis == "length" else "explicit"] for axis in shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), types, devices=jax.devices()[:4])
    spec = P(*(axis if axis in shape else None for axis in ("data", "length", "heads")))
    placed = jax.device_put((q, k, v), NamedSharding(mesh, spec))
    attend = functools.partial(random_feature_attention, sequence_axis="length", **options)
    compiled = jax.jit(attend).lower(*placed, w).compile()
    out = np.asarray(compiled(*placed, w))
    assert not any(name == "all-gather" for name, _, _ in collectives(compiled))
    for i in range(2):
        expected = attention(q[i], k[i], v[i], w, visible=visible(MODES[mode]))
        assert relative_error(out[i], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("mode", ["bidirectional", "packed_causal"])
def test_a_length_on_one_device_beside_heads_over_several(mode, kind):
    q, k, v = inputs(LENGTH, heads=HEADS)
    options = MODES[mode]
    w, mesh, spec = projection(FEATURES), make_mesh(kind, length=1, heads=2), P("length", "heads")
    placed = jax.device_put((q, k, v), NamedSharding(mesh, spec))
    out = jax.jit(sharded(estimator(w), kind, mesh, spec, **options))(*placed)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert relative_error(out, attention(q, k, v, w, visible=visible(options))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"is_causal": True}, {"exact_bandwidth": 2}])
def test_masks_of_heads_that_explicit_axes_shard(options):
    q, k, v = inputs(LENGTH, heads=HEADS)
    mask = np.random.default_rng(3).random((HEADS, 1, LENGTH)) < 0.8
    w, mesh = projection(FEATURES), make_mesh(heads=HEADS)
    attend = jax.jit(functools.partial(random_feature_attention, **options))
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P(None, "heads")))
    of_heads = jax.device_put(mask, NamedSharding(mesh, P("heads")))
    out = attend(*placed, w, mask=of_heads)
    assert relative_error(out, attend(q, k, v, w, mask=jnp.asarray(mask))) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_a_bias_of_each_head_where_explicit_axes_shard_heads_that_share_keys(options, key_heads):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=key_heads)
    bias = np.random.default_rng(3).normal(size=(HEADS, 1, LENGTH)).astype(np.float32)
    w, mesh = projection(FEATURES, heads=key_heads), make_mesh(heads=2)
    attend = jax.jit(functools.partial(random_feature_attention, bias=bias, **options))
    of_keys = P(None, "heads") if key_heads > 1 else P()
    placed = jax.device_put(q, NamedSharding(mesh, P(None, "heads")))
    of_key_heads = jax.device_put((k, v), NamedSharding(mesh, of_keys))
    with jax.set_mesh(mesh):
        out = attend(placed, *of_key_heads, w)
    assert relative_error(out, attend(q, k, v, w)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("options", [*MODES.values(), {"exact_bandwidth": 2}])
def test_more_explicit_devices_than_key_heads(options):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    w, mesh = projection(FEATURES, heads=KEY_HEADS), make_mesh(heads=HEADS)
    attend = jax.jit(functools.partial(random_feature_attention, projection=w, **options))
    out = attend(jax.device_put(q, NamedSharding(mesh, P(None, "heads"))), k, v)
    assert jax.typeof(out).sharding.spec == P(None, "heads", None)
    assert relative_error(out, attend(q, k, v)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", slow_but(["dense", "calibrated"], ["dense", "fast", "calibrated", "learned"])
)
@pytest.mark.parametrize("is_causal", slow_but([False], [False, True]))
def test_explicit_axes_of_heads_beside_a_w_for_each_head_that_is_on_all_devices(is_causal, kind):
    options = {"is_causal": is_causal}
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2, 3))
    w = projection(FEATURES, heads=KEY_HEADS)
    if kind == "fast":
        keys = jax.random.split(jax.random.key(0), KEY_HEADS)
        w = jax.vmap(lambda key: simrf_jax.draw_fast_projection(key, FEATURES, DIM))(keys)
    if kind == "learned":
        options, w = options | {"feature_map": learned(DIM)}, None
    if kind == "calibrated":
        options = options | {"feature_map": simrf_jax.calibrate(q, k)}

    @jax.jit
    def gradients(q, k, v, w):
        def loss(*arguments):
            return jnp.sum(jnp.sin(random_feature_attention(*arguments, **options)))

        return jax.grad(loss, (0, 1, 2))(q, k, v, w)

    mesh = make_mesh(data=2, heads=KEY_HEADS)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("data", None, None, "heads")))
    for a, e in zip(gradients(*placed, w), gradients(q, k, v, w), strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.slow
def test_steps_over_explicit_axes_of_heads():
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2,))
    mechanism = simrf_jax.RandomFeatureMechanism(projection(FEATURES, heads=KEY_HEADS))
    sizes = {"num_key_heads": KEY_HEADS, "head_dim": DIM, "value_dim": DIM}
    state = mechanism.init(batch=(2,), **sizes)
    expected, _ = mechanism.step(state, q, k, v)
    mesh = make_mesh(heads=KEY_HEADS)
    state = jax.device_put(state, NamedSharding(mesh, P(None, "heads")))
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P(None, None, "heads")))
    out, after = mechanism.step(state, *placed)
    assert relative_error(out, expected) < 1e-6
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def test_the_mesh_of_the_context():
    q, k, v = inputs(LENGTH)
    w = projection(FEATURES)
    attend = jax.jit(functools.partial(random_feature_attention, sequence_axis="length"))
    with jax.set_mesh(make_mesh("auto", length=2)):
        out = attend(q, k, v, w)
    assert relative_error(out, attention(q, k, v, w)) < 1e-5


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sequence_axis": "time"}, ValueError, r"among the axes \('length',\) .* got 'time'"),
        ({"sequence_axis": 0}, TypeError, "the name of a mesh axis, or a tuple of names, got 0"),
        ({"sequence_axis": ()}, TypeError, r"or a tuple of names, got \(\)"),
        ({"sequence_axis": ("length",) * 2}, ValueError, "name each axis once, got"),
        ({"length": 30}, ValueError, "a multiple of the 4 devices of 'length', got 30 queries"),
        ({"key_length": 9}, ValueError, "a multiple of the 4 devices of 'length', got 9 keys"),
        ({"key_length": 16, "is_causal": True}, ValueError, "got 32 queries and 16 keys"),
        ({"mask": np.tri(LENGTH, dtype=bool)}, ValueError, "may differ between queries"),
        ({"scale": jnp.float32(jnp.inf)}, ValueError, "scale must be finite, got inf"),
        ({"mask": np.ones(LENGTH + 1, bool)}, ValueError, r"2, 32, 32\), got shape \(33,\)"),
    ],
)
def test_refuses(options, error, match):
    sizes = {name: options.pop(name) for name in ("length", "key_length") if name in options}
    q, k, v = inputs(**{"length": LENGTH} | sizes)
    with jax.set_mesh(make_mesh("auto", length=4)), pytest.raises(error, match=match):
        random_feature_attention(q, k, v, projection(), **{"sequence_axis": "length"} | options)


@pytest.mark.fast
def test_refuses_an_explicit_axis_of_the_batch():
    sharding = jax.NamedSharding(make_mesh(data=2), P("data"))
    q, k, v = jax.device_put(inputs(batch=(2,)), sharding)
    with pytest.raises(ValueError, match="got 'data', which shards another axis of query"):
        random_feature_attention(q, k, v, projection(), sequence_axis="data")


@pytest.mark.fast
@pytest.mark.parametrize(
    "attend",
    [
        estimator(np.ones((FEATURES, DIM), np.float32)),
        functools.partial(simrf_jax.banded_attention, bandwidth=1),
    ],
)
def test_refuses_explicit_axes_of_a_later_batch_axis(attend):
    sharding = jax.NamedSharding(make_mesh(data=2), P(None, "data"))
    q, k, v = jax.device_put(inputs(batch=(3, 2)), sharding)
    match = r"may shard only the first, got .*\(None, 'data', None, None, None\) of query"
    with pytest.raises(ValueError, match=match):
        attend(q, k, v)


@pytest.mark.fast
def test_refuses_an_axis_without_a_mesh():
    with pytest.raises(ValueError, match=r"of a mesh: .* got 'length' and no mesh"):
        random_feature_attention(*inputs(), projection(), sequence_axis="length")


@pytest.mark.parametrize("options", [{"is_causal": True}, {"segment_ids": np.zeros(LENGTH, int)}])
def test_refuses_no_keys_for_queries_in_order(options):
    q, k, v = inputs(length=LENGTH)
    with (
        jax.set_mesh(make_mesh("auto", length=4)),
        pytest.raises(
            ValueError, match=f"equal numbers of queries and keys, got {LENGTH} queries and 0 keys"
        ),
    ):
        random_feature_attention(q, k[:0], v[:0], projection(), sequence_axis="length", **options)


@pytest.mark.slow
def test_errors_of_the_queries_map_tell_whole_shapes():
    def only_one(x, w):
        return x[..., :0]

    def features(x, w):
        return jnp.exp(simrf_jax.project(x, w))

    custom = simrf_jax.feature_maps.Custom(only_one, features)
    with (
        jax.set_mesh(make_mesh("auto", length=4)),
        pytest.raises(ValueError, match=rf"feature_map must map \(\d+, {LENGTH}, "),
    ):
        random_feature_attention(
            *inputs(length=LENGTH), projection(), feature_map=custom, sequence_axis="length"
        )
