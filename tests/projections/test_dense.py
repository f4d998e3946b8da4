import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from simrf_jax import draw_projection
from tests.standard_errors import assert_mean
from tests.tiers import slow_but
from tests.versions import enable_x64

COUPLED = [
    ("orthogonal", "regular"),
    ("simplex", "regular"),
    ("simplex", "square"),
    ("cross_polytope", "regular"),
    ("simplex_plus", "regular"),
]


def draw_many(num_draws, num_features, dim, *, seed=0, **options):
    keys = jax.random.split(jax.random.key(seed), num_draws)
    draw = jax.jit(jax.vmap(lambda key: draw_projection(key, num_features, dim, **options)))
    return np.asarray(draw(keys), np.float64)


def directions(w):
    return w / np.linalg.norm(w, axis=-1, keepdims=True)


@pytest.mark.slow
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
        (130, 64, "cross_polytope", "regular", [128, 2]),
        (13, 5, "cross_polytope", "square", [10, 3]),
        (3, 1, "cross_polytope", "regular", [2, 1]),
    ],
)
def test_angles_within_each_block(num_features, dim, coupling, block, sizes):
    [w] = draw_many(1, num_features, dim, coupling=coupling, block=block)
    start = 0
    for size in sizes:
        s = directions(w)[start : start + size]
        vertices = dim if block == "square" else size
        cosine = -1 / (vertices - 1) if coupling == "simplex" and size > 1 else 0.0
        gram = np.where(np.eye(size), 1, cosine)
        if coupling == "cross_polytope":
            row = np.arange(size - size % 2)
            gram[row, row ^ 1] = -1
        np.testing.assert_allclose(s @ s.T, gram, atol=3e-6)
        start += size
    assert start == num_features


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "block"), [*COUPLED, ("iid", "regular")])
def test_blocks_are_independent(coupling, block):
    dim = 4
    size = {"simplex": dim + 1, "simplex_plus": dim + 1, "cross_polytope": 2 * dim}.get(
        coupling, dim
    )
    size = dim if block == "square" else size
    s = directions(draw_many(20_000, 2 * size, dim, coupling=coupling, block=block))
    cosines = np.einsum("nid,njd->nij", s[:, :size], s[:, size:])
    # Cosines of independent directions have mean 0 and variance 1/d.
    assert_mean(cosines, 0)
    assert_mean(cosines**2, 1 / dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    "coupling", ["iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus"]
)
def test_row_norms_are_chi_distributed_and_independent(coupling):
    dim = 6
    norms = np.linalg.norm(draw_many(4_000, 7, dim, coupling=coupling), axis=-1)
    for row in norms.T:
        assert scipy.stats.kstest(row, "chi", (dim,)).pvalue > 1e-4
    normalized = norms - scipy.stats.chi.mean(dim)
    assert_mean(normalized[:, 0] * normalized[:, 1], 0)


@pytest.mark.slow
@pytest.mark.parametrize(("coupling", "block"), [*COUPLED, ("iid", "regular")])
def test_rows_are_marginally_standard_normal(coupling, block):
    w = draw_many(20_000, 5, 3, coupling=coupling, block=block)
    assert_mean(w, 0)
    assert_mean(np.einsum("nmi,nmj->nmij", w, w), np.broadcast_to(np.eye(3), (5, 3, 3)))
    assert_mean(w**4, 3)


@pytest.mark.slow
def test_couplings_share_their_row_norms_as_paired_draws():
    iid, *others = (
        np.linalg.norm(draw_many(1, 20, 8, coupling=c), axis=-1)
        for c in ("iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus")
    )
    for norms in others:
        np.testing.assert_allclose(norms, iid, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "coupling", ["iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus"]
)
def test_sqrt_dim_norms(coupling):
    w = draw_many(3, 12, 7, coupling=coupling, norms="sqrt_dim")
    np.testing.assert_allclose(np.linalg.norm(w, axis=-1), np.sqrt(7), rtol=1e-5)


@pytest.mark.parametrize(
    ("coupling", "rotation"),
    [("simplex", "haar"), ("simplex_plus", "haar"), ("simplex", "hadamard"), ("simplex", "givens")],
)
def test_many_draws_in_one_computation_call_no_library(coupling, rotation):
    # XLA on a CPU can deadlock when LAPACK calls run side by side; see rotations.py.
    def init(key):
        return [
            draw_projection(k, 20, 8, coupling=coupling, rotation=rotation)
            for k in jax.random.split(key, 4)
        ]

    text = jax.jit(init).lower(jax.random.key(0)).compile().as_text()
    assert "custom-call" not in text
    qr = jax.jit(lambda key: jax.random.orthogonal(key, 8))
    assert "custom-call" in qr.lower(jax.random.key(0)).compile().as_text()


@pytest.mark.slow
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
    with enable_x64(True):
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
        ((8, 1), {"coupling": "simplex_plus"}, ValueError, "'simplex_plus' needs dim of at least"),
        ((8, 8), {"num_sweeps": 2}, ValueError, "for coupling='simplex_plus', got 'simplex'"),
        (
            (8, 8),
            {"coupling": "simplex_plus", "num_sweeps": 0},
            ValueError,
            "num_sweeps must be at",
        ),
        (
            (8, 8),
            {"coupling": "simplx"},
            ValueError,
            "one of 'iid', 'orthogonal', 'simplex', .*got 'simplx'",
        ),
        ((8, 8), {"block": "round"}, ValueError, "'regular', 'square', got 'round'"),
        ((8, 8), {"rotation": "qr"}, ValueError, "'haar', 'hadamard', 'givens', got 'qr'"),
        ((8, 8), {"norms": "one"}, ValueError, "'chi', 'sqrt_dim', .* got 'one'"),
        ((8, 8), {"dtype": jnp.int32}, TypeError, "floating type, of 16 bits or more, got int32"),
        ((8, 8), {"dtype": jnp.float8_e4m3fn}, TypeError, "16 bits or more, got float8_e4m3fn"),
        ((8, 8), {"dtype": None}, TypeError, "dtype must be a floating type, got None"),
        ((8, 8), {"dtype": jnp.float64}, TypeError, "dtype float64 needs jax.config.update"),
        ((True, 8), {}, TypeError, "num_features must be an integer, got True"),
        ((8, 8), {"coupling": np.array(["iid"] * 2)}, ValueError, "coupling must be one of"),
    ],
)
def test_draw_refuses(arguments, options, error, match):
    with pytest.raises(error, match=match):
        draw_projection(jax.random.key(0), *arguments, **options)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (0, TypeError, r"must be a typed PRNG key, such as jax.random.key\(0\), got int"),
        (np.zeros(2, np.uint32), TypeError, "got uint32 array"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"single key, got shape \(3,\)"),
    ],
)
def test_draw_refuses_keys(key, error, match):
    with pytest.raises(error, match=match):
        draw_projection(key, 8, 8)


@pytest.mark.fast
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "cross_polytope"])
@pytest.mark.parametrize("rotation", ["haar", "hadamard", "givens"])
def test_one_dimension(coupling, rotation):
    w = draw_many(200, 3, 1, coupling=coupling, rotation=rotation)
    assert np.isfinite(w).all()
    assert_mean(np.sign(w), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "coupling",
    slow_but(
        ["simplex", "cross_polytope"],
        ["iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus"],
    ),
)
@pytest.mark.parametrize("rotation", ["haar", "hadamard", "givens"])
def test_sizes_at_the_edges(coupling, rotation):
    sizes = [(1, 2), (1, 8), (9, 8), (10, 8), (5, 6), (1000, 3)]
    for num_features, dim in sizes if rotation == "haar" else sizes[1:5:2]:
        w = draw_projection(
            jax.random.key(0), num_features, dim, coupling=coupling, rotation=rotation
        )
        chex.assert_shape(w, (num_features, dim))
        chex.assert_tree_all_finite(w)


@pytest.mark.slow
@pytest.mark.parametrize("rotation", ["hadamard", "givens"])
def test_other_rotations_work_in_the_next_power_of_two(rotation):
    w = draw_many(1, 17, 13, coupling="simplex", rotation=rotation, norms="sqrt_dim")[0]
    padded = draw_many(1, 17, 16, coupling="simplex", rotation=rotation, norms="sqrt_dim")[0]
    np.testing.assert_allclose(w, padded[:, :13], rtol=1e-6)
    np.testing.assert_allclose(padded @ padded.T, np.where(np.eye(17), 16, -1), atol=1e-4)
