"""DrawOptions: what they accept, what they draw, and that a redraw repeats them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import DrawOptions, draw_projection, redraw_projections
from simrf_jax.hybrid import draw_bipolar_projection

pytestmark = pytest.mark.fast

OTHERS = DrawOptions("simplex_plus", "square", "givens", "sqrt_dim", 2)


def key(seed=0):
    return jax.random.key(seed)


def carrier(*fields):
    """Returns a class of pytree nodes that hold a value and say how it was drawn."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Carrier:
        value: object
        draw_options: object = dataclasses.field(metadata={"static": True})

    return Carrier(*fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [DrawOptions(), DrawOptions("iid"), OTHERS, DrawOptions("cross_polytope", norms="antithetic")],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_they_draw_as_draw_projection_does(options, dtype):
    expected = draw_projection(key(), 9, 4, dtype=dtype, **vars(options))
    np.testing.assert_array_equal(options.draw(key(), 9, 4, dtype=dtype), expected)
    assert expected.dtype == dtype


def test_the_defaults_are_those_of_draw_projection():
    np.testing.assert_array_equal(DrawOptions().draw(key(), 9, 4), draw_projection(key(), 9, 4))


@pytest.mark.slow
def test_equal_options_are_equal_records_and_one_static_argument():
    assert DrawOptions("simplex_plus") == DrawOptions("simplex_plus", num_sweeps=3)
    assert DrawOptions() != DrawOptions("iid")
    draw = jax.jit(lambda key, options: options.draw(key, 5, 4), static_argnums=1)
    np.testing.assert_array_equal(draw(key(), OTHERS), OTHERS.draw(key(), 5, 4))
    assert len({OTHERS, dataclasses.replace(OTHERS), DrawOptions()}) == 2


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"coupling": "simplx"}, ValueError, "coupling must be one of .*, got 'simplx'"),
        ({"coupling": None}, ValueError, "coupling must be one of .*, got None"),
        ({"block": "round"}, ValueError, "block must be one of 'regular', 'square', got 'round'"),
        ({"rotation": "qr"}, ValueError, "rotation must be one of .*, got 'qr'"),
        ({"norms": "one"}, ValueError, "norms must be one of 'chi', 'sqrt_dim', .* got 'one'"),
        (
            {"norms": "pair"},
            ValueError,
            "only coupling='cross_polytope' has, got coupling='simplex'",
        ),
        ({"num_sweeps": 2}, ValueError, "num_sweeps is for coupling='simplex_plus', got 'simplex'"),
        (
            {"coupling": "simplex_plus", "num_sweeps": 0},
            ValueError,
            "num_sweeps must be at least 1, got 0",
        ),
        (
            {"coupling": "simplex_plus", "num_sweeps": 1.5},
            TypeError,
            "num_sweeps must be an integer, got 1.5",
        ),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        DrawOptions(**fields)


@pytest.mark.slow
def test_a_redraw_repeats_the_draw_of_each_projection():
    zeros = jnp.zeros((2, 5, 4))
    tree = {
        "a": carrier(zeros, OTHERS),
        "b": zeros,
        "c": carrier((zeros, None, [zeros, zeros]), (DrawOptions("iid"), None, OTHERS)),
        "d": carrier(zeros, DrawOptions("iid")),
    }
    # Only b does not say how it was drawn, and no other is drawn by the options that are given.
    with pytest.raises(ValueError, match="does not record how it was drawn"):
        redraw_projections(key(), tree)
    del tree["b"]
    drawn = redraw_projections(key(), tree)
    assert jax.tree.structure(drawn) == jax.tree.structure(tree)
    by = [OTHERS, DrawOptions("iid"), OTHERS, OTHERS, DrawOptions("iid")]
    for number, (w, options) in enumerate(zip(jax.tree.leaves(drawn), by, strict=True)):
        head = jax.random.fold_in(jax.random.fold_in(key(), number), 1)
        np.testing.assert_allclose(w[1], options.draw(head, 5, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_options_are_for_projections_that_do_not_say_how_they_were_drawn():
    zeros = jnp.zeros((5, 4))
    drawn = redraw_projections(key(), [carrier(zeros, OTHERS), zeros], options=OTHERS)
    alone = redraw_projections(key(), [zeros, zeros], options=OTHERS)
    np.testing.assert_array_equal(drawn[0].value, alone[0])
    np.testing.assert_array_equal(drawn[1], alone[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: carrier(jnp.zeros((5, 4)), DrawOptions("orthogonal")),
        lambda: carrier((jnp.zeros((5, 4)), None), (DrawOptions("orthogonal"), None)),
        lambda: draw_bipolar_projection(key(), 5, 3, 4),
        lambda: jax.eval_shape(lambda: draw_bipolar_projection(key(), 5, 3, 4)),
    ],
)
def test_a_redraw_that_contradicts_the_draw_is_refused(make):
    tree = {"a": make()}
    match = r"drawn by DrawOptions\(coupling='orthogonal'.* got options=.*coupling='simplex'"
    with pytest.raises(ValueError, match=match):
        redraw_projections(key(), tree, options=DrawOptions("simplex"))
    drawn = redraw_projections(key(), tree, options=DrawOptions("orthogonal"))
    same = redraw_projections(key(), tree)
    jax.tree.map(np.testing.assert_array_equal, drawn, same)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"coupling": "simplex_plus", "num_sweeps": 2}])
def test_hybrids_say_how_they_were_drawn(fields):
    keys = jax.random.split(key(), 3)
    stack = jax.vmap(lambda key: draw_bipolar_projection(key, 5, 3, 4, **fields))(keys)
    assert stack.draw_options == DrawOptions(**{"coupling": "orthogonal", **fields})
    drawn = redraw_projections(key(1), stack)
    assert jax.tree.structure(drawn) == jax.tree.structure(stack)
    head = jax.random.fold_in(jax.random.fold_in(key(1), 0), 2)
    expected = draw_bipolar_projection(head, 5, 3, 4, **fields)
    for part, one in zip(jax.tree.leaves(drawn), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(part[2], one, rtol=1e-5, atol=1e-6)
