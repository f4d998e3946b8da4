import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from simrf_jax import draw_projection, project
from simrf_jax.projections.rotations import haar_frame
from tests.standard_errors import assert_mean

COUPLED = [("orthogonal", "regular"), ("simplex", "regular"), ("simplex", "square")]


def draw_many(num_draws, num_features, dim, *, seed=0, **options):
    keys = jax.random.split(jax.random.key(seed), num_draws)
    draw = jax.jit(jax.vmap(lambda key: draw_projection(key, num_features, dim, **options)))
    return np.asarray(draw(keys), np.float64)


def directions(w):
    return w / np.linalg.norm(w, axis=-1, keepdims=True)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("num_features", "dim", "coupling", "block", "sizes"),
    [
        (64, 64, "simplex", "regular", [64]),
        (130, 64, "simplex", "regular", [65, 65]),
        (66, 64, "simplex", "regular", [64, 2]),
        (8, 64, "simplex", "regular", [8]),
        (5, 2, "simplex", "regular", [3, 2]),
        (64, 64, "simplex", "square", [64]),
        (130, 64, "simplex", "square", [64, 64, 2]),
        (5, 2, "simplex", "square", [2, 2, 1]),
        (130, 64, "orthogonal", "regular", [64, 64, 2]),
        (3, 1, "orthogonal", "square", [1, 1, 1]),
    ],
)
def test_angles_within_each_block(num_features, dim, coupling, block, sizes):
    [w] = draw_many(1, num_features, dim, coupling=coupling, block=block)
    start = 0
    for size in sizes:
        s = directions(w)[start : start + size]
        vertices = dim if block == "square" else size
        cosine = -1 / (vertices - 1) if coupling == "simplex" and size > 1 else 0.0
        np.testing.assert_allclose(s @ s.T, np.where(np.eye(size), 1, cosine), atol=3e-6)
        start += size
    assert start == num_features


@pytest.mark.parametrize(("coupling", "block"), [*COUPLED, ("iid", "regular")])
def test_blocks_are_independent(coupling, block):
    dim, size = 4, 5 if (coupling, block) == ("simplex", "regular") else 4
    s = directions(draw_many(20_000, 2 * size, dim, coupling=coupling, block=block))
    cosines = np.einsum("nid,njd->nij", s[:, :size], s[:, size:])
    # Of independent directions: mean 0, and not a function of each other, so variance 1/d.
    assert_mean(cosines, 0)
    assert_mean(cosines**2, 1 / dim)


@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
def test_row_norms_are_chi_distributed_and_independent(coupling):
    dim = 6
    norms = np.linalg.norm(draw_many(4_000, 7, dim, coupling=coupling), axis=-1)
    for row in norms.T:
        assert scipy.stats.kstest(row, "chi", (dim,)).pvalue > 1e-4
    normalised = norms - scipy.stats.chi.mean(dim)
    assert_mean(normalised[:, 0] * normalised[:, 1], 0)


@pytest.mark.parametrize(("coupling", "block"), [*COUPLED, ("iid", "regular")])
def test_rows_are_marginally_standard_normal(coupling, block):
    w = draw_many(20_000, 5, 3, coupling=coupling, block=block)
    assert_mean(w, 0)
    assert_mean(np.einsum("nmi,nmj->nmij", w, w), np.broadcast_to(np.eye(3), (5, 3, 3)))
    assert_mean(w**4, 3)


@pytest.mark.fast
def test_couplings_share_their_row_norms_as_paired_draws():
    iid, orthogonal, simplex = (
        np.linalg.norm(draw_many(1, 20, 8, coupling=c), axis=-1)
        for c in ("iid", "orthogonal", "simplex")
    )
    np.testing.assert_allclose(orthogonal, iid, rtol=1e-5)
    np.testing.assert_allclose(simplex, iid, rtol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
def test_sqrt_dim_norms(coupling):
    w = draw_many(3, 12, 7, coupling=coupling, norms="sqrt_dim")
    np.testing.assert_allclose(np.linalg.norm(w, axis=-1), np.sqrt(7), rtol=1e-5)


def draw_frames(num_draws, dim, num_rows):
    keys = jax.random.split(jax.random.key(1), num_draws)
    draw = jax.jit(jax.vmap(lambda key: haar_frame(key, dim, num_rows, jnp.dtype("float32"))))
    return np.asarray(draw(keys), np.float64)


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_haar_entries_have_mean_zero_and_variance_one_over_d(dim):
    q = draw_frames(20_000, dim, dim)
    np.testing.assert_allclose(q @ q.mT, np.broadcast_to(np.eye(dim), q.shape), atol=1e-5)
    assert_mean(q, 0)  # LAPACK's Q without the sign fix has q[0, 0] <= 0 always.
    if dim > 1:
        assert_mean(q**2, 1 / dim)
        assert_mean(q**4, 3 / (dim * (dim + 2)))
        assert_mean(q[:, 0, 0] * q[:, 1, 1], 0)


@pytest.mark.parametrize("dim", [2, 5, 16])
def test_haar_trace_has_its_law(dim):
    trace = np.trace(draw_frames(20_000, dim, dim), axis1=1, axis2=2)
    # Diaconis and Shahshahani (1994): the first moments are those of a standard normal, exactly.
    for power, moment in [(1, 0), (2, 1), (3, 0), (4, 3)]:
        assert_mean(trace**power, moment)
    keys = jax.random.key(2)
    library = np.trace(jax.random.orthogonal(keys, dim, (20_000,)), axis1=1, axis2=2)
    assert scipy.stats.ks_2samp(trace.round(4), library.round(4)).pvalue > 1e-4


def test_haar_frame_of_few_rows_is_uniform_on_the_sphere():
    q = draw_frames(20_000, 5, 2)
    assert_mean(np.einsum("ni,nj->nij", q[:, 1], q[:, 1]), np.eye(5) / 5)
    assert scipy.stats.kstest((q[:, 1, 4] + 1) / 2, "beta", (2, 2)).pvalue > 1e-4


@pytest.mark.fast
def test_many_draws_in_one_computation_call_no_library():
    # XLA on a CPU can deadlock when LAPACK calls run side by side; see rotations.py.
    def init(key):
        return [draw_projection(k, 20, 8) for k in jax.random.split(key, 4)]

    text = jax.jit(init).lower(jax.random.key(0)).compile().as_text()
    assert "custom-call" not in text
    qr = jax.jit(lambda key: jax.random.orthogonal(key, 8))
    assert "custom-call" in qr.lower(jax.random.key(0)).compile().as_text()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes(dtype):
    w = draw_projection(jax.random.key(0), 10, 4, dtype=dtype)
    chex.assert_shape(w, (10, 4))
    assert w.dtype == dtype
    chex.assert_trees_all_close(
        w.astype(jnp.float32), draw_projection(jax.random.key(0), 10, 4), rtol=1e-2
    )


@pytest.mark.fast
def test_float64_is_drawn_in_float64():
    with jax.enable_x64(True):
        w = np.asarray(draw_projection(jax.random.key(0), 9, 8, dtype=jnp.float64))
    assert w.dtype == np.float64
    s = directions(w)
    np.testing.assert_allclose(s @ s.T, np.where(np.eye(9), 1, -1 / 8), atol=1e-14)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 8), {}, ValueError, "num_features must be at least 1, got 0"),
        ((8, 0), {}, ValueError, "dim must be at least 1, got 0"),
        ((8.0, 8), {}, TypeError, "num_features must be an integer, got 8.0"),
        ((8, 1), {}, ValueError, "coupling='simplex' needs dim of at least 2, got dim=1"),
        (
            (8, 8),
            {"coupling": "simplx"},
            ValueError,
            "'orthogonal', 'simplex', got 'simplx'",
        ),
        ((8, 8), {"block": "round"}, ValueError, "'regular', 'square', got 'round'"),
        ((8, 8), {"rotation": "qr"}, ValueError, "rotation must be one of 'haar', got 'qr'"),
        ((8, 8), {"norms": "one"}, ValueError, "'chi', 'sqrt_dim', got 'one'"),
        ((8, 8), {"dtype": jnp.int32}, TypeError, "dtype must be a floating type, got int32"),
    ],
)
def test_draw_refuses(arguments, options, error, match):
    with pytest.raises(error, match=match):
        draw_projection(jax.random.key(0), *arguments, **options)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (0, TypeError, "must be a typed PRNG key, made by jax.random.key.seed., got int"),
        (np.zeros(2, np.uint32), TypeError, "got uint32 array"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"single key, got shape \(3,\)"),
    ],
)
def test_draw_refuses_keys(key, error, match):
    with pytest.raises(error, match=match):
        draw_projection(key, 8, 8)


@pytest.mark.fast
def test_project_is_the_matrix_product():
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    np.testing.assert_allclose(project(x, w), x @ w.T, rtol=1e-5, atol=1e-6)
    assert project(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.fast
@pytest.mark.parametrize(
    ("x", "projection", "error", "match"),
    [
        (np.zeros(4), np.zeros((3, 5)), ValueError, r"dim=5, got shape \(4,\)"),
        (np.zeros(5), np.zeros((2, 3, 5)), ValueError, r"\[num_features, dim\], got shape \(2, 3"),
        (np.zeros(()), np.zeros((3, 5)), ValueError, r"got shape \(\)"),
        (np.zeros(5, int), np.zeros((3, 5)), TypeError, "x must be a floating type, got int"),
    ],
)
def test_project_refuses(x, projection, error, match):
    with pytest.raises(error, match=match):
        project(x, projection)
