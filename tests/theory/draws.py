"""Draws of projections and estimates in NumPy, from the definitions alone."""

import numpy as np
from scipy import stats

from simrf_jax._src.projections.row_blocks import simplex_vertices


def row_blocks(num_rows, dim, coupling):
    """Returns the directions of each row block before rotation; iid rows are blocks of one."""
    if coupling == "simplex":
        full, rest = divmod(num_rows, dim + 1)
        assert rest != 1 or not full, "A single row would be left over."
        sizes = [dim + 1] * full + [rest] * (rest > 0)
        return [simplex_vertices(size) for size in sizes]
    signs = np.tile([[1.0], [-1.0]], (dim, 1))
    full = {
        "iid": np.eye(dim)[:1],
        "orthogonal": np.eye(dim),
        "cross_polytope": np.repeat(np.eye(dim), 2, axis=0) * signs,
    }[coupling]
    starts = range(0, num_rows, len(full))
    return [full[: num_rows - start] for start in starts]


def rotations(rng, num_draws, dim):
    """Returns Haar matrices ``[num_draws, dim, dim]``."""
    q, r = np.linalg.qr(rng.normal(size=(num_draws, dim, dim)))
    return q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]


def block_norms(rng, num_draws, num_rows, dim, coupling, norms):
    """Returns norms ``[num_draws, num_rows]`` of one row block."""
    if norms in ("sqrt_dim", "radau"):
        return np.full((num_draws, num_rows), np.sqrt(dim + 2 * (norms == "radau")))
    u = rng.uniform(size=(num_draws, num_rows))
    if norms == "shared":
        u = np.repeat(u[:, :1], num_rows, axis=1)
    if coupling == "cross_polytope" and norms in ("pair", "antithetic"):
        u = np.repeat(u, 2, axis=1)[:, :num_rows]
    if norms == "antithetic":
        step = 2 if coupling == "cross_polytope" else 1
        index = np.arange(num_rows)
        is_second = index // step % 2 == 1
        u[:, is_second] = 1 - u[:, index[is_second] - step]
    return stats.chi.ppf(u, dim)


def draw_rows(rng, num_draws, num_rows, dim, coupling, norms):
    """Returns rows ``[num_draws, num_rows, dim]``, without a row of zeros."""
    blocks = []
    for directions in row_blocks(num_rows, dim, coupling):
        turned = directions @ rotations(rng, num_draws, dim)[:, : directions.shape[1]]
        lengths = block_norms(rng, num_draws, len(directions), dim, coupling, norms)
        blocks.append(lengths[..., None] * turned)
    return np.concatenate(blocks, axis=1)


def relative_estimates(rng, num_draws, sums, num_features, coupling, norms, parameter, features):
    """Returns K_hat / K for each draw and each sum x + y, ``[num_draws, n]``."""
    dim = sums.shape[1]
    num_rows = num_features - (norms == "radau")
    rows = draw_rows(rng, num_draws, num_rows, dim, coupling, norms)
    if features == "hyperbolic":
        rows = np.concatenate([rows, -rows], axis=1)
    log_weights = dim / 2 * np.log(1 - 4 * parameter) + 2 * parameter * np.sum(rows**2, axis=-1)
    half_squares = np.sum(sums**2, axis=1) / 2
    exponents = np.sqrt(1 - 4 * parameter) * rows @ sums.T + log_weights[..., None] - half_squares
    means = np.mean(np.exp(exponents), axis=1)
    if norms == "radau":
        return (dim * means + 2 * np.exp(-half_squares)) / (dim + 2)
    return means
