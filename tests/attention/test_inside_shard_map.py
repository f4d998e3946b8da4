"""Attention inside a user's own shard_map gives what it gives on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import banded_attention, draw_fast_projection, random_feature_attention
from simrf_jax.fmm import fmm_attention
from tests.attention import steps
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection

BATCH, LENGTH, HEADS, KEY_HEADS, DIM, FEATURES = 2, 8, 4, 2, 4, 5
P = jax.P
# name -> attention by q, k, v and W
FUNCTIONS = {
    "bidirectional": random_feature_attention,
    "causal": functools.partial(random_feature_attention, is_causal=True, chunk_size=2),
    "near": lambda q, k, v, w, **options: banded_attention(q, k, v, bandwidth=3, **options),
    "near, causal": lambda q, k, v, w, **options: banded_attention(
        q, k, v, bandwidth=3, is_causal=True, **options
    ),
    "near and far": lambda q, k, v, w, **options: fmm_attention(
        q, k, v, (w,), bandwidth=3, **options
    ),
}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 1, 1, 1, 1, 1, 1, 1]])
RNG = np.random.default_rng(1)
# All that bears on the keys, and how it is sharded beside [batch, length, heads].
OPTIONS = {
    "mask": (RNG.random((BATCH, 1, 1, LENGTH)) < 0.8, P("batch", None, None, "length")),
    "bias": (
        RNG.normal(size=(BATCH, HEADS, 1, LENGTH)).astype(np.float32),
        P("batch", "heads", None, "length"),
    ),
    "key_value_seq_lengths": (np.array([7, 3]), P("batch")),
    "query_seq_lengths": (np.array([8, 5], np.uint8), P("batch")),
}
OF_SEGMENTS = {"segment_ids": (SEGMENTS, P("batch", "length"))}


def projections(kind):
    if kind == "dense":
        return projection(FEATURES, DIM, heads=KEY_HEADS)
    keys = jax.random.split(jax.random.key(0), KEY_HEADS)
    return jax.vmap(lambda key: draw_fast_projection(key, FEATURES, DIM))(keys)


def tokens(**options):
    shape = {"heads": HEADS, "key_heads": KEY_HEADS, "dim": DIM, "batch": (BATCH,)}
    arrays = inputs(LENGTH, **(shape | options))
    return dict(zip(("query", "key", "value"), map(jnp.asarray, arrays), strict=True))


def with_gradients(attend, arrays):
    """The output of ``attend(**arrays)`` and its gradients with respect to all of them."""

    def loss(arrays):
        out = attend(**arrays)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, gradients


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=2e-6)


def on_mesh(spec, sizes):
    """The spec with the axes that the mesh has."""
    return P(*(axis if axis in sizes else None for axis in spec))


def in_shard_map(attend, sizes, options, **settings):
    """The call as users write it: each device has its part of the batch, length and heads."""
    axis = {"sequence_axis": "length"} if "length" in sizes else {}
    spec = on_mesh(P("batch", "length", "heads"), sizes)
    specs = {name: on_mesh(of_array, sizes) for name, (_, of_array) in options.items()}

    def part(q, k, v, w, options):
        return attend(q, k, v, w, **axis, **options)

    return jax.shard_map(
        part,
        mesh=make_mesh("manual", **sizes),
        in_specs=(spec, spec, spec, on_mesh(P("heads"), sizes), specs),
        out_specs=spec,
        **settings,
    )


def check(name, sizes, options, kind="dense", **settings):
    """Compares the output and the gradients of q, k, v and the bias with those of one device."""
    attend, w = FUNCTIONS[name], projections(kind)
    given = {name: jnp.asarray(x) for name, (x, _) in options.items()}
    differentiated = tokens() | {name: x for name, x in given.items() if name == "bias"}
    part = in_shard_map(attend, sizes, options, **settings)

    def over_devices(query, key, value, **bias):
        return part(query, key, value, w, given | bias)

    def on_one_device(query, key, value, **bias):
        return attend(query, key, value, w, **given | bias)

    assert_close(*(with_gradients(f, differentiated) for f in (over_devices, on_one_device)))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("bidirectional", {"length": 8}, OPTIONS),  # One position each.
        slow("causal", {"length": 4}, OPTIONS),
        ("near", {"length": 8}, OPTIONS),
        ("near, causal", {"length": 4}, OPTIONS | OF_SEGMENTS),
        slow("causal", {"batch": 2, "length": 2, "heads": 2}, OF_SEGMENTS),
        ("near and far", {"heads": 2, "length": 4}, OPTIONS),
        ("causal", {"heads": 2}, OPTIONS),  # No length: nothing has to be said of it.
        *(
            slow(name, sizes, options)
            for name in FUNCTIONS
            for sizes in (
                {"length": 1},
                {"length": 2},
                {"length": 4},
                {"length": 8},
                {"batch": 2, "length": 4},
                {"heads": 2, "length": 2},
                {"batch": 2},
            )
            for options in ({}, OPTIONS, OF_SEGMENTS, OPTIONS | OF_SEGMENTS)
        ),
    ],
)
def test_outputs_and_gradients_are_those_of_one_device(name, sizes, options):
    check(name, sizes, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("bidirectional", {"heads": 2, "length": 2}, {}),
        slow("causal", {"heads": 2, "length": 4}, OPTIONS | OF_SEGMENTS),
        slow("near and far", {"heads": 2, "length": 2}, OF_SEGMENTS),
    ],
)
def test_fast_projections_sharded_over_heads(name, sizes, options):
    check(name, sizes, options, kind="fast")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bidirectional", slow("causal"), slow("near and far")])
def test_without_the_check_of_varying_axes(name):
    check(name, {"batch": 2, "length": 4}, OPTIONS, check_vma=False)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["near", slow("bidirectional"), slow("causal")])
def test_under_vmap(name, inside):
    w = projections("dense")
    mesh = make_mesh("manual", length=4)

    def part(query, key, value):
        return FUNCTIONS[name](query, key, value, w, sequence_axis="length")

    if inside:
        spec = P(None, "length")
        mapped = jax.shard_map(jax.vmap(part), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    else:
        spec = P("length")
        mapped = jax.vmap(jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))

    def over_devices(query, key, value):
        return mapped(query, key, value)

    def on_one_device(query, key, value):
        return FUNCTIONS[name](query, key, value, w)

    assert_close(*(with_gradients(f, tokens()) for f in (over_devices, on_one_device)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bidirectional", slow("causal"), slow("near and far")])
def test_a_length_over_two_axes(name):
    w, spec = projections("dense"), P(None, ("a", "b"))
    part = functools.partial(FUNCTIONS[name], sequence_axis=("a", "b"))
    mapped = jax.shard_map(
        part, mesh=make_mesh("manual", a=2, b=4), in_specs=(spec, spec, spec, P()), out_specs=spec
    )

    def over_devices(query, key, value):
        return mapped(query, key, value, w)

    def on_one_device(query, key, value):
        return FUNCTIONS[name](query, key, value, w)

    assert_close(*(with_gradients(f, tokens()) for f in (over_devices, on_one_device)))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_cross_attention(whole):
    """Queries of another length, whole on every device or sharded, with all that hides keys."""
    w, lengths = projections("dense"), jnp.array([7, 3])
    arrays = tokens() | {"query": jnp.asarray(inputs(12, heads=HEADS, dim=DIM, batch=(BATCH,))[0])}
    mask = jnp.asarray(OPTIONS["mask"][0])
    of_queries, of_keys = P() if whole else P(None, "length"), P(None, "length")

    def attend(query, key, value, mask, **axis):
        hidden = {"mask": mask, "key_value_seq_lengths": lengths}
        return random_feature_attention(query, key, value, w, **hidden, **axis)

    mapped = jax.shard_map(
        functools.partial(attend, sequence_axis="length"),
        mesh=make_mesh("manual", length=4),
        in_specs=(of_queries, of_keys, of_keys, P(None, None, None, "length")),
        out_specs=of_queries,
    )

    def over_devices(query, key, value):
        return mapped(query, key, value, mask)

    def on_one_device(query, key, value):
        return attend(query, key, value, mask)

    assert_close(*(with_gradients(f, arrays) for f in (over_devices, on_one_device)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"is_causal": True}, {"exact_bandwidth": 2}])
def test_heads_of_queries_over_devices_that_share_the_keys(options):
    w = projection(FEATURES, DIM)
    spec = P(None, None, "heads")

    def attend(query, key, value):
        return random_feature_attention(query, key, value, w, **options)

    mapped = jax.shard_map(
        attend,
        mesh=make_mesh("manual", heads=2),
        in_specs=(spec, P(), P()),
        out_specs=spec,
    )

    def over_devices(query, key, value):
        return mapped(query, key, value)

    arrays = tokens(key_heads=1)
    assert_close(*(with_gradients(f, arrays) for f in (over_devices, attend)))


@pytest.mark.parametrize(
    ("name", "devices"), [("bidirectional", 2), ("bidirectional", 1), ("near", 2)]
)
def test_an_explicit_length_inside_a_shard_map_over_the_batch(name, devices):
    w, mesh, spec = projections("dense"), make_mesh(batch=2, length=devices), P("batch")
    placed = jax.device_put((*tokens().values(),), jax.NamedSharding(mesh, P("batch", "length")))
    with jax.set_mesh(mesh):

        def part(q, k, v):
            return FUNCTIONS[name](q, k, v, w)

        mapped = jax.shard_map(part, in_specs=spec, out_specs=spec, axis_names={"batch"})
        out = jax.jit(mapped)(*placed)
    assert_close(np.asarray(out), jax.jit(FUNCTIONS[name])(*tokens().values(), w))


DECODERS = {
    "far": (
        lambda w, sizes: steps.init_state(w, **sizes),
        lambda state, q, k, v, w: steps.step(state, q, k, v, w),
    ),
    "near": (
        lambda w, sizes: steps.init_window(bandwidth=3, **sizes),
        lambda state, q, k, v, w: steps.window_step(state, q, k, v),
    ),
    "near and far": (
        lambda w, sizes: steps.init_fmm_state((w,), bandwidth=3, **sizes),
        lambda state, q, k, v, w: steps.fmm_step(state, q, k, v, (w,)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_batch_and_heads_over_devices(name):
    """A prompt, then token by token in a scan, inside one shard_map."""
    init, step = DECODERS[name]

    def decode(q, k, v, w):
        sizes = {"batch": q.shape[:1], "num_key_heads": k.shape[2]}
        state = init(w, sizes | {"head_dim": DIM, "value_dim": DIM})
        first, state = step(state, q[:, :4], k[:, :4], v[:, :4], w)

        def body(state, token):
            out, state = step(state, *(x[:, None] for x in token), w)
            return state, out[:, 0]

        rest = tuple(jnp.moveaxis(x[:, 4:], 1, 0) for x in (q, k, v))
        _, rest = jax.lax.scan(body, state, rest)
        return jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)

    w, spec = projections("dense"), P("batch", None, "heads")
    mapped = jax.shard_map(
        decode,
        mesh=make_mesh("manual", batch=2, heads=2),
        in_specs=(spec, spec, spec, P("heads")),
        out_specs=spec,
    )
    arrays = (*tokens().values(), w)
    assert_close(jax.jit(mapped)(*arrays), jax.jit(decode)(*arrays))
