"""The fused kernels of causal attention, interpreted."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from simrf_jax import random_feature_attention
from simrf_jax._src.attention.pallas_tpu import weights
from tests.attention import devices, reference
from tests.attention.inputs import KINDS, inputs, map_and_rows, projection
from tests.attention.test_pallas_tpu import MAPS, assert_close
from tests.tiers import slow_but

P = jax.P
in_kernel = functools.partial(random_feature_attention, is_causal=True, implementation="pallas_tpu")
by_xla = functools.partial(random_feature_attention, is_causal=True, implementation="xla")


def gradients(attend, q, k, v, w, **options):
    """Returns the output and the gradients of queries, keys and values."""
    of_outputs = jnp.sin(jnp.arange(q.size)).reshape(q.shape)
    out, back = jax.vjp(lambda *tokens: attend(*tokens, w, **options), q, k, v)
    return out, *back(of_outputs.astype(out.dtype))


@pytest.fixture(params=[149, 151], ids=["common units", "units of halves"])
def length(request, monkeypatch):
    """A length whose tiles take the usual way, or another one whose tiles take the rare way.

    Lengths differ, because a program that was compiled with another limit would be used again.
    """
    if request.param == 151:
        monkeypatch.setattr(weights, "LARGEST", -jnp.inf)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 2, 8])
@pytest.mark.parametrize("name", MAPS)
def test_the_estimator_in_float64(length, name, scale):
    feature_map, size, formula = MAPS[name]
    w = projection(*size)
    q, k, v = inputs(length, heads=4, key_heads=2, scale=scale)
    got = in_kernel(q, k, v, w, feature_map=feature_map)
    visible = np.tri(length, dtype=bool)
    assert_close(got, reference.attention(q, k, v, w, formula=formula, visible=visible), 1e-5)


OPTIONS = {
    "all": {},
    "lengths": {"key_value_seq_lengths": [131, 0], "query_seq_lengths": [148, 17]},
    "mask and bias of heads": {
        "mask": np.arange(140) > 9 + np.arange(4)[:, None, None],
        "bias": np.cos(np.arange(2 * 4 * 140)).reshape(2, 4, 1, 140).astype(np.float32),
    },
    "scale": {"scale": -0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_and_the_gradients_of_xla(length, kind, options):
    q, k, v = inputs(length, 140, heads=4, key_heads=2, batch=(2,))
    feature_map, w = map_and_rows(kind, q, k)
    run = functools.partial(gradients, feature_map=feature_map, **options)
    for got, want in zip(run(in_kernel, q, k, v, w), run(by_xla, q, k, v, w), strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1], ids=["growing", "shrinking"])
def test_norms_that_differ_by_many_powers_of_two(order):
    q, k, v = inputs(300, heads=2)
    k = k * np.geomspace(0.1, 30, 300)[::order, None, None].astype(np.float32)
    w = projection(11)
    want = reference.attention(q, k, v, w, visible=np.tri(300, dtype=bool))
    assert_close(in_kernel(q, k, v, w), want, 1e-5)
    for got, want in zip(
        gradients(in_kernel, q, k, v, w), gradients(by_xla, q, k, v, w), strict=True
    ):
        assert_close(got, want, 1e-4)


@pytest.mark.slow
def test_bfloat16():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(300, heads=2, dim=16, scale=2))
    wide = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    w = projection(33, dim=16)
    exact, fused, plain = (
        [np.asarray(x, np.float64) for x in gradients(attend, *tokens, w)]
        for attend, tokens in ((by_xla, wide), (in_kernel, (q, k, v)), (by_xla, (q, k, v)))
    )
    errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(fused, exact, strict=True)]
    assert errors[0] <= 1.2 * np.linalg.norm(plain[0] - exact[0]) / np.linalg.norm(exact[0])
    # The gradients of the sums are rounded to bfloat16, as XLA does on a TPU but not on a CPU.
    assert max(errors) <= 0.012


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("planted", [0.5, 40, jnp.nan, jnp.inf])
@pytest.mark.parametrize("time", [1, 70, 128, 259])
def test_nothing_of_later_tokens_reaches_earlier_outputs(dtype, planted, time):
    tokens = [jnp.asarray(x, dtype) for x in inputs(300, heads=2)]
    attend = jax.jit(lambda *tokens: in_kernel(*tokens, projection()))
    out, later = attend(*tokens), np.arange(300)[:, None, None] >= time
    for which in range(3):
        other = list(tokens)
        other[which] = jnp.where(later, planted * tokens[which], tokens[which]).astype(dtype)
        np.testing.assert_array_equal(attend(*other)[:time], out[:time])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("time", [70, 140])
def test_what_is_not_finite_reaches_those_that_see_it(time, which):
    tokens = {
        name: jnp.asarray(x)
        for name, x in zip(("query", "key", "value"), inputs(300, heads=2), strict=True)
    }
    poisoned = tokens | {which: tokens[which].at[time, 1].set(jnp.nan)}
    sees = np.arange(300) == time if which == "query" else np.arange(300) >= time

    def attend(tokens):
        return in_kernel(**tokens, projection=projection())

    got, want = attend(poisoned), attend(tokens)
    assert np.isnan(got[sees, 1]).all()
    np.testing.assert_array_equal(got[:, 0], want[:, 0])
    assert_close(got[~sees, 1], want[~sees, 1], 1e-6)

    def gradient(tokens):
        # Where the output is NaN, nobody counts it.
        def loss(tokens):
            out = attend(tokens)
            return jnp.sum(jnp.sin(jnp.where(sees[:, None, None], 0, out)))

        return jax.grad(loss)(tokens)

    of_poisoned, of_tokens = gradient(poisoned), gradient(tokens)
    for name in tokens:
        assert_close(of_poisoned[name], of_tokens[name], 1e-6)


@pytest.mark.slow
def test_hidden_keys_reach_nothing():
    q, k, v = (jnp.asarray(x) for x in inputs(200, heads=2))
    mask = ~np.isin(np.arange(200), [0, 1, 60, 128, 150])

    def run(k, v):
        return jax.vjp(lambda q, k, v: in_kernel(q, k, v, projection(), mask=mask), q, k, v)

    clean, back = run(k, v)
    assert_close(clean, by_xla(q, k, v, projection(), mask=mask), 1e-5)
    np.testing.assert_array_equal(clean[:2], 0)
    hidden = jnp.asarray(~mask)[:, None, None]
    poisoned, back_of_poisoned = run(jnp.where(hidden, jnp.nan, k), jnp.where(hidden, jnp.inf, v))
    np.testing.assert_array_equal(clean, poisoned)
    for got, want in zip(back_of_poisoned(clean), back(clean), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()


@pytest.mark.slow
def test_very_large_numbers_reach_nobody_else():
    tokens = [jnp.asarray(x) for x in inputs(20, heads=1)]
    last = jnp.arange(20)[:, None, None] >= 10

    def run(*tokens):
        def loss(*tokens):
            return jnp.sum(jnp.sin(jnp.where(last, 0, in_kernel(*tokens, projection()))))

        return in_kernel(*tokens, projection())[:10], jax.grad(loss, (0, 1, 2))(*tokens)

    want = run(*tokens)
    for which, number in ((0, 3.3e38), (1, 1e19), (2, 1e37)):
        poisoned = list(tokens)
        poisoned[which] = tokens[which].at[10].set(0).at[10, 0, 0].set(number)
        out, grads = run(*poisoned)
        np.testing.assert_array_equal(out, want[0])
        for got, expected in zip(grads, want[1], strict=True):
            assert np.isfinite(got).all()
            assert_close(got[:10], expected[:10], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e14, 1e30])
def test_large_values_beside_large_features(size):
    q, k, v = (jnp.asarray(x) for x in inputs(20, heads=1, scale=0.1))
    bias = jnp.where(jnp.arange(20) >= 3, 54.0, 0)
    run = functools.partial(gradients, q=q, k=k, w=projection(), bias=bias)
    for got, want in zip(run(in_kernel, v=size * v), run(by_xla, v=size * v), strict=True):
        assert_close(got / size, want / size, 1e-5)


@pytest.mark.slow
def test_a_very_long_key_that_is_alone_is_read():
    q, k, v = (jnp.asarray(x) for x in inputs(20, heads=1))
    out = in_kernel(q, k.at[0, 0].set(1e16), v, projection())
    assert_close(out[0], v[0], 1e-6)


@pytest.mark.slow
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    length=st.integers(1, 300),
    key_length=st.integers(1, 300),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    dim=st.integers(2, 40),
    width=st.integers(1, 40),
    num_features=st.integers(1, 70),
    scale=st.sampled_from([0.5, 2, 8]),
    seed=st.integers(0, 99),
)
def test_any_shape(length, key_length, key_heads, groups, dim, width, num_features, scale, seed):
    q, k, v = inputs(
        length, key_length, groups * key_heads, key_heads, dim, width, scale=scale, seed=seed
    )
    w = projection(num_features, dim, key_heads)
    assert_close(in_kernel(q, k, v, w), by_xla(q, k, v, w), 1e-5)


@pytest.mark.slow
def test_many_tiles():
    """The maxima of more than 128 tiles go from one kernel of the gradient to the other."""
    length = 129 * 128 + 5
    q, k, v = inputs(length, dim=2, heads=1)
    k = k + np.linspace(-3, 3, length, dtype=np.float32)[:, None, None]
    w = projection(3, dim=2)
    for got, want in zip(
        gradients(in_kernel, q, k, v, w), gradients(by_xla, q, k, v, w), strict=True
    ):
        assert_close(got, want, 1e-5)


@pytest.mark.slow
def test_gradients_of_everything_else_are_those_of_xla():
    q, k, v = inputs(20)

    def of_rest(attend):
        def loss(w, bias, scale):
            return jnp.sum(jnp.sin(attend(q, k, v, w, bias=bias, scale=scale)))

        return jax.grad(loss, (0, 1, 2))(projection(), jnp.linspace(-1, 1, 20), 0.4)

    for got, want in zip(of_rest(in_kernel), of_rest(by_xla), strict=True):
        assert np.abs(want).max() > 1e-3
        assert_close(got, want, 1e-6)


@pytest.mark.slow
def test_each_device_has_its_part():
    q, k, v = inputs(20, heads=4, key_heads=2, batch=(2,))
    w = projection(heads=2)
    want = gradients(by_xla, q, k, v, w)
    options = {"batch_axis": "data", "head_axis": "tensor"}
    with jax.set_mesh(devices.make_mesh("auto", data=2, tensor=2)):
        tokens = [jax.device_put(x, P("data", None, "tensor")) for x in (q, k, v)]
        run = jax.jit(functools.partial(gradients, in_kernel, **options))
        compiled = run.lower(*tokens, w).compile()
        got = compiled(*tokens, w)
    assert "all-gather" not in compiled.as_text()
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but([jnp.bfloat16], [jnp.float32, jnp.bfloat16]))
def test_mosaic_takes_the_kernels(dtype):
    tokens = jax.ShapeDtypeStruct((2, 300, 4, 64), dtype)

    def loss(q, k, v):
        return jnp.sum(in_kernel(q, k, v, w, bias=bias).astype(jnp.float32))

    w, bias = jnp.ones((4, 130, 64)), jnp.zeros(300)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(tokens, tokens, tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
