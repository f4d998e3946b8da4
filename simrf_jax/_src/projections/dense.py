"""Dense rows: W as one array, whose rows are coupled within each row block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.couplings import COUPLED, Coupling, minimize_resultant
from simrf_jax._src.projections.norms import Norms, draw_norms
from simrf_jax._src.projections.rotations import ROTATIONS, Rotation
from simrf_jax._src.projections.row_blocks import BlockMode, EqualRowBlocks


@functools.partial(jax.jit, static_argnums=range(1, 10))
def draw_rows(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    coupling: Coupling,
    block: BlockMode,
    rotation: Rotation,
    norms: Norms,
    kernel: ScaleMixture,
    dtype: jnp.dtype,
    num_sweeps: int | None,
) -> Float[Array, "{num_features} {dim}"]:
    """Draws the rows for ``draw_projection``, which has checked the arguments.

    With ``norms="radau"`` these are all rows except the zero row.
    """
    compute = np.promote_types(dtype, jnp.float32)
    norm_key, rotation_key = jax.random.split(key)
    if coupling == "iid":
        return _draw_iid(norm_key, num_features, dim, norms, kernel, compute).astype(dtype)
    ambient = ROTATIONS[rotation].ambient_dim(dim)
    row_blocks = COUPLED[coupling].blocks(num_features, ambient, block)
    if _is_gaussian(norms, kernel):
        gaussian = jax.random.normal(norm_key, (num_features, ambient), compute)
        lengths = jnp.linalg.norm(gaussian, axis=-1)
    else:
        lengths = draw_norms(norm_key, norms, kernel, num_features, row_blocks, ambient, compute)
    directions = _draw_directions(rotation_key, row_blocks, lengths, ambient, rotation, num_sweeps)
    return (directions[:, :dim] * lengths[:, None]).astype(dtype)


def _draw_iid(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    norms: Norms,
    kernel: ScaleMixture,
    dtype: jnp.dtype,
) -> Float[Array, "{num_features} {dim}"]:
    """Draws rows with independent directions."""
    gaussian = jax.random.normal(key, (num_features, dim), dtype)
    if _is_gaussian(norms, kernel):
        return gaussian
    lengths = draw_norms(jax.random.fold_in(key, 1), norms, kernel, num_features, [], dim, dtype)
    return gaussian * (lengths / jnp.linalg.norm(gaussian, axis=-1))[:, None]


def _is_gaussian(norms: Norms, kernel: ScaleMixture) -> bool:
    """Returns whether the norms are those of independent Gaussian vectors."""
    return norms == "chi" and kernel == GAUSSIAN


def _draw_directions(
    key: Key[Array, ""],
    row_blocks: list[EqualRowBlocks],
    lengths: Float[Array, " num_features"],
    dim: int,
    rotation: Rotation,
    num_sweeps: int | None,
) -> Float[Array, "num_features {dim}"]:
    """Draws unit vectors, each row block under its own rotation."""

    def draw_block(
        directions: Float[Array, "rows coordinates"],
        lengths: Float[Array, " rows"],
        key: Key[Array, ""],
    ) -> Float[Array, "rows dim"]:
        if num_sweeps is not None:
            directions = minimize_resultant(directions, lengths, num_sweeps=num_sweeps)
        return ROTATIONS[rotation].rotate(key, directions, dim)

    keys = jax.random.split(key, sum(each.repeats for each in row_blocks))
    rows, first_block, first_row = [], 0, 0
    for block, count in row_blocks:
        end_block, end_row = first_block + count, first_row + count * block.num_rows
        directions = jnp.asarray(block.directions(), lengths.dtype)
        drawn = jax.vmap(draw_block, in_axes=(None, 0, 0))(
            directions,
            lengths[first_row:end_row].reshape(count, block.num_rows),
            keys[first_block:end_block],
        )
        rows.append(drawn.reshape(-1, dim))
        first_block, first_row = end_block, end_row
    return jnp.concatenate(rows)
