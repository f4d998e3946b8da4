import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import simrf_jax
from experiments.swap import swapping
from experiments.swap.learning import Schedule, learn
from experiments.swap.methods import METHODS, draw_heads
from simrf_jax import feature_maps
from tests.experiments.swap import tiny
from tests.tiers import slow_but

LONG = Schedule(num_steps=100, batch_size=8, learning_rate=0.1)


@pytest.fixture(scope="module")
def tokens():
    """Returns queries, keys and values of 40 sequences, whose means and scales differ."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 40, 9, 2, 4))
    scales = jnp.broadcast_to(jnp.array([4.0, 2.0, 0.5, 0.5]), q.shape)
    return (q + 1) * scales, k * scales - 1, v


@pytest.fixture(scope="module")
def start(tokens):
    """Returns a map of three pairs whose features are calibrated ones."""
    w = simrf_jax.draw_projection(jax.random.key(1), 3, 4, coupling="orthogonal")
    return feature_maps.Learned.start(w, simrf_jax.calibrate(*tokens[:2]))


def learned_from(
    start, tokens, schedule, *, is_causal=False, exact_bandwidth=None, exact_keys=None
):
    """Returns the map after learning from the first 32 sequences."""
    return learn(
        jax.random.key(2),
        start,
        tokens[0][:32],
        tokens[1][:32],
        is_causal=is_causal,
        schedule=schedule,
        exact_bandwidth=exact_bandwidth,
        exact_keys=exact_keys,
    )


def loss(learned, tokens, **options):
    """Returns the loss on the last eight sequences."""
    q, k, _ = tokens
    return float(simrf_jax.distillation_loss(q[32:], k[32:], None, feature_map=learned, **options))


@pytest.mark.slow
def test_the_first_step_is_that_of_adam_on_all_sequences(start, tokens):
    q, k, _ = tokens
    schedule = Schedule(num_steps=1, batch_size=99, learning_rate=0.01)
    ours = learned_from(start, tokens, schedule)
    gradient = jax.grad(
        lambda one: simrf_jax.distillation_loss(q[:32], k[:32], None, feature_map=one)
    )(start)
    for name in ("query_rows", "key_rows", "query_offsets", "key_offsets", "log_weights"):
        slope = np.asarray(getattr(gradient, name), np.float64)
        step = 0.01 * slope / (np.abs(slope) + 1e-8)
        expected = np.asarray(getattr(start, name)) - step
        np.testing.assert_allclose(getattr(ours, name), expected, atol=1e-5, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, ours.calibration, start.calibration)


@pytest.mark.slow
def test_what_is_learned_holds_on_other_sequences(start, tokens):
    learned = learned_from(start, tokens, LONG)
    q, k, _ = (np.asarray(x[32:], np.float64) for x in tokens)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / 2
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    entropy = -np.sum(weights * np.log(weights), -1).mean()
    assert loss(learned, tokens) - entropy < 0.6 * (loss(start, tokens) - entropy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"exact_bandwidth": 2}, {"exact_keys": 2}]
)
def test_a_map_is_learned_for_the_attention_that_it_serves(options, start, tokens):
    own = learned_from(start, tokens, LONG, **options)
    other = learned_from(start, tokens, LONG)
    assert loss(own, tokens, **options) < loss(other, tokens, **options)
    assert loss(own, tokens, **options) < loss(start, tokens, **options)


@pytest.mark.slow
def test_a_schedule_is_a_function_of_its_key(start, tokens):
    first, again = (learned_from(start, tokens, tiny.SCHEDULE) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    whole = learned_from(start, tokens, tiny.SCHEDULE._replace(batch_size=4))
    assert not np.array_equal(first.query_rows, whole.query_rows)


def test_a_random_start_has_the_coordinates_of_the_tokens(tokens):
    ours = METHODS["learned_from_random"].fit(swapping.Inputs(*tokens, is_causal=False), None)
    expected = feature_maps.Calibrated.identity(2, 4)
    jax.tree.map(np.testing.assert_array_equal, ours.calibration, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["learned"], ["learned_from_random", "learned"]))
def test_rows_are_drawn_and_then_learned(name, tokens):
    method, layer = METHODS[name], swapping.Inputs(*tokens, is_causal=False)
    [attention] = method.attentions(jax.random.key(0), [layer], 6, schedule=tiny.SCHEDULE)
    rngs = nnx.Rngs(features=jax.random.key(0))
    rows = draw_heads(rngs.features(), 2, 3, 4, "orthogonal")
    start = feature_maps.Learned.start(rows, method.fit(layer, None).calibration)
    expected = learn(
        rngs.features(),
        start,
        *tokens[:2],
        is_causal=False,
        schedule=tiny.SCHEDULE,
        exact_bandwidth=None,
        exact_keys=None,
    )
    learned = attention.learned.feature_map(attention.feature_map.get_value())
    jax.tree.map(np.testing.assert_array_equal, learned, expected)
    assert jnp.max(jnp.abs(learned.query_rows - rows)) > 0.1


@pytest.mark.slow
def test_learned_attention_is_nearer_to_softmax_than_its_start(tokens):
    fit, test = (
        swapping.Inputs(*(x[part] for x in tokens), is_causal=False)
        for part in (slice(32), slice(32, 40))
    )
    options = {"schedule": LONG, "bandwidth": 1}
    errors = {}
    for name in ("calibrated", "learned", "band_calibrated", "band_learned"):
        [attention] = METHODS[name].attentions(jax.random.key(3), [fit], 6, **options)
        errors[name] = float(jnp.mean(swapping.head_errors(test, attention)))
    assert errors["learned"] < 0.7 * errors["calibrated"]
    assert errors["band_learned"] < 0.7 * errors["band_calibrated"]
