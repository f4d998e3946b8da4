"""Attention by fast rows is that by the matrix it stands for, in every mode."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import draw_fast_projection, random_feature_attention
from tests.attention.inputs import inputs
from tests.attention.modes import MODES
from tests.projections.matrices import dense, dense_stack
from tests.tiers import slow_but

LENGTH, DIM, FEATURES = 5, 6, 11
DEFAULT = ("bidirectional", "packed, causal", "decoding")


def arguments(name):
    shape = MODES[name].shape | {"length": LENGTH, "dim": DIM}
    if "key_length" in shape:
        shape["key_length"] = LENGTH - 1
    return tuple(jnp.asarray(x) for x in inputs(**shape))


def draw(*stack):
    """One projection, or a stack of them with leading axes of the sizes given."""
    draw_one = functools.partial(draw_fast_projection, num_features=FEATURES, dim=DIM)
    for _ in stack:
        draw_one = jax.vmap(draw_one)
    key = jax.random.key(0)
    return draw_one(jax.random.split(key, stack) if stack else key)


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


# The near field has no projection.
@pytest.mark.slow
@pytest.mark.parametrize("per_head", slow_but([True], [False, True]))
@pytest.mark.parametrize(
    "name", slow_but(DEFAULT, [name for name in MODES if not name.startswith("near,")])
)
def test_outputs_and_gradients_are_those_of_the_matrix(name, per_head):
    qkv = arguments(name)
    key_heads = qkv[1].shape[-2]
    projection = draw(key_heads) if per_head else draw()
    matrix = jnp.asarray((dense_stack if per_head else dense)(projection), jnp.float32)

    @jax.jit
    def with_gradients(qkv, w):
        def loss(qkv):
            out = MODES[name].attend(*qkv, w)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(qkv)

    assert_close(with_gradients(qkv, projection), with_gradients(qkv, matrix))


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "cross_polytope"])
def test_every_coupling(coupling):
    q, k, v = inputs(LENGTH, dim=DIM)
    projection = draw_fast_projection(jax.random.key(0), FEATURES, DIM, coupling=coupling)
    attend = jax.jit(random_feature_attention)
    assert_close(attend(q, k, v, projection), attend(q, k, v, jnp.float32(dense(projection))))


@pytest.mark.slow
def test_another_draw_is_no_other_program():
    q, k, v = inputs(LENGTH, dim=DIM)
    chex.clear_trace_counter()
    attend = jax.jit(chex.assert_max_traces(random_feature_attention, n=1))
    stack = draw(2)
    for i in range(2):
        attend(q, k, v, jax.tree.map(lambda leaf, i=i: leaf[i], stack))


@pytest.mark.slow
def test_vmap_over_layers_of_heads():
    q, k, v = inputs(LENGTH, dim=DIM)
    layers = draw(3, 2)
    attend = functools.partial(random_feature_attention, q, k, v)
    mapped = jax.jit(jax.vmap(attend))(layers)
    for i in range(3):
        heads = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
        matrices = jnp.asarray(dense_stack(heads), jnp.float32)
        np.testing.assert_allclose(mapped[i], attend(matrices), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_donated_projection():
    q, k, v = inputs(LENGTH, dim=DIM)
    projection, kept = draw(), draw()

    @functools.partial(jax.jit, donate_argnums=0)
    def attend(projection):
        return random_feature_attention(q, k, v, projection), projection

    out, projection = attend(projection)
    matrix = jnp.asarray(dense(kept), jnp.float32)
    assert_close(out, random_feature_attention(q, k, v, matrix))
    assert_close(projection, kept)
