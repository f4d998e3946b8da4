"""Tests of FMMAttention in both Flax APIs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import simrf_jax
from simrf_jax._src.integrations.flax_versions import get_value, set_value, view
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomProjection
from tests.attention.devices import collectives, make_mesh
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error

HEADS, KEY_HEADS, DIM, BANDWIDTH, LENGTH = 4, 2, 4, 2, 7
MAPS = ("positive", "elu", "angular_hybrid")
FEATURES = (5, None, 3)


def pair(**options):
    """Returns adapters whose weights differ, and the variables of the Linen adapter."""
    options = {"feature_maps": MAPS, "coupling": "iid", "num_weights": 2, **options}
    count = len(options["feature_maps"])
    sizes = (FEATURES[:count], BANDWIDTH)
    one = nnx_adapter.FMMAttention(KEY_HEADS, DIM, *sizes, rngs=nnx.Rngs(0), **options)
    set_value(one.near_logit, jnp.array([-1.0, 2.0]))
    set_value(one.far_logits, jnp.linspace(-2, 1, 2 * count).reshape(count, KEY_HEADS))
    variables = {
        "params": {"near_logit": one.near_logit[...], "far_logits": one.far_logits[...]},
        "random_features": {"projections": get_value(one.projections)},
    }
    return one, linen_adapter.FMMAttention(*sizes, **options), variables


def qkv(length=LENGTH):
    return inputs(length, heads=HEADS, key_heads=KEY_HEADS, dim=DIM, batch=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_both_apis_and_their_gradients_are_those_of_the_function(is_causal, shared):
    mask = np.arange(LENGTH)[None, None, None] < np.array([LENGTH, 4])[:, None, None, None]
    one, other, variables = pair(is_causal=is_causal, shared=shared)
    graphdef, params, rest = nnx.split(one, nnx.Param, ...)

    def function(x, near_logit, far_logits):
        return simrf_jax.fmm.fmm_attention(
            *x,
            variables["random_features"]["projections"],
            bandwidth=BANDWIDTH,
            feature_maps=MAPS,
            near_weight=jnp.repeat(1 / (1 + jnp.exp(-near_logit)), 2),
            far_weights=jnp.repeat(1 / (1 + jnp.exp(-far_logits)), 2, axis=1),
            mask=mask,
            is_causal=is_causal,
        )

    def of_nnx(x, near_logit, far_logits):
        weights = {"near_logit": near_logit, "far_logits": far_logits}
        new = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(weights))
        return nnx.merge(graphdef, new, rest)(*x, mask=mask)

    def of_linen(x, near_logit, far_logits):
        weights = {"near_logit": near_logit, "far_logits": far_logits}
        return other.apply({**variables, "params": weights}, *x, mask=mask)

    def value_and_gradients(call, *arguments):
        def loss(*arguments):
            out = call(*arguments)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arguments)

    arguments = (qkv(), *(variables["params"][name] for name in ("near_logit", "far_logits")))
    expected, *found = jax.jit(
        lambda *a: [value_and_gradients(call, *a) for call in (function, of_nnx, of_linen)]
    )(*arguments)
    for leaves in found:
        chex.assert_trees_all_close(leaves, expected, rtol=1e-4, atol=1e-5)
    assert all(np.abs(gradient).min() > 0 for gradient in expected[0][1:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prompt_and_steps_are_the_parallel_form(dtype):
    x = [jnp.asarray(array, dtype) for array in qkv()]
    maps = {"feature_maps": MAPS[:2], "num_weights": None}
    one, other, variables = pair(masks="factored", **maps)
    real = np.ones((2, LENGTH))
    real[1, 2:4] = 0
    mask = nnx.combine_masks(nnx.make_attention_mask(real, real), nnx.make_causal_mask(real))
    step = nnx.jit(lambda m, *x, mask: m(*x, mask=mask))
    one.is_causal = True
    expected = step(one, *x, mask=mask)
    assert expected.dtype == dtype
    np.testing.assert_array_equal(expected[1, 2:4], 0)
    one.set_view(decode=True, batch_size=2, cache_dtype=dtype)
    other = other.clone(decode=True)
    held = {**variables, "cache": {"state": jax.tree.map(jnp.copy, get_value(one.cache))}}
    other_step = jax.jit(functools.partial(other.apply, mutable=["cache"]))
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for first, last in [(0, 5), (5, 6), (6, 7)]:
        new, block = [array[:, first:last] for array in x], mask[..., first:last, first:last]
        out = step(one, *new, mask=block)
        assert relative_error(out, expected[:, first:last]) < tolerance
        out, updates = other_step(held, *new, mask=block)
        assert relative_error(out, expected[:, first:last]) < tolerance
        held |= updates
    assert get_value(one.cache).near.key.shape == (2, BANDWIDTH, KEY_HEADS, DIM)


@pytest.mark.slow
def test_inside_flaxs_attention_weights_train_and_projections_do_not():
    rngs = nnx.Rngs(0)
    adapter = nnx_adapter.FMMAttention(2, 4, 5, BANDWIDTH, coupling="iid", rngs=rngs)
    module = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=adapter, rngs=rngs)
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    gradient = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)))(module, x)
    assert gradient["attention_fn"].keys() == {"near_logit", "far_logits"}
    assert all(np.abs(leaf).min() > 0 for leaf in jax.tree.leaves(gradient["attention_fn"]))
    state = nnx.state(module, RandomProjection)
    nnx.update(module, simrf_jax.redraw_projections(jax.random.key(1), state))
    collection = {"projections": jax.tree.leaves(state)[0][None]}
    options = simrf_jax.DrawOptions("iid")
    redrawn = simrf_jax.redraw_projections(jax.random.key(1), collection, options=options)
    np.testing.assert_array_equal(get_value(adapter.projections)[0], redrawn["projections"][0])


@pytest.mark.slow
def test_checkpoints_hold_projections_weights_and_cache():
    one, other, _ = pair(decode=True)
    variables = jax.jit(other.init)(jax.random.key(0), *qkv(3))
    assert variables.keys() == {"params", "random_features", "cache"}
    assert variables["params"].keys() == {"near_logit", "far_logits"}
    one.init_cache((2, LENGTH, HEADS * DIM))
    for saved in (variables, nnx.to_pure_dict(nnx.state(one))):
        blank = jax.tree.map(jnp.zeros_like, saved)
        restored = serialization.from_bytes(blank, serialization.to_bytes(saved))
        chex.assert_trees_all_equal(restored, saved)


@pytest.mark.slow
def test_a_view_has_a_window_of_the_type_that_is_said():
    one, _, _ = pair(feature_maps=MAPS[:1], num_weights=None)
    x = [jnp.asarray(array, jnp.bfloat16) for array in qkv(3)]
    decoder = view(one, decode=True, batch_size=2)
    with pytest.raises(TypeError, match=r"key bfloat16, .* got key float32, .* with their dtype"):
        decoder(*x)
    decoder = view(one, decode=True, batch_size=2, cache_dtype=jnp.bfloat16)
    assert decoder(*x).dtype == get_value(decoder.cache).near.key.dtype == jnp.bfloat16


@pytest.mark.slow
def test_over_an_axis_that_is_named_no_key_is_gathered():
    one, _, _ = pair(feature_maps=MAPS[:1], num_weights=None, is_causal=True)
    named, _, _ = pair(
        feature_maps=MAPS[:1], num_weights=None, is_causal=True, sequence_axis="length"
    )
    x = jax.tree.map(jnp.asarray, qkv(8))
    expected = nnx.jit(lambda m, *x: m(*x))(one, *x)
    mesh = make_mesh("auto", length=4)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "length")))
    graphdef, state = nnx.split(named)
    with jax.set_mesh(mesh):
        program = jax.jit(lambda state, *x: nnx.merge(graphdef, state)(*x)).lower(state, *x)
        compiled = program.compile()
        assert relative_error(compiled(state, *x), expected) < 1e-5
    assert {name for name, _, _ in collectives(compiled)} == {"collective-permute"}


def test_refuses_other_heads_than_it_was_made_for():
    one, _, _ = pair()
    q, _, v = qkv()
    with pytest.raises(ValueError, match="keys of 2 heads of dim 4, got 4 heads of 4"):
        one(q, q, jnp.repeat(v, 2, axis=2))
    with pytest.raises(ValueError, match="keys of 2 heads of dim 4, got 3 heads of 4"):
        one(q, q[:, :, :3], q[:, :, :3])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"feature_maps": "positive"}, TypeError, "feature_maps must be a tuple of feature maps"),
        ({"feature_maps": ("cosine",)}, ValueError, "feature_map must be one of"),
        ({"feature_maps": ("clustered_hybrid",)}, ValueError, "takes the centers of clusters"),
        ({"num_weights": 2}, ValueError, "num_weights is for angular_hybrid .* got 2"),
        ({"num_features": (4, 4)}, ValueError, "one for each feature map, got 2 for 1"),
        ({"bandwidth": -1}, ValueError, "bandwidth must be at least 0, got -1"),
    ],
)
def test_refuses(options, error, match):
    options = {"num_features": 4, "bandwidth": 2, "coupling": "iid", **options}
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(error, match=match):
        nnx_adapter.FMMAttention(2, 4, rngs=nnx.Rngs(0), **options)
    with pytest.raises(error, match=match):
        linen_adapter.FMMAttention(**options).init(jax.random.key(0), x, x, x)
