"""Exact keys by score, also causal and in decoding; test_every_mode.py has those of plain maps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import ExactKeys, RandomFeatureMechanism, feature_maps, random_feature_attention
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inspection.all_pairs import score_ranks
from tests import formulas
from tests.attention import steps
from tests.attention.inputs import inputs, projection
from tests.attention.modes import calibrated
from tests.attention.reference import Gaussian, beside_band, best_keys, relative_error
from tests.standard_errors import assert_mean
from tests.tiers import slow_but

LENGTH, COUNT = 30, 3
BEST = ExactKeys(COUNT, by="score")
GROUPED = {"heads": 4, "key_heads": 2}


def test_scores_of_a_calibration_are_those_of_gaussian_queries_and_keys():
    q, k, _ = inputs(20_000, scale=0.5, **GROUPED)
    axes = np.linspace(0.3, 2, 8, dtype=np.float32)
    q, k = q * axes + 0.3, k / axes - 0.2
    fitted = simrf_jax.calibrate(q, k)
    of_heads = [np.concatenate([q[:, n], q[:, n + 1]]) for n in (0, 2)], [k[:, 0], k[:, 1]]
    moments = [
        f([8**-0.25 * np.asarray(x, np.float64) for x in side])
        for side in of_heads
        for f in (
            lambda heads: np.array([x.mean(axis=0) for x in heads]),
            lambda heads: np.array([np.cov(x.T) for x in heads]),
        )
    ]
    for head in range(2):
        y = k[:100, head] * 8**-0.25
        expected = Gaussian(*moments).scores(y, head)
        of_head = jax.tree.map(lambda leaf, head=head: leaf[head], fitted)
        learned = feature_maps.Learned.start(projection(), of_head)
        for feature_map in (of_head, learned):
            scores = np.array(feature_map.key_scores(jnp.asarray(y)))
            scores += expected.mean() - scores.mean()  # Scores lack a number.
            np.testing.assert_allclose(scores, expected, atol=0.02)


def test_scores_without_a_fit_are_those_of_standard_normal_queries_and_keys():
    y = inputs(5, heads=1)[1][:, 0]
    expected = Gaussian.standard(1, 8).scores(y, 0)
    identity = jax.tree.map(lambda leaf: leaf[0], feature_maps.Calibrated.identity(1, 8))
    for feature_map in (feature_maps.Positive(), identity):
        scores = feature_map.key_scores(jnp.asarray(y))
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("causal", slow_but([True], [False, True]))
@pytest.mark.parametrize("bandwidth", slow_but([2], [None, 2]))
def test_calibrated_features_against_float64(causal, bandwidth):
    q, k, v = inputs(LENGTH, dim=64, scale=2, **GROUPED)
    w = projection(20, 64, heads=2)
    visible = np.tri(LENGTH, dtype=bool) if causal else np.ones((LENGTH, LENGTH), bool)
    out = random_feature_attention(
        q,
        k,
        v,
        w,
        feature_map=calibrated(),
        is_causal=causal,
        exact_bandwidth=bandwidth,
        exact_keys=BEST,
    )
    parts = []
    for head in range(2):
        fit = formulas.calibration(64, head)
        # The best tilt sigma for variances 2 lambda of x + y solves this for u = 4 sigma - 2.
        steep = 4 * np.asarray(fit["variances"], np.float64) - 2
        variances = np.diag(steep * (steep - 2) / (steep + 2) / 8)
        for side, other in (("query", "key"), ("key", "query")):
            back = np.asarray(fit[f"{other}_matrix"], np.float64).T  # The inverse of the side's.
            parts += [fit[f"{side}_mean"], back @ variances @ back.T]
    gaussian = Gaussian(*(np.stack([parts[i], parts[i + 4]]) for i in range(4)))
    delay = -LENGTH if not causal else 0 if bandwidth is None else bandwidth + 1
    chosen = best_keys(k, COUNT, visible=visible, delay=delay, gaussian=gaussian)
    band = -1 if bandwidth is None else bandwidth
    expected = beside_band(
        q, k, v, w, band, visible=visible, exact_keys=chosen, formula=formulas.calibrated
    )
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("dtype", slow_but([jnp.float32], [jnp.float32, jnp.bfloat16]))
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_nothing_of_the_future_reaches_the_past(bandwidth, dtype):
    tokens = [jnp.asarray(x, dtype) for x in inputs(LENGTH, batch=(2,), **GROUPED)]

    @jax.jit
    def past(q, k, v):
        def outputs(q, k, v):
            options = {"is_causal": True, "chunk_size": 8, "exact_bandwidth": bandwidth}
            out = random_feature_attention(q, k, v, projection(), exact_keys=BEST, **options)
            return out[:, :19]

        out, pullback = jax.vjp(outputs, q, k, v)
        return out, pullback(jnp.ones_like(out))

    expected = past(*tokens)
    for future in (30.0, 1e4, np.nan):
        changed = [x.at[:, 19:].multiply(future) for x in tokens]
        chex.assert_trees_all_equal(past(*changed), expected)


@pytest.mark.parametrize("bandwidth", [None, 2])
@pytest.mark.parametrize("pieces", slow_but([(17, 1, 12)], [(1,) * 6 + (24,), (17, 1, 12)]))
def test_decoding_in_any_pieces_is_the_whole_call(pieces, bandwidth):
    q, k, v = inputs(LENGTH, batch=(2,), width=5, **GROUPED)
    k[1, 5:8], v[1, 5:8] = np.nan, np.inf
    mask = np.ones((2, 1, 1, LENGTH), bool)
    mask[1, ..., 5:8] = False
    bias = np.random.default_rng(1).normal(size=(2, 1, 1, LENGTH)).astype(np.float32)
    options = {"exact_keys": BEST, "exact_bandwidth": bandwidth}
    expected = random_feature_attention(
        q, k, v, projection(), is_causal=True, mask=mask, bias=bias, **options
    )
    sizes = {"batch": (2,), "num_key_heads": 2, "head_dim": 8, "value_dim": 5}
    state = empty = steps.init_state(projection(), **options, **sizes)
    step = jax.jit(functools.partial(steps.step, projection=projection(), **options))
    outs, ends = [], np.cumsum(pieces)
    for start, end in zip(ends - pieces, ends, strict=True):
        tokens = (x[:, start:end] for x in (q, k, v))
        masks = {"mask": mask[..., start:end], "bias": bias[..., start:end]}
        out, state = step(state, *tokens, **masks)
        outs.append(out)
    assert relative_error(np.concatenate(outs, axis=1), expected) < 1e-5
    chex.assert_trees_all_equal_shapes_and_dtypes(state, empty)
    # Keys alone make the same state.
    mechanism = RandomFeatureMechanism(projection(), **options)
    for part in (slice(0, 11), slice(11, LENGTH)):
        masks = {"mask": mask[..., part], "bias": bias[..., part]}
        empty = mechanism.append(empty, k[:, part], v[:, part], **masks)
    chex.assert_trees_all_close(empty, state, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_chunk_size_does_not_choose():
    q, k, v = inputs(LENGTH)
    outs = [
        random_feature_attention(
            q, k, v, projection(), is_causal=True, exact_keys=BEST, chunk_size=size
        )
        for size in (1, 4, 32)
    ]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-4, atol=1e-5)


def test_ranks_take_quadratic_time():
    mechanism = RandomFeatureMechanism(projection(), exact_keys=BEST)
    calls = (Call.of(*inputs(length), is_causal=True) for length in (256, 512))
    short, long = (
        jax.jit(score_ranks).lower(mechanism, call).compile().cost_analysis()["flops"]
        for call in calls
    )
    assert long < 5 * short


def test_as_many_keys_as_there_are_make_softmax_attention():
    q, k, v = inputs(LENGTH, batch=(2,), **GROUPED)
    every = ExactKeys(LENGTH, by="score")
    out = random_feature_attention(q, k, v, projection(), is_causal=True, exact_keys=every)
    assert relative_error(out, jax.nn.dot_product_attention(q, k, v, is_causal=True)) < 1e-5


@pytest.mark.parametrize("bandwidth", [None, 1])
def test_the_estimate_is_unbiased(bandwidth):
    """Numerators and denominators are means of unbiased estimates, as kernel rows show."""
    q, k, _ = inputs(8, heads=1, dim=4, scale=0.5)
    exact, visible = np.exp(q[:, 0] @ k[:, 0].T / 2), np.tri(8, dtype=bool)
    delay = 0 if bandwidth is None else bandwidth + 1
    [near] = best_keys(k, COUNT, visible=visible, delay=delay)
    near |= visible & ~np.tri(8, k=-delay, dtype=bool)  # The band.
    first = np.argmax(near, axis=-1)

    def kernel_rows(key):
        w = simrf_jax.draw_projection(key, 8, 4)
        options = {"is_causal": True, "exact_keys": BEST, "exact_bandwidth": bandwidth}
        report = simrf_jax.attention_matrix(q, k, w, **options)[0]
        # Next to an exact weight, all others are known.
        rows = np.arange(8)
        return report * (exact[rows, first] / report[rows, first])[:, None]

    samples = np.array(jax.jit(jax.vmap(kernel_rows))(jax.random.split(jax.random.key(0), 4000)))
    far = visible & ~near
    assert far.sum() == (15 if bandwidth is None else 6)
    assert_mean(samples[:, far], exact[far])
    known = np.broadcast_to(exact[near], samples[:, near].shape)
    np.testing.assert_allclose(samples[:, near], known, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [2, None])
def test_the_report_and_the_loss_take_kept_keys(bandwidth):
    q, k, v = inputs(LENGTH, scale=2, **GROUPED)
    ids = np.repeat([0, 1, 2], 10)
    options = {"is_causal": True, "exact_keys": BEST, "exact_bandwidth": bandwidth}
    out = random_feature_attention(q, k, v, projection(), segment_ids=ids, **options)
    weights = simrf_jax.attention_matrix(q, k, projection(), segment_ids=ids, **options)
    by_weights = np.einsum("nts,snd->tnd", weights, np.repeat(v, 2, axis=1))
    assert relative_error(by_weights, out) < 1e-5
    loss = simrf_jax.distillation_loss(q, k, projection(), feature_map="positive", **options)
    without = simrf_jax.distillation_loss(
        q, k, projection(), feature_map="positive", is_causal=True
    )
    assert loss < without


@pytest.mark.slow
def test_custom_and_signed_maps():
    q, k, v = inputs(LENGTH, scale=0.3)
    options = {"is_causal": True, "exact_keys": BEST}
    expected = random_feature_attention(q, k, v, projection(), **options)
    own = random_feature_attention(
        q, k, v, projection(), feature_map=lambda x, w: simrf_jax.positive_features(x, w), **options
    )
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
    visible = np.tri(LENGTH, dtype=bool)
    signed = random_feature_attention(q, k, v, projection(), feature_map="trigonometric", **options)
    expected = beside_band(
        q,
        k,
        v,
        projection(),
        -1,
        visible=visible,
        exact_keys=best_keys(k, COUNT, visible=visible),
        formula=formulas.trigonometric,
    )
    assert relative_error(signed, expected) < 1e-5


REFUSED = {
    "least": (lambda: ExactKeys(0), ValueError, "count must be at least 1, got 0"),
    "rule": (lambda: ExactKeys(2, by="norm"), ValueError, "by must be .*mass.*score.*'norm'"),
    "packed": (
        lambda: random_feature_attention(
            *inputs(5), projection(), exact_keys=BEST, segment_ids=np.array([0, 0, 1, 1, 1])
        ),
        ValueError,
        "exact_keys=3 by score are for each segment, .* set is_causal=True, or pass positions",
    ),
    "folded": (
        lambda: random_feature_attention(
            *inputs(5),
            None,
            feature_map=feature_maps.Folded.of("positive", projection()),
            exact_keys=BEST,
        ),
        ValueError,
        "needs the statistics of queries, which a Folded map lacks",
    ),
    "kernels": (
        lambda: random_feature_attention(
            *inputs(5), projection(), exact_keys=BEST, implementation="pallas_tpu"
        ),
        ValueError,
        "its kernels have no exact_keys",
    ),
    "decoding by mass": (
        lambda: steps.init_state(
            projection(), exact_keys=2, num_key_heads=1, head_dim=8, value_dim=8
        ),
        ValueError,
        "Decoding chooses exact keys by scores of the keys, exact_keys=ExactKeys",
    ),
    "another state": (
        lambda: steps.step(
            steps.init_state(projection(), num_key_heads=2, head_dim=8, value_dim=8),
            *inputs(1),
            projection(),
            exact_keys=BEST,
        ),
        TypeError,
        "state must be of type ExactKeysState, got AttentionState",
    ),
    "another number": (
        lambda: steps.step(
            steps.init_state(
                projection(), exact_keys=BEST, num_key_heads=2, head_dim=8, value_dim=8
            ),
            *inputs(1),
            projection(),
            exact_keys=ExactKeys(2, by="score"),
        ),
        ValueError,
        "state must hold 2 exact keys, got 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
