"""Tests of the adapters' recurrent cache, in NNX and in Linen."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx, serialization
from flax import linen as nn

from simrf_jax import ExactKeys
from simrf_jax._src.integrations.flax_versions import get_value, view
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomFeatureAttention
from tests.attention import steps
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error
from tests.integrations.adapters import (
    FEATURES,
    HEADS,
    KINDS,
    WIDTH,
    copy_to_linen,
    fmm,
    linen_attention,
    nnx_attention,
    tokens,
)
from tests.tiers import slow_but

TRAINED = ("params", "random_features")
MODES = {
    "positive": {},
    "shared": {"shared": True},
    "trigonometric": {"feature_map": "trigonometric"},
    "elu": {"feature_map": "elu"},
    "angular_hybrid": {"feature_map": "angular_hybrid", "num_weights": 3},
    "exact band": {"exact_bandwidth": 2},
    "exact keys": {"exact_keys": ExactKeys(2, by="score")},
    "exact band and keys": {"exact_bandwidth": 1, "exact_keys": ExactKeys(2, by="score")},
}


@functools.partial(nnx.jit, static_argnames="is_causal")
def nnx_step(module, x, mask=None, is_causal=False):
    return module(x, mask=mask, is_causal=is_causal)


@functools.partial(jax.jit, static_argnums=0)
def linen_step(module, variables, *x):
    return module.apply(variables, *x, mutable=["cache"])


def decode_nnx(module, x, *, prompt):
    """Decodes a prompt and then token by token; returns the outputs and the decoder."""
    decoder = view(module, only=RandomFeatureAttention, decode=True, batch_size=len(x))
    outs = [nnx_step(decoder, piece) for piece in pieces(x, prompt)]
    return jnp.concatenate(outs, axis=1), decoder


def decode_linen(module, variables, x, *, prompt):
    cache = jax.jit(module.init)(jax.random.key(0), x[:, :1])["cache"]
    outs = []
    for piece in pieces(x, prompt):
        out, updates = linen_step(module, {**variables, "cache": cache}, piece)
        cache = updates["cache"]
        outs.append(out)
    return jnp.concatenate(outs, axis=1), cache


def pieces(x, prompt):
    """Yields the prompt, and then one token after the other."""
    return [x[:, :prompt], *(x[:, t : t + 1] for t in range(prompt, x.shape[1]))]


@pytest.mark.parametrize("mode", slow_but(["exact band and keys"], list(MODES)))
def test_prompt_and_steps_are_the_parallel_form_in_both_apis(mode):
    q, k, v = inputs(7, heads=2, dim=4, batch=(2,))
    mask = np.ones((2, 1, 1, 7), bool)
    mask[1, ..., 2:4] = False
    options = {"coupling": "iid", **MODES[mode]}
    one = RandomFeatureAttention(2, 4, 5, rngs=nnx.Rngs(0), **options)
    expected = nnx.jit(lambda m, *x: m(*x, mask=mask, is_causal=True))(one, q, k, v)
    one.set_view(decode=True, batch_size=2)
    linen = linen_adapter.RandomFeatureAttention(5, decode=True, **options)
    held = {"random_features": {"projection": get_value(one.projection)}}
    held["cache"] = {"state": jax.tree.map(jnp.copy, get_value(one.cache))}
    step = nnx.jit(lambda m, *x, mask: m(*x, mask=mask))
    other_step = jax.jit(lambda held, *x, mask: linen.apply(held, *x, mask=mask, mutable=["cache"]))
    for first, last in [(0, 5), (5, 6), (6, 7)]:
        new, padding = [x[:, first:last] for x in (q, k, v)], mask[..., first:last]
        out = step(one, *new, mask=padding)
        assert relative_error(out, expected[:, first:last]) < 1e-5
        out, updates = other_step(held, *new, mask=padding)
        assert relative_error(out, expected[:, first:last]) < 1e-5
        held |= updates


@pytest.mark.slow
def test_prompt_and_steps_inside_flaxs_attention():
    x = tokens(2, 6)
    module = nnx_attention()
    expected = nnx_step(module, x, None, is_causal=True)
    out, _ = decode_nnx(module, x, prompt=4)
    assert relative_error(out, expected) < 1e-5
    out, _ = decode_linen(linen_attention(decode=True), copy_to_linen(module), x, prompt=4)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.slow
def test_grouped_queries_in_bfloat16():
    adapter = RandomFeatureAttention(2, 8, FEATURES, rngs=nnx.Rngs(0))
    module = nnx.MultiHeadAttention(
        HEADS,
        WIDTH,
        num_kv_heads=2,
        dtype=jnp.bfloat16,
        decode=False,
        attention_fn=adapter,
        rngs=nnx.Rngs(1),
    )
    x = tokens(2, 6)
    out, decoder = decode_nnx(module, x, prompt=4)
    assert out.dtype == jnp.bfloat16
    assert relative_error(out, nnx_step(module, x, is_causal=True)) < 1e-2
    state = get_value(decoder.attention_fn.cache)
    assert state.sums.dtype == jnp.float32
    assert state.sums.shape == (2, 2, FEATURES, 8 + 1)  # The number of tokens does not matter.


@pytest.mark.slow
def test_the_model_that_is_viewed_stays_as_it_is_and_views_start_anew():
    module = nnx_attention()
    x = tokens(2, 3)
    first, _ = decode_nnx(module, x, prompt=3)
    assert module.attention_fn.cache is None
    assert not module.attention_fn.decode
    again, decoder = decode_nnx(module, x, prompt=3)
    np.testing.assert_array_equal(first, again)
    assert (nnx_step(decoder, x) != first).any()  # The decoder continues.
    decoder.attention_fn.init_cache(x.shape)
    np.testing.assert_array_equal(nnx_step(decoder, x), first)


@pytest.mark.slow
def test_set_in_place_and_scanned_with_a_donated_cache():
    module = nnx_attention()
    x = tokens(2, 8)
    expected = nnx_step(module, x, is_causal=True)
    module.set_attributes(RandomFeatureAttention, decode=True)
    for _, adapter in nnx.iter_modules(module):
        if isinstance(adapter, RandomFeatureAttention):
            adapter.init_cache(x.shape)
    graphdef, cache, rest = nnx.split(module, nnx.Cache, ...)

    @functools.partial(jax.jit, donate_argnums=0)
    def generate(cache, rest, x):
        def step(cache, token):
            module = nnx.merge(graphdef, cache, rest, copy=True)
            out = module(token[:, None])
            return nnx.state(module, nnx.Cache), out[:, 0]

        cache, outs = jax.lax.scan(step, cache, jnp.moveaxis(x, 1, 0))
        return cache, jnp.moveaxis(outs, 0, 1)

    before = cache
    cache, first = generate(cache, rest, x[:, :4])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    _, second = generate(cache, rest, x[:, 4:])
    assert relative_error(jnp.concatenate([first, second], axis=1), expected) < 1e-5


@pytest.mark.slow
def test_linen_init_makes_an_empty_cache_and_counts_no_token():
    module = linen_attention(decode=True)
    x = tokens(2, 3)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    state = variables["cache"]["attention_fn"]["state"]
    assert state.sums.shape == (2, HEADS, FEATURES, WIDTH // HEADS + 1)
    assert not state.sums.any()
    assert (state.maxima == -jnp.inf).all()
    again, _ = jax.jit(module.init_with_output)(jax.random.key(0), x)
    out, updates = linen_step(module, variables, x)
    np.testing.assert_allclose(out, again, atol=1e-6)
    assert updates["cache"]["attention_fn"]["state"].sums.all()


@pytest.mark.fast
@pytest.mark.parametrize("mutable", [["cache"], True, ["intermediates"], False])
@pytest.mark.parametrize("kind", KINDS)
def test_linen_refuses_to_decode_without_a_cache(kind, mutable):
    """Flax's own attention would make a cache, answer, and forget the tokens."""
    both = KINDS[kind](2, 4, decode=True)
    x = inputs(3, heads=2, dim=4, batch=(2,))
    with pytest.raises(ValueError, match=r"decode=True needs a cache: make .*\(model.init\)"):
        both.linen.apply(both.variables, *x, mutable=mutable)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"mutable": ["intermediates"], "capture_intermediates": True}],
    ids=["immutable", "capturing"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_linen_refuses_to_decode_where_the_cache_may_not_change(kind, options):
    both = KINDS[kind](2, 4, decode=True)
    x = inputs(3, heads=2, dim=4, batch=(2,))
    variables = {**both.variables, "cache": both.linen.init(jax.random.key(0), *x)["cache"]}
    with pytest.raises(ValueError, match=r'pass mutable=\["cache"\] to apply'):
        both.linen.apply(variables, *x, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_linen_variables_trained_without_decode_decode_with_the_cache_of_init(kind):
    both = KINDS[kind](2, 4, decode=True)
    x = inputs(5, heads=2, dim=4, batch=(2,))
    variables = {**both.variables, "cache": both.linen.init(jax.random.key(9), *x)["cache"]}
    apply = functools.partial(
        both.linen.apply, mutable=["cache", "intermediates"], capture_intermediates=True
    )
    outs = []
    for piece in zip(*(pieces(array, 3) for array in x), strict=True):
        out, updates = apply(variables, *piece)
        np.testing.assert_array_equal(updates["intermediates"]["__call__"][0], out)
        variables["cache"] = updates["cache"]
        outs.append(out)
    expected = both.function(*x, is_causal=True)
    assert relative_error(jnp.concatenate(outs, axis=1), expected) < 1e-5


class LinenLayer(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, _):
        adapter = linen_adapter.RandomFeatureAttention(
            FEATURES, is_causal=True, decode=self.decode, parent=None
        )
        return x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)(x), None


def linen_stack(*, decode, collections=("params", "random_features", "cache")):
    return nn.scan(
        nn.remat(LinenLayer),
        variable_axes=dict.fromkeys(collections, 0),
        split_rngs={"params": True, "features": True},
        length=3,
    )(decode)


@pytest.mark.slow
def test_linen_layers_under_remat_and_scan_decode():
    x = tokens(2, 5)
    rngs = {"params": jax.random.key(0), "features": jax.random.key(1)}
    trained = jax.jit(linen_stack(decode=False).init)(rngs, x, None)
    assert trained.keys() == {"params", "random_features"}
    expected, _ = jax.jit(linen_stack(decode=False).apply)(trained, x, None)
    decoder = linen_stack(decode=True)
    cache = jax.jit(decoder.init)(rngs, x[:, :1], None)["cache"]
    outs = []
    for piece in pieces(x, 3):
        (out, _), updates = linen_step(decoder, {**trained, "cache": cache}, piece, None)
        cache = updates["cache"]
        outs.append(out)
    assert relative_error(jnp.concatenate(outs, axis=1), expected) < 1e-5
    ignorant = linen_stack(decode=True, collections=("params", "random_features"))
    with pytest.raises(ValueError, match=r'nn.scan does with variable_axes=\{"cache": 0\}'):
        ignorant.apply({**trained, "cache": cache}, x, None, mutable=["cache"])
    with pytest.raises(errors.ScopeCollectionNotFound, match='"state" from collection "cache"'):
        ignorant.init(rngs, x, None)


class LinenToken(nn.Module):
    @nn.compact
    def __call__(self, carry, token):
        adapter = linen_adapter.RandomFeatureAttention(FEATURES, decode=True, parent=None)
        attention = nn.MultiHeadDotProductAttention(HEADS, attention_fn=adapter)
        return carry, attention(token[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("over", ["tokens", "sequences"])
def test_linen_scans_tokens_and_maps_sequences(over):
    x = tokens(2, 5)
    variables = jax.jit(LinenToken().init)(jax.random.key(0), None, x[:, 0])
    if over == "tokens":
        lifted = nn.scan(
            LinenToken,
            variable_broadcast=["params", "random_features"],
            variable_carry="cache",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )()
        (_, out), _ = jax.jit(functools.partial(lifted.apply, mutable=["cache"]))(
            variables, None, x
        )
    else:
        lifted = nn.vmap(
            LinenLayer,
            variable_axes={"params": None, "random_features": None, "cache": 0},
            split_rngs={"params": False, "features": False},
            in_axes=(0, None),
        )(decode=True)
        cache = jax.jit(lifted.init)(jax.random.key(0), x, None)["cache"]
        (out, _), _ = linen_step(lifted, {**variables, "cache": cache}, x, None)
        out = out - x
    inner = {name: variables[name]["MultiHeadDotProductAttention_0"] for name in TRAINED}
    expected = jax.jit(linen_attention(is_causal=True).apply)(inner, x)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.fast
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_refuses_the_cache_of_another_bandwidth(api):
    both = fmm(2, 4, decode=True)
    x = inputs(3, heads=2, dim=4, batch=(2,))
    state = steps.init_fmm_state(
        both.variables["random_features"]["projections"],
        bandwidth=3,
        batch=(2,),
        num_key_heads=2,
        head_dim=4,
        value_dim=4,
    )
    with pytest.raises(ValueError, match="state must be of bandwidth=2, got one of bandwidth=3"):
        both.step(api, state, *x)


@pytest.mark.slow
@pytest.mark.parametrize("feature_map", ["positive", "gaussian_hybrid"])
def test_projections_and_cache_survive_a_checkpoint(feature_map):
    x = jnp.asarray(inputs(5, heads=2, dim=4, batch=(2,)))
    options = {"feature_map": feature_map, "coupling": "iid"}
    module, other = (
        RandomFeatureAttention(2, 4, 5, decode=True, rngs=nnx.Rngs(seed), **options)
        for seed in (0, 1)
    )
    for one in (module, other):
        one.init_cache((2, 5, 8))
    step = nnx.jit(lambda module, x: module(*x))
    step(module, x[:, :, :4])
    saved = serialization.to_bytes(nnx.to_pure_dict(nnx.state(module)))
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, serialization.from_bytes(nnx.to_pure_dict(state), saved))
    nnx.update(other, state)
    np.testing.assert_array_equal(step(other, x[:, :, 4:]), step(module, x[:, :, 4:]))

    linen = linen_adapter.RandomFeatureAttention(5, decode=True, **options)
    variables = jax.jit(linen.init)(jax.random.key(0), *x)
    variables |= jax.jit(functools.partial(linen.apply, mutable=["cache"]))(variables, *x)[1]
    blank = jax.tree.map(jnp.zeros_like, variables)
    restored = serialization.from_bytes(blank, serialization.to_bytes(variables))
    chex.assert_trees_all_equal(restored, variables)


@pytest.mark.slow
def test_flaxs_own_caches_see_the_prefix():
    module = nnx_attention()
    x = tokens(2, 5)
    expected = nnx_step(module, x, is_causal=True)
    module.init_cache(x.shape)
    outs = [module(x[:, t : t + 1], decode=True) for t in range(5)]
    assert relative_error(jnp.concatenate(outs, axis=1), expected) < 1e-5
    linen = linen_attention(attention={"decode": True})
    cache = linen.init(jax.random.key(0), x)["cache"]
    for t in range(5):
        variables = {**copy_to_linen(module), "cache": cache}
        out, updates = linen.apply(variables, x[:, t : t + 1], mutable=["cache"])
        cache = updates["cache"]
        assert relative_error(out[:, 0], expected[:, t]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RandomFeatureAttention", {"is_causal": True}),
        ("RandomFeatureAttention", {"exact_bandwidth": 2}),
        ("FMMAttention", {"bandwidth": 2}),
    ],
)
def test_positions_are_not_known_in_flaxs_own_caches(name, options):
    """A query in Flax's own cache would see only the first key, or the band around it."""
    x = tokens(1, 3)
    match = "equal numbers of queries and keys, .* got 3 keys for 1 queries. .* turn its decode off"
    options = {"num_features": FEATURES, "coupling": "iid", **options}
    of_nnx, of_linen = (getattr(module, name) for module in (nnx_adapter, linen_adapter))
    rngs = nnx.Rngs(0)
    adapter = of_nnx(HEADS, WIDTH // HEADS, rngs=rngs, **options)
    module = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=adapter, decode=True, rngs=rngs)
    module.init_cache(x.shape)
    with pytest.raises(ValueError, match=match):
        module(x[:, :1])
    linen = nn.MultiHeadDotProductAttention(HEADS, attention_fn=of_linen(**options), decode=True)
    variables = linen.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=match):
        linen.apply(variables, x[:, :1], mutable=["cache"])


class EncoderDecoder(nnx.Module):
    """Encoder and decoder with every kind of attention, as in a translation model."""

    def __init__(self, rngs):
        self.encoder, self.decoder, self.cross = (nnx_attention(seed=seed) for seed in range(3))

    def __call__(self, source, target):
        memory = self.encoder(source)
        target = self.decoder(target, is_causal=True)
        return self.cross(target, memory)


@pytest.mark.slow
def test_only_the_self_attention_of_a_decoder_decodes():
    model = EncoderDecoder(nnx.Rngs(0))
    source, target = tokens(2, 5), tokens(2, 5, seed=2)
    call = nnx.jit(lambda model, *x: model(*x))
    expected = call(model, source, target)
    only = nnx.All(nnx.PathContains("decoder"), RandomFeatureAttention)
    decoder = view(model, only=only, decode=True, batch_size=2)
    outs = [call(decoder, source, piece) for piece in pieces(target, 3)]
    assert relative_error(jnp.concatenate(outs, axis=1), expected) < 1e-5


@pytest.mark.slow
def test_refuses_both_caches_at_once():
    x = tokens(2, 5)
    match = "decode=True takes the keys of the new tokens, .* got 5 keys for 1 queries"
    module = nnx_attention(decode=True)
    module.init_cache(x.shape)
    module.attention_fn.init_cache(x.shape)
    with pytest.raises(ValueError, match=match):
        module(x[:, :1], decode=True)
    linen = linen_attention(decode=True, attention={"decode": True})
    variables = linen.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=match):
        linen.apply(variables, x[:, :1], mutable=["cache"])


@pytest.mark.slow
def test_refuses_to_decode_without_a_cache():
    adapter = RandomFeatureAttention(2, 4, 6, decode=True, coupling="iid", rngs=nnx.Rngs(0))
    x = jnp.ones((1, 1, 2, 4))
    with pytest.raises(
        ValueError, match=r"decode=True needs a cache: call init_cache\(input_shape\)"
    ):
        adapter(x, x, x)
    with pytest.raises(ValueError, match="value_dim must be at least 1, got 0"):
        adapter.init_cache((1, 1, 8), value_dim=0)
    with pytest.raises(
        ValueError, match=r"input_shape must be \[..., length, features\], got \(1,\)"
    ):
        adapter.init_cache((1,))
    with pytest.raises(TypeError, match="input_shape must be a tuple of integers, got 8"):
        adapter.init_cache(8)
    with pytest.raises(ValueError, match=r"input_shape\[0\] must be at least 0, got -1"):
        adapter.init_cache((-1, 1, 8))
    adapter.init_cache((1, 1, 8), value_dim=3)
    assert adapter(x, x, x[..., :3]).shape == (1, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "lead"),
    [
        (2, (2,)),
        (np.int64(2), (2,)),
        (np.array(2), (2,)),
        ((2, np.int32(1)), (2, 1)),
        ([2], (2,)),
        ((), ()),
        (0, (0,)),
    ],
)
def test_a_view_has_the_batch_that_is_said(batch_size, lead):
    module = nnx_attention()
    decoder = view(module, only=RandomFeatureAttention, decode=True, batch_size=batch_size)
    out = nnx_step(decoder, tokens(*lead, 3))
    assert out.shape == (*lead, 3, WIDTH)
    np.testing.assert_allclose(out, nnx_step(module, tokens(*lead, 3), None, True), atol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("batch_size", "error", "match"),
    [
        (True, TypeError, "batch_size must be an integer, got True"),
        (np.bool_(True), TypeError, "batch_size must be an integer, got"),
        (2.5, TypeError, "batch_size must be an integer, got 2.5"),
        ("2", TypeError, "batch_size must be an integer, got '2'"),
        (np.array([2, 1]), TypeError, "batch_size must be an integer, got array"),
        (-1, ValueError, "batch_size must be at least 0, got -1"),
        ((2, -1), ValueError, r"batch_size\[1\] must be at least 0, got -1"),
        ((True,), TypeError, r"batch_size\[0\] must be an integer, got True"),
    ],
)
def test_refuses_views_of_other_batches(batch_size, error, match):
    with pytest.raises(error, match=match):
        view(nnx_attention(), only=RandomFeatureAttention, decode=True, batch_size=batch_size)


@pytest.mark.fast
@pytest.mark.parametrize("decode", ["yes", 1, np.ones(1, bool)])
def test_refuses_views_that_half_decode(decode):
    with pytest.raises(TypeError, match="decode must be True or False, got"):
        view(nnx_attention(), only=RandomFeatureAttention, decode=decode)


@pytest.mark.slow
def test_clones_go_on_by_themselves_and_views_of_a_decoder_with_it():
    module = nnx_attention()
    x = tokens(2, 4)
    expected = nnx_step(module, x, is_causal=True)
    decoder = view(module, only=RandomFeatureAttention, decode=True, batch_size=2)
    nnx_step(decoder, x[:, :2])
    clone = nnx.clone(decoder)
    second = view(decoder, only=RandomFeatureAttention, decode=True)
    for one, token in [(clone, 2), (clone, 3), (decoder, 2), (second, 3)]:
        out = nnx_step(one, x[:, token : token + 1])
        assert relative_error(out[:, 0], expected[:, token]) < 1e-5
