"""An exact band beside random features over a sharded length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from simrf_jax import random_feature_attention
from tests.attention.devices import collectives, make_mesh, sharded
from tests.attention.inputs import inputs, projection
from tests.attention.reference import beside_band, relative_error

LENGTH, HEADS, KEY_HEADS, DIM, FEATURES = 32, 4, 2, 8, 11
# Segments begin and end on borders of devices and inside, one spans five devices, ids come again.
SEGMENTS = np.repeat([0, 1, 2, 1, 3], [3, 1, 19, 5, 4])
RUNS = np.cumsum(np.diff(SEGMENTS, prepend=0) != 0)
CAUSAL, PACKED = {"is_causal": True}, {"segment_ids": SEGMENTS}
P = jax.P


def estimator(bandwidth):
    return functools.partial(
        random_feature_attention,
        projection=projection(FEATURES),
        exact_bandwidth=bandwidth,
        chunk_size=2,
    )


def visible(*, is_causal=False, segment_ids=None):
    seen = np.tri(LENGTH, dtype=bool) if is_causal else np.ones((LENGTH, LENGTH), bool)
    return seen if segment_ids is None else seen & (RUNS[:, None] == RUNS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "kind", "devices", "options"),
    [
        (0, "explicit", 8, {}),
        (3, "auto", 8, CAUSAL),
        (3, "manual", 2, PACKED),
        (4, "manual", 8, CAUSAL | PACKED),
        (7, "manual", 8, {}),
        (10, "explicit", 8, PACKED),
        (29, "auto", 8, CAUSAL),
        (10**12, "explicit", 2, {}),
    ],
)
def test_one_length_over_devices(bandwidth, kind, devices, options):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    mask = np.random.default_rng(2).random(LENGTH) < 0.8
    k[~mask], v[~mask] = np.nan, np.nan
    mesh = make_mesh(kind, length=devices)
    call = sharded(estimator(bandwidth), kind, mesh, P("length"), mask=mask[None, None], **options)
    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("length")))
    compiled = jax.jit(call).lower(*placed).compile()
    out = compiled(*placed)

    weights = np.broadcast_to(np.where(mask, 0, -np.inf), (HEADS, LENGTH))
    k, v, w = np.nan_to_num(k), np.nan_to_num(v), projection(FEATURES)
    seen = visible(**options)
    truth = beside_band(q, k, v, w, bandwidth, log_weights=weights, visible=seen)
    np.testing.assert_allclose(out, truth, atol=1e-5)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("length")), 3)

    # Sums over keys, and the keys of the band: no more of these than the bandwidth.
    found = collectives(compiled)
    assert {name for name, _, _ in found} <= {"collective-permute"}
    sums = KEY_HEADS * FEATURES * (DIM + 1)
    of_band = min(bandwidth, LENGTH // devices) * KEY_HEADS * DIM
    assert max(np.prod(shape) for _, _, shape in found) <= max(sums, of_band)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "options"),
    [
        pytest.param(5, {}, marks=pytest.mark.slow),
        pytest.param(9, PACKED, marks=pytest.mark.slow),
        (11, CAUSAL),
    ],
)
def test_gradients_are_those_of_one_device(bandwidth, options):
    options = dict(options)
    if "segment_ids" in options:
        options["segment_ids"] = np.stack([SEGMENTS, SEGMENTS[::-1]])

    def loss(*arrays):
        return jnp.sum(estimator(bandwidth)(*arrays, **options) ** 2)

    qkv = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS, batch=(2,))
    mesh = make_mesh(data=2, length=4)
    placed = jax.device_put(qkv, NamedSharding(mesh, P("data", "length")))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    for a, e in zip(gradient(*placed), gradient(*qkv), strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.slow
def test_what_is_not_finite_reaches_those_that_see_it_on_other_devices():
    options = CAUSAL | PACKED
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    where = 14  # Inside the segment that spans five devices.
    mesh = make_mesh("manual", length=8)
    call = jax.jit(sharded(estimator(5), "manual", mesh, P("length"), **options))
    planted_k, planted_v = k.copy(), v.copy()
    planted_k[where], planted_v[where] = np.nan, np.inf
    sees = visible(**options)[:, where]
    out, planted = call(q, k, v), call(q, planted_k, planted_v)
    assert np.isnan(planted[sees]).all()
    np.testing.assert_array_equal(planted[~sees], out[~sees])


def test_refuses_other_keys_than_queries():
    q, k, v = inputs(LENGTH, key_length=16)
    mesh = make_mesh("auto", length=2)
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError, match="equal numbers of queries and keys, got 32 queries and 16 keys"
        ),
    ):
        estimator(3)(q, k, v, sequence_axis="length")


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_an_axis_of_one_device_takes_other_keys_than_queries(kind):
    q, k, v = inputs(LENGTH, key_length=16)
    placed = jax.device_put((q, k, v), NamedSharding(make_mesh(kind, length=1), P("length")))
    options = {"sequence_axis": "length"} if kind == "auto" else {}
    out = jax.jit(functools.partial(estimator(3), **options))(*placed)
    assert relative_error(out, beside_band(q, k, v, projection(FEATURES), 3)) < 1e-6
