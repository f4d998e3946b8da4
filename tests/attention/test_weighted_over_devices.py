"""Weighted rows, and feature maps with an array for each head, over lengths that devices share."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from simrf_jax import Projection, feature_maps, random_feature_attention
from tests import formulas
from tests.attention.devices import KINDS, make_mesh, sharded
from tests.attention.inputs import inputs, projection

LENGTH, HEADS, KEY_HEADS, FEATURES = 16, 4, 2, 11
ARGUMENTS = {
    "weighted rows": lambda w: {"projection": Projection(w, formulas.log_weights(w))},
    "a parameter for each head": lambda w: {
        "projection": w,
        "feature_map": feature_maps.OptimalPositive(np.float32([-0.05, -0.4])),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.devices(8)
def test_devices_give_what_one_device_gives(name, kind, is_causal):
    options = ARGUMENTS[name](projection(FEATURES, heads=KEY_HEADS))
    options |= {"is_causal": True, "chunk_size": 2} if is_causal else {}
    qkv = inputs(LENGTH, heads=HEADS, key_heads=KEY_HEADS)
    expected = random_feature_attention(*qkv, **options)
    mesh = make_mesh(kind, length=4)
    if kind != "manual":  # The arrays of the map lie on the mesh, as the state of a model does.
        options |= jax.device_put(
            {name: x for name, x in options.items() if name in ("projection", "feature_map")},
            NamedSharding(mesh, jax.P()),
        )
    call = sharded(random_feature_attention, kind, mesh, jax.P("length"), **options)
    placed = jax.device_put(qkv, NamedSharding(mesh, jax.P("length")))
    np.testing.assert_allclose(jax.jit(call)(*placed), expected, rtol=1e-5, atol=1e-6)
