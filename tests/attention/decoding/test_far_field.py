import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import RandomFeatureMechanism, random_feature_attention
from simrf_jax._src.attention import Call
from tests.attention import steps
from tests.attention.inputs import inputs, projection
from tests.attention.reference import relative_error


def parallel(q, k, v, w, **options):
    return random_feature_attention(q, k, v, w, is_causal=True, **options)


def empty(q, k, v, w):
    return steps.init_state(
        w,
        batch=q.shape[:-3],
        num_key_heads=k.shape[-2],
        value_dim=v.shape[-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 16.0])
def test_a_thousand_tokens_in_a_scan(scale):
    q, k, v = inputs(1000, heads=2, dim=16, scale=scale * 16**-0.25)
    w = projection(32, 16)

    def body(state, token):
        out, state = steps.step(state, *(x[None] for x in token), w)
        return state, out[0]

    state, outs = jax.jit(lambda s, x: jax.lax.scan(body, s, x))(empty(q, k, v, w), (q, k, v))
    assert relative_error(outs, parallel(q, k, v, w)) < 1e-5
    assert [x.shape for x in state] == [(2, 32, 17), (2, 32)]


def test_prefill_and_append():
    q, k, v = inputs(25, batch=(2,))
    w = projection()
    expected = parallel(q, k, v, w)
    out, state = steps.step(empty(q, k, v, w), q[:, :17], k[:, :17], v[:, :17], w, chunk_size=4)
    assert relative_error(out, expected[:, :17]) < 1e-5
    appended = steps.append(empty(q, k, v, w), k[:, :10], v[:, :10], w)
    appended = steps.append(appended, k[:, 10:17], v[:, 10:17], w)
    for one, other in zip(state, appended, strict=True):
        assert relative_error(one, other) < 1e-5
    for before in (state, appended):
        out, _ = steps.step(before, q[:, 17:], k[:, 17:], v[:, 17:], w)
        assert relative_error(out, expected[:, 17:]) < 1e-5


@pytest.mark.slow
def test_masks_lengths_and_biases_of_the_new_keys():
    q, k, v = inputs(12, batch=(2,))
    w = projection()
    k[1, 5:8] = np.nan
    mask = np.ones((2, 1, 1, 12), bool)
    mask[1, ..., 5:8] = False
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, 12)).astype(np.float32)
    expected = parallel(q, k, v, w, mask=mask, bias=bias)
    first = {"mask": mask[..., :7], "bias": bias[..., :7]}
    state = steps.append(empty(q, k, v, w), k[:, :7], v[:, :7], w, **first)
    rest = {"mask": mask[..., 7:], "bias": bias[..., 7:]}
    out, _ = steps.step(state, *(x[:, 7:] for x in (q, k, v)), w, **rest)
    np.testing.assert_allclose(out, expected[:, 7:], atol=1e-5)
    shorter = steps.append(empty(q, k, v, w), k, v, w, key_value_seq_lengths=np.array([3, 5]))
    for b, length in enumerate((3, 5)):
        one = steps.append(empty(q[b], k, v, w), k[b, :length], v[b, :length], w)
        assert relative_error(shorter.sums[b], one.sums) < 1e-5


@pytest.mark.slow
def test_bfloat16_keeps_a_wide_state():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(6))
    state = steps.init_state(projection(), num_key_heads=2, value_dim=8, dtype=jnp.bfloat16)
    out, state = steps.step(state, q, k, v, projection())
    assert (out.dtype, state.sums.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_gradients_flow_through_the_state():
    q, k, v = inputs(8)
    w = projection()

    def loss(k, v):
        state = steps.append(empty(q, k, v, w), k[:5], v[:5], w)
        return jnp.sum(steps.step(state, q[5:], k[5:], v[5:], w)[0] ** 2)

    def expected(k, v):
        return jnp.sum(parallel(q, k, v, w)[5:] ** 2)

    for one, other in zip(
        jax.grad(loss, (0, 1))(k, v), jax.grad(expected, (0, 1))(k, v), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_refuses_other_states():
    q, k, v = inputs()
    w = projection()
    window = steps.init_window(bandwidth=2, num_key_heads=2, head_dim=8, value_dim=8)
    with pytest.raises(TypeError, match="state must be of type AttentionState, got Window"):
        steps.step(window, q, k, v, w)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), empty(q, k, v, w))
    with pytest.raises(TypeError, match=r"sums float32, .* got sums bfloat16, .* with their dtype"):
        steps.append(state, k, v, w)


@pytest.mark.parametrize(
    ("verb", "options", "match"),
    [
        ("step", {"is_causal": False}, "step got .*'is_causal'; its keywords are bias, "),
        ("step", {"window": 3, "segment_ids": 1}, "unexpected keyword argument 'segment_ids'"),
        ("append", {"query_seq_lengths": 3}, "append got .* argument 'query_seq_lengths'"),
        ("append", {"is_causal": True}, "append got an unexpected .* 'is_causal'"),
    ],
)
def test_refuses_keywords_that_say_nothing_here(verb, options, match):
    q, k, v = inputs()
    mechanism = RandomFeatureMechanism(projection())
    state = mechanism.init(num_key_heads=2, head_dim=8, value_dim=8)
    tokens = {"step": (q, k, v), "append": (k, v)}[verb]
    with pytest.raises(TypeError, match=match):
        getattr(mechanism, verb)(state, *tokens, **options)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda q, k, v, w, s: RandomFeatureMechanism(w).step_to(
                s, Call.of(q, k, v, segment_ids=np.zeros(len(q), int))
            ),
            "segment_ids are for whole sequences",
        ),
        (
            lambda q, k, v, w, s: steps.step(s, q, k[:4], v[:4], w),
            "A decoding step needs equal numbers of keys and queries, got 4 and 9",
        ),
        (
            lambda q, k, v, w, s: steps.step(s, q, k, v[..., :3], w),
            r"state must have sums \(2, 11, 4\).*got sums \(2, 11, 9\)",
        ),
        (
            lambda q, k, v, w, s: steps.append(s, k[None], v[None], w),
            r"state must have sums \(1, 2, 11, 9\)",
        ),
        (
            lambda q, k, v, w, s: steps.init_state(w, num_key_heads=2, value_dim=3, head_dim=0),
            "head_dim must be at least 1, got 0",
        ),
        (
            lambda q, k, v, w, s: steps.init_state(w, num_key_heads=0, value_dim=3),
            "num_key_heads must be at least 1, got 0",
        ),
        (
            lambda q, k, v, w, s: steps.init_state(w, num_key_heads=2, value_dim=3, head_dim=5),
            "for heads of dim 5, got shape",
        ),
    ],
)
def test_refuses(call, match):
    q, k, v = inputs()
    w = projection()
    with pytest.raises(ValueError, match=match):
        call(q, k, v, w, empty(q, k, v, w))
