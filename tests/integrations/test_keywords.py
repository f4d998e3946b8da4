"""Tests of each keyword of an ``attention_fn``, on both adapters of both APIs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from simrf_jax._src.integrations.flax_versions import get_value
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error
from tests.integrations.adapters import KINDS, linen_attention, nnx_attention, tokens

LENGTH, DIM = 7, 4
APIS = ("nnx", "linen")
QKV = inputs(LENGTH, heads=2, dim=DIM, batch=(2,))


@functools.cache
def both_of(kind):
    """Returns adapters that no test changes."""
    return KINDS[kind](2, DIM)


every_adapter = pytest.mark.parametrize(
    ("kind", "api"), [(kind, api) for kind in KINDS for api in APIS]
)

HONOURED = {
    "bias": np.linspace(-1, 1, LENGTH, dtype=np.float32),
    "scale": 0.3,
    "negative scale": -0.3,
    "is_causal": True,
    "query_seq_lengths": np.array([3, 7]),
    "key_value_seq_lengths": np.array([7, 4]),
    "segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HONOURED)
@pytest.mark.parametrize("kind", KINDS)
def test_honors(kind, name):
    both = both_of(kind)
    options = {name.removeprefix("negative "): HONOURED[name]}
    calls = {**both.calls(), "function": both.function}
    outs = jax.jit(lambda *x: {api: call(*x, **options) for api, call in calls.items()})(*QKV)
    expected = outs.pop("function")
    assert relative_error(both.function(*QKV), expected) > 1e-2
    for api, out in outs.items():
        assert relative_error(out, expected) < 1e-6, api


# Values of keywords that change nothing.
NEUTRAL = {
    "dropout_rng": (jax.random.key(0),),
    "broadcast_dropout": (False,),
    "dropout_rate": (0.0,),
    "deterministic": (True, np.bool_(True)),
    "module": (None,),
    "dtype": (jnp.float32, None),
    "precision": (None, "highest", "default", jax.lax.Precision.HIGH, ("high", "highest")),
}
OF_LINEN = {
    "force_fp32_for_softmax": (True, False),
    "qk_attn_weights_einsum": (None,),
    "attn_weights_value_einsum": (None,),
}


@pytest.mark.parametrize(
    ("api", "name"),
    [("nnx", name) for name in NEUTRAL] + [("linen", name) for name in NEUTRAL | OF_LINEN],
)
@pytest.mark.parametrize("kind", KINDS)
def test_takes_what_changes_nothing(kind, api, name):
    call = both_of(kind).calls()[api]
    expected = call(*QKV)
    for given in (NEUTRAL | OF_LINEN)[name]:
        np.testing.assert_array_equal(call(*QKV, **{name: given}), expected)


@every_adapter
def test_computes_in_the_type_that_is_asked_for(kind, api):
    both = both_of(kind)
    out = both.calls()[api](*QKV, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    expected = both.function(*(jnp.asarray(x, jnp.bfloat16) for x in QKV))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"is_casual": True}, TypeError, "unexpected keyword argument 'is_casual'"),
        ({"implementation": "xla"}, TypeError, "unexpected keyword argument 'implementation'"),
        ({"promote_dtype": None}, TypeError, "unexpected keyword argument 'promote_dtype'"),
        ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got 'no'"),
        ({"deterministic": "no"}, TypeError, "deterministic must be True or False, got 'no'"),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate=0.1: .* cannot drop them out"),
        ({"dropout_rate": float("nan")}, ValueError, "dropout_rate=nan: .* cannot drop them out"),
        ({"module": nn.Dense(1)}, ValueError, "sow_weights=True: .* there are none to sow"),
        ({"precision": "F64_F64_F64"}, ValueError, "one of jax.lax.Precision, got 'F64_F64_F64'"),
        (
            {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32},
            ValueError,
            "one of jax.lax.Precision, got .*BF16_BF16_F32.* supports no other algorithm",
        ),
        ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
        ({"segment_ids": np.zeros(3, int)}, ValueError, "segment_ids must be .*got shape"),
    ],
)
@every_adapter
def test_refuses(kind, api, options, error, match):
    call = both_of(kind).calls()[api]
    with pytest.raises(error, match=match):
        call(*QKV, **options)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["is_causal", "decode", "shared"])
@every_adapter
def test_fields_are_true_or_false(kind, api, name):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        KINDS[kind](2, DIM, **{name: "no"}).calls()[api](*QKV)


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_nnx_fields_are_looked_at_again_in_a_call(kind):
    adapter = KINDS[kind](2, DIM).nnx
    adapter.set_attributes(decode="no")
    with pytest.raises(TypeError, match="decode must be True or False, got 'no'"):
        adapter(*QKV)


@every_adapter
def test_fields_may_be_numpys(kind, api):
    both = KINDS[kind](np.int64(2), np.int64(DIM), is_causal=np.bool_(True))
    out = both.calls()[api](*QKV)
    assert relative_error(out, both.function(*QKV, is_causal=True)) < 1e-5


@pytest.mark.fast
@every_adapter
def test_sequence_axes_are_names(kind, api):
    with pytest.raises(TypeError, match=r"sequence_axis must be .* tuple of names, got 0"):
        KINDS[kind](2, DIM, sequence_axis=0).calls()[api](*QKV)


@pytest.mark.fast
@every_adapter
def test_no_keyword_of_flaxs_own_attention_is_dropped(kind, api):
    """Flax Linen passes only keywords in the signature, and drops the others."""
    own, not_passed = {
        "nnx": (nnx.dot_product_attention, {"promote_dtype"}),
        "linen": (nn.dot_product_attention, {"einsum_dot_general"}),
    }[api]
    adapter = getattr(both_of(kind), api)
    parameters = inspect.signature(adapter).parameters
    assert set(inspect.signature(own).parameters) - not_passed <= set(parameters)
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())


@pytest.mark.slow
@pytest.mark.parametrize("call", [nnx_attention, linen_attention])
def test_a_precision_of_flaxs_attention_arrives(call):
    module = call(attention={"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32})
    x = tokens(2, 3)
    with pytest.raises(ValueError, match="supports no other algorithm for its products"):
        module(x) if call is nnx_attention else module.init(jax.random.key(0), x)
    module = call(attention={"precision": "highest"})
    out = module(x) if call is nnx_attention else module.init_with_output(jax.random.key(0), x)[0]
    assert out.shape == (2, 3, x.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_lengths_in_decoding(kind):
    lengths = np.array([LENGTH, 4])
    both = KINDS[kind](2, DIM, decode=True)
    both.nnx.init_cache((2, LENGTH, 2 * DIM))
    cache = {"state": jax.tree.map(jnp.copy, get_value(both.nnx.cache))}
    options = {"scale": -0.4, "is_causal": True}
    expected = both.function(*QKV, key_value_seq_lengths=lengths, **options)
    step = nnx.jit(lambda m, *x, new: m(*x, scale=-0.4, key_value_seq_lengths=new))
    linen_step = jax.jit(
        lambda cache, *x, new: both.linen.apply(
            {**both.variables, "cache": cache},
            *x,
            scale=-0.4,
            key_value_seq_lengths=new,
            mutable=["cache"],
        )
    )
    for first, last in [(0, 5), (5, 7)]:
        x = [array[:, first:last] for array in QKV]
        new = np.clip(lengths - first, 0, last - first)  # Lengths of the new keys.
        assert relative_error(step(both.nnx, *x, new=new), expected[:, first:last]) < 1e-5
        out, updates = linen_step(cache, *x, new=new)
        assert relative_error(out, expected[:, first:last]) < 1e-5
        cache = updates["cache"]


@every_adapter
def test_decoding_refuses_segments(kind, api):
    both = KINDS[kind](2, DIM, decode=True)
    both.nnx.init_cache((2, LENGTH, 2 * DIM))
    ids = np.zeros((2, LENGTH), int)
    match = r"segment_ids are for whole sequences: .* with decode=True"
    with pytest.raises(ValueError, match=match):
        both.step(api, get_value(both.nnx.cache), *QKV, segment_ids=ids)


@pytest.mark.fast
@every_adapter
def test_masks_are_of_a_kind(kind, api):
    match = "masks must be one of 'keys', 'factored', 'packed', got 'causal'"
    with pytest.raises(ValueError, match=match):
        KINDS[kind](2, DIM, masks="causal").calls()[api](*QKV)
