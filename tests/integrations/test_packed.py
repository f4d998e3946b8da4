"""Tests of packed sequences, whose masks are products with a mask of segments."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from simrf_jax._src.integrations import flax_masks
from simrf_jax._src.integrations.flax_masks import factor
from tests.attention.inputs import inputs
from tests.integrations.adapters import KINDS

LENGTH, HEADS, DIM = 9, 2, 4
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 3, 0, 0], [1, 2, 2, 2, 2, 2, 3, 3, 3]])  # 0 is padding.
HOLES = np.array([[1, 1, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 1, 1]])
PADDING = nn.make_attention_mask(SEGMENTS > 0, SEGMENTS > 0)
SAME = nn.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal)
CAUSAL = nn.make_causal_mask(SEGMENTS)
KEYS = nn.make_attention_mask(np.ones_like(HOLES), HOLES)
# Masks as flax's lm1b example makes them, and others.
MASKS = {
    "padding, segments": (nn.combine_masks(PADDING, SAME), False),
    "causal, padding, segments": (nn.combine_masks(PADDING, CAUSAL, SAME), True),
    "padding, segments of a causal adapter": (nn.combine_masks(PADDING, SAME), True),
    "segments": (SAME, False),
    "holes": (nn.combine_masks(PADDING, SAME, KEYS), False),
    "holes, causal": (nn.combine_masks(PADDING, SAME, KEYS), True),
    "no segments": (nn.combine_masks(PADDING, CAUSAL), True),
    "nothing": (jnp.zeros_like(SAME), False),
}
QKV = inputs(LENGTH, heads=HEADS, dim=DIM, batch=(2,))
every_adapter = [(kind, api) for kind in KINDS for api in ("nnx", "linen")]


@functools.cache
def calls(kind, is_causal):
    """Returns the adapters, and the function with a mask of keys in one program."""
    both = KINDS[kind](HEADS, DIM, masks="packed", is_causal=is_causal)
    function = functools.partial(both.function, is_causal=is_causal)
    return both.calls(), jax.jit(lambda *x, mask: function(*x, mask=mask))


@functools.cache
def compiled(kind, api, is_causal):
    """Returns an adapter as one program for all masks."""
    call = calls(kind, is_causal)[0][api]
    return jax.jit(lambda *x, mask: call(*x, mask=mask))


def one_by_one(kind, mask, is_causal, segments):
    """Returns the attention of each sequence by itself, and zeros where a query sees nothing."""
    function = calls(kind, is_causal)[1]
    mask = np.asarray(mask, bool) & (np.tri(LENGTH, dtype=bool) if is_causal else True)
    out = np.zeros(QKV[0].shape, np.float32)
    for segment in np.unique(segments):
        where = segments == segment
        keys = where & (mask[:, 0] & where[:, :, None]).any(axis=1)
        out[where] = np.asarray(function(*QKV, mask=keys[:, None, None]))[where]
    return np.where(mask[:, 0].any(axis=-1)[..., None, None], out, 0)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("kind", "api"), every_adapter)
def test_segments_attend_as_they_do_by_themselves(kind, api, name, jit):
    mask, is_causal = MASKS[name]
    attend = compiled(kind, api, is_causal) if jit else calls(kind, is_causal)[0][api]
    out = attend(*QKV, mask=mask)
    segments = np.ones_like(SEGMENTS) if name == "no segments" else SEGMENTS
    expected = one_by_one(kind, mask, is_causal, segments)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "api"),
    [every_adapter[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in every_adapter[1:])],
)
def test_segment_ids_are_a_mask_of_integers(kind, api):
    """The same without a mask of all pairs, in which padding does not divide a segment."""
    both = KINDS[kind](HEADS, DIM, masks="packed", is_causal=True)
    ids = SEGMENTS * HOLES
    expected = both.calls()[api](
        *QKV, mask=nn.make_attention_mask(ids, ids, np.equal) * (ids > 0)[:, None, None]
    )
    call = jax.jit(lambda *x, mask: both.calls()[api](*x, mask=mask))
    out = call(*QKV, mask=ids[:, None, None])
    np.testing.assert_allclose(
        out, np.where((ids > 0)[..., None, None], expected, 0), rtol=1e-5, atol=2e-6
    )
    np.testing.assert_array_equal(out[ids == 0], 0)


@pytest.mark.slow
def test_segment_ids_that_jax_would_wrap_are_refused():
    both = KINDS["random features"](HEADS, DIM, masks="packed")
    ids = np.where(SEGMENTS[0, 0] == SEGMENTS, 7, 7 + 2**32)
    with pytest.raises(ValueError, match="Segment ids in a mask must fit int32"):
        both.nnx(*QKV, mask=ids[:, None, None])


@pytest.mark.slow
def test_gradients_of_packed_sequences_are_those_of_each_by_itself():
    both = KINDS["random features"](HEADS, DIM, masks="packed", is_causal=True)
    mask = nn.combine_masks(PADDING, CAUSAL, SAME)
    cotangent = jax.random.normal(jax.random.key(3), QKV[0].shape)

    @jax.jit
    def gradients(*x):
        return jax.grad(lambda *x: jnp.sum(both.nnx(*x, mask=mask) * cotangent), (0, 1, 2))(*x)

    packed = gradients(*QKV)
    for row, segment in [(0, 2), (1, 2)]:
        where = np.flatnonzero(SEGMENTS[row] == segment)
        x = [jnp.asarray(array[row, where]) for array in QKV]
        own = jax.grad(
            lambda *x, c=cotangent[row, where]: jnp.sum(both.function(*x, is_causal=True) * c),
            argnums=(0, 1, 2),
        )(*x)
        for one, expected in zip(packed, own, strict=True):
            np.testing.assert_allclose(one[row, where], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_factors_make_the_mask_again(name, make):
    mask, is_causal = MASKS[name]
    mask = np.asarray(mask, bool)
    factors = factor(make(mask), (2, HEADS, LENGTH, LENGTH), is_causal=is_causal, no_segments=None)
    ids = np.asarray(factors.segment_ids)
    assert ids.shape == (2, LENGTH)
    again = np.asarray(factors.queries) & np.asarray(factors.keys)
    again = again & (ids[:, None, :, None] == ids[:, None, None])
    causal = np.tri(LENGTH, dtype=bool) if is_causal else True
    np.testing.assert_array_equal(again & causal, mask & causal)
    assert (np.diff(ids) >= 0).all()


APART = np.array([[1, 1, 2, 2, 1, 1, 1, 1, 1], [1] * LENGTH])  # The first segment is in two parts.
NO_PRODUCTS = {
    "segments in parts": nn.make_attention_mask(APART, APART, np.equal),
    "a band": np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))) < 2,
}


@pytest.fixture
def _unsaid():
    flax_masks._speaker.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_unsaid")
@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_other_masks_raise_or_give_nan_and_say_why(name, api, caplog):
    call = KINDS["random features"](HEADS, DIM, masks="packed").calls()[api]
    mask = np.asarray(NO_PRODUCTS[name], bool)
    match = r"masks=\"packed\": the mask .* is not a product of .* keys and a mask of segments"
    with pytest.raises(ValueError, match=match):
        call(*QKV, mask=mask)
    run = jax.jit(lambda *x, mask: call(*x, mask=mask))
    with caplog.at_level(logging.ERROR, "simrf_jax"):
        out = run(*QKV, mask=mask)
        jax.effects_barrier()
        assert np.isnan(out[0]).all()
        [record] = caplog.records
        assert (
            "The output of attention is NaN. is_causal=True is needed for a causal"
            in record.message
        )
        assert re.search(match, record.message)
        run(*QKV, mask=mask)
        jax.effects_barrier()
    assert len(caplog.records) == 1  # It is said once.


@pytest.mark.slow
@pytest.mark.usefixtures("_unsaid")
@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (nn.combine_masks(PADDING, SAME), 'The mask of packed sequences needs masks="packed"'),
        (np.where(SEGMENTS > 0, 0.0, -1e9)[:, None, None], "Pass terms of the logits as bias"),
    ],
)
def test_what_adapters_without_packed_say_under_jit(mask, match, caplog):
    call = KINDS["random features"](HEADS, DIM, masks="factored").nnx
    with pytest.raises(ValueError, match=match):
        call(*QKV, mask=mask)

    def loss(query, mask):
        return jnp.sum(jax.checkpoint(lambda q: call(q, *QKV[1:], mask=mask))(query))

    with caplog.at_level(logging.ERROR, "simrf_jax"):
        jax.block_until_ready(jax.jit(jax.grad(loss))(QKV[0], mask))
        jax.effects_barrier()
    assert any("The output of attention is NaN" in record.message for record in caplog.records)


@pytest.mark.slow
@pytest.mark.usefixtures("_unsaid")
def test_masks_that_are_honored_say_nothing_and_programs_may_do_without_the_callback(caplog):
    call = KINDS["random features"](HEADS, DIM, masks="packed").nnx
    mask = jnp.asarray(MASKS["padding, segments"][0])

    def traced():
        return str(jax.make_jaxpr(lambda mask: call(*QKV, mask=mask))(mask))

    jax.jit(jax.vmap(lambda *x: call(*x[:3], mask=x[3])))(*QKV, mask)
    jax.effects_barrier()
    assert not caplog.records
    assert "debug_callback" in traced()
    with caplog.at_level(logging.CRITICAL, "simrf_jax"):
        assert "debug_callback" not in traced()


@pytest.mark.fast
def test_no_positions_have_no_segments():
    assert factor(np.ones((2, 1, 0, 0), bool), (2, 1, 0, 0), is_causal=False, no_segments=None)


CROSS = (QKV[0][:, :4], *QKV[1:])  # Fewer queries than keys.


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_masks_of_other_lengths_have_no_segments(api):
    call = KINDS["random features"](HEADS, DIM, masks="packed").calls()[api]
    for mask in (HOLES[:, None, None], nn.make_attention_mask(SEGMENTS[:, :4] > 0, HOLES)):
        out = call(*CROSS, mask=mask.astype(np.int32))
        np.testing.assert_array_equal(out, call(*CROSS, mask=mask.astype(bool)))


IDS = SEGMENTS[:, None, None]
NO_SEGMENTS = {
    "not packed": ({}, QKV, {}, 'The mask of packed sequences needs masks="packed"'),
    "decode": ({"decode": True}, QKV, {}, "With decode=True there are no segments"),
    "segment_ids": (
        {},
        QKV,
        {"segment_ids": SEGMENTS},
        "segment_ids were given: leave the segments out of the mask",
    ),
    "lengths": ({}, CROSS, {}, "equal numbers of queries and keys, got 9 keys for 4 queries"),
}


@pytest.mark.fast
@pytest.mark.parametrize("api", ["nnx", "linen"])
@pytest.mark.parametrize("name", NO_SEGMENTS)
def test_says_why_a_mask_holds_no_segments(name, api):
    fields, qkv, options, reason = NO_SEGMENTS[name]
    masks = "factored" if name == "not packed" else "packed"
    call = KINDS["random features"](HEADS, DIM, masks=masks, **fields).calls()[api]
    with pytest.raises(ValueError, match=f"mask must hold booleans, .* as bias, .*{reason}"):
        call(*qkv, mask=IDS, **options)
    lead = "" if fields else "is_causal=True is needed for a causal mask. "
    with pytest.raises(ValueError, match=f'^{lead}masks="{masks}": the mask .* is no.*{reason}'):
        call(*qkv, mask=SAME[..., : qkv[0].shape[1], :], **options)
