import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax._src.integrations import flax_versions
from simrf_jax._src.integrations.flax_versions import get_value, set_value, view
from simrf_jax.integrations.nnx import FMMAttention, RandomFeatureAttention

pytestmark = pytest.mark.fast


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.far = RandomFeatureAttention(2, 4, 8, rngs=rngs)
        self.fields = nnx.data([FMMAttention(2, 4, 8, bandwidth=2, rngs=rngs) for _ in range(2)])


@pytest.fixture(params=[True, False], ids=["Flax's view", "our view"])
def model(request, monkeypatch):
    if request.param and not flax_versions._HAS_VIEW:
        pytest.skip("This Flax has no nnx.view.")
    monkeypatch.setattr(flax_versions, "_HAS_VIEW", request.param)
    return Model()


@pytest.mark.slow
def test_a_view_changes_the_chosen_modules_of_a_copy(model):
    decoder = view(model, only=FMMAttention, decode=True, batch_size=3)
    assert [one.decode for one in (decoder.far, *decoder.fields)] == [False, True, True]
    assert all(get_value(one.cache).near.key.shape == (3, 2, 2, 4) for one in decoder.fields)
    assert [one.decode for one in (model.far, *model.fields)] == [False, False, False]
    assert model.fields[0].cache is None


@pytest.mark.slow
def test_a_view_shares_the_variables_of_the_model(model):
    decoder = view(model, only=nnx.PathContains("far"), decode=True, batch_size=1)
    w = jnp.ones_like(get_value(model.far.projection))
    set_value(model.far.projection, w)
    np.testing.assert_array_equal(get_value(decoder.far.projection), w)


def test_an_attribute_that_no_module_has_is_refused(model):
    with pytest.raises((TypeError, ValueError), match="decoed"):
        view(model, only=RandomFeatureAttention, decoed=True)
