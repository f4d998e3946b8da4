import copy
import dataclasses
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import draw_fast_projection, draw_projection, hybrid, positive_features, project
from tests import conformance
from tests.attention.reference import relative_error
from tests.projections.matrices import dense, dense_stack
from tests.standard_errors import assert_mean
from tests.tiers import slow_but
from tests.versions import enable_x64

maps_and_kernels = pytest.mark.parametrize(("name", "kernel"), conformance.MAPS_AND_KERNELS)
SIZES = [(1, 2), (64, 64), (65, 64), (130, 64), (8, 64), (66, 64), (9, 2), (300, 100), (5, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_features", "dim"), [*SIZES, (600, 300)])
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "cross_polytope"])
@pytest.mark.parametrize("block", ["regular", "square"])
def test_equals_its_own_dense_matrix(num_features, dim, coupling, block):
    options = {"coupling": coupling, "block": block}
    projection = draw_fast_projection(jax.random.key(0), num_features, dim, **options)
    x = np.random.default_rng(1).normal(size=(2, 3, dim))
    expected = x @ dense(projection).T
    actual = project(jnp.asarray(x, jnp.float32), projection)
    assert projection.shape == (num_features, dim)
    assert np.linalg.norm(actual - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["orthogonal", "simplex", "cross_polytope"])
def test_no_vectors(coupling):
    projection = draw_fast_projection(jax.random.key(0), 11, 6, coupling=coupling)
    assert project(jnp.zeros((3, 0, 6)), projection).shape == (3, 0, 11)


TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-14}
FIXED = [
    ("orthogonal", "regular"),
    ("simplex", "regular"),
    ("simplex", "square"),
    ("cross_polytope", "regular"),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize(("coupling", "block"), FIXED)
@pytest.mark.parametrize(("num_features", "dim"), [(3, 5), (8, 8), (20, 6)])
def test_values_and_gradients_in_every_type(num_features, dim, coupling, block, dtype):
    rng = np.random.default_rng(1)
    with enable_x64(True):
        options = {"coupling": coupling, "block": block, "dtype": dtype}
        projection = draw_fast_projection(jax.random.key(0), num_features, dim, **options)
        x = jnp.asarray(rng.normal(size=(2, 3, dim)), dtype)
        y, pullback = jax.vjp(lambda x: project(x, projection), x)
        cotangent = jnp.asarray(rng.normal(size=y.shape), y.dtype)
        [gradient] = pullback(cotangent)
    assert y.dtype == jnp.promote_types(dtype, jnp.float32)
    assert gradient.dtype == dtype
    w = dense(projection)
    # The logits are float32 for any type of x, but its gradient is rounded to that type.
    assert relative_error(y, np.asarray(x, np.float64) @ w.T) < TOLERANCE[y.dtype.name]
    expected = np.asarray(cotangent, np.float64) @ w
    assert relative_error(gradient, expected) < TOLERANCE[gradient.dtype.name]


@pytest.mark.slow
def test_a_stack_under_nested_vmap_and_in_a_scan():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    draw = jax.vmap(jax.vmap(lambda key: draw_fast_projection(key, 10, 6)))
    stack = jax.jit(draw)(keys)
    assert stack.shape == (2, 3, 10, 6)
    x = jax.random.normal(jax.random.key(1), (4, 6))
    of_one = functools.partial(project, x)
    mapped = jax.jit(jax.vmap(jax.vmap(of_one)))(stack)
    flat = jax.tree.map(lambda leaf: leaf.reshape(6, *leaf.shape[2:]), stack)
    _, scanned = jax.lax.scan(lambda _, projection: (None, of_one(projection)), None, flat)
    expected = np.einsum("nd,pmd->pnm", x, dense_stack(flat))
    np.testing.assert_allclose(mapped.reshape(scanned.shape), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "block"), FIXED)
@pytest.mark.parametrize("norms", ["chi", "sqrt_dim"])
def test_a_draw_is_the_same_traced_mapped_or_neither(coupling, block, norms):
    draw = functools.partial(
        draw_fast_projection, num_features=11, dim=5, coupling=coupling, block=block, norms=norms
    )

    def keys():
        return jax.random.split(jax.random.key(0), 3)

    stack = jax.vmap(draw)(keys())
    _, scanned = jax.lax.scan(lambda _, key: (None, draw(key)), None, keys())
    for i, key in enumerate(keys()):
        one = draw(key)
        for several in (stack, scanned):
            chosen = jax.tree.map(lambda leaf, i=i: leaf[i], several)
            chex.assert_trees_all_equal(chosen.rows.signs, one.rows.signs)
            chex.assert_trees_all_close(chosen.rows.row_norms, one.rows.row_norms, rtol=1e-6)


@pytest.mark.slow
def test_goes_through_what_pytrees_go_through():
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    leaves, structure = jax.tree.flatten(projection)
    for again in (
        jax.tree.unflatten(structure, leaves),
        copy.deepcopy(projection),
        pickle.loads(pickle.dumps(projection)),
        jax.jit(lambda p: p)(projection),
        jax.tree.map(np.asarray, projection),
    ):
        chex.assert_trees_all_equal(again, projection)
        assert (again.shape, again.dtype) == ((10, 6), jnp.float32)
    assert structure == jax.tree.structure(draw_fast_projection(jax.random.key(1), 9, 6))
    assert structure != jax.tree.structure(draw_fast_projection(jax.random.key(1), 10, 7))
    abstract = jax.eval_shape(lambda: projection)
    assert (abstract.shape, abstract.dtype) == ((10, 6), jnp.float32)


@pytest.mark.fast
def test_donated_arrays_are_reused_and_the_copy_is_not():
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    kept = jax.tree.map(jnp.copy, projection)

    def flip(projection):
        rows = dataclasses.replace(projection.rows, signs=-projection.rows.signs)
        return dataclasses.replace(projection, rows=rows)

    flipped = jax.jit(flip, donate_argnums=0)(projection)
    assert projection.rows.signs.is_deleted()
    x = jnp.linspace(0, 1, 6)
    # Each of the three factors changes its sign.
    np.testing.assert_allclose(project(x, flipped), -project(x, kept), rtol=1e-6)


@maps_and_kernels
@pytest.mark.parametrize(
    "coupling", slow_but(["simplex"], ["orthogonal", "simplex", "cross_polytope"])
)
def test_features_are_those_of_the_matrix(name, kernel, coupling):
    projection = draw_fast_projection(jax.random.key(0), 10, 6, coupling=coupling)
    w = jnp.asarray(dense(projection), jnp.float32)
    x = 0.3 * jax.random.normal(jax.random.key(1), (4, 6))
    phi = conformance.feature_map(name, kernel)

    def with_gradients(w):
        def loss(x):
            features = phi(x, w)
            return jnp.sum(jnp.sin(features)), features

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    chex.assert_trees_all_close(with_gradients(projection), with_gradients(w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_map", [hybrid.AngularHybrid(), hybrid.GaussianHybrid()])
@pytest.mark.parametrize("side", ["query", "key"])
def test_hybrids_of_fast_projections(feature_map, side):
    keys = jax.random.split(jax.random.key(0), 3)
    parts = [draw_fast_projection(key, 10, 6) for key in keys]
    matrices = [jnp.asarray(dense(part), jnp.float32) for part in parts]
    x = 0.3 * jax.random.normal(jax.random.key(1), (4, 6))
    phi = jax.jit(functools.partial(feature_map.features, side=side))
    fast, slow = (phi(x, hybrid.BipolarProjection(*those)) for those in (parts, matrices))
    np.testing.assert_allclose(fast, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
def test_angles_and_norms_of_the_rows():
    projection = draw_fast_projection(jax.random.key(0), 65, 64, norms="sqrt_dim")
    w = project(jnp.eye(64), projection).T
    np.testing.assert_allclose(w @ w.T, np.where(np.eye(65), 64, -1), atol=1e-3)


@pytest.mark.slow
def test_rows_have_unit_covariance_and_their_norms_are_chi():
    keys = jax.random.split(jax.random.key(0), 20_000)

    def draw(key):
        return project(jnp.eye(6), draw_fast_projection(key, 10, 6)).T

    w = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
    assert_mean(w, 0)
    assert_mean(np.einsum("nmi,nmj->nmij", w, w), np.broadcast_to(np.eye(6), (10, 6, 6)))


@pytest.mark.slow
def test_state_is_linear_in_the_dimension():
    projection = draw_fast_projection(jax.random.key(0), 4096, 4096)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(projection)) < 64 * 1024


@pytest.mark.fast
def test_no_square_matrix_is_formed():
    projection = draw_fast_projection(jax.random.key(0), 4096, 4096)
    compiled = jax.jit(project).lower(jnp.ones((1, 4096)), projection).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 / 16


@pytest.mark.slow
def test_under_jit_vmap_and_grad():
    keys = jax.random.split(jax.random.key(0), 3)
    stack = jax.vmap(lambda key: draw_fast_projection(key, 10, 6))(keys)
    assert stack.shape == (3, 10, 6)
    assert stack.ndim == 3
    x = jax.random.normal(jax.random.key(1), (4, 6))
    mapped = jax.vmap(project, in_axes=(None, 0))(x, stack)
    chex.assert_shape(mapped, (3, 4, 10))
    second = jax.tree.map(lambda leaf: leaf[1], stack)
    chex.assert_trees_all_close(mapped[1], jax.jit(project)(x, second), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda x: positive_features(x, second).sum())(x)
    chex.assert_tree_all_finite(gradient)
    traced = jax.jit(chex.assert_max_traces(lambda x, p: project(x, p), n=1))
    traced(x, second)
    traced(x, jax.tree.map(lambda leaf: leaf[2], stack))


@pytest.mark.slow
@pytest.mark.devices(8)
def test_keeps_the_sharding_of_its_input_and_can_be_sharded_itself():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    x = jax.device_put(jnp.ones((16, 6)), sharding)
    assert jax.jit(project)(x, projection).sharding.is_equivalent_to(sharding, 2)
    keys = jax.random.split(jax.random.key(0), 8)
    stack = jax.vmap(lambda key: draw_fast_projection(key, 10, 6))(keys)
    stack = jax.device_put(stack, sharding)
    y = jax.jit(jax.vmap(project, in_axes=(None, 0)))(jnp.ones((2, 6)), stack)
    assert y.sharding.is_equivalent_to(sharding, 3)


def test_is_checkpointed_as_its_arrays(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint", reason="needs orbax")
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "projection", projection)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "projection", jax.eval_shape(lambda: projection))
    chex.assert_trees_all_equal(restored, projection)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes(dtype):
    projection = draw_fast_projection(jax.random.key(0), 10, 6, dtype=dtype)
    assert projection.dtype == projection.rows.row_norms.dtype == dtype
    assert project(jnp.ones(6, dtype), projection).dtype == jnp.float32
    assert positive_features(jnp.ones(6, dtype), projection).dtype == dtype


@pytest.mark.slow
def test_float64():
    with enable_x64(True):
        projection = draw_fast_projection(jax.random.key(0), 10, 6, dtype=jnp.float64)
        x = np.linspace(0, 1, 6)
        np.testing.assert_allclose(project(x, projection), dense(projection) @ x, rtol=1e-13)


@pytest.mark.fast
def test_nothing_overflows_on_the_way():
    projection = draw_fast_projection(jax.random.key(0), 64, 64)
    x = jnp.full(64, 1e36)
    np.testing.assert_allclose(
        project(x, projection) / 1e36, dense(projection).sum(axis=1), atol=1e-3
    )


def test_one_dimension_empty_batches_and_nan():
    one = draw_fast_projection(jax.random.key(0), 3, 1, coupling="orthogonal")
    chex.assert_tree_all_finite(project(jnp.ones(1), one))
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    chex.assert_shape(project(jnp.ones((0, 6)), projection), (0, 10))
    assert jnp.isnan(project(jnp.full(6, jnp.nan), projection)).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((8, 8), {"coupling": "iid"}, ValueError, "'iid' has no fast form"),
        ((8, 8), {"coupling": "simplex_plus"}, ValueError, "'simplex_plus' has no fast form"),
        ((8, 8), {"coupling": "qmc"}, ValueError, "'simplex', 'cross_polytope', got 'qmc'"),
        ((8, 1), {}, ValueError, "needs dim of at least 2, got dim=1"),
        ((0, 8), {}, ValueError, "num_features must be at least 1, got 0"),
        ((8, 8.0), {}, TypeError, "dim must be an integer, got 8.0"),
        ((8, 8), {"block": "round"}, ValueError, "'regular', 'square', got 'round'"),
        ((8, 8), {"norms": "one"}, ValueError, "'chi', 'sqrt_dim', .* got 'one'"),
        (
            (8, 8),
            {"dtype": jnp.int32},
            TypeError,
            "dtype must be a floating type, of 16 bits or more, got int32",
        ),
    ],
)
def test_draw_refuses(arguments, options, error, match):
    with pytest.raises(error, match=match):
        draw_fast_projection(jax.random.key(0), *arguments, **options)


def test_project_refuses_what_does_not_fit():
    projection = draw_fast_projection(jax.random.key(0), 10, 6)
    with pytest.raises(ValueError, match=r"dim=6, got shape \(5,\)"):
        project(jnp.ones(5), projection)
    with pytest.raises(TypeError, match="typed PRNG key"):
        draw_fast_projection(0, 10, 6)
    assert draw_projection(jax.random.key(0), 10, 6).shape == projection.shape
