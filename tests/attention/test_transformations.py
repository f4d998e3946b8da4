"""Every way to attend under JAX's transformations gives what a plain loop gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import (
    attention_matrix,
    banded_attention,
    draw_fast_projection,
    draw_projection,
    random_feature_attention,
)
from simrf_jax.fmm import fmm_attention
from simrf_jax.hybrid import GaussianHybrid, draw_bipolar_projection
from tests.attention import steps
from tests.attention.inputs import inputs, projection
from tests.attention.modes import MODES
from tests.versions import enable_x64

# Each case compiles a program of its own.
pytestmark = pytest.mark.slow

SEQUENCES, LENGTH, HEADS, DIM, FEATURES = 2, 5, 4, 4, 6
# Each of the others is one of these with another shape or a second bracket of the same states.
DEFAULT = ("packed, causal", "decoding", "near, packed", "near and far")


def modes(*default):
    """Parametrizes over all modes; those that are not named are slow."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in MODES],
    )


def arguments(name, batch=(SEQUENCES,)):
    """Queries, keys, values, two projections and the masks of one or several sequences."""
    shape = dict(MODES[name].shape) | {"length": LENGTH, "dim": DIM, "batch": batch}
    if "key_length" in shape:
        shape["key_length"] = LENGTH - 1
    q, k, v = (jnp.asarray(x) for x in inputs(**shape))
    w = projection(FEATURES, DIM, heads=2)
    mask = np.random.default_rng(1).random((*batch, 1, 1, k.shape[-3])) < 0.8
    return q, k, v, w, jnp.asarray(mask)


def objective(name, q, k, v, w, mask):
    out = MODES[name].attend(q, k, v, w, mask=mask)
    return jnp.sum(jnp.sin(out)), out


def with_gradients(name, *arguments):
    """The output and the gradients with respect to all but the mask."""
    loss = functools.partial(objective, name)
    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arguments)
    return out, gradients


@functools.cache
def program(name):
    return jax.jit(functools.partial(with_gradients, name))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def assert_close(actual, expected, tolerance=1e-5):
    actual, structure = jax.tree.flatten(actual)
    expected, other = jax.tree.flatten(expected)
    assert structure == other
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


@modes(*DEFAULT)
def test_vmap_over_projections_of_vmap_over_sequences_of_gradients(name):
    q, k, v, w, mask = arguments(name)
    each = jax.vmap(functools.partial(with_gradients, name), in_axes=(0, 0, 0, None, 0))
    actual = jax.jit(jax.vmap(each, in_axes=(None, None, None, 0, None)))(q, k, v, w, mask)
    one = program(name)
    expected = stack(
        stack(one(q[i], k[i], v[i], one_w, mask[i]) for i in range(SEQUENCES)) for one_w in w
    )
    assert_close(actual, expected)


@modes("near and far")
def test_gradients_of_a_vmap(name):
    q, k, v, w, mask = arguments(name)

    def loss(q, k, v, w):
        each = jax.vmap(functools.partial(objective, name), in_axes=(0, 0, 0, None, 0))
        return jnp.sum(each(q, k, v, w, mask)[0])

    actual = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, w[0])
    one = program(name)
    rows = [one(q[i], k[i], v[i], w[0], mask[i])[1] for i in range(SEQUENCES)]
    of_qkv = stack(row[:3] for row in rows)
    assert_close(actual, (*of_qkv, sum(row[3] for row in rows)))


@modes(*DEFAULT)
def test_map_and_conditions(name):
    q, k, v, w, mask = arguments(name, batch=(3,))
    shown = jnp.array([True, False, True])

    def maybe(shown, q, k, v, mask):
        def attend():
            return MODES[name].attend(q, k, v, w[0], mask=mask)

        nothing = jnp.zeros((*q.shape[:-1], v.shape[-1]))
        return jax.lax.cond(shown, attend, lambda: nothing)

    by_map = jax.jit(lambda *x: jax.lax.map(lambda one: maybe(*one), x, batch_size=2))
    by_vmap = jax.jit(jax.vmap(maybe))
    one = program(name)
    expected = stack(one(q[i], k[i], v[i], w[0], mask[i])[0] for i in range(3)).at[1].set(0)
    for mapped in (by_map, by_vmap):
        assert_close(mapped(shown, q, k, v, mask), expected)


@modes("causal", "near, decoding")
@pytest.mark.parametrize(
    "policy",
    [None, pytest.param(jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow)],
    ids=["nothing", "products"],
)
def test_scan_over_layers_that_are_computed_again(name, policy):
    x, _, _, w, _ = arguments(name, batch=())

    def layer(x, w):
        out = MODES[name].attend(x, x[:, :2], x[:, 2:], w)
        return x + out, jnp.sum(out)

    def by_scan(x, w):
        again = jax.checkpoint(layer, policy=policy)
        return jax.lax.scan(again, x, w)

    def by_loop(x, w):
        sums = []
        for one_w in w:
            x, total = layer(x, one_w)
            sums.append(total)
        return x, jnp.stack(sums)

    def value_and_gradients(layers):
        def loss(x, w):
            x, sums = layers(x, w)
            return jnp.sum(jnp.sin(x)) + 1e-2 * jnp.sum(sums**2), (x, sums)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)

    assert_close(value_and_gradients(by_scan), value_and_gradients(by_loop))


@modes("causal", "near, packed")
def test_forward_mode_and_products_with_the_hessian(name):
    rng = np.random.default_rng(2)
    with enable_x64(True):
        *x, mask = arguments(name, batch=())
        x = [jnp.asarray(array, jnp.float64) for array in (*x[:3], x[3][0])]
        tangent = [jnp.asarray(rng.normal(size=array.shape)) for array in x]

        def loss(x):
            return objective(name, *x, mask)[0]

        def derivatives(x):
            value, push = jax.linearize(loss, x)
            gradient, curvature = jax.jvp(jax.grad(loss), (x,), (tangent,))
            return value, push(tangent), gradient, curvature

        def product(one, other):
            return sum(jnp.vdot(a, b) for a, b in zip(one, other, strict=True))

        value, slope, gradient, curvature = jax.jit(derivatives)(x)
        step, of = 1e-5, jax.jit(jax.value_and_grad(loss))
        (_, ahead), (_, behind) = (
            of([a + sign * step * t for a, t in zip(x, tangent, strict=True)]) for sign in (1, -1)
        )
        finite = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
        assert_close((value, gradient), of(x), 1e-12)
        assert_close(slope, product(gradient, tangent), 1e-12)
        assert_close(curvature, finite, 1e-8)


@pytest.mark.slow
@modes(*MODES)
def test_both_orders_of_the_second_derivative(name):
    q, k, v, w, mask = arguments(name, batch=())
    x = (q, k, v, w[0])
    tangent = tuple(jnp.cos(3 * array + 1) for array in x)

    def loss(x):
        return objective(name, *x, mask)[0]

    def slope(x):
        return jax.jvp(loss, (x,), (tangent,))[1]

    def product(x):
        return sum(jnp.vdot(a, b) for a, b in zip(jax.grad(loss)(x), tangent, strict=True))

    forward_over_reverse = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (tangent,))[1])(x)
    for scalar in (slope, product):
        assert_close(jax.jit(jax.grad(scalar))(x), forward_over_reverse)


SIZES = {"num_key_heads": 2, "head_dim": DIM, "value_dim": DIM}
# name -> what makes the first state from W, and one step
DECODERS = {
    "far": (lambda w: steps.init_state(w, **SIZES), steps.step),
    "near": (
        lambda w: steps.init_window(bandwidth=2, **SIZES),
        lambda state, q, k, v, w: steps.window_step(state, q, k, v),
    ),
    "near and far": (
        lambda w: steps.init_fmm_state((w,), bandwidth=2, **SIZES),
        lambda state, q, k, v, w: steps.fmm_step(state, q, k, v, (w,)),
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_in_a_while_loop_under_vmap(name):
    """Sequences that end stand still, with all that their states hold, until the others do."""
    init, step = DECODERS[name]
    q, k, v = (jnp.asarray(x) for x in inputs(LENGTH, heads=2, dim=DIM, batch=(3,)))
    w, lengths = projection(FEATURES, DIM), jnp.array([4, 0, LENGTH])

    def decode(q, k, v, length):
        def one_more(carry):
            t, state, outs = carry
            token = (jax.lax.dynamic_slice_in_dim(x, t, 1) for x in (q, k, v))
            out, state = step(state, *token, w)
            return t + 1, state, jax.lax.dynamic_update_slice_in_dim(outs, out, t, 0)

        start = (0, init(w), jnp.zeros_like(v))
        return jax.lax.while_loop(lambda carry: carry[0] < length, one_more, start)[1:]

    states, outs = jax.jit(jax.vmap(decode))(q, k, v, lengths)
    one_step = jax.jit(step)
    for i, length in enumerate(lengths):
        state, expected = init(w), np.zeros_like(v[i])
        for t in range(length):
            out, state = one_step(state, *(x[i, t : t + 1] for x in (q, k, v)), w)
            expected[t] = out[0]
        assert_close(outs[i], jnp.asarray(expected))
        assert_close(jax.tree.map(lambda x, i=i: x[i], states), state)


FUNCTIONS = {
    "bidirectional": random_feature_attention,
    "causal": functools.partial(random_feature_attention, is_causal=True, chunk_size=2),
    "near": lambda q, k, v, w, **options: banded_attention(q, k, v, bandwidth=2, **options),
    "near and far": lambda q, k, v, w, **options: fmm_attention(
        q, k, v, (w,), bandwidth=2, **options
    ),
    "matrix": lambda q, k, v, w, **options: attention_matrix(q, k, w, **options),
}
RNG = np.random.default_rng(3)
# name -> several values of an argument, to map over
OPTIONS = {
    "scale": np.array([0.3, 1.0, 0.0], np.float32),
    "mask": RNG.random((3, HEADS, 1, LENGTH)) < 0.7,
    "bias": RNG.normal(size=(3, 1, 1, LENGTH)).astype(np.float32),
    "key_value_seq_lengths": np.array([3, 0, 9], np.uint8),
    "query_seq_lengths": np.array([0, 9, 2]),
    "segment_ids": np.array([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2], [1, 0, 1, 1, 0]]),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        # The blend passes its options on to the other two.
        pytest.param(name, option, marks=pytest.mark.slow if name == "near and far" else ())
        for name in FUNCTIONS
        for option in OPTIONS
        if (name, option) != ("matrix", "segment_ids")  # Which it does not take.
    ],
)
def test_vmap_over_one_option_alone(name, option):
    q, k, v = inputs(LENGTH, heads=HEADS, key_heads=2, dim=DIM)
    w, given = projection(FEATURES, DIM), OPTIONS[option]

    @jax.jit
    def attend(one):
        return FUNCTIONS[name](q, k, v, w, **{option: one})

    expected = stack(attend(jnp.asarray(one)) for one in given)
    assert_close(jax.jit(jax.vmap(attend))(jnp.asarray(given)), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_over_heads_with_a_projection_each(name):
    q, k, v = inputs(LENGTH, heads=2, dim=DIM)
    w = projection(FEATURES, DIM, heads=2)
    attend = FUNCTIONS[name]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(1, 1, 1, 0))
    def one_head(q, k, v, w):
        return attend(q[:, None], k[:, None], v[:, None], w)

    axis = 0 if name == "matrix" else 1
    whole = jnp.moveaxis(jax.jit(attend)(q, k, v, w), axis, 0)
    assert_close(jnp.squeeze(one_head(q, k, v, w), axis + 1), whole)


@pytest.mark.parametrize(
    ("draw", "is_causal"), [(draw_projection, False), (draw_fast_projection, True)]
)
def test_vmap_over_keys_that_draw(draw, is_causal):
    q, k, v = inputs(LENGTH, dim=DIM)
    keys = jax.random.split(jax.random.key(0), 3)

    def attend(key):
        w = draw(key, FEATURES, DIM)
        return random_feature_attention(q, k, v, w, is_causal=is_causal)

    mapped = jax.jit(jax.vmap(attend))(keys)
    one = jax.jit(attend)
    assert_close(mapped, stack(one(jax.random.clone(key)) for key in keys))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "gain"], meta_fields=["name"]
)
@dataclasses.dataclass(frozen=True)
class Layer:
    """A user's own pytree that holds a projection."""

    w: object
    gain: jax.Array
    name: str


DRAWS = {
    "dense": ("positive", functools.partial(draw_projection, num_features=FEATURES)),
    "fast": ("hyperbolic", functools.partial(draw_fast_projection, num_features=FEATURES)),
    "bipolar": (
        "angular_hybrid",
        functools.partial(draw_bipolar_projection, num_features=FEATURES, num_weights=3),
    ),
}


@pytest.mark.parametrize(
    ("kind", "is_causal"),
    [
        ("dense", False),
        ("fast", True),
        pytest.param("dense", True, marks=pytest.mark.slow),
        pytest.param("fast", False, marks=pytest.mark.slow),
        pytest.param("bipolar", False, marks=pytest.mark.slow),
        pytest.param("bipolar", True, marks=pytest.mark.slow),
    ],
)
def test_scan_over_layers_in_a_pytree_of_the_user(kind, is_causal):
    name, draw = DRAWS[kind]
    x = 0.3 * inputs(LENGTH, dim=DIM)[0]

    @jax.vmap
    def make(key):
        return Layer(draw(key, dim=DIM), jnp.float32(0.5), kind)

    layers = make(jax.random.split(jax.random.key(0), 2))

    def apply(x, layer):
        out = random_feature_attention(
            x,
            x,
            x,
            layer.w,
            feature_map=name,
            is_causal=is_causal,
            chunk_size=2 * is_causal or None,
        )
        return x + layer.gain * out, None

    def by_scan(x, gain):
        return jax.lax.scan(apply, x, dataclasses.replace(layers, gain=gain))[0]

    def by_loop(x, gain):
        for i in range(2):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], layers)
            x, _ = apply(x, dataclasses.replace(layer, gain=gain[i]))
        return x

    def differentiate(run):
        def loss(x, gain):
            out = run(x, gain)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, layers.gain)

    assert_close(differentiate(by_scan), differentiate(by_loop))


def test_vmap_over_what_a_feature_map_holds():
    """The bandwidth of the Gaussian weights of a hybrid, traced."""
    q, k, v = (0.3 * x for x in inputs(LENGTH, dim=DIM))
    w = draw_bipolar_projection(jax.random.key(0), 6, 3, DIM)

    @jax.jit
    def attend(bandwidth):
        feature_map = GaussianHybrid(bandwidth)
        return random_feature_attention(q, k, v, w, feature_map=feature_map)

    bandwidths = jnp.array([0.5, 1.0, 3.0])
    expected = stack(attend(bandwidth) for bandwidth in bandwidths)
    assert_close(jax.jit(jax.vmap(attend))(bandwidths), expected)
