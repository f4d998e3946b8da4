import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import (
    DrawOptions,
    Projection,
    draw_fast_projection,
    draw_projection,
    redraw_key,
    redraw_projections,
)
from simrf_jax.hybrid import BipolarProjection, ClusteredProjection, draw_bipolar_projection
from tests.memory import assert_flat
from tests.tiers import slow_but
from tests.versions import enable_x64

pytestmark = pytest.mark.fast


def test_key_changes_every_interval_and_never_with_zero():
    key = jax.random.key(3)
    keys = [jax.random.key_data(redraw_key(key, step, interval=4)).tolist() for step in range(9)]
    assert keys[0] == keys[3] != keys[4] == keys[7] != keys[8]
    never = [jax.random.key_data(redraw_key(key, s, interval=0)).tolist() for s in (0, 1, 10**6)]
    assert never[0] == never[1] == never[2]
    traced = jax.jit(lambda step: redraw_key(key, step, interval=4))(jnp.int32(6))
    assert jax.random.key_data(traced).tolist() == keys[6]


BORDERS = (2**31 - 1, 2**31, 2**32 - 1, 2**32)
KINDS = {
    "python": int,
    "numpy": np.int64,
    "jax": jnp.int64,
    "unsigned": jnp.uint64,
}


def _same_key(one, other):
    return bool((jax.random.key_data(one) == jax.random.key_data(other)).all())


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", BORDERS)
def test_steps_of_all_kinds_about_32_bits(step, kind, traced):
    key = jax.random.key(3)
    find = functools.partial(redraw_key, key, interval=2**10)
    with enable_x64(True):
        found = (jax.jit(find) if traced else find)(KINDS[kind](step))
    assert _same_key(found, jax.random.fold_in(key, step // 2**10))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("traced", [False, True])
def test_intervals_about_as_large_as_the_type_of_the_step_holds(dtype, beyond, traced):
    """JAX wraps Python numbers that overflow small types, and refuses those beyond int32."""
    key, most = jax.random.key(3), int(jnp.iinfo(dtype).max)
    find = functools.partial(redraw_key, key, interval=most + beyond)
    found = (jax.jit(find) if traced else find)(jnp.asarray(most, dtype))
    assert _same_key(found, jax.random.fold_in(key, 1 if beyond <= 0 else 0))


def test_the_last_key_there_is():
    key = jax.random.key(3)
    last = redraw_key(key, 2**32 - 1, interval=1)
    assert _same_key(last, redraw_key(key, jnp.uint32(2**32 - 1), interval=1))
    assert _same_key(last, redraw_key(key, 2**34 - 1, interval=4))
    assert not _same_key(last, redraw_key(key, 2**32 - 2, interval=1))


def test_steps_under_vmap():
    key = jax.random.key(3)
    found = jax.vmap(functools.partial(redraw_key, key, interval=3))(jnp.arange(7))
    for step in range(7):
        assert _same_key(found[step], redraw_key(key, step, interval=3))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_each_layer_and_head_is_drawn_from_its_own_key(kind):
    key = jax.random.key(0, impl=kind)
    layers = [jnp.zeros((3, 10, 4)), jnp.zeros((6, 2)), jnp.zeros((3, 10, 4), jnp.bfloat16)]
    drawn = redraw_projections(key, layers, options=DrawOptions("orthogonal"))
    assert [(w.shape, w.dtype) for w in drawn] == [(w.shape, w.dtype) for w in layers]

    def expected(layer, head, shape):
        key_of_head = jax.random.fold_in(jax.random.fold_in(key, layer), head)
        return draw_projection(key_of_head, *shape, coupling="orthogonal")

    np.testing.assert_allclose(drawn[0][2], expected(0, 2, (10, 4)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(drawn[1], expected(1, 0, (6, 2)), rtol=1e-5, atol=1e-6)
    third = expected(2, 1, (10, 4))
    np.testing.assert_allclose(drawn[2][1].astype(jnp.float32), third, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("abstract", [False, True])
def test_hybrids_are_redrawn_part_by_part(abstract):
    key = jax.random.key(0)
    parts = [jnp.zeros((2, 3, rows, 4)) for rows in (6, 6, 5)]
    layers = {"a": jnp.zeros((2, 6, 4)), "b": BipolarProjection(*parts), "c": None}
    if abstract:
        layers = jax.eval_shape(lambda: layers)
    drawn = redraw_projections(key, layers, options=DrawOptions("simplex", "square"))
    chex.assert_trees_all_equal_shapes_and_dtypes(drawn, layers)
    head = jax.random.fold_in(jax.random.fold_in(key, 1), 4)
    expected = draw_bipolar_projection(head, 6, 5, 4, coupling="simplex", block="square")
    for found, part in zip(jax.tree.leaves(drawn["b"]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found[1, 1], part, rtol=1e-5, atol=1e-6)
    base = drawn["b"].trigonometric[0, 0]
    s = base / jnp.linalg.norm(base, axis=1, keepdims=True)
    np.testing.assert_allclose(jnp.dot(s[0], s[1]), -1 / 3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.devices(8)
def test_values_do_not_depend_on_the_devices():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    layers = {"a": jax.ShapeDtypeStruct((8, 10, 4), jnp.float32)}

    def redraw(key):
        return redraw_projections(key, layers, options=DrawOptions())["a"]

    one = redraw(jax.random.key(0))
    eight = jax.jit(redraw, out_shardings=sharding)(jax.random.key(0))
    assert eight.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_allclose(eight, one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("jitted", slow_but([True], [False, True]))
def test_devices_of_a_mesh_draw_a_part_each(jitted, kind):
    kinds = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), kinds)
    layers = {"a": jnp.zeros((3, 3, 10, 4)), "b": jnp.zeros((10, 4)), "c": jnp.zeros((17, 3))}

    def redraw(key, mesh=None):
        return redraw_projections(key, layers, options=DrawOptions("simplex"), mesh=mesh)

    key = jax.random.key(0, impl="rbg" if kind == "Auto" else None)
    alone, of_mesh = redraw(key), functools.partial(redraw, mesh=mesh)
    with jax.set_mesh(mesh):
        together = (jax.jit(of_mesh) if jitted else of_mesh)(key)
    chex.assert_trees_all_close(together, alone, rtol=1e-5, atol=1e-6)
    # A part is what is drawn from as many numbers as there are devices, or fewer.
    jaxpr = str(jax.make_jaxpr(of_mesh)(key))
    assert "shard_map" in jaxpr
    assert "f32[1,10,4]" in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cosine"),
    [
        ({"coupling": "orthogonal"}, 0),
        ({"coupling": "simplex"}, -1 / 4),
        ({"coupling": "simplex", "block": "square"}, -1 / 3),
    ],
)
def test_the_coupling_asked_for_is_drawn(options, cosine):
    options = DrawOptions(**options)
    [w] = redraw_projections(jax.random.key(0), [jnp.zeros((5, 4))], options=options)
    s = w / jnp.linalg.norm(w, axis=1, keepdims=True)
    np.testing.assert_allclose(jnp.dot(s[0], s[1]), cosine, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jitted", "count"),
    [
        (True, 200),
        (False, 20),
        pytest.param(True, 5_000, marks=pytest.mark.slow),
        pytest.param(False, 500, marks=pytest.mark.slow),
    ],
)
def test_memory_is_flat_over_redraws(jitted, count):
    layers = {"a": jnp.zeros((2, 6, 4)), "b": jnp.zeros((5, 4))}

    def redraw(key, step):
        key = redraw_key(key, step, interval=1)
        return redraw_projections(key, layers, options=DrawOptions())

    redraw = jax.jit(redraw) if jitted else redraw
    key, steps = jax.random.key(0), itertools.count()
    assert_flat(lambda: redraw(key, next(steps)), count=count, warm_up=5)


def test_empty_tree_stays_empty():
    assert redraw_projections(jax.random.key(0), {}) == {}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda k: redraw_key(k, 0, interval=-1),
            ValueError,
            "at least 0, got -1",
        ),
        (lambda k: redraw_key(k, 0, interval=0.5), TypeError, "interval must be an integer"),
        (lambda k: redraw_key(k, -1, interval=1), ValueError, "step must be at least 0, got -1"),
        (lambda k: redraw_key(k, np.int64(-1), interval=1), ValueError, "at least 0, got -1"),
        (lambda k: redraw_key(k, jnp.int32(-1), interval=4), ValueError, "at least 0, got -1"),
        (lambda k: redraw_key(k, jnp.int32(-1), interval=0), ValueError, "at least 0, got -1"),
        (
            lambda k: redraw_key(k, 2**32, interval=1),
            ValueError,
            r"must be less than 2\*\*32, .* got 4294967296 // 1",
        ),
        (lambda k: redraw_key(k, 2**70, interval=3), ValueError, r"less than 2\*\*32"),
        (lambda k: redraw_key(k, 3.0, interval=1), TypeError, "step must be an integer, got 3.0"),
        (lambda k: redraw_key(k, jnp.float32(3), interval=1), TypeError, "must be an integer, got"),
        (lambda k: redraw_key(k, jnp.array(True), interval=1), TypeError, "must be an integer"),
        (lambda k: redraw_key(k, jnp.arange(2), interval=0), TypeError, "must be an integer"),
        (
            lambda k: jax.jit(lambda s: redraw_key(k, s, interval=1))(3.0),
            TypeError,
            r"step must be one integer, got float32 of shape \(\)",
        ),
        (
            lambda k: jax.jit(lambda s: redraw_key(k, s, interval=0))(jnp.arange(2)),
            TypeError,
            r"step must be one integer, got int32 of shape \(2,\)",
        ),
        (lambda k: redraw_projections(k, [1.0], options=DrawOptions()), ValueError, "got 1.0"),
        (lambda k: redraw_projections(k, [], coupling="iid"), TypeError, "'coupling'"),
        (
            lambda k: redraw_projections(k, [], options="iid"),
            TypeError,
            "options must be a simrf_jax.DrawOptions, got 'iid'",
        ),
        (
            lambda k: redraw_projections(k, {"a": jnp.zeros((5, 4))}),
            ValueError,
            r"not record how it was drawn; pass .*options=simrf_jax.DrawOptions\(.*nnx.state\(m",
        ),
        (lambda _: redraw_key(7, 0, interval=1), TypeError, "typed PRNG key"),
        (
            lambda k: redraw_projections(k, [jnp.zeros(3)], options=DrawOptions()),
            ValueError,
            r"array \[\.\.\., num_features, dim\], got",
        ),
        (lambda _: redraw_projections(7, []), TypeError, "typed PRNG key"),
        (
            lambda k: redraw_projections(k, [], options=DrawOptions(), mesh=("data",)),
            TypeError,
            r"mesh must be a jax.sharding.Mesh, got \('data',\)",
        ),
        (
            lambda k: redraw_projections(
                k, [Projection(draw_fast_projection(k, 4, 4).rows)], options=DrawOptions()
            ),
            TypeError,
            "A Projection cannot be redrawn here; draw it again",
        ),
        (
            lambda k: redraw_projections(
                k, ClusteredProjection(*[jnp.zeros((3, 4))] * 3), options=DrawOptions()
            ),
            TypeError,
            "A ClusteredProjection cannot be redrawn here",
        ),
        (
            lambda k: redraw_projections(
                k,
                BipolarProjection(*[draw_fast_projection(k, 4, 4)] * 2, jnp.zeros((3, 4))),
                options=DrawOptions(),
            ),
            TypeError,
            "A BipolarProjection cannot be redrawn here",
        ),
        (
            lambda k: redraw_projections(k, [jnp.zeros((5, 1))], options=DrawOptions()),
            ValueError,
            "coupling='simplex' needs dim of at least 2, got dim=1",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call(jax.random.key(0))
