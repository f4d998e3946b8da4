"""Folded maps, and attention that folds a map in each call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import Projection, RandomFeatureMechanism, random_feature_attention
from simrf_jax.feature_maps import Calibrated, Folded, Learned
from tests import formulas
from tests.attention.inputs import inputs, projection
from tests.tiers import slow_but

pytestmark = pytest.mark.fast
LENGTH, ROWS = 40, 12


@dataclasses.dataclass(frozen=True, eq=False)
class Unfolded(Calibrated):
    """A calibrated map that attention does not fold."""

    multiplies_rows = False


def tokens(**options):
    q, k, v = inputs(LENGTH, heads=4, key_heads=2, batch=(2,), **options)
    return q + 0.3, k - 0.5, v


W = {
    "for all heads": lambda: projection(ROWS),
    "for each head": lambda: projection(ROWS, heads=2),
    "pairs": lambda: Projection(
        projection(ROWS // 2, heads=2, coupling="orthogonal"), is_paired=True
    ),
    "weighted": lambda: Projection(projection(ROWS), jnp.linspace(-1, 1, ROWS)),
}
MODES = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "band": {"exact_bandwidth": 3},
    "causal band": {"exact_bandwidth": 3, "is_causal": True},
    "packed": {"segment_ids": np.tile(np.repeat([0, 1], LENGTH // 2), (2, 1))},
    "lengths": {"key_value_seq_lengths": np.array([LENGTH, 17])},
    "negative scale": {"scale": -0.3},
}


ROWS_AND_MODES = [
    pytest.param(
        rows,
        mode,
        marks=()
        if mode == "bidirectional" or (rows, mode) == ("for each head", "causal band")
        else pytest.mark.slow,
    )
    for rows in W
    for mode in MODES
]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "mode"), ROWS_AND_MODES)
def test_attention_has_the_outputs_and_gradients_of_the_map(rows, mode):
    q, k, v = tokens()
    calibrated, w = simrf_jax.calibrate(q, k), W[rows]()
    unfolded = Unfolded(**vars(calibrated))

    def run(feature_map, w):
        def attend(*tokens):
            return random_feature_attention(*tokens, w, feature_map=feature_map, **MODES[mode])

        out, back = jax.vjp(attend, q, k, v)
        return out, *back(jnp.cos(out))

    run = jax.jit(run)
    expected = run(unfolded, w)
    for found in (run(calibrated, w), run(Folded.of(calibrated, w), None)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["query", "key"])
def test_features_are_those_of_the_formula(side):
    x, w = 0.5 * inputs(LENGTH)[0][:, 0], projection(ROWS)
    folded = Folded.of(Calibrated(**formulas.calibration(x.shape[-1])), w)
    formula = formulas.of_side(formulas.calibrated[0], side)
    expected = formulas.evaluate(formula, x, np.asarray(w))
    np.testing.assert_allclose(folded.features(x, None, side=side), expected, rtol=2e-5)


@pytest.mark.slow
def test_gradients_reach_the_map_and_its_rows():
    q, k, v = tokens()
    calibrated, w = simrf_jax.calibrate(q, k), projection(ROWS)

    def gradient(feature_map):
        def loss(feature_map, w):
            return jnp.sum(random_feature_attention(q, k, v, w, feature_map=feature_map) ** 2)

        return jax.grad(loss, argnums=(0, 1))(feature_map, w)

    found, expected = gradient(calibrated), gradient(Unfolded(**vars(calibrated)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_learned_features_fold():
    q, k, v = tokens()
    learned = Learned.start(projection(ROWS), simrf_jax.calibrate(q, k))
    found = random_feature_attention(q, k, v, None, feature_map=Folded.of(learned, None))
    expected = random_feature_attention(q, k, v, None, feature_map=learned)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("exact_bandwidth", slow_but([None], [None, 3]))
def test_decodes_token_by_token_after_a_folded_prompt(exact_bandwidth):
    q, k, v = tokens()
    calibrated, w = simrf_jax.calibrate(q, k), projection(ROWS, heads=2)
    whole = random_feature_attention(
        q, k, v, w, feature_map=calibrated, is_causal=True, exact_bandwidth=exact_bandwidth
    )
    # Fewer tokens than rows are not folded, and either must go on where the other left off.
    for mechanism in (
        RandomFeatureMechanism(w, calibrated, exact_bandwidth=exact_bandwidth),
        RandomFeatureMechanism(None, Folded.of(calibrated, w), exact_bandwidth=exact_bandwidth),
    ):
        state = mechanism.init(batch=(2,), num_key_heads=2, head_dim=8, value_dim=8)
        step, outputs = jax.jit(mechanism.step), []
        for start, stop in ((0, 30), (30, 31), (31, 35), (35, LENGTH)):
            part = (x[:, start:stop] for x in (q, k, v))
            out, state = step(state, *part)
            outputs.append(out)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_map_and_one_w_for_all_heads():
    q, k, v = inputs(LENGTH)
    w = projection(ROWS)
    folded = Folded.of("positive", w)
    assert folded.query.rows.shape == w.shape
    found = random_feature_attention(q, k, v, None, feature_map=folded)
    expected = random_feature_attention(q, k, v, w)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_refuses_rows_with_norms_that_the_map_cannot_use():
    calibration = simrf_jax.calibrate(*tokens()[:2])
    options = simrf_jax.DrawOptions(norms="radau")
    w = Projection.draw(jax.random.key(0), ROWS, calibration.head_dim, options=options)
    with pytest.raises(ValueError, match="must have rows whose norms are chi variables"):
        Folded.of(calibration, w)


@pytest.mark.slow
def test_refuses_what_is_no_exponential_and_a_second_w():
    with pytest.raises(TypeError, match="exponentials, such as Calibrated, got Trigonometric"):
        Folded.of("trigonometric", projection(ROWS))
    with pytest.raises(ValueError, match="for a Calibrated of that dim, got shape"):
        Folded.of(simrf_jax.calibrate(*tokens()[:2]), jnp.ones((ROWS, 5)))
    q, k, v = inputs(LENGTH)
    folded = Folded.of(simrf_jax.calibrate(q, k), projection(ROWS))
    with pytest.raises(ValueError, match="projection must be None, got shape"):
        random_feature_attention(q, k, v, projection(ROWS), feature_map=folded)
    with pytest.raises(ValueError, match="those of several heads"):
        folded.features(q, None)
    with pytest.raises(ValueError, match="one for each of the 1 key heads"):
        random_feature_attention(q[:, :1], k[:, :1], v[:, :1], None, feature_map=folded)
