"""Tests of the reports of a whole model's attention, in NNX and in Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import DenyList

import simrf_jax
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.selection import required_features
from tests.integrations.adapters import (
    FEATURES,
    HEADS,
    WIDTH,
    copy_to_linen,
    linen_attention,
    nnx_attention,
    tokens,
)
from tests.tiers import slow_but

DIM = WIDTH // HEADS
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 2, 2]])
PACKED = nn.combine_masks(
    nn.make_attention_mask(SEGMENTS > 0, SEGMENTS > 0),
    nn.make_attention_mask(SEGMENTS, SEGMENTS, np.equal),
    nn.make_causal_mask(SEGMENTS),
)
FIELDS = (
    "relative_error",
    "output_error",
    "row_sum_mean",
    "effective_rank",
    "softmax_effective_rank",
)


def call_nnx(module, mask):
    return nnx_adapter.attention_report(
        module, mask, call=lambda m, mask: m(tokens(2, 7), mask=mask)
    )


def call_linen(module, mask, options):
    variables = copy_to_linen(module)
    return linen_adapter.attention_report(
        linen_attention(**options),
        variables,
        mask,
        call=lambda m, v, mask, mutable: m.apply(v, tokens(2, 7), mask=mask, mutable=mutable),
    )


CASES = {
    "plain": ({}, None),
    "causal, with a band": ({"is_causal": True, "exact_bandwidth": 1}, None),
    "keys": ({}, (SEGMENTS > 0)[:, None, None]),
}


@pytest.mark.parametrize("name", slow_but(["keys"], [*CASES]))
def test_the_report_is_that_of_the_queries_and_keys_of_each_layer(name):
    options, mask = CASES[name]
    module = nnx_attention(coupling="iid", **options)
    x = tokens(2, 7)
    q, k, v = module.query(x), module.key(x), module.value(x)
    w = get_value(module.attention_fn.projection)
    lengths = None if mask is None else np.sum(SEGMENTS > 0, axis=-1)  # Padding does not count.
    expected = simrf_jax.attention_report(
        q, k, w, value=v, mask=mask, query_seq_lengths=lengths, **options
    )
    reports = [call_nnx(module, mask), call_linen(module, mask, {"coupling": "iid", **options})]
    for report in reports:
        assert [*report] == ["attention_fn"]
        layer = report["attention_fn"]
        for field in FIELDS:
            mean = getattr(expected, field).mean(axis=0)
            np.testing.assert_allclose(getattr(layer, field), mean, rtol=1e-4)
        assert layer.num_features == FEATURES
    if name == "plain":
        q, k = (np.asarray(x, np.float64) * DIM**-0.25 for x in (q, k))
        across = np.einsum("bthd,cshd->h", q, k) / (14 * 14)
        squares = sum(np.einsum("bthd,bthd->h", x, x) / 14 for x in (q, k))
        np.testing.assert_allclose(layer.mean_squared_distance, squares + 2 * across, rtol=1e-4)
        covariances = [np.cov(x[:, :, 1].reshape(-1, DIM).T, bias=True) for x in (q, k)]
        needed = required_features(*covariances, relative_error=0.1)
        np.testing.assert_allclose(layer.features_needed[1], needed, atol=1)


@pytest.mark.slow
def test_packed_sequences_are_compared_inside_their_segments():
    module = nnx_attention(coupling="iid", is_causal=True, masks="packed")
    layer = call_nnx(module, PACKED)["attention_fn"]
    x = tokens(2, 7)
    w = get_value(module.attention_fn.projection)
    values = [one(x) for one in (module.query, module.key, module.value)]
    whole = simrf_jax.attention_report(
        *values[:2], w, value=values[2], is_causal=True, segment_ids=SEGMENTS
    )
    # The second row has no padding.
    weights = simrf_jax.attention_matrix(*values[:2], w, is_causal=True, segment_ids=SEGMENTS)
    assert np.all((np.asarray(weights[1]) != 0) == np.asarray(PACKED[1], bool))
    shorter = simrf_jax.attention_report(
        *(x[:1, :6] for x in values[:2]),
        w,
        value=values[2][:1, :6],
        is_causal=True,
        segment_ids=SEGMENTS[:1, :6],
    )
    for field in FIELDS:
        expected = (getattr(shorter, field)[0] + getattr(whole, field)[1]) / 2
        np.testing.assert_allclose(getattr(layer, field), expected, rtol=1e-4)


@pytest.mark.slow
def test_a_band_as_wide_as_the_sequence_leaves_no_error():
    module = nnx_attention(exact_bandwidth=7)
    layer = call_nnx(module, None)["attention_fn"]
    np.testing.assert_allclose(layer.relative_error, 0, atol=1e-6)
    np.testing.assert_allclose(layer.output_error, 0, atol=1e-5)


@pytest.mark.slow
def test_stacked_layers_have_a_report_each_and_nothing_stays_behind():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        adapter = nnx_adapter.RandomFeatureAttention(2, DIM, FEATURES, coupling="iid", rngs=rngs)
        return nnx.MultiHeadAttention(2, 2 * DIM, decode=False, attention_fn=adapter, rngs=rngs)

    layers, x = make(nnx.Rngs(0)), tokens(2, 7)[..., : 2 * DIM]
    scanned = nnx.scan(lambda layer, x: x + layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    before = jax.tree.structure(nnx.state(layers))
    report = nnx_adapter.attention_report(layers, x, call=nnx.jit(scanned))
    assert [*report] == [f"attention_fn[{n}]" for n in range(3)]
    assert jax.tree.structure(nnx.state(layers)) == before
    first = nnx.merge(*jax.tree.map(lambda leaf: leaf[0], nnx.split(layers)))
    alone = nnx_adapter.attention_report(first, x)["attention_fn"]
    for ours, expected in zip(report["attention_fn[0]"], alone, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 3 * 2
    assert lines[0].split()[:3] == ["layer", "head", "error"]
    assert lines[1].split()[:2] == ["attention_fn[0]", "0"]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + linen_attention(coupling="iid", parent=None)(x), None


def scanned(**axes):
    axes = {"params": 0, "random_features": 0, **axes}
    rngs = {"params": True, "features": True}
    return nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs=rngs, length=2)()


@pytest.mark.slow
def test_linen_layers_under_scan_and_remat_have_a_report_each():
    x = tokens(2, 7)
    variables = scanned().init(jax.random.key(0), x, None)

    def call(model, variables, x, mutable):
        return model.apply(variables, x, None, mutable=mutable)

    model = scanned(attention_calls=0)
    report = linen_adapter.attention_report(model, variables, x, call=call)
    [first, second] = report
    assert first.endswith("attention_fn[0]")
    assert report[first].relative_error.shape == (HEADS,)
    assert (report[first].relative_error != report[second].relative_error).all()
    with pytest.raises(ValueError, match=r"saw no call: .* nn.vmap by attention_calls"):
        linen_adapter.attention_report(scanned(), variables, x, call=call)
    assert "attention_calls" not in model.init(jax.random.key(0), x, None)


@pytest.mark.slow
def test_grouped_queries_calibrated_and_learned_maps():
    for feature_map in ("calibrated", "learned", "elu"):
        size = None if feature_map == "elu" else FEATURES
        adapter = nnx_adapter.RandomFeatureAttention(
            2, DIM, size, feature_map=feature_map, rngs=nnx.Rngs(0)
        )
        q, k = jax.random.normal(jax.random.key(0), (2, 5, 4, DIM))
        report = nnx_adapter.attention_report(
            adapter, q, call=lambda m, q, k=k: m(q, k[:, :2], k[:, :2])
        )
        layer = report[""]
        assert layer.relative_error.shape == layer.features_needed.shape == (4,)
        assert np.isfinite(layer.relative_error).all()
        assert layer.num_features == (size or 0)


@pytest.mark.slow
def test_linen_collects_nothing_unless_asked():
    adapter = linen_adapter.RandomFeatureAttention(8)
    x = jnp.ones((3, 1, 5, 2, 4))
    variables = adapter.init(jax.random.key(1), *x)
    for mutable in (True, DenyList("params")):
        _, updates = adapter.apply(variables, *x, mutable=mutable)
        assert "attention_calls" not in updates


@pytest.mark.slow
def test_refuses():
    with pytest.raises(ValueError, match="no RandomFeatureAttention to report on"):
        nnx_adapter.attention_report(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="no RandomFeatureAttention to report on"):
        linen_adapter.attention_report(nn.Dense(2), {"params": {}}, 1, call=lambda *x, **o: (0, {}))
    module = nnx_attention()
    with pytest.raises(ValueError, match="'attention_fn' saw no call: call the whole model"):
        nnx_adapter.attention_report(module, 0, call=lambda model, batch: None)
    with pytest.raises(ValueError, match=r"relative_error must be .*positive"):
        nnx_adapter.attention_report(module, tokens(1, 3), relative_error=-1.0)
    with pytest.raises(ValueError, match="decode=True: report on the model without it"):
        nnx_adapter.attention_report(nnx_attention(decode=True), tokens(1, 3))
    decoder = linen_attention(decode=True)
    variables = decoder.init(jax.random.key(0), tokens(1, 3))
    with pytest.raises(ValueError, match="decode=True: report on the model without it"):
        linen_adapter.attention_report(decoder, variables, tokens(1, 3))


def test_refuses_masks_that_are_no_products_under_jit():
    module = nnx_attention(masks="factored")
    mask = np.abs(np.subtract.outer(np.arange(7), np.arange(7))) < 2
    call = nnx.jit(lambda m, mask: m(tokens(2, 7), mask=mask))
    with pytest.raises(ValueError, match="The mask of the adapter 'attention_fn' cannot be honor"):
        nnx_adapter.attention_report(module, mask, call=call)
