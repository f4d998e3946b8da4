"""What every way to attend must be: equal to a float64 loop, with its gradients, and finite.

A mode is one program for each type, which all tests here share: masks and the gradients of outputs
are arrays.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.inputs import inputs, projection
from tests.attention.modes import DIM, MODES, SCALES, WITH_OTHER_MAPS
from tests.attention.reference import relative_error
from tests.tiers import slow_but


def arguments(mode, scale, dtype=jnp.float32, **shape):
    q, k, v = inputs(**(mode.shape | {"scale": scale} | shape))
    heads = mode.shape["key_heads"]
    w = projection(mode.num_features, DIM, heads=heads, coupling="orthogonal")
    return (*(x.astype(dtype) for x in (q, k, v)), w)


def forbidden_promotion():
    """Refuses to combine arrays of two types, as some users tell JAX to."""
    return jax.numpy_dtype_promotion("strict")


@functools.cache
def program(name):
    def with_gradients(q, k, v, w, cotangent, mask):
        with forbidden_promotion():
            out, pullback = jax.vjp(lambda *x: MODES[name].attend(*x, w, mask=mask), q, k, v)
            return out, pullback(cotangent)

    return jax.jit(with_gradients)


def run(name, q, k, v, w, *, counts=True, mask=None):
    """Returns outputs, gradients and those of the outputs, zeros at queries that do not count."""
    shape = (*q.shape[:-1], v.shape[-1])
    cotangent = np.where(counts, np.random.default_rng(1).normal(size=shape), 0)
    mask = np.ones((*k.shape[:-3], 1, 1, k.shape[-3]), bool) if mask is None else mask
    # NumPy's arrays, of which the tests take parts without a compilation for each.
    out, gradients = jax.device_get(program(name)(q, k, v, w, cotangent.astype(q.dtype), mask))
    assert (out.shape, out.dtype) == (shape, q.dtype)
    return out, gradients, cotangent


def expected(mode, q, k, v, w, log_weights=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for i in np.ndindex(q.shape[:-3]):
        one = None if log_weights is None else log_weights[i]
        out[i] = mode.expected(q[i], k[i], v[i], w, log_weights=one)
    return out


def gradient_error(mode, number, gradient, q, k, v, w, cotangent, num_directions=3, step=1e-6):
    """Relative error of a gradient, estimated along random directions by central differences."""
    rng, squares = np.random.default_rng(number), []
    for _ in range(num_directions):
        moved = [np.asarray(x, np.float64) for x in (q, k, v)]
        direction = rng.normal(size=moved[number].shape)
        moved[number] = moved[number] + step * direction
        ahead = expected(mode, *moved, w)
        moved[number] = moved[number] - 2 * step * direction
        slope = np.sum(cotangent * (ahead - expected(mode, *moved, w))) / (2 * step)
        squares.append((np.sum(gradient * direction) - slope) ** 2)
    return np.sqrt(np.mean(squares)) / np.linalg.norm(gradient)


@pytest.fixture(scope="module", params=MODES)
def name(request):
    """Runs all tests of one mode together, so that no more than its programs are in memory."""
    yield request.param
    program.cache_clear()


def tolerance(scale, most):
    # At 16 the exponents are about 1,000, and their last digit in float32 is 6e-5.
    return most if scale < 16 else 5 * most


def test_float32_against_float64(name):
    mode = MODES[name]
    for scale in mode.scales:
        q, k, v, w = arguments(mode, scale)
        out, gradients, cotangent = run(name, q, k, v, w)
        assert relative_error(out, expected(mode, q, k, v, w)) < tolerance(scale, 1e-5), scale
        if scale in mode.gradient_scales:
            for number, gradient in enumerate(gradients):
                gradient = np.asarray(gradient, np.float64)
                error = gradient_error(mode, number, gradient, q, k, v, w, cotangent)
                assert error < tolerance(scale, 1e-4), (scale, "qkv"[number])


# Each map in one mode, and each mode of an exact band.
SOME_MAPS = [
    *(f"causal, {name}" for name in ("relu", "trigonometric", "learned")),
    *(f"packed, {name}" for name in ("hyperbolic", "weighted", "calibrated")),
    *(f"decoding, {name}" for name in ("elu", "optimal_positive", "weighted_hyperbolic")),
    "exact band, bidirectional, learned",
    "exact band, packed, hyperbolic",
    "exact band, decoding, calibrated",
]


@pytest.mark.parametrize("name", slow_but(SOME_MAPS, list(WITH_OTHER_MAPS)))
def test_other_feature_maps_against_float64(name):
    mode = WITH_OTHER_MAPS[name]
    attend = jax.jit(mode.attend)
    for scale in mode.scales:
        q, k, v, w = arguments(mode, scale)
        out = attend(q, k, v, w)
        assert relative_error(out, expected(mode, q, k, v, w)) < tolerance(scale, 1e-5), scale
    chex.assert_tree_all_finite(attend(*arguments(mode, 1e3)))
    with forbidden_promotion():
        jax.eval_shape(mode.attend, *arguments(mode, 1.0, jnp.bfloat16))


def test_bfloat16_against_float64(name):
    for scale in SCALES:
        q, k, v, w = arguments(MODES[name], scale, jnp.bfloat16)
        out, gradients, _ = run(name, q, k, v, w)
        assert relative_error(out, expected(MODES[name], q, k, v, w)) < 2e-2, scale
        chex.assert_tree_all_finite(gradients)


def test_entries_up_to_a_thousand_stay_finite(name):
    rng = np.random.default_rng(2)
    for dtype in (jnp.float32, jnp.bfloat16):
        q, k, v, w = arguments(MODES[name], 1e3, dtype)
        signs = [rng.choice([-1e3, 1e3], x.shape).astype(dtype) for x in (q, k)]
        for queries, keys in [(q, k), signs, (signs[0], k)]:
            out, gradients, _ = run(name, queries, keys, v, w)
            chex.assert_tree_all_finite((out, gradients))


def test_hidden_keys_and_rows_that_see_none(name):
    mode = MODES[name]
    q, k, v, w = arguments(mode, 1.0)
    key_length = k.shape[-3]
    shown = np.ones((*k.shape[:-3], 1, 1, key_length), bool)
    shown[..., [0, 1, 2, 5]] = False  # The first queries of causal modes see nothing.
    if shown.ndim > 3:
        shown[-1] = False  # Nor does anybody in the last sequence.
    hidden = ~np.swapaxes(shown[..., 0, :], -1, -2)[..., None]
    k, v = np.where(hidden, np.float32("nan"), k), np.where(hidden, np.float32("inf"), v)
    out, gradients, _ = run(name, q, k, v, w, mask=shown)
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.broadcast_to(shown[..., 0, :], (*q.shape[:-3], 4, key_length)))
    truth = expected(mode, q, *(np.where(hidden, 0, x) for x in (k, v)), w, log_weights)
    np.testing.assert_allclose(out, truth, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[(truth == 0).all(axis=-1)], 0)
    chex.assert_tree_all_finite(gradients)
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(np.where(hidden, gradient, 0), 0)


EDGES = ["bidirectional", "causal", "packed, causal", "near", "near and far", "near, decoding"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([*EDGES, "exact band, causal"], list(MODES)))
def test_one_token_and_empty_axes(name):
    mode = MODES[name]
    self_attention = any(word in name for word in ("packed", "decoding"))
    q, k, v, w = arguments(mode, 1.0, length=1, key_length=1, batch=())
    out, gradients, _ = run(name, q, k, v, w)
    total = 1.1 if "near and far" in name else 1  # Of its weights.
    np.testing.assert_allclose(out, total * np.repeat(v, 4 // v.shape[-2], -2), rtol=1e-5)
    chex.assert_tree_all_finite(gradients)
    whole = arguments(mode, 1.0, batch=())[:3]
    for cut in [(0, 0, 0)] if self_attention else [(0, 0, 0), (None, 0, 0), (0, None, None)]:
        q, k, v = (x[:end] for x, end in zip(whole, cut, strict=True))
        out, gradients, _ = run(name, q, k, v, w)
        np.testing.assert_array_equal(out, 0)
        chex.assert_tree_all_finite(gradients)
    run(name, *(x[None, :0] for x in whole), w)
    run(name, *arguments(mode, 1.0, batch=(0,)))


PLACE = 5  # In a segment that begins before it and goes on.
LAST_OF_CHUNK = 3  # A segment by itself, before one that goes on in the next chunk but one.
ALL = slice(None)
# By array: the key heads, or the query heads, that are changed, and what to.
PLANTS = {
    "NaN in a key": {"k": (ALL, np.nan)},
    "infinity in a key": {"k": (ALL, -np.inf)},
    "NaN in a value": {"v": (ALL, np.nan)},
    "infinity in a value": {"v": (ALL, np.inf)},
    "numbers that overflow": {"k": (ALL, 1e30), "v": (ALL, 3e38)},
    "squares that overflow": {"q": (ALL, -1e25), "k": (ALL, 1e25)},
    "NaN in the key of one head": {"k": (0, np.nan)},
    "NaN in a query": {"q": (ALL, np.nan)},
}


def planted(tokens, what, place):
    """Returns tokens with something else at a place of the first sequence."""
    tokens = dict(zip("qkv", map(np.array, tokens), strict=True))
    for name, (heads, value) in what.items():
        first = (0,) * (tokens[name].ndim - 3)
        tokens[name][(*first, place, heads)] = value
    return tokens.values()


def reached(mode, what, place, q, k, v, w):
    """Returns ``[..., T, heads]``, True at queries that see what is planted, by the reference."""
    seen = np.zeros(q.shape[:-1], bool)
    first = (0,) * (q.ndim - 3)
    if "k" in what or "v" in what:
        heads = what.get("k", what.get("v"))[0]
        _, _, other = planted((q, k, v), {"v": (heads, 10.0)}, place)
        seen |= (expected(mode, q, k, v, w) != expected(mode, q, k, other, w)).any(-1)
    if "q" in what:
        seen[(*first, place)] = True
    return seen


def test_what_is_not_finite_reaches_those_that_see_it_alone(name):
    q, k, v, w = arguments(MODES[name], 1.0)
    cases = [(label, what, PLACE) for label, what in PLANTS.items()]
    cases.append(("NaN in a segment by itself", PLANTS["NaN in a key"], LAST_OF_CHUNK))
    for label, what, place in cases:
        sees = reached(MODES[name], what, place, q, k, v, w)
        assert sees.any(), label
        out, gradients, _ = run(name, q, k, v, w, counts=~sees[..., None])
        planted_out, planted_gradients, _ = run(
            name, *planted((q, k, v), what, place), w, counts=~sees[..., None]
        )
        np.testing.assert_array_equal(planted_out[~sees], out[~sees], label)
        if what != PLANTS["squares that overflow"]:  # Such a query has no large product with a key.
            assert np.isnan(planted_out[sees]).all(), label
        for gradient, other in zip(planted_gradients, gradients, strict=True):
            np.testing.assert_array_equal(gradient, other, label)
