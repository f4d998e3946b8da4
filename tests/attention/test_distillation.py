import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import simrf_jax
from simrf_jax import distillation_loss
from simrf_jax.feature_maps import Calibrated, Learned
from tests.attention.inputs import inputs, projection

BANDWIDTH = 2


def cross_entropy(query, key, w, *, visible=None, bandwidth=None, scale=None):
    """Returns the loss of positive features, and the entropy of softmax, in float64 loops."""
    query, key, w = (np.asarray(x, np.float64) for x in (query, key, w))
    root = np.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    groups = query.shape[1] // key.shape[1]
    losses, entropies = [], []
    for t, n in np.ndindex(query.shape[:2]):
        seen = np.ones(len(key), bool) if visible is None else visible[t]
        x, y = root * query[t, n], root * key[seen, n // groups]
        if not len(y):
            continue
        of_query = w @ x - x @ x / 2
        of_keys = y @ w.T - np.sum(y**2, axis=-1, keepdims=True) / 2
        logs = np.logaddexp.reduce(of_query + of_keys, axis=-1) - np.log(len(w))
        if bandwidth is not None:
            near = np.abs(t - np.arange(len(key))[seen]) <= bandwidth
            logs = np.where(near, y @ x, logs)
        exact = y @ x - np.logaddexp.reduce(y @ x)
        losses.append(-np.exp(exact) @ (logs - np.logaddexp.reduce(logs)))
        entropies.append(-np.exp(exact) @ exact)
    return np.mean(losses), np.mean(entropies)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.5, 4, 16])
@pytest.mark.parametrize("bandwidth", [None, BANDWIDTH])
@pytest.mark.parametrize("is_causal", [False, True])
def test_against_float64(scale, bandwidth, is_causal):
    q, k, _ = inputs(heads=4, key_heads=2, scale=scale)
    visible = np.tri(9, dtype=bool) if is_causal else None
    loss = distillation_loss(
        q, k, projection(), feature_map="positive", is_causal=is_causal, exact_bandwidth=bandwidth
    )
    expected, entropy = cross_entropy(q, k, projection(), visible=visible, bandwidth=bandwidth)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(expected, rel=1e-4 if scale < 16 else 1e-3)
    assert expected >= entropy


@pytest.mark.slow
def test_masks_lengths_and_batches_count_as_in_attention():
    q, k, _ = inputs(batch=(2,), scale=0.5)
    mask = np.ones((2, 1, 1, 9), bool)
    mask[:, ..., [1, 4]] = False
    lengths = {"query_seq_lengths": np.array([9, 3]), "key_value_seq_lengths": np.array([6, 9])}
    loss = distillation_loss(q, k, projection(), feature_map="positive", mask=mask, **lengths)
    per_row = []
    for i, (rows, keys) in enumerate(zip(*lengths.values(), strict=True)):
        seen = mask[i, 0, 0] & (np.arange(9) < keys)
        visible = np.broadcast_to(seen, (rows, 9))
        per_row += [cross_entropy(q[i, :rows], k[i], projection(), visible=visible)[0]] * rows
    assert float(loss) == pytest.approx(np.mean(per_row), rel=1e-5)


@pytest.mark.slow
def test_is_the_entropy_of_softmax_if_the_band_covers_all_keys():
    q, k, _ = inputs()
    loss = distillation_loss(q, k, projection(), feature_map="positive", exact_bandwidth=8)
    assert float(loss) == pytest.approx(cross_entropy(q, k, projection())[1], rel=1e-5)


@pytest.mark.slow
def test_padding_and_rows_without_keys_have_no_gradient():
    q, k, _ = inputs()
    k = k.copy()
    k[5:] = np.nan
    mask = np.arange(9) < 5

    def loss(q, k, mask):
        return distillation_loss(q, k, projection(), feature_map="positive", mask=mask)

    value, (of_queries, of_keys) = jax.value_and_grad(loss, (0, 1))(
        jnp.asarray(q), jnp.asarray(k), mask[None, None]
    )
    assert np.isfinite(value)
    assert np.isfinite(of_queries).all()
    np.testing.assert_array_equal(of_keys[5:], 0)
    value, gradients = jax.value_and_grad(loss, (0, 1))(
        jnp.asarray(q), jnp.asarray(k), np.zeros((1, 1, 9), bool)
    )
    assert float(value) == 0
    assert not any(np.any(leaf) for leaf in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_tokens_that_are_not_finite_make_it_nan(number):
    tokens = [x.copy() for x in inputs()[:2]]
    tokens[number][3, 0, 0] = np.inf
    assert np.isnan(distillation_loss(*tokens, projection(), feature_map="positive"))


@pytest.mark.slow
def test_the_target_has_no_gradient():
    """The gradient by queries is that of the estimated weights alone."""
    q, k, _ = inputs(scale=0.5)
    q, k, w = (jnp.asarray(x) for x in (q, k, projection()))

    def estimated(q, k):
        weights = simrf_jax.attention_matrix(q, k, w)
        return -jnp.mean(jnp.sum(target * jnp.log(weights), axis=-1))

    target = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k) * 8**-0.5, axis=-1)
    actual = jax.grad(lambda q, k: distillation_loss(q, k, w, feature_map="positive"), (0, 1))(q, k)
    for one, other in zip(actual, jax.grad(estimated, (0, 1))(q, k), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_small_weights_have_gradients():
    """Weights that float32 cannot hold still pull the features toward them."""
    q = jnp.array([[[20.0, 0.0]]])
    k = jnp.array([[[-20.0, 0.0]], [[20.0, 0.0]]])

    def loss(w):
        return distillation_loss(q, k, w, feature_map="positive", scale=1.0)

    w = jnp.array([[-30.0, 0.0], [-29.0, 1.0]])  # The first key seems to have all weight.
    assert float(loss(w)) > 500
    assert float(jnp.abs(jax.grad(loss)(w)).max()) > 1


def example(seed, heads=2, dim=8, length=24, batch=24):
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, dim + 1) ** -0.7
    q, k = 3 * rng.normal(size=(2, batch, length, heads, dim)) * spectrum + 0.5
    return q.astype(np.float32), (k[..., ::-1] - 1).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "most"), [("random", 0.5), pytest.param("calibrated", 0.8, marks=pytest.mark.slow)]
)
def test_training_lowers_the_loss_of_other_tokens(start, most):
    fit, held_out = example(0), example(1)
    calibration = Calibrated.identity(2, 8)
    if start == "calibrated":
        calibration = simrf_jax.calibrate(*fit)
    learned = Learned.start(projection(16, 8, coupling="orthogonal"), calibration)
    optimizer = optax.adam(1e-2)

    def loss(learned, tokens):
        return distillation_loss(*tokens, None, feature_map=learned)

    @jax.jit
    def step(learned, state):
        updates, state = optimizer.update(jax.grad(loss)(learned, fit), state)
        return optax.apply_updates(learned, updates), state

    before, state = float(loss(learned, held_out)), optimizer.init(learned)
    for _ in range(150):
        learned, state = step(learned, state)
    q, k = held_out
    logits = np.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
    logs = np.asarray(jax.nn.log_softmax(logits))
    entropy = -np.mean(np.sum(np.exp(logs) * logs, axis=-1))
    assert float(loss(learned, held_out)) - entropy < most * (before - entropy)
    for name in ("query_mean", "key_matrix", "variances"):
        np.testing.assert_array_equal(
            getattr(learned.calibration, name), getattr(calibration, name)
        )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"feature_map": "trigonometric"}, ValueError, "needs positive features, got .*Trigono"),
        ({"feature_map": "relu", "exact_bandwidth": 1}, ValueError, "exact_bandwidth takes a"),
        ({"feature_map": "positive", "is_causal": 1}, TypeError, "is_causal must be True or"),
        ({"feature_map": "simplex"}, ValueError, "feature_map must be one of"),
    ],
)
def test_refuses(options, error, match):
    q, k, _ = inputs()
    with pytest.raises(error, match=match):
        distillation_loss(q, k, projection(), **options)


@pytest.mark.slow
def test_a_map_that_gives_a_visible_key_no_weight_has_an_infinite_loss():
    q, k = jnp.ones((1, 1, 1)), jnp.array([[[1.0]], [[-1.0]]])
    for scale in (1, 20):  # The softmax weight of the second key is 0 with the second one.
        loss = distillation_loss(scale * q, scale * k, jnp.ones((1, 1)), feature_map="relu")
        assert float(loss) == np.inf


@pytest.mark.slow
def test_a_query_without_features_has_an_infinite_loss():
    q, k = jnp.array([[[-1.0]], [[1.0]]]), jnp.array([[[1.0]], [[2.0]]])

    def loss(q):
        return distillation_loss(q, k, jnp.ones((1, 1)), feature_map="relu")

    value, gradient = jax.value_and_grad(loss)(q)
    assert float(value) == np.inf
    assert np.all(np.isfinite(gradient))


@pytest.mark.slow
def test_a_record_can_be_changed_field_by_field():
    learned = Learned.start(projection(4, 8), simrf_jax.calibrate(*example(0)))
    moved = dataclasses.replace(learned, log_weights=learned.log_weights + 1)
    q, k = example(1)
    first, second = (distillation_loss(q, k, None, feature_map=one) for one in (learned, moved))
    np.testing.assert_allclose(first, second, rtol=1e-5)  # A common factor of all features cancels.
