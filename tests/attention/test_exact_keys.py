"""Exact keys beside random features, under one normalizer; test_every_mode.py has given keys."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import simrf_jax
from simrf_jax import RandomFeatureMechanism, feature_maps, random_feature_attention
from simrf_jax._src.attention.random_features import exact_keys, state, xla
from tests import formulas
from tests.attention.devices import make_mesh
from tests.attention.inputs import inputs, projection
from tests.attention.reference import beside_band, relative_error
from tests.standard_errors import assert_mean
from tests.tiers import slow_but
from tests.versions import enable_x64

LENGTH, COUNT = 30, 4
GROUPED = {"heads": 4, "key_heads": 2}


def most_attended(q, k, w, count=COUNT, shown=slice(None)):
    """Returns the keys of each key head with the largest sums of estimated weights, ``[K, g]``."""
    q, k, w = (np.asarray(x, np.float64) for x in (q, k, w))
    groups, root = q.shape[1] // k.shape[1], q.shape[-1] ** -0.25
    chosen = []
    for head in range(k.shape[1]):
        mass = np.zeros(len(k))
        log_k, _ = formulas.positive(root * k[:, head], w, "softmax")
        for n in range(head * groups, (head + 1) * groups):
            log_q, _ = formulas.positive(root * q[:, n], w, "softmax")
            # Queries at hidden keys are padding.
            kernel = np.exp(log_q[:, None] + log_k).sum(axis=-1)[shown][:, shown]
            mass[shown] += (kernel / kernel.sum(axis=-1, keepdims=True)).sum(axis=0)
        chosen.append(np.argsort(-mass)[:count])
    return np.array(chosen)


@pytest.mark.parametrize("bandwidth", [None, 3])
@pytest.mark.parametrize("scale", [0.5, 2])
def test_a_number_of_keys_has_the_largest_estimated_mass(scale, bandwidth):
    q, k, v = inputs(LENGTH, scale=scale, **GROUPED)
    w = projection()
    out = random_feature_attention(q, k, v, w, exact_keys=COUNT, exact_bandwidth=bandwidth)
    band = -1 if bandwidth is None else bandwidth
    expected = beside_band(q, k, v, w, band, exact_keys=most_attended(q, k, w))
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_mask_of_query_heads_that_is_the_same_for_all_changes_no_choice(name):
    q, k, v = inputs(LENGTH, batch=(1,), **GROUPED)
    of_keys = np.random.default_rng(0).normal(size=(1, 1, 1, LENGTH)).astype(np.float32)
    shared = of_keys > -1 if name == "mask" else of_keys
    each = np.broadcast_to(shared, (1, GROUPED["heads"], 1, LENGTH)).copy()
    expected, out = (
        random_feature_attention(q, k, v, projection(), exact_keys=COUNT, **{name: x})
        for x in (shared, each)
    )
    assert relative_error(out, expected) < 1e-5


@pytest.mark.slow
def test_query_heads_on_several_devices_see_the_keys_of_one_device():
    q, k, v = inputs(LENGTH, batch=(1,), **GROUPED)
    expected = random_feature_attention(q, k, v, projection(), exact_keys=COUNT)
    heads = jax.NamedSharding(make_mesh(heads=4), jax.P(None, None, "heads"))
    out = random_feature_attention(jax.device_put(q, heads), k, v, projection(), exact_keys=COUNT)
    assert out.sharding.spec[2] == "heads"
    assert relative_error(out, expected) < 1e-5


def test_many_tokens_are_weighed_in_chunks(monkeypatch):
    q, k, v = inputs(LENGTH, batch=(2,), **GROUPED)
    w = projection()
    lengths = np.array([LENGTH, 11])
    attend = functools.partial(random_feature_attention, exact_keys=COUNT)
    expected = attend(q, k, v, w, query_seq_lengths=lengths)
    for module in (exact_keys, state):
        monkeypatch.setattr(module, "SUMMARY_CHUNK", 7)
    # Another shape is traced again.
    [out] = attend(q[None], k[None], v[None], w, query_seq_lengths=lengths[None])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_padding_has_no_part_in_the_choice():
    q, k, v = inputs(LENGTH, **GROUPED)
    attend = functools.partial(random_feature_attention, exact_keys=COUNT)
    alone = attend(q[:17], k[:17], v[:17], projection())
    lengths = {"key_value_seq_lengths": np.array([17])}
    for rest in (1, 4):
        longer = np.concatenate([q[:17], rest * q[17:]])
        padded = attend(longer, k, v, projection(), **lengths)
        np.testing.assert_allclose(padded[:17], alone, rtol=1e-5)


@pytest.mark.parametrize("scale", [10, 30])
def test_visible_keys_come_before_hidden_ones_however_small(scale):
    q, k, v = inputs(LENGTH, scale=scale)
    shown = np.arange(LENGTH) % 2 > 0
    out = random_feature_attention(
        q, k, v, projection(), mask=shown[None, None], exact_keys=LENGTH // 2
    )
    expected = jax.nn.dot_product_attention(q, k[shown], v[shown])
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("dtype", slow_but([np.int8], [np.int8, np.uint8, np.int64]))
def test_positions_of_any_integer_type(dtype):
    q, k, v = inputs(300, heads=1)
    out = random_feature_attention(q, k, v, projection(), exact_keys=np.array([7, 7], dtype))
    expected = random_feature_attention(q, k, v, projection(), exact_keys=(7,))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positions", [[2**32], [2**63 - 1], [-(2**32)], np.uint32([2**32 - 1])])
def test_positions_beyond_the_keys_are_not_wrapped(positions):
    q, k, v = inputs(LENGTH, heads=1)
    out = random_feature_attention(q, k, v, projection(), exact_keys=np.asarray(positions))
    np.testing.assert_array_equal(
        out, random_feature_attention(q, k, v, projection(), exact_keys=[LENGTH])
    )


@pytest.mark.parametrize("keys", slow_but([2], [2, (0, 2)]))
def test_float32_in_x64_mode_without_promotion(keys):
    q, k, v = inputs(LENGTH)
    w = projection()
    expected = random_feature_attention(q, k, v, w, exact_keys=keys)
    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        out = random_feature_attention(q, k, v, w, exact_keys=keys)
        simrf_jax.attention_report(q, k, w, exact_keys=keys, exact_bandwidth=1)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_hidden_keys_are_not_chosen():
    q, k, v = inputs(LENGTH, **GROUPED)
    w, shown = projection(), np.arange(LENGTH) % 3 > 0
    k, v = (np.where(shown[:, None, None], x, np.nan) for x in (k, v))
    out = random_feature_attention(q, k, v, w, mask=shown[None, None], exact_keys=COUNT)
    chosen = most_attended(q, np.nan_to_num(k), w, shown=shown)
    log_weights = np.broadcast_to(np.where(shown, 0, -np.inf), (4, LENGTH))
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    expected = beside_band(q, k, v, w, -1, exact_keys=chosen, log_weights=log_weights)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("options", [{}, {"exact_bandwidth": 2}, {"implementation": "xla"}])
def test_as_many_keys_as_there_are_make_softmax_attention(options):
    q, k, v = inputs(LENGTH, batch=(2,), **GROUPED)
    out = random_feature_attention(q, k, v, projection(), exact_keys=LENGTH + 1, **options)
    assert relative_error(out, jax.nn.dot_product_attention(q, k, v)) < 1e-5


@pytest.mark.parametrize("feature_map", ["hyperbolic", "trigonometric"])
def test_chunks_and_whole_lengths_give_the_same(monkeypatch, feature_map):
    """On a CPU queries come in chunks; other backends take all of them at once."""
    # A length of its own, and another shape for each way, so that both are traced.
    q, k, v = inputs(LENGTH + 2, scale=0.3, batch=(2,), **GROUPED)
    attend = functools.partial(
        random_feature_attention, feature_map=feature_map, exact_keys=np.array([3, -1])
    )
    monkeypatch.setattr(xla, "CHUNK_ROWS", 1)
    monkeypatch.setattr(xla, "LEAST_CHUNK", 8)
    by_chunks = attend(q, k, v, projection())
    monkeypatch.setattr(xla, "_attend_by_chunks", xla._attend_at_once)
    [at_once] = attend(q[None], k[None], v[None], projection())
    np.testing.assert_allclose(by_chunks, at_once, rtol=1e-5, atol=1e-6)


def test_no_queries_and_no_keys():
    q, k, v = (jnp.asarray(x) for x in inputs(LENGTH))
    attend = functools.partial(random_feature_attention, projection=projection(), exact_keys=COUNT)
    assert attend(q[:0], k, v).shape == (0, 2, 8)
    assert attend(q[None][:0], k[None][:0], v[None][:0]).shape == (0, LENGTH, 2, 8)
    assert np.all(attend(q, k[:0], v[:0]) == 0)


def test_positions_of_each_sequence():
    q, k, v = inputs(LENGTH, batch=(2,))
    positions = np.array([[0, 4], [7, -2]])
    out = random_feature_attention(q, k, v, projection(), exact_keys=positions)
    for each, one in zip(out, range(2), strict=True):
        own = positions[one] % LENGTH
        expected = beside_band(q[one], k[one], v[one], projection(), -1, exact_keys=own)
        assert relative_error(each, expected) < 1e-5


def test_given_keys_leave_the_estimate_unbiased():
    """Numerators and denominators are means of unbiased estimates, as kernel rows show."""
    q, k, _ = inputs(8, heads=1, dim=4, scale=0.5)
    exact = np.exp(q[:, 0] @ k[:, 0].T / 2)
    keys = jax.random.split(jax.random.key(0), 4000)

    def kernel_rows(key):
        w = simrf_jax.draw_projection(key, 8, 4)
        report = simrf_jax.attention_matrix(q, k, w, exact_keys=jnp.array([2, 5]))[0]
        # Beside an exact weight, all others are known.
        return report / report[:, 2:3] * exact[:, 2:3]

    samples = np.array(jax.jit(jax.vmap(kernel_rows))(keys))
    given, others = [2, 5], [0, 1, 3, 4, 6, 7]
    assert_mean(samples[..., others], exact[:, others])
    known = np.broadcast_to(exact[:, given], samples[..., given].shape)
    np.testing.assert_allclose(samples[..., given], known, rtol=1e-4)


def test_the_report_and_the_loss_take_exact_keys():
    q, k, v = inputs(LENGTH, scale=2, **GROUPED)
    w = projection()
    out = random_feature_attention(q, k, v, w, exact_keys=COUNT)
    weights = simrf_jax.attention_matrix(q, k, w, exact_keys=COUNT)
    by_weights = np.einsum("nts,snd->tnd", weights, np.repeat(v, 2, axis=1))
    assert relative_error(by_weights, out) < 1e-5
    errors = [
        simrf_jax.attention_report(q, k, w, value=v, exact_keys=keys).output_error.mean()
        for keys in (None, COUNT)
    ]
    assert errors[1] < errors[0]
    whole = simrf_jax.distillation_loss(q, k, w, feature_map="positive", exact_keys=LENGTH)
    softmax = scipy.special.softmax(np.einsum("tnd,snd->nts", q, np.repeat(k, 2, 1)) / 8**0.5, -1)
    assert abs(whole - scipy.stats.entropy(softmax, axis=-1).mean()) < 1e-4


def test_a_mechanism_with_exact_keys_is_a_pytree():
    q, k, v = inputs(LENGTH)
    for keys in (COUNT, np.array([0, 1])):
        mechanism = RandomFeatureMechanism(projection(), exact_keys=keys)
        again = jax.tree.map(lambda x: x, mechanism)
        out = jax.jit(RandomFeatureMechanism.attend)(again, q, k, v)
        assert relative_error(out, mechanism.attend(q, k, v)) < 1e-6


W8 = np.zeros((16, 8), np.float32)
REFUSED = {
    "least": ({"exact_keys": 0}, ValueError, "exact_keys must be at least 1, got 0"),
    "type": ({"exact_keys": 1.5}, TypeError, "exact_keys must be an integer, got 1.5"),
    "floats": ({"exact_keys": np.ones(2)}, TypeError, "or integers, their positions, got float"),
    "none": ({"exact_keys": np.zeros(0, int)}, ValueError, r"must have a position, got shape \(0,"),
    "shape": (
        {"exact_keys": np.zeros((3, 1), int)},
        ValueError,
        r"\[\*batch, g\] with the batch shape \(\), got shape \(3, 1\)",
    ),
    "causal": (
        {"exact_keys": 2, "is_causal": True},
        ValueError,
        "exact_keys=2 chooses keys by all queries, so later tokens would reach earlier outputs",
    ),
    "packed": (
        {"exact_keys": 2, "segment_ids": np.array([0, 0, 1, 1, 1])},
        ValueError,
        "exact_keys=2 chooses keys by all queries, so the tokens of one packed segment would",
    ),
    "signed": (
        {"exact_keys": 2, "feature_map": "trigonometric"},
        ValueError,
        "A number of exact_keys is chosen by positive features, and these may be negative",
    ),
    "kernel": (
        {"exact_keys": 2, "feature_map": "relu"},
        ValueError,
        r"exact_keys takes a feature map that estimates exp\(x \. y\)",
    ),
    "kernels": (
        {"exact_keys": 2, "implementation": "pallas_tpu"},
        ValueError,
        "its kernels have no exact_keys",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        random_feature_attention(*inputs(5), W8, **options)


def test_decoding_and_sharded_lengths_have_none():
    mechanism = RandomFeatureMechanism(W8, exact_keys=2)
    with pytest.raises(ValueError, match="positions and masses are for whole sequences"):
        mechanism.init(num_key_heads=1, head_dim=8, value_dim=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("length",))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="that no mesh axes shard, got leng"):
        random_feature_attention(*inputs(4), W8, exact_keys=2, sequence_axis="length")


def test_gradients_do_not_choose():
    """A choice has no gradient: that of the keys' mass is left out, and the others are finite."""
    q, k, v = inputs(LENGTH, **GROUPED)
    w = projection()
    chosen = most_attended(q, k, w)
    assert len({*map(tuple, chosen)}) == 2  # Each key head has keys of its own.

    def loss(q, k, v, w, keys):
        return jnp.sum(random_feature_attention(q, k, v, w, exact_keys=keys) ** 2)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)), static_argnums=4)(q, k, v, w, COUNT)
    chex.assert_tree_all_finite(gradients)
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    for head in range(2):
        part = (q[:, 2 * head : 2 * head + 2], k[:, head : head + 1], v[:, head : head + 1])
        of_head = gradient(*part, w, chosen[head])
        places = (slice(2 * head, 2 * head + 2), slice(head, head + 1), slice(head, head + 1))
        for one, whole, place in zip(of_head, gradients, places, strict=False):
            chex.assert_trees_all_close(one, whole[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_custom_maps_and_calibrated_ones():
    q, k, v = inputs(LENGTH, **GROUPED)
    w = projection()
    calibrated = simrf_jax.calibrate(q, k)
    for feature_map in (calibrated, lambda x, w: simrf_jax.positive_features(x, w)):
        options = {"feature_map": feature_map, "exact_keys": LENGTH}
        out = jax.jit(functools.partial(random_feature_attention, **options))(q, k, v, w)
        assert relative_error(out, jax.nn.dot_product_attention(q, k, v)) < 1e-5
    assert isinstance(calibrated, feature_maps.Calibrated)
