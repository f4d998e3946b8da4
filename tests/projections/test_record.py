"""The projection record: its methods, and what it knows of its draw."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import DrawOptions, Projection, feature_maps, redraw_projections
from tests.attention.inputs import inputs

pytestmark = pytest.mark.fast
DIM, ROWS = 6, 10
OPTIMAL = feature_maps.OptimalPositive(-0.1)


def key(seed=0):
    return jax.random.key(seed)


def draw(is_fast=False, **options):
    options = DrawOptions(**({"rotation": "hadamard"} if is_fast else {}), **options)
    return Projection.draw(key(), ROWS, DIM, options=options, is_fast=is_fast)


RECORDS = {
    "dense": draw,
    "fast": lambda: draw(is_fast=True),
    "weighted": lambda: draw(norms="radau"),
    "fast, weighted": lambda: draw(is_fast=True, norms="radau"),
    "paired": lambda: draw(coupling="orthogonal").with_negatives(),
    "fast, paired": lambda: draw(is_fast=True, coupling="orthogonal").with_negatives(),
}


def test_a_draw_has_the_rows_of_the_functions_that_draw():
    np.testing.assert_array_equal(draw().rows, simrf_jax.draw_projection(key(), ROWS, DIM))
    chex.assert_trees_all_equal(
        draw(is_fast=True), simrf_jax.draw_fast_projection(key(), ROWS, DIM)
    )
    options = DrawOptions(norms="radau")
    chex.assert_trees_all_equal(draw(norms="radau"), options.draw(key(), ROWS, DIM))


@pytest.mark.parametrize("name", RECORDS)
def test_the_dense_matrix_is_the_projection_of_the_axes(name):
    w = RECORDS[name]()
    assert w.dense().shape == w.shape
    expected = simrf_jax.project(jnp.eye(DIM), w.unweighted).T
    np.testing.assert_allclose(w.dense(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_stack_is_made_dense(is_fast):
    draw_one = simrf_jax.draw_fast_projection if is_fast else Projection.draw
    draw_row = jax.vmap(lambda key: draw_one(key, ROWS, DIM))
    stack = jax.vmap(draw_row)(jax.random.split(key(), 4).reshape(2, 2))
    second = draw_row(jax.random.split(key(), 4)[2:])
    for row in range(2):
        alone = jax.tree.map(lambda x, row=row: x[row], second)
        np.testing.assert_allclose(stack.dense()[1, row], alone.dense(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECORDS)
def test_pairs_of_pairs_are_the_rows_and_their_negatives(name):
    w = dataclasses.replace(RECORDS[name](), log_weights=None)
    twice = w.with_negatives().with_negatives()
    x = jax.random.normal(key(1), (3, DIM))
    once = simrf_jax.project(x, w.with_negatives())
    expected = jnp.concatenate([once, -once], axis=-1)
    np.testing.assert_allclose(simrf_jax.project(x, twice), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECORDS)
def test_a_redraw_repeats_the_draw(name):
    w = RECORDS[name]()
    rows = dataclasses.replace(w, is_paired=False)
    expected = Projection.draw(key(3), *rows.shape, options=w.draw_options, is_fast=not w.is_dense)
    expected = dataclasses.replace(expected, is_paired=w.is_paired)
    assert jax.tree.structure(expected) == jax.tree.structure(w)
    chex.assert_trees_all_equal(w.redraw(key(3)), expected)
    chex.assert_trees_all_equal(w.redraw(key(3), w.draw_options), expected)


@pytest.mark.parametrize("is_fast", [False, True])
def test_stacks_are_redrawn_in_place(is_fast):
    def draw_one(key):
        options = DrawOptions(rotation="hadamard", norms="radau")
        return Projection.draw(key, ROWS, DIM, options=options, is_fast=is_fast)

    stack = jax.vmap(draw_one)(jax.random.split(key(), 3))
    drawn = redraw_projections(key(1), {"a": stack, "b": stack})
    assert jax.tree.structure(drawn) == jax.tree.structure({"a": stack, "b": stack})
    head = jax.random.fold_in(jax.random.fold_in(key(1), 1), 2)
    last = jax.tree.map(lambda leaf: leaf[2], drawn["b"])
    chex.assert_trees_all_close(last, draw_one(head), rtol=1e-5, atol=1e-6)


FIXED = [
    {"norms": "sqrt_dim"},
    {"norms": "sqrt_dim", "rotation": "hadamard"},
    {"norms": "radau"},
    {"norms": "sqrt_dim", "is_fast": True},
    {"norms": "radau", "is_fast": True},
]


@pytest.mark.parametrize("options", FIXED)
@pytest.mark.parametrize("jitted", [False, True])
def test_fixed_norms_are_refused_inside_jit_too(options, jitted):
    norms, w = options["norms"], draw(**options)
    own = feature_maps.OptimalPositive(-0.1)
    q, k, v = inputs(5, dim=DIM)

    def features(w):
        return OPTIMAL.features(jnp.ones(DIM), w)

    def attend(w):
        return simrf_jax.random_feature_attention(q, k, v, w, feature_map=own)

    for call in (features, attend):
        call = jax.jit(call) if jitted else call
        with pytest.raises(ValueError, match=f"as norms='{norms}' draws them"):
            call(w)


def test_nothing_is_known_of_an_array():
    """A draw without its options passes: nothing guesses the law of norms from numbers."""
    fixed = draw(norms="sqrt_dim")
    x = jnp.ones(DIM)
    for w in (fixed.rows, Projection(fixed.rows)):
        features = OPTIMAL.features(x, w)
        chex.assert_tree_all_finite(features)
        with pytest.raises(ValueError, match="does not record how it was drawn"):
            redraw_projections(key(), [w])


def calibration():
    return feature_maps.Calibrated.identity(2, DIM)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: draw().redraw(key(), DrawOptions("iid")), ValueError, "drawn by DrawOptions"),
        (lambda: Projection(jnp.ones((4, 3))).redraw(key()), ValueError, "does not record how"),
        (
            lambda: Projection.draw(key(), 4, 4, is_fast=True),
            ValueError,
            "Fast rows need rotation='hadamard', got 'haar'",
        ),
        (
            lambda: Projection.draw(key(), 4, 4, options=DrawOptions("iid"), is_fast=True),
            ValueError,
            "'iid' has no fast form",
        ),
        (
            lambda: feature_maps.Learned.start(draw().with_negatives(), calibration()),
            TypeError,
            "rows must be an array, or a Projection of one, got Projection",
        ),
        (
            lambda: feature_maps.Learned.start(draw(is_fast=True), calibration()),
            TypeError,
            "rows must be an array, or a Projection of one, got Projection",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_learned_features_start_at_a_record():
    start = feature_maps.Learned.start(draw(coupling="orthogonal"), calibration())
    expected = feature_maps.Learned.start(draw(coupling="orthogonal").rows, calibration())
    chex.assert_trees_all_equal(start, expected)
