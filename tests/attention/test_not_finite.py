"""NaN, infinity and what overflows reach those that see them, and nothing else, bit for bit.

``test_every_mode.py`` has every way to attend with the library's own maps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import attention_matrix, banded_attention, random_feature_attention
from simrf_jax.fmm import fmm_attention
from tests.attention import steps
from tests.attention.inputs import inputs, projection
from tests.tiers import slow_but

LENGTH, WHERE, DIM, BANDWIDTH = 21, 12, 8, 3
IDS = np.repeat([0, 1, 0], [7, 6, 8])  # WHERE is the last position of the second segment.
INPUTS = inputs(LENGTH, heads=4, key_heads=2, dim=DIM)
POSITIONS = np.arange(LENGTH)
SIZES = {"num_key_heads": 2, "head_dim": DIM, "value_dim": DIM}


def on_the_unit_sphere(x, w):
    """A feature map of a user, NaN at zero."""
    return jnp.exp((x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w.T)


def far(q, k, v, *, is_causal=False, segment_ids=None, **options):
    in_chunks = is_causal or segment_ids is not None
    options |= {"is_causal": is_causal, "segment_ids": segment_ids}
    return random_feature_attention(
        q, k, v, projection(), chunk_size=4 if in_chunks else None, **options
    )


def far_by_a_map_of_the_user(q, k, v, **options):
    return far(q, k, v, feature_map=on_the_unit_sphere, **options)


def near(q, k, v, **options):
    return banded_attention(q, k, v, bandwidth=BANDWIDTH, **options)


def near_in_short_blocks(q, k, v, **options):
    return near(q, k, v, block_size=2, **options)


def both(q, k, v, **options):
    return fmm_attention(
        q, k, v, (projection(),), bandwidth=BANDWIDTH, chunk_size=4, near_weight=0.5, **options
    )


def joint(q, k, v, **options):
    return random_feature_attention(
        q, k, v, projection(), chunk_size=4, exact_bandwidth=BANDWIDTH, **options
    )


def joint_by_a_map_of_the_user(q, k, v, **options):
    return joint(q, k, v, feature_map=on_the_unit_sphere, **options)


SEES_THE_PAST = POSITIONS >= WHERE
IN_THE_BAND = abs(POSITIONS - WHERE) <= BANDWIDTH
IN_THE_SEGMENT = IDS == 1
CAUSAL, PACKED = {"is_causal": True}, {"segment_ids": IDS}
# Attention, its options, and the queries that see the key at WHERE.
MODES = {
    "causal, a map of the user": (far_by_a_map_of_the_user, CAUSAL, SEES_THE_PAST),
    "packed, a map of the user": (far_by_a_map_of_the_user, PACKED, IN_THE_SEGMENT),
    "causal band in short blocks": (near_in_short_blocks, CAUSAL, IN_THE_BAND & SEES_THE_PAST),
    "exact band, causal, a map of the user": (joint_by_a_map_of_the_user, CAUSAL, SEES_THE_PAST),
    "exact band, packed, a map of the user": (joint_by_a_map_of_the_user, PACKED, IN_THE_SEGMENT),
}
# By array: the key heads that are changed, and what to.
ALL = slice(None)
PLANTS = {
    "NaN in a key": {"k": (ALL, np.nan)},
    "infinity in a key": {"k": (ALL, -np.inf)},
    "NaN in a value": {"v": (ALL, np.nan)},
    "infinity in a value": {"v": (ALL, np.inf)},
    "numbers that overflow": {"k": (ALL, 1e30), "v": (ALL, 3e38)},
    "NaN in the key of one head": {"k": (0, np.nan)},
}


def plant(qkv, what, where=WHERE):
    """Returns copies with something else at a position, of the first key head or of all."""
    planted = dict(zip("qkv", map(np.copy, qkv), strict=True))
    for name, (heads, value) in what.items():
        planted[name][where, heads] = value
    return tuple(planted.values())


@functools.cache
def outputs_and_gradients(mode):
    """Attention that also returns the gradients of the outputs of some of the queries."""
    attend, options, _ = MODES[mode]

    @jax.jit
    def call(others, *qkv):
        out, pull_back = jax.vjp(functools.partial(attend, **options), *qkv)
        waves = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return out, pull_back(jnp.where(others[:, None, None], waves, 0))

    return call


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize(
    "mode", slow_but(set(MODES) - {"exact band, packed, a map of the user"}, list(MODES))
)
def test_reaches_those_that_see_it_alone(mode, what):
    _, _, sees = MODES[mode]
    call = outputs_and_gradients(mode)
    out, gradients = call(~sees, *INPUTS)
    planted_out, planted_gradients = call(~sees, *plant(INPUTS, PLANTS[what]))
    assert np.isfinite(out).all()
    # Queries of two heads share a key.
    reached = sees[:, None] & np.isin(np.arange(4) // 2, 0 if "head" in what else [0, 1])
    assert np.isnan(planted_out[reached]).all()
    np.testing.assert_array_equal(planted_out[~reached], out[~reached])
    for gradient, planted in zip(gradients, planted_gradients, strict=True):
        np.testing.assert_array_equal(planted, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", slow_but(set(MODES) - {"exact band, packed, a map of the user"}, list(MODES))
)
def test_a_query_reaches_its_own_output_alone(mode):
    others = POSITIONS != WHERE
    call = outputs_and_gradients(mode)
    out, gradients = call(others, *INPUTS)
    planted_out, planted_gradients = call(others, *plant(INPUTS, {"q": (ALL, np.nan)}))
    assert np.isnan(planted_out[WHERE]).all()
    np.testing.assert_array_equal(planted_out[others], out[others])
    for gradient, planted in zip(gradients, planted_gradients, strict=True):
        np.testing.assert_array_equal(planted, gradient)


@pytest.mark.parametrize("bias", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("attend", [far, near, both, joint])
def test_a_bias_that_is_not_finite(attend, bias):
    def loss(biases):
        out = attend(*INPUTS, is_causal=True, bias=biases[None, None])
        return jnp.sum(out[:WHERE] ** 2), out

    usual = np.zeros(LENGTH, np.float32)
    planted = usual.copy()
    planted[WHERE] = bias
    grad = jax.jit(jax.grad(loss, has_aux=True))
    (gradient, out), (planted_gradient, planted_out) = grad(usual), grad(planted)
    assert np.isnan(planted_out[WHERE]).all()
    np.testing.assert_array_equal(planted_out[:WHERE], out[:WHERE])
    np.testing.assert_array_equal(planted_gradient, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [far, near, joint])
@pytest.mark.parametrize("planted", [{"k": (ALL, np.nan)}, {"q": (ALL, 1e25), "k": (ALL, 1e25)}])
def test_the_gradient_of_the_scale(attend, planted):
    @jax.jit
    @jax.grad
    def gradient(scale, *qkv):
        return jnp.sum(attend(*qkv, is_causal=True, scale=scale)[:WHERE] ** 2)

    np.testing.assert_array_equal(gradient(0.3, *plant(INPUTS, planted)), gradient(0.3, *INPUTS))


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTS)
def test_all_who_see_it_get_nan(what):
    q, k, v = plant(INPUTS, PLANTS[what])
    out = random_feature_attention(q, k, v, projection())
    assert np.isnan(out[:, :2]).all()
    matrix = attention_matrix(q, k, projection())  # It takes no values.
    assert np.isnan(matrix[:2]).all() == (not np.isfinite(k).all())


@pytest.mark.slow
def test_a_state_remembers_what_is_not_finite():
    _, k, v = plant(INPUTS, PLANTS["NaN in a value"])
    state = steps.init_state(projection(), num_key_heads=2, value_dim=DIM)
    state = steps.append(state, k, v, projection())
    out, state = steps.step(state, *(x[:1] for x in INPUTS), projection())
    assert np.isnan(out).all()
    out, _ = steps.step(state, *(x[:1] for x in INPUTS), projection())
    assert np.isnan(out).all()


@pytest.mark.slow
def test_a_window_forgets_what_is_out_of_the_band():
    q, k, v = plant(INPUTS, PLANTS["infinity in a value"])
    window = steps.init_window(bandwidth=BANDWIDTH, num_key_heads=2, head_dim=DIM, value_dim=DIM)
    outs = []
    for tokens in np.split(POSITIONS, [5, WHERE, WHERE + 1, WHERE + 2]):
        out, window = steps.window_step(window, q[tokens], k[tokens], v[tokens])
        outs.append(out)
    sees = IN_THE_BAND & SEES_THE_PAST
    np.testing.assert_array_equal(np.isnan(np.concatenate(outs)).any((1, 2)), sees)


@pytest.mark.slow
class TestMapsWithoutAValueAtZero:
    """Hidden keys and padding do not pass through a user's map as zeros."""

    HIDDEN = POSITIONS % 3 == 0

    def reference(self, visible):
        """The same by softmax over the logarithm of the estimated kernel, all pairs at once."""
        q, k, v = (jnp.asarray(x) for x in INPUTS)
        k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
        phi_q, phi_k = (on_the_unit_sphere(x, projection()) for x in (q, k))
        kernel = jnp.where(visible, jnp.einsum("tnm,snm->nts", phi_q, phi_k), 0)
        total = kernel.sum(-1, keepdims=True)
        return jnp.einsum("nts,snd->tnd", kernel / jnp.where(total == 0, 1, total), v)

    @pytest.mark.parametrize(
        ("is_causal", "options", "visible"),
        [
            (True, {}, np.ones(LENGTH, bool)),
            (False, {"mask": ~HIDDEN[None, None]}, ~HIDDEN),
            (True, {"mask": ~HIDDEN[None, None]}, ~HIDDEN),
            (False, {"key_value_seq_lengths": [10]}, POSITIONS < 10),
            (False, {"mask": np.zeros((1, 1, LENGTH), bool)}, np.zeros(LENGTH, bool)),
        ],
        ids=["causal", "mask", "causal and mask", "lengths", "nothing visible"],
    )
    def test_values_and_gradients(self, is_causal, options, visible):
        def loss(*qkv):
            out = far_by_a_map_of_the_user(*qkv, is_causal=is_causal, **options)
            return jnp.sum(out**2), out

        gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*INPUTS)
        pairs = visible[None] & (np.tri(LENGTH, dtype=bool) if is_causal else True)
        np.testing.assert_allclose(out, self.reference(pairs), rtol=1e-4, atol=1e-5)
        for gradient in gradients:
            assert np.isfinite(gradient).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("length", [3, 8])
    def test_a_state_after_a_prompt_of_any_length(self, length):
        options = {"projection": projection(), "feature_map": on_the_unit_sphere}
        state = steps.init_state(num_key_heads=2, value_dim=DIM, **options)
        first, state = steps.step(state, *(x[:length] for x in INPUTS), **options)
        rest, _ = steps.step(state, *(x[length:] for x in INPUTS), **options)
        expected = self.reference(np.tri(LENGTH, dtype=bool))
        np.testing.assert_allclose(np.concatenate([first, rest]), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("mode", ["causal, a map of the user", "packed, a map of the user"])
    def test_a_real_zero_is_seen_by_those_that_see_it(self, mode):
        """The features of a later token are not finite, though the token is."""
        _, _, sees = MODES[mode]
        call = outputs_and_gradients(mode)
        out, (_, d_key, d_value) = call(~sees, *INPUTS)
        planted_out, (_, *planted) = call(~sees, *plant(INPUTS, {"k": (ALL, 0)}))
        assert np.isnan(planted_out[sees]).all()
        np.testing.assert_array_equal(planted_out[~sees], out[~sees])
        others = POSITIONS != WHERE
        np.testing.assert_array_equal(planted[0][others], d_key[others])
        np.testing.assert_array_equal(planted[1], d_value)


@pytest.mark.slow
def test_large_features_and_values_of_one_segment_reach_no_other():
    """A user's features times values, each finite, would overflow the sums of keys."""

    def large(x, w):
        return 1e10 * jnp.exp(x @ w.T - jnp.sum(x**2, axis=-1, keepdims=True) / 2)

    q, k, v = INPUTS
    v = plant(INPUTS, {"v": (ALL, 1e30)})[2]
    attend = functools.partial(far, segment_ids=IDS, is_causal=True)
    out, expected = attend(q, k, v, feature_map=large), attend(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    others = IDS != 1
    gradients = jax.grad(
        lambda *qkv: jnp.sum(attend(*qkv, feature_map=large)[others] ** 2), argnums=(0, 1, 2)
    )(q, k, v)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_a_key_that_only_padding_sees_reaches_no_gradient():
    q, k, v = plant(INPUTS, {"k": (ALL, np.nan)})

    def loss(*arrays):
        return jnp.sum(random_feature_attention(*arrays, query_seq_lengths=[0]) ** 2)

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, projection()):
        np.testing.assert_array_equal(gradient, 0)


def test_rows_of_the_matrix_that_see_it_reach_no_gradient_of_others():
    q, k, _ = plant(INPUTS, {"k": (ALL, np.nan)})

    def loss(q, k, w):
        return jnp.sum(attention_matrix(q, k, w, is_causal=True)[:, :WHERE] ** 2)

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, projection()):
        assert np.isfinite(gradient).all()
