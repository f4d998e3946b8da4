"""The fused kernels beside an exact band, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import random_feature_attention
from tests.attention import devices, reference
from tests.attention.inputs import KINDS, inputs, map_and_rows, projection
from tests.attention.test_pallas_tpu import MAPS, assert_close
from tests.attention.test_pallas_tpu_causal import gradients

P = jax.P
BANDWIDTH = 9
in_kernel = functools.partial(
    random_feature_attention, exact_bandwidth=BANDWIDTH, implementation="pallas_tpu"
)
by_xla = functools.partial(
    random_feature_attention, exact_bandwidth=BANDWIDTH, implementation="xla"
)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.5, 2, 8])
@pytest.mark.parametrize("name", MAPS)
def test_the_estimator_in_float64(name, scale, is_causal):
    feature_map, size, formula = MAPS[name]
    w = projection(*size)
    q, k, v = inputs(149, heads=4, key_heads=2, scale=scale)
    got = in_kernel(q, k, v, w, feature_map=feature_map, is_causal=is_causal)
    visible = np.tri(149, dtype=bool) if is_causal else None
    want = reference.beside_band(q, k, v, w, BANDWIDTH, formula=formula, visible=visible)
    assert_close(got, want, 1e-5)


OPTIONS = {
    "all": {},
    "lengths": {"key_value_seq_lengths": [131, 0], "query_seq_lengths": [148, 17]},
    "mask and bias of heads": {
        "mask": np.arange(140) > 12 + np.arange(2)[:, None, None],
        "bias": np.cos(np.arange(2 * 2 * 140)).reshape(2, 2, 1, 140).astype(np.float32),
    },
    "scale": {"scale": -0.3},
    "no distance": {"exact_bandwidth": 0},
    "two tiles": {"exact_bandwidth": 130},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_and_the_gradients_of_xla(kind, is_causal, options):
    q, k, v = inputs(151, 140, heads=2, key_heads=1, batch=(2,))
    feature_map, w = map_and_rows(kind, q, k, heads=1)
    run = functools.partial(gradients, feature_map=feature_map, is_causal=is_causal, **options)
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("length", "key_length"), [(20, 290), (290, 20), (1, 140)])
def test_other_numbers_of_keys(length, key_length, is_causal):
    q, k, v = inputs(length, key_length)
    run = functools.partial(gradients, is_causal=is_causal)
    w = projection()
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_tilted_calibration(is_causal):
    """Its features have a stretch, a slope, a center and a constant, which a band needs."""
    rng = np.random.default_rng(0)
    q, k, v = inputs(150, heads=2)
    q, k = (x * rng.gamma(2, size=8) + rng.normal(size=(2, 8)) for x in (q, k))
    q, k = (jnp.asarray(x, jnp.float32) for x in (q, k))
    feature_map = simrf_jax.calibrate(q, k)
    assert np.abs(np.sum(feature_map.query_mean * feature_map.key_mean, axis=-1)).min() > 0.01
    run = functools.partial(gradients, feature_map=feature_map, is_causal=is_causal)
    w = projection(33, heads=2)
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_bfloat16(is_causal):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(200, heads=2, dim=16, scale=2))
    wide = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    w = projection(33, dim=16)
    exact, fused, plain = (
        [np.asarray(x, np.float64) for x in gradients(attend, *tokens, w, is_causal=is_causal)]
        for attend, tokens in ((by_xla, wide), (in_kernel, (q, k, v)), (by_xla, (q, k, v)))
    )
    errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(fused, exact, strict=True)]
    # The numerators of the band and of the keys beyond it are rounded before they are added.
    assert errors[0] <= 2 * np.linalg.norm(plain[0] - exact[0]) / np.linalg.norm(exact[0])
    assert max(errors) <= 0.012


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("planted", [40, jnp.nan])
@pytest.mark.parametrize("time", [1, 128, 150])
def test_nothing_of_later_tokens_reaches_earlier_outputs(dtype, planted, time):
    tokens = [jnp.asarray(x, dtype) for x in inputs(200, heads=1)]
    attend = jax.jit(lambda *tokens: in_kernel(*tokens, projection(), is_causal=True))
    out, later = attend(*tokens), np.arange(200)[:, None, None] >= time
    for which in range(3):
        other = list(tokens)
        other[which] = jnp.where(later, planted * tokens[which], tokens[which]).astype(dtype)
        np.testing.assert_array_equal(attend(*other)[:time], out[:time])


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_what_is_not_finite_reaches_those_that_see_it(which, is_causal):
    tokens = {
        name: jnp.asarray(x)
        for name, x in zip(("query", "key", "value"), inputs(150, heads=2), strict=True)
    }
    poisoned = tokens | {which: tokens[which].at[70, 1].set(jnp.nan)}
    time = np.arange(150)
    sees = time == 70 if which == "query" else (time >= 70) | (not is_causal)

    def run(tokens):
        # Where the output is NaN, nobody counts it.
        def loss(tokens):
            out = in_kernel(**tokens, projection=projection(), is_causal=is_causal)
            counts = ~jnp.asarray(sees)[:, None, None] | jnp.array([True, False])[None, :, None]
            return jnp.sum(jnp.sin(jnp.where(counts, out, 0))), out

        return jax.grad(loss, has_aux=True)(tokens)

    (got, out), (want, clean) = run(poisoned), run(tokens)
    assert np.isnan(out[sees, 1]).all()
    np.testing.assert_array_equal(out[:, 0], clean[:, 0])
    np.testing.assert_allclose(out[~sees, 1], clean[~sees, 1], rtol=0, atol=1e-6)
    for name in tokens:
        assert_close(got[name], want[name], 1e-6)


def test_a_band_that_does_not_fit_is_refused():
    q, k, v = inputs(9, heads=8, key_heads=1, dim=512)
    with pytest.raises(ValueError, match="a band of 250 keys does not fit into the memory"):
        in_kernel(q, k, v, projection(dim=512), exact_bandwidth=250)


@pytest.mark.slow
def test_gradients_of_everything_else_are_those_of_xla():
    q, k, v = inputs(20)

    def of_rest(attend):
        def loss(w, bias, scale):
            return jnp.sum(jnp.sin(attend(q, k, v, w, bias=bias, scale=scale, exact_bandwidth=3)))

        return jax.grad(loss, (0, 1, 2))(projection(), jnp.linspace(-1, 1, 20), 0.4)

    for got, want in zip(of_rest(in_kernel), of_rest(by_xla), strict=True):
        assert np.abs(want).max() > 1e-3
        assert_close(got, want, 1e-6)


@pytest.mark.slow
def test_each_device_has_its_part():
    q, k, v = inputs(20, heads=4, key_heads=2, batch=(2,))
    w, bias = projection(heads=2), np.linspace(-1, 1, 2 * 20, dtype=np.float32).reshape(2, 1, 1, 20)
    want = gradients(by_xla, q, k, v, w, bias=bias)
    options = {"batch_axis": "data", "head_axis": "tensor", "bias": bias}
    with jax.set_mesh(devices.make_mesh("auto", data=2, tensor=2)):
        tokens = [jax.device_put(x, P("data", None, "tensor")) for x in (q, k, v)]
        run = jax.jit(functools.partial(gradients, in_kernel, **options))
        compiled = run.lower(*tokens, w).compile()
        got = compiled(*tokens, w)
    assert "all-gather" not in compiled.as_text()
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("is_causal", "kernels"), [(True, 5), (False, 8)])
def test_mosaic_takes_the_kernels(is_causal, kernels, dtype):
    tokens = jax.ShapeDtypeStruct((2, 300, 4, 64), dtype)

    def loss(q, k, v):
        out = in_kernel(q, k, v, jnp.ones((4, 130, 64)), bias=jnp.zeros(300), is_causal=is_causal)
        return jnp.sum(out.astype(jnp.float32))

    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(tokens, tokens, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == kernels
