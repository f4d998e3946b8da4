"""Arguments that all ways to attend share: the scale, switches and sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import (
    attention_matrix,
    attention_report,
    banded_attention,
    draw_fast_projection,
    draw_projection,
    random_feature_attention,
)
from simrf_jax.fmm import fmm_attention
from tests import formulas
from tests.attention import all_pairs, steps
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, banded, relative_error

LENGTH, DIM, BANDWIDTH = 9, 8, 3
SIZES = {"num_key_heads": 2, "value_dim": DIM}


def append(q, k, v, **options):
    state = steps.init_state(projection(), **SIZES)
    state = steps.append(state, k, v, projection(), **options)
    return steps.step(state, q, k, v, projection(), **options)[0]


def step(q, k, v, **options):
    state = steps.init_state(projection(), **SIZES)
    return steps.step(state, q, k, v, projection(), **options)[0]


def window_step(q, k, v, **options):
    window = steps.init_window(bandwidth=BANDWIDTH, head_dim=DIM, **SIZES)
    return steps.window_step(window, q, k, v, **options)[0]


def fmm_step(q, k, v, **options):
    w = (projection(),)
    state = steps.init_fmm_state(w, bandwidth=BANDWIDTH, head_dim=DIM, **SIZES)
    return steps.fmm_step(state, q, k, v, w, **options)[0]


# name -> what it computes of queries, keys and values
WHOLE = {
    "far": lambda q, k, v, **o: random_feature_attention(q, k, v, projection(), **o),
    "near": lambda q, k, v, **o: banded_attention(q, k, v, bandwidth=BANDWIDTH, **o),
    "both": lambda q, k, v, **o: fmm_attention(q, k, v, (projection(),), bandwidth=BANDWIDTH, **o),
    "matrix": lambda q, k, v, **o: attention_matrix(q, k, projection(), **o),
    "report": lambda q, k, v, **o: attention_report(q, k, projection(), value=v, **o),
}
STEPS = {"append": append, "step": step, "window_step": window_step, "fmm_step": fmm_step}
EVERY = WHOLE | STEPS
TRACED = {name: call for name, call in EVERY.items() if name != "report"}

FORMULAS = {
    name: getattr(formulas, name)
    for name in ("positive", "hyperbolic", "trigonometric", "relu", "elu")
}


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", FORMULAS)
def test_features_of_a_negative_scale(feature_map, is_causal):
    q, k, v = inputs(scale=0.5)
    w = None if feature_map == "elu" else projection(40)
    options = {"feature_map": feature_map, "scale": -0.7, "is_causal": is_causal}
    visible = np.tri(LENGTH, dtype=bool) if is_causal else None
    formula = FORMULAS[feature_map]
    expected = attention(q, k, v, w, scale=-0.7, visible=visible, formula=formula)
    assert relative_error(random_feature_attention(q, k, v, w, **options), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_softmax_of_a_negative_scale(is_causal):
    q, k, v = inputs()
    expected = banded(q, k, v, BANDWIDTH, is_causal=is_causal, scale=-0.7)
    near = banded_attention(q, k, v, bandwidth=BANDWIDTH, is_causal=is_causal, scale=-0.7)
    assert relative_error(near, expected) < 1e-5
    exact = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, scale=-0.7)
    whole = banded_attention(q, k, v, bandwidth=LENGTH, is_causal=is_causal, scale=-0.7)
    assert relative_error(whole, exact) < 1e-5


@pytest.mark.slow
def test_inspection_of_a_negative_scale():
    q, k, _ = inputs(scale=0.5)
    w = projection(40)
    kernel, shift = all_pairs.estimated(q, k, w, scale=-0.7)
    exact, exact_shift = all_pairs.softmax(q, k, scale=-0.7)
    implied, softmax = (x / x.sum(axis=-1, keepdims=True) for x in (kernel, exact))
    assert relative_error(attention_matrix(q, k, w, scale=-0.7), implied) < 1e-5
    report = attention_report(q, k, w, scale=-0.7)
    norms = [np.linalg.norm(x, axis=(-2, -1)) for x in (implied - softmax, softmax)]
    np.testing.assert_allclose(report.relative_error, norms[0] / norms[1], rtol=1e-4)
    ratio = kernel.sum(axis=-1) / exact.sum(axis=-1) * np.exp(shift - exact_shift)[..., 0]
    np.testing.assert_allclose(report.row_sum_mean, ratio.mean(axis=-1), rtol=1e-4)


@functools.cache
def of_traced_scale(name):
    """A program from a query and a scale to the gradients by both and the output."""

    def loss(q, scale):
        _, k, v = inputs()
        out = TRACED[name](q, k, v, scale=scale)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_a_scale_may_be_traced_whatever_its_sign(name):
    q, call = inputs()[0], of_traced_scale(name)
    (of_query, of_scale), out = call(q, jnp.float32(-0.7))
    (turned, other), same = call(-q, jnp.float32(0.7))
    assert relative_error(of_query, -turned) < 1e-5
    assert relative_error(of_scale, -other) < 1e-5
    assert relative_error(out, same) < 1e-6


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", EVERY)
def test_refuses_scales_that_are_not_finite(name, scale):
    with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
        EVERY[name](*inputs(), scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_traced_scales_that_are_not_finite_give_nan(name):
    for scale in (np.inf, -np.inf, np.nan):
        _, out = of_traced_scale(name)(inputs()[0], jnp.float32(scale))
        assert np.isnan(out).all(), scale


@pytest.mark.fast
@pytest.mark.parametrize("is_causal", ["no", "", 1, 0, None, np.ones(1, bool), jnp.bool_(True)])
@pytest.mark.parametrize("name", WHOLE)
def test_is_causal_is_true_or_false(name, is_causal):
    with pytest.raises(TypeError, match="is_causal must be True or False, got"):
        WHOLE[name](*inputs(), is_causal=is_causal)


@pytest.mark.fast
@pytest.mark.parametrize("name", WHOLE)
def test_is_causal_is_not_traced(name):
    with pytest.raises(TypeError, match=r"is_causal must be .* got a traced value; .* static_arg"):
        jax.jit(lambda is_causal: WHOLE[name](*inputs(), is_causal=is_causal))(True)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_switches_and_sizes_may_be_numpys(name):
    sizes = {"near": {"block_size": 4}, "far": {"chunk_size": 4}}
    sizes["both"] = sizes["near"] | sizes["far"]
    of_numpy = {size: np.int64(number) for size, number in sizes.get(name, {}).items()}
    expected = WHOLE[name](*inputs(), is_causal=True, **sizes.get(name, {}))
    actual = WHOLE[name](*inputs(), is_causal=np.bool_(True), **of_numpy)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


SIZED = {
    "bandwidth": lambda q, k, v, size: banded_attention(q, k, v, bandwidth=size),
    "block_size": lambda q, k, v, size: WHOLE["near"](q, k, v, block_size=size),
    "chunk_size": lambda q, k, v, size: WHOLE["far"](q, k, v, chunk_size=size, is_causal=True),
    "num_features": lambda q, k, v, size: draw_projection(jax.random.key(0), size, DIM),
    "dim": lambda q, k, v, size: draw_fast_projection(jax.random.key(0), 4, size),
    "head_dim": lambda q, k, v, size: steps.init_state(projection(), head_dim=size, **SIZES),
}


@pytest.mark.fast
@pytest.mark.parametrize("size", [True, np.bool_(True), 2.0, "2", np.array([2])])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_integers(name, size):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
        SIZED[name](*inputs(), size)


MADE = {
    "state": lambda batch: steps.init_state(projection(), batch=batch, **SIZES),
    "window": lambda batch: steps.init_window(bandwidth=2, batch=batch, head_dim=DIM, **SIZES),
    "fmm": lambda batch: steps.init_fmm_state(
        (projection(),), bandwidth=2, batch=batch, head_dim=DIM, **SIZES
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_batch_is_a_tuple_of_sizes(name):
    expected = jax.tree.map(jnp.shape, MADE[name]((2, 0)))
    assert jax.tree.map(jnp.shape, MADE[name]([np.int64(2), np.array(0)])) == expected


@pytest.mark.fast
@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (2, TypeError, "batch must be a tuple of integers, got 2"),
        ("2", TypeError, "batch must be a tuple of integers, got '2'"),
        ((2, -1), ValueError, r"batch\[1\] must be at least 0, got -1"),
        ((True,), TypeError, r"batch\[0\] must be an integer, got True"),
        ((2.0,), TypeError, r"batch\[0\] must be an integer, got 2.0"),
    ],
)
@pytest.mark.parametrize("name", MADE)
def test_refuses_other_batches(name, batch, error, match):
    with pytest.raises(error, match=match):
        MADE[name](batch)


@pytest.mark.parametrize("name", ["far", "near", "both"])
def test_sequence_axes_are_names(name):
    with pytest.raises(TypeError, match=r"sequence_axis must be .* a tuple of names, got \['a'\]"):
        WHOLE[name](*inputs(), sequence_axis=["a"])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: simrf_jax.Band(-1), ValueError, "bandwidth must be at least 0, got -1"),
        (lambda: simrf_jax.Band(2, -5), ValueError, "block_size must be at least 1, got -5"),
        (lambda: simrf_jax.Band(2, sequence_axis=7), TypeError, "name of a mesh axis, .* got 7"),
        (
            lambda: features_with(chunk_size=3),
            ValueError,
            "chunk_size must be a power of two, got 3",
        ),
        (
            lambda: simrf_jax.RandomFeatureMechanism(jax.random.key(0)),
            TypeError,
            "projection must be a floating type, of 16 bits or more, got key<",
        ),
        (lambda: features_with(sequence_axis=7), TypeError, "name of a mesh axis, .* got 7"),
        (
            lambda: features_with(implementation="fast"),
            ValueError,
            "implementation must be one of 'xla', 'pallas_tpu', 'pallas_gpu', None, got 'fast'",
        ),
    ],
)
def test_mechanisms_refuse_fields(make, error, match):
    with pytest.raises(error, match=match):
        make()


def features_with(**fields):
    return simrf_jax.RandomFeatureMechanism(None, "elu", **fields)


def test_a_scale_may_be_any_integer():
    q, k, v = (np.ones((3, 2, 4), np.float32) for _ in range(3))
    out = simrf_jax.random_feature_attention(q, k, v, None, feature_map="elu", scale=2**33)
    np.testing.assert_allclose(out, v, rtol=1e-6)


def test_a_mechanism_refuses_a_traced_switch():
    x = np.ones((3, 2, 4), np.float32)
    attend = jax.jit(lambda causal: features_with().attend(x, x, x, is_causal=causal))
    with pytest.raises(TypeError, match="is_causal must be True or False when"):
        attend(True)
