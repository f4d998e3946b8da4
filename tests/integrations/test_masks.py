"""Tests of masks with a query axis, as Flax's functions make them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax._src.integrations.flax_masks import factor
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from tests.attention import reference
from tests.attention.inputs import inputs
from tests.tiers import slow_but

LENGTH, HEADS, DIM = 7, 2, 4
TOKENS = np.array([[3, 1, 0, 5, 2, 0, 0], [0, 0, 4, 1, 0, 2, 6]])  # 0 is padding.
PADDING = nnx.make_attention_mask(TOKENS > 0, TOKENS > 0)
CAUSAL = nnx.make_causal_mask(TOKENS)
PER_HEAD = np.stack([PADDING[:, 0], nnx.make_attention_mask(TOKENS > 2, TOKENS < 5)[:, 0]], axis=1)
MASKS = {
    "padding": (PADDING, False),
    "padding of a causal call": (PADDING, True),
    "causal": (CAUSAL, True),
    "causal, of no batch": (CAUSAL[0, 0], True),
    "padding and causal": (nnx.combine_masks(PADDING, CAUSAL), True),
    "of queries": ((TOKENS > 0)[:, None, :, None], False),
    "of queries, causal": ((TOKENS > 0)[:, None, :, None], True),
    "for each head": (PER_HEAD, False),
    "for each head, causal": (PER_HEAD, True),
    "nothing": (jnp.zeros_like(CAUSAL), True),
}


def adapters(**options):
    """Returns both adapters as functions of queries, keys, values and a mask, and their W."""
    options = {"coupling": "iid", "masks": "factored", **options}
    one = nnx_adapter.RandomFeatureAttention(HEADS, DIM, 6, rngs=nnx.Rngs(0), **options)
    w = get_value(one.projection)
    linen = linen_adapter.RandomFeatureAttention(6, **options)
    variables = {"random_features": {"projection": w}}

    def other(*arrays, mask):
        return linen.apply(variables, *arrays, mask=mask)

    return (one, other), w


def expected(q, k, v, w, mask, is_causal):
    """Returns the estimator with a mask for each query, and zeros where a query sees nothing."""
    mask = np.broadcast_to(np.asarray(mask, bool), (len(q), HEADS, LENGTH, LENGTH))
    mask = mask & np.tri(LENGTH, dtype=bool) if is_causal else mask
    out = np.zeros(q.shape)
    for b, n in np.ndindex(mask.shape[:2]):
        rows = mask[b, n].any(axis=-1)
        one = (x[b, :, n : n + 1] for x in (q, k, v))
        with np.errstate(invalid="ignore", divide="ignore"):
            head = reference.attention(*one, w[n], visible=mask[b, n] | ~rows[:, None])
        out[b, rows, n] = head[rows, 0]
    return out


@pytest.mark.parametrize("name", ["causal", "padding and causal", "of queries, causal"])
def test_a_causal_adapter_takes_the_causal_mask_apart(name):
    mask, _ = MASKS[name]
    calls, w = adapters(masks="keys", is_causal=True)
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    for call in calls:
        for known in (np.asarray(mask), mask):
            out = call(q, k, v, mask=known)
            np.testing.assert_allclose(out, expected(q, k, v, w, mask, True), 1e-4, 1e-5)
        with pytest.raises(ValueError, match=r"is_causal=True: the mask of .* is not a product"):
            call(q, k, v, mask=np.eye(LENGTH, dtype=bool)[None, None])


@functools.cache
def causal_or_not(is_causal):
    """Returns both adapters, the program of each, and their W."""
    calls, w = adapters(is_causal=is_causal)
    programs = [jax.jit(lambda *x, mask, call=call: call(*x, mask=mask)) for call in calls]
    return calls, programs, w


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("jit", [True, False])
def test_masks_that_are_products_are_honored(name, jit):
    mask, is_causal = MASKS[name]
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    calls, programs, w = causal_or_not(is_causal)
    for attend in programs if jit else calls:
        out = attend(q, k, v, mask=mask)
        np.testing.assert_allclose(out, expected(q, k, v, w, mask, is_causal), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_padding_reaches_nothing(is_causal):
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    for x in (q, k, v):
        x[TOKENS == 0] = np.nan
    (call, _), _ = adapters(is_causal=is_causal)
    loss = jax.jit(jax.grad(lambda *x: jnp.sum(call(*x, mask=PADDING) ** 2), argnums=(0, 1, 2)))
    for gradient in loss(q, k, v):
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[TOKENS == 0], 0)


@pytest.mark.slow
def test_padding_does_not_pass_through_a_users_map_as_zeros():
    def on_the_unit_sphere(x, w):
        return jnp.exp((x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w.T)

    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    (call, _), _ = adapters(feature_map=on_the_unit_sphere)

    def loss(call, *x):
        out = call(*x, mask=PADDING)
        return jnp.sum(out**2), out

    @nnx.jit
    def run(call, *x):
        return nnx.grad(loss, argnums=(1, 2, 3), has_aux=True)(call, *x)

    gradients, out = run(call, q, k, v)
    np.testing.assert_array_equal(out[TOKENS == 0], 0)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[TOKENS == 0], 0)


ADDITIVE = np.where(TOKENS > 0, 0.0, -1e9).astype(np.float32)[:, None, None]
NO_MASKS = {
    "additive": ADDITIVE,
    "minus infinity": np.where(ADDITIVE < 0, -np.inf, 0),
    "a half": np.where(ADDITIVE < 0, 0.5, 1),
    "nan": np.where(ADDITIVE < 0, np.nan, 1),
    "integers": TOKENS[:, None, None],
    "minus one": np.where(ADDITIVE < 0, -1, 1).astype(np.int8),
    "bfloat16": jnp.asarray(ADDITIVE, jnp.bfloat16),
}


@pytest.mark.fast
@pytest.mark.parametrize("masks", ["keys", "factored"])
@pytest.mark.parametrize("name", NO_MASKS)
def test_refuses_masks_of_other_numbers_than_zeros_and_ones(name, masks):
    qkv = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    match = "mask must hold booleans, or zeros and ones, got .* numbers from .* to .* as bias"
    for call in adapters(masks=masks)[0]:
        for known in (np.asarray(NO_MASKS[name]), jnp.asarray(NO_MASKS[name])):
            with pytest.raises(ValueError, match=match):
                call(*qkv, mask=known)
        with pytest.raises(ValueError, match=match):  # NumPy masks, under jit.
            jax.jit(lambda *x, call=call: call(*x, mask=np.asarray(NO_MASKS[name])))(*qkv)


@pytest.mark.fast
@pytest.mark.parametrize("mask", ["causal", np.ones(LENGTH, complex)])
def test_refuses_masks_that_are_no_numbers(mask):
    qkv = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    for call in adapters()[0]:
        with pytest.raises(TypeError, match="mask must hold booleans, or zeros and ones, got"):
            call(*qkv, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["keys", "factored"])
def test_traced_masks_of_other_numbers_make_their_sequence_nan(masks):
    mask = np.where(ADDITIVE < 0, 0, 1).astype(np.float32)
    mask[1, ..., 2] = -1e9
    qkv = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    for call in adapters(masks=masks)[0]:
        out = jax.jit(lambda *x, mask, call=call: call(*x, mask=mask))(*qkv, mask=mask)
        assert np.isnan(out[1]).all()
        expected = call(*(x[:1] for x in qkv), mask=TOKENS[:1, None, None] > 0)
        np.testing.assert_allclose(out[:1], expected, rtol=1e-5, atol=1e-6)


NUMBERS = {
    f"{np.dtype(dtype)}, {len(shape)} axes": (dtype, shape)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8)
    for shape in ((7,), (1, 7), (2, 1, 7), (1, 2, 1, 7))
}
# All types, and all shapes.
NEEDED = [name for name in NUMBERS if name.startswith("float32") or name.endswith("3 axes")]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(NEEDED, NUMBERS))
def test_zeros_and_ones_of_any_type_and_rank_are_booleans(case):
    """Inputs without a batch may come with a mask that has a batch axis of size 1."""
    dtype, shape = case
    qkv = inputs(LENGTH, heads=HEADS, dim=DIM)
    mask = np.broadcast_to(TOKENS[0] > 0, shape)
    number = jnp.asarray(mask, dtype)
    for call in adapters(masks="keys")[0]:
        expected = call(*qkv, mask=mask)
        assert expected.shape == (LENGTH, HEADS, DIM)
        np.testing.assert_array_equal(call(*qkv, mask=number), expected)
        program = jax.jit(lambda *x, mask, call=call: call(*x, mask=mask))
        traced = program(*qkv, mask=number)
        np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=1e-6)
        out = program(*qkv, mask=jnp.asarray(2 * mask, dtype))
        assert out.shape == expected.shape
        assert np.isnan(out).all()


BAND = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))) < 2
NOT_PRODUCTS = {"band": (BAND, True), "causal": (CAUSAL, False), "band, per head": (BAND, False)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_PRODUCTS)
def test_other_masks_raise_or_give_nan(name):
    mask, is_causal = NOT_PRODUCTS[name]
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    calls, _ = adapters(is_causal=is_causal)
    for call in calls:
        for known in (np.asarray(mask), jnp.asarray(mask)):
            lead = "" if is_causal else "^is_causal=True is needed .*"
            with pytest.raises(ValueError, match=f"{lead}is not a product of a mask of queries"):
                call(q, k, v, mask=known)
        with pytest.raises(ValueError, match="is not a product"):  # NumPy masks, under jit.
            jax.jit(lambda *x, call=call: call(*x, mask=np.asarray(mask)))(q, k, v)
        out = jax.jit(lambda *x, mask, call=call: call(*x, mask=mask))(q, k, v, mask=mask)
        assert np.isnan(out).all()


def test_one_bad_head_of_one_sequence_is_nan_and_no_other():
    mask = np.array(np.broadcast_to(PADDING, (2, HEADS, LENGTH, LENGTH)), bool)
    mask[1, 0] = BAND
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    (call, _), _ = adapters()
    out = jax.jit(lambda *x, mask: call(*x, mask=mask))(q, k, v, mask=mask)
    assert np.isnan(out[1, :, 0]).all()
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, :, 1]).all()


@pytest.mark.slow
def test_masks_of_a_prompt_in_the_cache():
    mask, _ = MASKS["padding and causal"]
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    (call, _), w = adapters()
    call.set_view(decode=True, batch_size=2)
    out = [call(*(x[:, :5] for x in (q, k, v)), mask=mask[..., :5, :5])]
    for t in (5, 6):  # For one token, Flax makes masks of one query and one key.
        new = TOKENS[:, t : t + 1]
        one = nnx.combine_masks(
            nnx.make_attention_mask(new > 0, new > 0), nnx.make_causal_mask(new)
        )
        out.append(call(*(x[:, t : t + 1] for x in (q, k, v)), mask=one))
    out, real = np.concatenate(out, axis=1), TOKENS > 0
    np.testing.assert_allclose(out[real], expected(q, k, v, w, mask, True)[real], atol=2e-5)


@pytest.mark.fast
def test_masks_that_do_not_fit_are_left_to_attention():
    target = (2, HEADS, LENGTH, LENGTH)
    assert factor(np.ones((2, 1, 1, LENGTH), bool), target, is_causal=True) is None
    assert factor(np.ones((3, 1, LENGTH, LENGTH), bool), target, is_causal=True) is None
    assert factor(np.ones((1, *target), bool), target, is_causal=True) is None
    q, k, v = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
    for call in adapters()[0]:
        with pytest.raises(ValueError, match="mask must be broadcastable"):
            call(q, k, v, mask=np.ones((3, 1, LENGTH, LENGTH), bool))
    for call in adapters(masks="keys")[0]:
        with pytest.raises(
            ValueError, match=r"may differ between queries, .* in Flax adapters, masks='factored'"
        ):
            call(q, k, v, mask=PADDING)
