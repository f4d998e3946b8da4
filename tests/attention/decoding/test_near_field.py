import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import Band, banded_attention
from tests.attention import steps
from tests.attention.inputs import inputs
from tests.attention.reference import relative_error

# One computation, which compiles faster than its operations one by one.
window_step = jax.jit(steps.window_step)


def empty(k, v, bandwidth, dtype=jnp.float32):
    return steps.init_window(
        bandwidth=bandwidth,
        batch=k.shape[:-3],
        num_key_heads=k.shape[-2],
        head_dim=k.shape[-1],
        value_dim=v.shape[-1],
        dtype=dtype,
    )


@pytest.mark.parametrize("bandwidth", [0, 1, 6, 40])
@pytest.mark.parametrize("pieces", [[1] * 30, [30], [17, 1, 1, 11], [0, 3, 27]])
def test_in_any_pieces_it_is_the_parallel_form(pieces, bandwidth):
    q, k, v = inputs(30, heads=4, key_heads=2, width=3, batch=(2,))
    window, outs, start = empty(k, v, bandwidth), [], 0
    shapes = [x.shape for x in window]
    for count in pieces:
        tokens = (x[:, start : start + count] for x in (q, k, v))
        out, window = window_step(window, *tokens)
        outs.append(out)
        start += count
    expected = banded_attention(q, k, v, bandwidth=bandwidth, is_causal=True)
    assert relative_error(np.concatenate(outs, axis=1), expected) < 1e-5
    assert [x.shape for x in window] == shapes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_keeps_the_numbers_of_the_parallel_form(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in inputs(200, scale=4))
    out, window = window_step(empty(k, v, 50, dtype), q[:90], k[:90], v[:90])
    assert (out.dtype, window.key.dtype, window.value.dtype) == (dtype,) * 3
    rest, _ = window_step(window, q[90:], k[90:], v[90:])
    expected = banded_attention(q, k, v, bandwidth=50, is_causal=True)
    tolerance = 1e-6 if dtype == jnp.float32 else 5e-3
    assert relative_error(jnp.concatenate([out, rest]), expected) < tolerance


@pytest.mark.slow
def test_masks_biases_lengths_and_what_padding_holds():
    q, k, v = inputs(12, batch=(2,))
    k[1, 5:8], v[1, 5:8] = np.nan, np.inf
    mask = np.ones((2, 1, 1, 12), bool)
    mask[1, ..., 5:8] = False
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, 12)).astype(np.float32)
    expected = banded_attention(q, k, v, bandwidth=4, is_causal=True, mask=mask, bias=bias)
    window, outs = empty(k, v, 4), []
    for some in (slice(0, 6), slice(6, 7), slice(7, 12)):
        tokens = (x[:, some] for x in (q, k, v))
        out, window = window_step(window, *tokens, mask=mask[..., some], bias=bias[..., some])
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-5)
    lengths = {"query_seq_lengths": np.array([12, 9]), "key_value_seq_lengths": np.array([12, 4])}
    q, k, v = inputs(12, batch=(2,))
    out, window = window_step(empty(k, v, 4), q, k, v, scale=0.3, **lengths)
    expected = banded_attention(q, k, v, bandwidth=4, is_causal=True, scale=0.3, **lengths)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert (window.log_weights[1] == -jnp.inf).all()


@pytest.mark.slow
def test_gradients_flow_through_the_window():
    q, k, v = inputs(8)

    def loss(k, v):
        _, window = steps.window_step(empty(k, v, 3), q[:5], k[:5], v[:5])
        return jnp.sum(steps.window_step(window, q[5:], k[5:], v[5:])[0] ** 2)

    def expected(k, v):
        return jnp.sum(banded_attention(q, k, v, bandwidth=3, is_causal=True)[5:] ** 2)

    for one, other in zip(
        jax.grad(loss, (0, 1))(k, v), jax.grad(expected, (0, 1))(k, v), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "call", "match"),
    [
        (
            ValueError,
            lambda q, k, v, window: steps.window_step(window, q, k[:4], v[:4]),
            "A decoding step needs equal numbers of keys and queries, got 4 and 9",
        ),
        (
            ValueError,
            lambda q, k, v, window: steps.window_step(window, q, k, v[..., :3]),
            r"state must have key \(3, 2, 8\), value \(3, 2, 3\).* got .*value \(3, 2, 8\)",
        ),
        (
            TypeError,
            lambda q, k, v, window: Band(3).step((k, v), q, k, v),
            "state must be of type Window, got tuple",
        ),
        (ValueError, lambda q, k, v, window: empty(k, v, -1), "bandwidth must be at least 0"),
        (TypeError, lambda q, k, v, window: empty(k, v, 2.5), "bandwidth must be an integer"),
    ],
)
def test_refuses(error, call, match):
    q, k, v = inputs()
    with pytest.raises(error, match=match):
        call(q, k, v, empty(k, v, 3))
