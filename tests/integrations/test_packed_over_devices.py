"""Tests of segment ids as the mask of sequences whose length mesh axes shard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from simrf_jax._src.integrations.flax_masks import factors_of_ids
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs
from tests.integrations.adapters import KINDS

P = jax.P
LENGTH, HEADS, DIM = 8, 2, 4
# Holes, which divide no segment, on borders of four devices and over a whole one; 0 is padding.
IDS = np.array([[1, 1, 1, 0, 0, 0, 1, 2], [0, 0, 0, 3, 3, 3, 0, 4]])[:, None, None]
# The holes have the ids of the segment before them, and the first one has none.
FILLED = [[1, 1, 1, 1, 1, 1, 1, 2], [0, 0, 0, 3, 3, 3, 3, 4]]
TARGET = (2, HEADS, LENGTH, LENGTH)
QKV = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))


@pytest.fixture(scope="module")
def expected():
    """Returns the attention of one device to ids whose holes are filled."""
    both = KINDS["random features"](HEADS, DIM)
    out = both.function(*QKV, mask=IDS != 0, segment_ids=np.array(FILLED))
    return np.where(np.moveaxis(IDS != 0, -1, 1), out, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_holes_on_borders_of_devices_divide_no_segment(api, kind, expected):
    mesh, spec = make_mesh(kind, length=4), P(None, "length")
    specs = (spec, spec, spec, P(None, None, None, "length"))
    named = {} if kind == "explicit" else {"sequence_axis": "length"}
    both = KINDS["random features"](HEADS, DIM, masks="packed", **named)

    def attend(*x):
        return both.calls()[api](*x[:3], mask=x[3])

    if kind == "manual":
        attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    placed = jax.device_put((*QKV, IDS), tuple(NamedSharding(mesh, one) for one in specs))
    np.testing.assert_allclose(jax.jit(attend)(*placed), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", [{"data": 1, "length": 8}, {"data": 2, "length": 2}])
def test_each_device_fills_the_holes_of_its_part(sizes):
    mesh = make_mesh("manual", **sizes)

    def fill(ids):
        target = (ids.shape[0], HEADS, ids.shape[-1], ids.shape[-1])
        return factors_of_ids(ids, target, ("length",)).segment_ids

    spec = P("data", None, None, "length")
    filled = jax.shard_map(fill, mesh=mesh, in_specs=spec, out_specs=P("data", "length"))(IDS)
    np.testing.assert_array_equal(filled, FILLED)


def test_the_batch_may_be_explicit_where_the_length_is_manual():
    mesh = make_mesh("explicit", data=2, length=2)
    placed = jax.device_put(IDS, NamedSharding(mesh, P("data", None, None, "length")))
    target = (2, HEADS, LENGTH // 2, LENGTH // 2)
    with jax.set_mesh(mesh):
        out = jax.jit(
            jax.shard_map(
                lambda ids: factors_of_ids(ids, target, ("length",)).segment_ids,
                in_specs=P(None, None, None, "length"),
                out_specs=P(None, "length"),
                axis_names={"length"},
            )
        )(placed)
    np.testing.assert_array_equal(out, FILLED)


@pytest.mark.parametrize(
    ("ids", "spec", "filled", "filled_spec"),
    [
        (IDS, P("data", None, None, "length"), FILLED, P("data", "length")),
        (IDS[0, 0, 0], P("length"), FILLED[:1] * 2, P(None, "length")),
        (IDS, P("data"), FILLED, P("data", None)),
    ],
)
def test_explicit_axes_stay(ids, spec, filled, filled_spec):
    mesh = make_mesh("explicit", data=2, length=2)
    placed = jax.device_put(jnp.asarray(ids), NamedSharding(mesh, spec))
    out = factors_of_ids(placed, TARGET, ()).segment_ids
    np.testing.assert_array_equal(out, filled)
    assert jax.typeof(out).sharding.spec == filled_spec
