import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import Band, RandomFeatureMechanism
from simrf_jax.fmm import Blend, fmm_attention
from tests.attention import steps
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection
from tests.attention.reference import relative_error

MAPS = ("positive", "elu")
WEIGHTS = {"near_weight": np.array([0.7, 0.2]), "far_weights": np.array([[0.5, 1.0], [0.1, 0.4]])}


def empty(k, v, projections, feature_maps=MAPS):
    return steps.init_fmm_state(
        projections,
        bandwidth=5,
        batch=k.shape[:-3],
        num_key_heads=k.shape[-2],
        head_dim=k.shape[-1],
        value_dim=v.shape[-1],
        feature_maps=feature_maps,
    )


@pytest.mark.slow
def test_prefill_and_steps_are_the_parallel_form():
    q, k, v = inputs(30, width=3, batch=(2,))
    mask = np.ones((2, 1, 1, 30), bool)
    mask[1, ..., 3:10] = False
    projections = (projection(heads=2), None)
    options = {"feature_maps": MAPS, **WEIGHTS}

    @jax.jit
    def parallel(q, k, v):
        return fmm_attention(
            q, k, v, projections, bandwidth=5, is_causal=True, mask=mask, **options
        )

    @jax.jit
    def step(state, q, k, v, mask):
        return steps.fmm_step(state, q, k, v, projections, mask=mask, **options)

    state, outs = empty(k, v, projections), []
    shapes = jax.tree.map(jnp.shape, state)
    for some in (slice(0, 17), *(slice(t, t + 1) for t in range(17, 30))):
        out, state = step(state, *(x[:, some] for x in (q, k, v)), mask[..., some])
        outs.append(out)
    assert relative_error(np.concatenate(outs, axis=1), parallel(q, k, v)) < 1e-5
    assert jax.tree.map(jnp.shape, state) == shapes


@pytest.mark.slow
def test_batches_over_an_explicit_axis():
    q, k, v = inputs(6, heads=2, batch=(4,))
    w = projection()
    expected = fmm_attention(q, k, v, (w,), bandwidth=5, is_causal=True)
    sharding = jax.NamedSharding(make_mesh(data=2), jax.P("data"))
    state, outs = empty(k, v, (w,), MAPS[:1]), []
    step = jax.jit(steps.fmm_step)
    for some in (slice(0, 4), slice(4, 6)):
        tokens = jax.device_put([x[:, some] for x in (q, k, v)], sharding)
        out, state = step(state, *tokens, (w,))
        outs.append(np.asarray(out))
    assert relative_error(np.concatenate(outs, axis=1), expected) < 1e-5


def test_refuses_a_length_that_devices_share_and_masks_by_query_head():
    q, k, v = inputs(4, heads=4, key_heads=2, batch=(1,))
    w = projection()
    state = empty(k, v, (w,), MAPS[:1])
    mask = jnp.ones((1, 4, 1, 4), bool)
    with pytest.raises(ValueError, match="one for each of 4 query heads, and 2 key heads"):
        steps.fmm_step(state, q, k, v, (w,), mask=mask)
    with pytest.raises(ValueError, match="one for each of 4 query heads, and 2 key heads"):
        steps.step(state.far[0], q, k, v, w, mask=mask)
    sharding = jax.NamedSharding(make_mesh(length=2), jax.P(None, "length"))
    q, k, v = jax.device_put((q, k, v), sharding)
    for call in (
        lambda: steps.step(state.far[0], q, k, v, w),
        lambda: steps.append(state.far[0], k, v, w),
        lambda: steps.window_step(state.near, q, k, v),
    ):
        with pytest.raises(ValueError, match=r"length is not sharded, got .* axis 'length'"):
            call()


def test_refuses():
    q, k, v = inputs()
    projections = (projection(), None)
    state = empty(k, v, projections)
    with pytest.raises(ValueError, match="state must be of 1 feature maps, got one of 2"):
        steps.fmm_step(state, q, k, v, projections[:1])
    mechanism = Blend(Band(3), (RandomFeatureMechanism(projections[0]),))
    with pytest.raises(TypeError, match="state must be of type BlendState, got Window"):
        mechanism.step(state.near, q, k, v)
